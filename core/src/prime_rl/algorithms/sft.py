"""Hard distillation: a frozen teacher plays the episodes, the policy learns its tokens by heart."""

from __future__ import annotations

from typing import Literal

from prime_rl.algorithms.distillation import DistillationConfig, teaching_weights
from prime_rl.api.algorithm import Algorithm, AlgorithmNeeds, Credit, Group
from prime_rl.configs.frozen import FrozenModelConfig


class SFTAlgorithmConfig(DistillationConfig):
    """Settings of sft."""

    type: Literal["sft"] = "sft"
    """Name of the algorithm."""
    teacher: FrozenModelConfig
    """The frozen model that plays the episodes."""


class SFT(Algorithm):
    """Cross-entropy on what the teacher sampled: ce weight 1 on every token of the mask.

    The minimum of the mean over episodes is the teacher's own distribution: forward KL. Rewards
    play no part and a group of one episode trains. Failed episodes never train (or take their
    group with them, `failed`); nor do truncated ones with `truncated = "exclude"`.
    """

    Config = SFTAlgorithmConfig
    requirements = AlgorithmNeeds(sampled_by="frozen", components=frozenset({"ce"}))

    @property
    def teacher(self) -> FrozenModelConfig:
        """See Algorithm.teacher."""
        found: FrozenModelConfig = self.config.teacher
        return found

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Episodes that do not count get empty credit."""
        return [
            [Credit(ce_weights=weights) for weights in branches]
            for branches in teaching_weights(group, self.config)
        ]
