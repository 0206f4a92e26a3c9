"""On-policy self-distillation: the policy learns what it would do with a demonstration at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from prime_rl.algorithms.distillation import DistillationConfig, teaching_weights
from prime_rl.api.algorithm import (
    Algorithm,
    AlgorithmNeeds,
    Branch,
    Credit,
    Group,
    ReferenceContext,
)

PLACE = "{demonstration}"
"""Where the template has the demonstration."""


class OPSDConfig(DistillationConfig):
    """Settings of opsd."""

    type: Literal["opsd"] = "opsd"
    """Name of the algorithm."""
    demo_key: str = Field("demonstration", min_length=1)
    """Key of the task's data that holds the demonstration, a text."""
    template: str = f"A correct answer to what follows:\n{PLACE}"
    """Text of the hint; {demonstration} stands for the demonstration."""
    role: Literal["system", "user"] = "system"
    """Role of the message that carries the hint."""

    @field_validator("template")
    @classmethod
    def _has_the_place(cls, template: str) -> str:
        if PLACE not in template:
            raise ValueError(
                f"found {template!r}, expected {PLACE} where the demonstration shall stand"
            )
        return template


class OPSD(Algorithm):
    """As opd, with the policy itself as teacher: it scores its own tokens behind a hint block that
    holds the task's demonstration, with the weights that run when the batch ships.

    Rewards play no part and a group of one episode trains. Failed episodes never train (or take
    their group with them, `failed`); nor do truncated ones with `truncated = "exclude"`.
    """

    Config = OPSDConfig
    requirements = AlgorithmNeeds(reference="policy", components=frozenset({"ref_kl"}))

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Episodes that do not count get empty credit."""
        return [
            [Credit(ref_kl_weights=weights) for weights in branches]
            for branches in teaching_weights(group, self.config)
        ]

    def reference_context(self, branch: Branch, task: Mapping[str, Any]) -> ReferenceContext:
        """See Algorithm.reference_context. Raises ValueError when the task has no demonstration."""
        demonstration = task.get(self.config.demo_key)
        if not isinstance(demonstration, str) or not demonstration:
            found = f"{demonstration!r:.60}" if self.config.demo_key in task else "nothing"
            raise ValueError(
                f"opsd needs a demonstration, a text, under {self.config.demo_key!r} of every "
                f"task; found {found} there. Keys of this task: {', '.join(sorted(task))}. Set "
                "algo.demo_key"
            )
        # Not str.format: braces of template and demonstration are text.
        hint = self.config.template.replace(PLACE, demonstration)
        return [{"role": self.config.role, "content": hint}]
