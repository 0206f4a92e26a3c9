"""Look-up tables whose rows are divided over all ranks, whatever else is sharded how.

N row numbers asked for, U distinct ones, D width, P ranks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from prime_rl.layers.row_table import RowTable
from prime_rl.parallel.exchange import Route, averaged


class RowExchange:
    """Asks the ranks that keep them for rows."""

    def __init__(self, group: dist.ProcessGroup, rows: int) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rows_per_rank = -(-rows // self.ranks)
        self.first_row = dist.get_rank(group) * self.rows_per_rank

    def __call__(self, table: RowTable, rows: Tensor) -> Tensor:
        """[..., D]; each row travels once however often it is asked for. Asynchronous: the first
        use of the result waits. Gradients reach only the rank that keeps the row."""
        distinct_U, place_N = rows.flatten().unique(return_inverse=True)  # sorted: by rank, too
        sent_P = (distinct_U // self.rows_per_rank).bincount(minlength=self.ranks)
        route = Route.of(sent_P, self.group)
        wanted = route.there(distinct_U) - self.first_row
        values_UD = route.back(averaged(table.read(wanted), self.ranks))
        return values_UD.index_select(0, place_N).view(*rows.shape, -1)


def divide_tables(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Divide the rows of every RowTable over the ranks of a one-dimensional mesh, in place.

    Returns the parameters of all tables, which no other sharding may touch.
    """
    host = mesh
    tables = [part for part in module.modules() if isinstance(part, RowTable)]
    if any(table.on_cpu for table in tables) and mesh.device_type != "cpu":
        host = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("shard",))
    for table in tables:
        own = host if table.on_cpu else mesh
        if own.size() > 1:
            table.exchange = RowExchange(own.get_group(), table.weight.shape[0])
        weight = distribute_tensor(table.weight, own, [Shard(0)])
        table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    return {table.weight for table in tables}
