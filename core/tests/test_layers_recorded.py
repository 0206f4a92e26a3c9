"""Recorded operations: same results, other sizes, in-place writes; the function where that fails."""

import torch
from torch import Tensor

from prime_rl.layers.recorded import record_operations


def step(x_RH: Tensor, weight_HH: Tensor, cache_SH: Tensor, slots_R: Tensor) -> Tensor:
    """Writes into the cache and reads it."""
    cache_SH.index_put_((slots_R,), x_RH @ weight_HH)
    return cache_SH.sum(0, keepdim=True) + x_RH.view(-1, 4)


def test_other_sizes_and_values_and_writes() -> None:
    generator = torch.Generator().manual_seed(0)
    example = (torch.randn(1, 4), torch.randn(4, 4), torch.zeros(5, 4), torch.tensor([2]))
    recorded = record_operations(step, example)
    assert recorded is not step
    for rows in (1, 3, 2, 5):
        x_RH = torch.randn(rows, 4, generator=generator)
        weight_HH = torch.randn(4, 4, generator=generator)
        slots_R = torch.randperm(5, generator=generator)[:rows]
        ours, theirs = torch.ones(5, 4), torch.ones(5, 4)
        found = recorded(x_RH, weight_HH, ours, slots_R)
        assert torch.allclose(found, step(x_RH, weight_HH, theirs, slots_R))
        assert ours.equal(theirs)


def test_a_function_that_cannot_be_traced_is_returned() -> None:
    def picky(x: Tensor) -> Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError("not under a tracer")
        return x + 1

    kept = record_operations(picky, (torch.zeros(2),))
    assert kept is picky and kept(torch.ones(2)).tolist() == [2, 2]
