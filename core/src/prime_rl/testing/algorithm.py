"""Conformance kit of algorithms: alignment, credit only where the policy acted, state, determinism."""

from __future__ import annotations

import json
import math
from typing import ClassVar

from prime_rl.api import Branch, Credit, Episode, Group
from prime_rl.testing.conformance import PluginConformance

STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights")


class AlgorithmConformance(PluginConformance):
    """Checks of an algorithm. Switch a flag off where it is different by design."""

    kind = "algorithm"
    prefers_reward: ClassVar[bool] = True
    """In a group with two rewards, the better episode gets more credit than the worse."""
    silent_without_contrast: ClassVar[bool] = True
    """A group whose episodes all have the same reward gives no advantage to anybody."""

    def score(self, group: Group) -> list[list[Credit]]:
        """Score with a new instance."""
        credits: list[list[Credit]] = self.plugin().score_group(group)
        return credits

    def test_credit_has_the_shape_of_the_group(self) -> None:
        """One Credit per branch per episode, one entry per token in every stream."""
        for group in _groups():
            credits = self.score(group)
            assert len(credits) == len(group.episodes)
            for episode, of_episode in zip(group.episodes, credits, strict=True):
                assert len(of_episode) == len(episode.branches)
                for branch, credit in zip(episode.branches, of_episode, strict=True):
                    for name in STREAMS:
                        stream = getattr(credit, name)
                        if stream is not None:
                            assert len(stream) == len(branch.token_ids), name

    def test_credit_is_finite(self) -> None:
        for group in _groups():
            for name, value in _values(self.score(group)):
                assert math.isfinite(value), f"{name} {value} for {group.task_key}"

    def test_weights_stay_on_sampled_tokens(self) -> None:
        """Only tokens that the policy sampled may carry a component's weight."""
        for group in _groups():
            credits = self.score(group)
            for episode, of_episode in zip(group.episodes, credits, strict=True):
                for branch, credit in zip(episode.branches, of_episode, strict=True):
                    for name in ("rl_weights", "ref_kl_weights"):
                        for is_sampled, weight in zip(
                            branch.mask, getattr(credit, name) or (), strict=False
                        ):
                            assert is_sampled or weight == 0.0, f"{name} {weight} on a given token"

    def test_uses_only_the_components_it_declares(self) -> None:
        declared = self.plugin_class().requirements.components  # type: ignore[attr-defined]
        present: set[str] = set()
        for group in _groups():
            for of_episode in self.score(group):
                for credit in of_episode:
                    present |= {"rl"} if credit.advantages is not None else set()
                    present |= {"ce"} if credit.ce_weights is not None else set()
                    present |= {"ref_kl"} if credit.ref_kl_weights is not None else set()
        assert present <= set(declared), f"declares {sorted(declared)}, uses {sorted(present)}"

    def test_better_episodes_get_more_credit(self) -> None:
        if not self.prefers_reward:
            return
        good, bad = self.score(group([1.0, 0.0]))
        assert _mean_advantage(good[0]) > _mean_advantage(bad[0])

    def test_equal_rewards_give_no_advantage(self) -> None:
        if not self.silent_without_contrast:
            return
        for of_episode in self.score(group([1.0, 1.0, 1.0])):
            assert all(value == 0.0 for value in of_episode[0].advantages or ())

    def test_order_of_episodes_does_not_matter(self) -> None:
        rewards = [0.0, 1.0, 0.25, 0.5]
        forward = self.score(group(rewards))
        backward = self.score(group(rewards[::-1]))[::-1]
        for one, other in zip(forward, backward, strict=True):
            difference = _mean_advantage(one[0]) - _mean_advantage(other[0])
            assert abs(difference) < 1e-6, (
                f"an episode's credit moves by {difference} with its place"
            )

    def test_same_group_gives_the_same_credit(self) -> None:
        assert self.score(group([0.0, 1.0])) == self.score(group([0.0, 1.0]))

    def test_state_survives_a_restart(self) -> None:
        """What a restored instance scores is what the old one would have scored."""
        old = self.plugin()
        old.score_group(group([0.0, 1.0, 0.5]))
        state = json.loads(json.dumps(old.state_dict()))
        assert state == old.state_dict(), "state_dict must hold plain JSON values only"
        new = self.plugin()
        new.load_state_dict(state)
        assert new.state_dict() == old.state_dict()
        assert new.score_group(group([1.0, 0.0])) == old.score_group(group([1.0, 0.0]))


def group(rewards: list[float], outcome: str = "completed", tokens: int = 4) -> Group:
    """A group of one-branch episodes: one prompt token, then `tokens` sampled ones."""
    episodes = [
        Episode(
            id=f"episode-{index}",
            outcome=outcome,  # type: ignore[arg-type]
            reward=reward,
            branches=[
                Branch(
                    agent="policy",
                    token_ids=list(range(tokens + 1)),
                    mask=[False] + [True] * tokens,
                    reward=reward,
                )
            ],
            input_tokens=1,
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(env_name="kit", task_key=f"rewards {rewards} {outcome}", episodes=episodes)


def _groups() -> list[Group]:
    """Ordinary and awkward groups: alone, equal, huge, failed, empty, several branches."""
    ordinary = group([0.0, 1.0, 0.5])
    two_branches = Episode(
        id="two",
        outcome="completed",
        reward=0.5,
        branches=[
            Branch("policy", [1, 2, 3], [False, True, True], 0.5),
            Branch("policy", [1, 2, 4, 5], [False, False, True, True], 0.5),
        ],
        turns=2,
    )
    no_branches = Episode(id="failed", outcome="error", reward=0.0, branches=[])
    untrained = Episode("given", "completed", 1.0, [Branch("other", [1, 2], [False, False], 1.0)])
    return [
        ordinary,
        group([1.0]),
        group([0.3, 0.3]),
        group([1e9, -1e9]),
        group([0.0, 1.0], outcome="truncated"),
        Group("kit", "mixed", [*ordinary.episodes, two_branches, no_branches, untrained]),
        Group("kit", "all failed", [no_branches, no_branches]),
    ]


def _values(credits: list[list[Credit]]) -> list[tuple[str, float]]:
    return [
        (name, value)
        for of_episode in credits
        for credit in of_episode
        for name in STREAMS
        for value in getattr(credit, name) or ()
    ]


def _mean_advantage(credit: Credit) -> float:
    advantages = credit.advantages or (0.0,)
    return sum(advantages) / len(advantages)
