"""Recomputed blocks choose nothing a second time."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from prime_rl.api import Kernels
from prime_rl.configs.trainer import MemoryConfig, TrainerConfig
from prime_rl.layers import dsa_torch_select
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
from prime_rl.parallel.shard import make_meshes, shard
from prime_rl.parallel.world import World
from prime_rl.trainer.recompute import recompute_in_backward, remember_choices
from prime_rl.trainer.setup import leave_kernels_alone, prepare_blocks


class SparseBlock(nn.Module):
    """Selects keys and attends to them."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.backend = TorchDSA(TorchDSAConfig())

    def forward(self, x_TD: Tensor) -> Tensor:
        tokens = x_TD.shape[0]
        last = torch.arange(tokens) + 1
        q = self.q(x_TD)[:, None]
        weights = torch.ones(tokens, 1)
        rows = self.backend.select(q, x_TD, weights, torch.zeros_like(last), last, 3)
        return self.backend.attend(q, x_TD[:, None], None, rows, 0.5, None, 8)[:, 0]


@pytest.mark.parametrize(("keeps", "expected"), [(True, 1), (False, 2)])
def test_what_was_chosen_is_not_chosen_again(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, expected: int
) -> None:
    calls = []
    select = dsa_torch_select._select_chunk
    monkeypatch.setattr(
        dsa_torch_select, "_select_chunk", lambda *tensors: calls.append(select(*tensors))
    )
    torch.manual_seed(0)
    block, x_TD = SparseBlock(), torch.randn(9, 8)
    block(x_TD).square().sum().backward()
    plain = [parameter.grad for parameter in block.parameters()]
    calls.clear()
    block.zero_grad()
    kernels = Kernels(TorchAttention(TorchAttentionConfig()), [], block.backend)
    if keeps:
        remember_choices(kernels)
    recompute_in_backward(block)
    block(x_TD).square().sum().backward()
    assert len(calls) == expected
    for parameter, gradient in zip(block.parameters(), plain, strict=True):
        assert parameter.grad is not None and gradient is not None
        assert parameter.grad.equal(gradient)


class Island(nn.Module):
    """Computes in float32 whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD.float() * self.scale


class BlockWithIslands(nn.Module):
    """Modules inside that gather their parameters themselves, two of them behind the selection: in
    backward their hooks run before the block does again."""

    def __init__(self) -> None:
        super().__init__()
        self.islands = nn.ModuleList(Island() for _ in range(3))
        self.sparse = SparseBlock()

    def forward(self, x_TD: Tensor) -> Tensor:
        first, second, third = self.islands
        mixed = self.sparse(first(x_TD).to(x_TD.dtype)).to(x_TD.dtype)
        return (mixed * second(mixed) * third(x_TD)).to(x_TD.dtype)


def sharded_gradients(recompute: bool) -> list[Tensor]:
    torch.manual_seed(0)
    root = nn.Sequential(nn.Linear(8, 8), BlockWithIslands(), BlockWithIslands())
    blocks = list(root)[1:]
    for block in blocks if recompute else ():
        kernels = Kernels(TorchAttention(TorchAttentionConfig()), [], block.sparse.backend)
        remember_choices(kernels)
        recompute_in_backward(block)
    islands = [module for module in root.modules() if isinstance(module, Island)]
    meshes = make_meshes(World(0, 1, torch.device("cpu"), None), 1, 1)
    shard(root, blocks, meshes, torch.bfloat16, torch.float32, keep_float32=islands)
    for _ in range(2):  # shards are laid out in the first forward
        root.zero_grad()
        root(torch.randn(9, 8, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [parameter.grad.full_tensor() for parameter in root.parameters()]


def test_sharded_modules_inside_a_recomputed_block() -> None:
    try:
        plain, recomputed = sharded_gradients(False), sharded_gradients(True)
    finally:
        dist.destroy_process_group()
    assert len(plain) == 2 + 2 * 5 and all(gradient.any() for gradient in plain[4:])
    for first, second in zip(plain, recomputed, strict=True):
        assert first.equal(second)


def test_choices_belong_to_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards before either backward, as with several rows in flight."""
    torch.manual_seed(0)
    block = SparseBlock()
    rows = [torch.randn(9, 8), torch.randn(5, 8)]
    expected = []
    for row in rows:
        block.zero_grad()
        block(row).square().sum().backward()
        expected.append(block.q.weight.grad.clone())
    remember_choices(Kernels(TorchAttention(TorchAttentionConfig()), [], block.backend))
    recompute_in_backward(block)
    outputs = [block(row).square().sum() for row in rows]
    for output, gradient in reversed(list(zip(outputs, expected, strict=True))):
        block.zero_grad()
        output.backward()
        assert block.q.weight.grad.equal(gradient)


def test_compiled_blocks_are_recomputed() -> None:
    """The graph breaks at the kernels; values are those of the plain block."""
    torch.manual_seed(0)
    block, x_TD = SparseBlock(), torch.randn(9, 8)
    block(x_TD).square().sum().backward()
    expected = block.q.weight.grad.clone()
    block.zero_grad()
    kernels = Kernels(TorchAttention(TorchAttentionConfig()), [], block.backend)
    leave_kernels_alone(kernels)
    remember_choices(kernels)
    block.forward = torch.compile(block.forward, backend="aot_eager")
    recompute_in_backward(block)
    block(x_TD).square().sum().backward()
    torch.testing.assert_close(block.q.weight.grad, expected)


class RoundedBlock(nn.Module):
    """Rounds in its middle."""

    def forward(self, x_TD: Tensor) -> Tensor:
        rounded_TD = (x_TD.float() * 1.1).bfloat16().float()
        return ((rounded_TD * 3.3).bfloat16() * 0.7).float()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="drops roundings on a CPU")
def test_compiled_blocks_round_where_plain_ones_do() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([RoundedBlock()])
    (block,) = model.layers
    x_TD = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    expected = block(x_TD)
    trainer = TrainerConfig.model_construct(memory=MemoryConfig(compile=True))
    prepare_blocks(model, Kernels(TorchAttention(TorchAttentionConfig()), []), trainer)
    assert block(x_TD).equal(expected)
