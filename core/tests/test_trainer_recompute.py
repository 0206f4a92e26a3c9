"""Recomputed blocks choose nothing a second time."""

import pytest
import torch
from torch import Tensor, nn

from prime_rl.api import Kernels
from prime_rl.layers import dsa_torch_select
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
from prime_rl.trainer.setup import kept_operators, recompute_in_backward


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
def test_kept_operators_run_once(
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
    recompute_in_backward(block, kept_operators(kernels) if keeps else frozenset())
    block(x_TD).square().sum().backward()
    assert len(calls) == expected
    for parameter, gradient in zip(block.parameters(), plain, strict=True):
        assert parameter.grad is not None and gradient is not None
        assert parameter.grad.equal(gradient)
