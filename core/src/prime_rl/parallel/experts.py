"""Expert parallelism: every rank of a group keeps some experts of each layer; tokens travel.

T tokens, k experts per token, H hidden, N = T * k assignments here, M that arrived, P ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from prime_rl.layers.local import local_tensor
from prime_rl.layers.moe import Experts
from prime_rl.parallel.exchange import Route, averaged


class ExpertExchange:
    """Sends tokens to the ranks that keep their experts, and what comes of them back."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        """`experts` of the whole layer; a multiple of the group's size."""
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.experts_here = experts // self.ranks

    def __call__(
        self, experts: Experts, x_TH: Tensor, indices_Tk: Tensor, weights_Tk: Tensor
    ) -> Tensor:
        """The result of `experts` as if all were here: [T, H]."""
        tokens, per_token = indices_Tk.shape
        order_N = indices_Tk.flatten().argsort(stable=True)
        ids_N = indices_Tk.flatten()[order_N]
        sent_P = (ids_N // self.experts_here).bincount(minlength=self.ranks)
        route = Route.of(sent_P, self.group)
        repeated_NH = x_TH[:, None].expand(-1, per_token, -1).reshape(-1, x_TH.shape[1])
        rows_MH = route.there(repeated_NH.index_select(0, order_N))
        local_M1 = route.there(ids_N)[:, None] % self.experts_here
        ones_M1 = torch.ones_like(local_M1, dtype=x_TH.dtype)
        gate_up, down = (
            averaged(local_tensor(matrix), self.ranks) for matrix in (experts.gate_up, experts.down)
        )
        out_NH = route.back(
            experts.backend.experts(rows_MH, local_M1, ones_M1, gate_up, down, experts.activation)
        )
        place_N = order_N.argsort()
        out_TkH = out_NH.index_select(0, place_N).view(tokens, per_token, -1)
        return (out_TkH * weights_Tk.to(x_TH.dtype)[..., None]).sum(1)


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> list[Experts]:
    """Divide every `Experts` of the module over the ranks of a one-dimensional mesh, in place.

    Their parameters become tensors sharded by expert. Raises ValueError when a layer's experts
    cannot be divided evenly.
    """
    found = [part for part in module.modules() if isinstance(part, Experts)]
    for experts in found:
        count = experts.gate_up.shape[0]
        if count % mesh.size():
            raise ValueError(f"{count} experts cannot be divided over {mesh.size()} ranks")
        experts.exchange = ExpertExchange(mesh.get_group(), count)
        for name, parameter in list(experts.named_parameters()):
            divided = distribute_tensor(parameter, mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    return found
