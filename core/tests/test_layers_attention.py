"""How the torch attention back end groups documents."""

import random

import torch

from prime_rl.layers.attention_torch import PADDING_LIMIT, PADDING_TOKENS, plan_groups

CPU = torch.device("cpu")


def test_equal_documents_need_no_index() -> None:
    plan = plan_groups((7, 7, 7), CPU)
    assert plan.inverse is None
    assert [(g.documents, g.length, g.tokens) for g in plan.groups] == [(3, 7, None)]


def test_every_token_has_one_place_and_padding_is_bounded() -> None:
    """Random rows: the inverse finds each token, few groups, little padding."""
    rng = random.Random(0)
    for _ in range(50):
        lengths = tuple(rng.choice((1, 3, 20, 100, 800)) + rng.randrange(9) for _ in range(60))
        plan = plan_groups(lengths, CPU)
        assert plan.inverse is not None
        tokens = [group.tokens for group in plan.groups if group.tokens is not None]
        flat = torch.cat(tokens)
        assert flat[plan.inverse].equal(torch.arange(sum(lengths)))
        assert len(plan.groups) <= 8
        for group in plan.groups:
            rows = group.tokens.view(group.documents, group.length)  # type: ignore[union-attr]
            sizes = (rows[:, -1] - rows[:, 0] + 1).tolist()
            for size in sizes:
                allowed = max(size * PADDING_LIMIT, size + PADDING_TOKENS)
                assert size <= group.length <= allowed


def test_padding_repeats_a_token_of_the_same_document() -> None:
    """Whatever is in another document, NaN included, stays there."""
    plan = plan_groups((2, 4), CPU)
    tokens = plan.groups[0].tokens
    assert tokens is not None and tokens.view(2, 4).tolist() == [[2, 3, 4, 5], [0, 1, 1, 1]]
