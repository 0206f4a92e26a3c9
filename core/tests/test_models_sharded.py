"""Loading into FSDP2-sharded modules: each rank its own rows, uneven ones included."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prime_rl.api.layout import WeightLayout, fuse, rename, stack_experts
from prime_rl.models.load import load_named, load_weights, local_part
from prime_rl.models.save import iter_checkpoint
from prime_rl.testing.layout import RecordingSource

LAYOUT = WeightLayout.of(
    fuse("qkv.weight", ["q", "k", "v"], sizes=(6, 2, 2)),
    stack_experts("experts", ["e.{e}.gate", "e.{e}.up"], range(4)),
    rename("small", "small"),
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 10, bias=False)
        self.experts = nn.Parameter(torch.empty(4, 6, 4))
        self.small = nn.Parameter(torch.empty(2))


def checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"q": drawn(6, 4), "k": drawn(2, 4), "v": drawn(2, 4), "small": drawn(2)}
    for expert in range(4):
        tensors |= {f"e.{expert}.gate": drawn(3, 4), f"e.{expert}.up": drawn(3, 4)}
    return tensors


def test_each_rank_reads_its_rows() -> None:
    """10 rows, 4 experts and 2 numbers over 3 ranks: 4 + 4 + 2, 2 + 2 + 0 and 1 + 1 + 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def check_this_rank() -> None:
    """What every rank runs."""
    dist.init_process_group("gloo")
    given = checkpoint()
    full = Layer()
    load_weights(full, LAYOUT, RecordingSource(given))
    assert full.qkv.weight.equal(torch.cat([given["q"], given["k"], given["v"]]))
    with torch.device("meta"):
        module = Layer()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    source = RecordingSource(given)
    load_weights(module, LAYOUT, source, "cpu")
    held = sum(local_part(parameter)[0].numel() for parameter in module.parameters())
    assert source.numbers_read == held
    for name, tensor in iter_checkpoint(module, LAYOUT):
        assert tensor.equal(given[name]), name
    with torch.no_grad():
        for parameter in module.parameters():
            local_part(parameter)[0].zero_()
    load_named(module, LAYOUT, reversed(given.items()))
    for name, tensor in iter_checkpoint(module, LAYOUT):
        assert tensor.equal(given[name]), name
    dist.destroy_process_group()


if __name__ == "__main__":
    check_this_rank()
