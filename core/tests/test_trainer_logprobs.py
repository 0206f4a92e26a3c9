"""Chunked log-probabilities against the whole softmax: values, gradients, kept candidates, memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.trainer.logprobs import KeptTokens, token_logprobs

HIDDEN, VOCABULARY = 6, 11


def random_case(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float32)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float32)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    temperatures = 0.5 + torch.rand(count, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, temperatures


def whole(hidden, weight, targets, temperatures, kept_sets=None):
    """The same from full logits, one row at a time where candidates were kept."""
    logits = (hidden @ weight.T) / temperatures[:, None]
    entropy = torch.distributions.Categorical(logits=logits).entropy().detach()
    if kept_sets is not None:
        rows = [
            logits[n] if not kept else logits[n].masked_fill(~_is_in(kept), float("-inf"))
            for n, kept in enumerate(kept_sets)
        ]
        logits = torch.stack(rows)
    return torch.log_softmax(logits, 1).gather(1, targets[:, None]).squeeze(1), entropy


def _is_in(kept):
    return torch.tensor([token in kept for token in range(VOCABULARY)])


def as_kept(kept_sets):
    ids = [token for kept in kept_sets for token in kept]
    rows = [n for n, kept in enumerate(kept_sets) for _ in kept]
    borders = [0]
    for kept in kept_sets:
        borders.append(borders[-1] + len(kept))
    return KeptTokens(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64), tuple(borders)
    )


def gradients(logprobs, hidden, weight):
    scale = torch.linspace(-1, 2, len(logprobs))
    return torch.autograd.grad((logprobs * scale).sum(), (hidden, weight))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_equals_the_whole_softmax(chunk):
    case = random_case(7)
    expected, entropy = whole(*case)
    logprobs, entropies = token_logprobs(*case, chunk_tokens=chunk)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropies, entropy)
    assert not entropies.requires_grad
    for ours, theirs in zip(
        gradients(logprobs, *case[:2]), gradients(expected, *case[:2]), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_kept_candidates_renormalise(chunk):
    hidden, weight, targets, temperatures = random_case(5)
    kept_sets = [sorted({int(t), 1, 4}) for t in targets]
    kept_sets[1] = []
    kept_sets[3] = [int(targets[3])]
    case = (hidden, weight, targets, temperatures)
    expected, entropy = whole(*case, kept_sets)
    logprobs, entropies = token_logprobs(*case, as_kept(kept_sets), chunk_tokens=chunk)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropies, entropy)
    assert logprobs[3].item() == 0.0
    for ours, theirs in zip(
        gradients(logprobs, hidden, weight), gradients(expected, hidden, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def from_logits(logits, target, temperature=1.0, kept=None):
    """Log-probability of one token when the head is the identity."""
    hidden = torch.tensor([logits])
    kept = None if kept is None else as_kept([kept])
    logprobs, _ = token_logprobs(
        hidden, torch.eye(len(logits)), torch.tensor([target]), torch.tensor([temperature]), kept
    )
    return logprobs.item()


def test_temperature_by_hand():
    assert from_logits([2.0, 0.0], 0) == pytest.approx(-0.126928, abs=1e-6)
    assert from_logits([2.0, 0.0], 0, temperature=0.7) == pytest.approx(-0.055844, abs=1e-6)


def test_truncated_sampling_by_hand():
    assert from_logits([2.0, 1.0, 0.0], 1, kept=[0, 1]) == pytest.approx(-1.313262, abs=1e-6)
    assert from_logits([2.0, 1.0, 0.0], 1) == pytest.approx(-1.407606, abs=1e-6)
    assert from_logits([1.0, 1.0, 0.0], 1, kept=[1]) == 0.0


def test_huge_logits_stay_finite():
    assert from_logits([1e4, 0.0], 1) == -1e4
    assert from_logits([1e4, 0.0], 1, kept=[1]) == 0.0


def test_without_tokens_both_inputs_get_a_gradient():
    hidden, weight, targets, temperatures = random_case(0)
    logprobs, entropies = token_logprobs(hidden, weight, targets, temperatures)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.abs().sum() == 0


def test_without_entropy_the_logprobs_are_the_same():
    case = random_case(4)
    with_entropy, _ = token_logprobs(*case)
    without, entropies = token_logprobs(*case, with_entropy=False)
    assert with_entropy.equal(without) and entropies.abs().sum() == 0


def test_half_precision_states_give_float32_results():
    hidden, weight, targets, temperatures = random_case(5)
    low = (hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_())
    logprobs, entropies = token_logprobs(*low, targets, temperatures, chunk_tokens=2)
    expected, entropy = whole(low[0].float(), low[1].float(), targets, temperatures)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, entropy, rtol=1e-5, atol=1e-5)
    found = gradients(logprobs, *low)
    assert [g.dtype for g in found] == [torch.bfloat16] * 2


class LargestTensor(TorchDispatchMode):
    """Notes the most elements any tensor had that an operation made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_full_logits_never_exist():
    count, chunk = 40, 4
    case = random_case(count)
    with LargestTensor() as seen:
        logprobs, _ = token_logprobs(*case, chunk_tokens=chunk)
        logprobs.sum().backward()
    assert seen.largest < count * VOCABULARY
    assert seen.largest <= max(chunk * VOCABULARY, count * HIDDEN)
