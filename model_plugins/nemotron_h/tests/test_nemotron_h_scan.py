"""The chunked scan against the recurrence, token by token, as the formulas say."""

import pytest
import torch
from prime_rl_model_nemotron_h.carry import states_before
from prime_rl_model_nemotron_h.chunks import make_chunks
from prime_rl_model_nemotron_h.scan import running_sums, scan

from prime_rl.api import PackedBatch

LENGTHS = (5, 1, 17, 3, 8, 1, 1, 30)


def positions(*lengths: int) -> torch.Tensor:
    return PackedBatch.from_documents([[0] * length for length in lengths]).positions


def inputs(tokens: int, groups: int, seed: int = 0) -> list[torch.Tensor]:
    """u, decay, B and C of 6 heads of 5 channels with a state of 4; strong and weak decays."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 6, 5), (tokens, 6), (tokens, groups, 4), (tokens, groups, 4))
    u, decay, b, c = (torch.empty(s).normal_(generator=generator) for s in shapes)
    return [x.requires_grad_() for x in (u, -(3 * decay).exp(), b, c)]


def recurrence(
    u: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Float64, one token and one head at a time."""
    u, decay, b, c = (x.double() for x in (u, decay, b, c))
    per_group = u.shape[1] // b.shape[1]
    rows, token = [], 0
    for length in lengths:
        states = [torch.zeros(5, 4, dtype=torch.float64) for _ in range(6)]
        for _ in range(length):
            heads = []
            for head in range(6):
                group = head // per_group
                added = torch.outer(u[token, head], b[token, group])
                states[head] = decay[token, head].exp() * states[head] + added
                heads.append(states[head] @ c[token, group])
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 16, 66, 100])
def test_scan_is_the_recurrence(groups: int, length: int) -> None:
    """Every chunk length gives the recurrence: borders on, off and inside chunks."""
    tokens = sum(LENGTHS)
    ours, slow = inputs(tokens, groups), inputs(tokens, groups)
    found = scan(*ours, make_chunks(positions(*LENGTHS), length))
    expected = recurrence(*slow, LENGTHS)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    upstream = torch.linspace(-1, 1, found.numel()).sin().view_as(found)
    found.backward(upstream)
    expected.backward(upstream.double())
    for name, a, b in zip(("u", "decay", "B", "C"), ours, slow, strict=True):
        assert (a.grad - b.grad).abs().max() <= 2e-5 * b.grad.abs().max(), name


def test_scan_of_one_document_over_many_chunks() -> None:
    """Slow decays: the state of the first chunk is still felt in the last one."""
    u, decay, b, c = (x.detach() for x in inputs(90, 2))
    decay = decay.clamp(min=-0.01)
    found = scan(u, decay, b, c, make_chunks(positions(90), 4))
    expected = recurrence(u, decay, b, c, (90,))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    other = u.clone()
    other[0] += 1
    changed = scan(other, decay, b, c, make_chunks(positions(90), 4))
    assert (changed[-1] - found[-1]).abs().max() > 1e-2


def test_chunks_say_which_tokens_meet() -> None:
    """By hand: documents of 2, 1 and 4 tokens in chunks of 3; two places are filled up."""
    chunks = make_chunks(positions(2, 1, 4), 3)
    assert chunks.number == 3 and chunks.length == 3
    assert chunks.before_CL.tolist() == [[0, 1, 0], [0, 1, 2], [0, 0, 0]]
    assert chunks.began_earlier_CL.tolist() == [
        [False, False, False],
        [False, False, False],
        [True, False, False],
    ]
    assert chunks.visible_CLL[0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]
    assert chunks.visible_CLL[1].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_other_documents_leave_no_trace() -> None:
    """Bit for bit, even in the same chunk (BL-037)."""
    first, second = (inputs(sum(LENGTHS), 2, seed) for seed in (0, 1))
    mixed = [torch.cat((b[:6], a[6:23], b[23:])) for a, b in zip(first, second, strict=True)]
    chunks = make_chunks(positions(*LENGTHS), 8)
    with torch.no_grad():
        assert scan(*first, chunks)[6:23].equal(scan(*mixed, chunks)[6:23])


def test_running_sums() -> None:
    chunks = make_chunks(positions(2, 1, 4), 7)
    values = torch.tensor([1.0, 2, 4, 8, 16, 32, 64]).view(1, 7, 1)
    sums = running_sums(values, chunks.before_CL)
    assert sums.flatten().tolist() == [1, 3, 4, 8, 24, 56, 120]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 10, 17])
def test_states_before(count: int) -> None:
    """Against a loop, with its gradients; one factor for three numbers."""
    generator = torch.Generator().manual_seed(count)
    added = torch.empty(count, 3, dtype=torch.float64).normal_(generator=generator)
    factor = torch.empty(count, 1, dtype=torch.float64).uniform_(generator=generator)
    inputs = (added.requires_grad_(), factor.requires_grad_())
    state, expected = torch.zeros(3, dtype=torch.float64), []
    for chunk in range(count):
        expected.append(state)
        state = factor[chunk] * state + added[chunk]
    assert torch.allclose(states_before(*inputs), torch.stack(expected))
    assert torch.autograd.gradcheck(states_before, inputs)
    torch.library.opcheck(states_before, inputs)
