"""On-policy distillation: the policy samples, a frozen teacher says how likely it finds the tokens."""

from __future__ import annotations

from typing import Literal

from prime_rl.algorithms.distillation import DistillationConfig, teaching_weights
from prime_rl.api.algorithm import Algorithm, AlgorithmNeeds, Credit, Group
from prime_rl.configs.frozen import FrozenModelConfig


class OPDConfig(DistillationConfig):
    """Settings of opd."""

    type: Literal["opd"] = "opd"
    """Name of the algorithm."""
    teacher: FrozenModelConfig
    """The frozen model that scores what the policy sampled."""


class OPD(Algorithm):
    """Reverse KL to the teacher, one sampled token at a time: ref_kl weight 1 on every token of the
    mask. With lr and lt the log-probabilities at teacher and trainer, a token pulls with lr - lt.

    Rewards play no part and a group of one episode trains. Failed episodes never train (or take
    their group with them, `failed`); nor do truncated ones with `truncated = "exclude"`.
    """

    Config = OPDConfig
    requirements = AlgorithmNeeds(reference="teacher", components=frozenset({"ref_kl"}))

    @property
    def teacher(self) -> FrozenModelConfig:
        """See Algorithm.teacher."""
        found: FrozenModelConfig = self.config.teacher
        return found

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Episodes that do not count get empty credit."""
        return [
            [Credit(ref_kl_weights=weights) for weights in branches]
            for branches in teaching_weights(group, self.config)
        ]
