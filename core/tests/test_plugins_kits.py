"""The loss and algorithm kits reject implementations that are wrong in one deliberate way each."""

import inspect
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar, Literal

import pytest
import torch

from prime_rl.api import Algorithm, AlgorithmNeeds, Credit, Group, Loss, LossInputs, LossOutput
from prime_rl.configs.base import PluginConfig
from prime_rl.testing.algorithm import AlgorithmConformance
from prime_rl.testing.conformance import PluginConformance
from prime_rl.testing.loss import LossConformance

INSTALLED_ONLY = {"test_importing_it_is_light"}
"""Checks that look at an installed wheel; the classes of this file are in none."""


def failures(kit: PluginConformance) -> set[str]:
    """Names of the kit's checks that do not pass, of those that need no installed wheel."""
    failed = set()
    for name, check in inspect.getmembers(kit, inspect.ismethod):
        if name.startswith("test_") and name not in INSTALLED_ONLY:
            try:
                check()
            except Exception:
                failed.add(name)
    return failed


class GoodConfig(PluginConfig):
    type: Literal["good"] = "good"
    bound: float = 1.0
    """Largest difference of log-probabilities, in nats."""


class GoodLoss(Loss):
    """Importance-weighted policy gradient with a keep mask: right in everything."""

    Config = GoodConfig

    def compute(self, inputs: LossInputs) -> LossOutput:
        gap = inputs.trainer_logprobs - inputs.inference_logprobs
        keep = gap.detach().abs() <= self.config.bound
        ratio = gap.masked_fill(~keep, 0.0).exp()
        return LossOutput(
            -inputs.advantages * ratio * keep, {"ratio": ratio.detach(), "left_out": ~keep}, keep
        )


def loss_kit(loss: type[Loss]) -> LossConformance:
    class Kit(LossConformance):
        plugin_name = "good"

        def plugin_class(self) -> type:
            return loss

        def config_class(self) -> type[PluginConfig]:
            return loss.Config

    return Kit()


class Averaged(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, loss=output.loss / max(len(output.loss), 1))


class Reduced(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, loss=output.loss.sum())


class WrongSign(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, loss=-output.loss)


class ExpBeforeSelecting(GoodLoss):
    """BL-001, BL-009: a mask multiplied onto an infinite ratio is NaN."""

    def compute(self, inputs):
        gap = inputs.trainer_logprobs - inputs.inference_logprobs
        keep = gap.detach().abs() <= self.config.bound
        return LossOutput(-inputs.advantages * gap.exp() * keep, {}, keep)


class InfiniteMetric(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        gap = (inputs.trainer_logprobs - inputs.inference_logprobs).detach()
        return replace(output, metrics={"mismatch": gap.exp()})


class Detached(GoodLoss):
    """Without tokens there is no graph, so backward fails and the other ranks wait (BL-005)."""

    def compute(self, inputs):
        if not len(inputs.trainer_logprobs):
            return LossOutput(torch.zeros(0))
        return super().compute(inputs)


class MetricInGraph(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, metrics={"loss": output.loss})


class ScalarMetric(GoodLoss):
    def compute(self, inputs):
        return replace(super().compute(inputs), metrics={"mean": torch.tensor(0.0)})


class HalfPrecision(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, loss=output.loss.bfloat16())


class InPlace(GoodLoss):
    def compute(self, inputs):
        inputs.advantages.mul_(2.0)
        return super().compute(inputs)


class Random(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, loss=output.loss * torch.rand_like(output.loss))


class Centred(GoodLoss):
    """Normalises advantages over the row: documents and tokens mix."""

    def compute(self, inputs):
        mean = inputs.advantages.mean() if len(inputs.advantages) else 0.0
        return super().compute(replace(inputs, advantages=inputs.advantages - mean))


class NumbersMatter(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        return replace(output, loss=output.loss * (1 + inputs.segment_ids))


class LoudWhenDropped(GoodLoss):
    def compute(self, inputs):
        output = super().compute(inputs)
        gap = inputs.trainer_logprobs - inputs.inference_logprobs
        return replace(output, loss=output.loss + gap.clamp(-20, 20) ** 2)


class NotAnOutput(GoodLoss):
    def compute(self, inputs):
        return super().compute(inputs).loss


class OpenConfig(GoodConfig):
    model_config = {"extra": "ignore"}


class AcceptsAnything(GoodLoss):
    Config = OpenConfig


class SilentConfig(PluginConfig):
    type: Literal["good"] = "good"
    bound: float = 1.0


class Undocumented(GoodLoss):
    Config = SilentConfig


class MisleadingConfig(GoodConfig):
    former: ClassVar = {"limit": "write `.bond` instead"}


class Misleading(GoodLoss):
    Config = MisleadingConfig


class ForgetfulConfig(GoodConfig):
    def model_dump(self, **options):
        return {"type": "good"}


class Forgetful(GoodLoss):
    Config = ForgetfulConfig


WRONG_LOSSES = {
    Averaged: "test_documents_do_not_mix",
    Reduced: "test_every_stream_is_per_token",
    WrongSign: "test_rewarded_tokens_become_likelier",
    ExpBeforeSelecting: "test_everything_is_finite_for_any_finite_inputs",
    InfiniteMetric: "test_everything_is_finite_for_any_finite_inputs",
    Detached: "test_no_tokens_still_run_backward",
    MetricInGraph: "test_every_stream_is_per_token",
    ScalarMetric: "test_every_stream_is_per_token",
    HalfPrecision: "test_every_stream_is_per_token",
    InPlace: "test_inputs_are_left_alone",
    Random: "test_same_inputs_give_same_bits",
    Centred: "test_tokens_do_not_mix",
    NumbersMatter: "test_document_numbers_are_only_names",
    LoudWhenDropped: "test_dropped_tokens_are_silent",
    NotAnOutput: "test_every_stream_is_per_token",
    AcceptsAnything: "test_unknown_setting_is_refused",
    Undocumented: "test_every_setting_says_what_it_does",
    Misleading: "test_former_settings_lead_to_present_ones",
}


def test_good_loss_passes():
    assert failures(loss_kit(GoodLoss)) == set()


@pytest.mark.parametrize("wrong", WRONG_LOSSES, ids=lambda loss: loss.__name__)
def test_wrong_loss_is_rejected(wrong):
    assert WRONG_LOSSES[wrong] in failures(loss_kit(wrong))


def test_settings_that_do_not_survive_a_dump_are_rejected():
    class Kit(LossConformance):
        plugin_name = "good"
        settings: ClassVar = {"bound": 2.0}

        def plugin_class(self) -> type:
            return Forgetful

        def config_class(self) -> type[PluginConfig]:
            return ForgetfulConfig

    assert failures(Kit()) == {"test_settings_survive_dump_and_load"}


class GoodAlgorithmConfig(PluginConfig):
    type: Literal["good"] = "good"


class GoodAlgorithm(Algorithm):
    """Reward minus the mean of the group, on sampled tokens."""

    Config = GoodAlgorithmConfig

    def score_group(self, group: Group) -> list[list[Credit]]:
        rewards = [episode.reward for episode in group.episodes]
        mean = rewards[0] if len(set(rewards)) == 1 else sum(rewards) / max(len(rewards), 1)
        return [
            [self.credit(branch, episode.reward - mean) for branch in episode.branches]
            for episode in group.episodes
        ]

    def credit(self, branch, advantage) -> Credit:
        return Credit(advantages=[advantage if sampled else 0.0 for sampled in branch.mask])


def algorithm_kit(algorithm: type[Algorithm]) -> AlgorithmConformance:
    class Kit(AlgorithmConformance):
        plugin_name = "good"

        def plugin_class(self) -> type:
            return algorithm

        def config_class(self) -> type[PluginConfig]:
            return algorithm.Config

    return Kit()


class OnlySampledTokens(GoodAlgorithm):
    def credit(self, branch, advantage):
        return Credit(advantages=[advantage for sampled in branch.mask if sampled])


class OneCreditPerEpisode(GoodAlgorithm):
    def score_group(self, group):
        return [credits[:1] for credits in super().score_group(group)]


class DropsFailedEpisodes(GoodAlgorithm):
    def score_group(self, group):
        return [credits for credits in super().score_group(group) if credits]


class DividesByDeviation(GoodAlgorithm):
    def score_group(self, group):
        rewards = torch.tensor([episode.reward for episode in group.episodes])
        scores = (rewards - rewards.mean()) / rewards.std(correction=0)
        return [
            [self.credit(branch, float(score)) for branch in episode.branches]
            for episode, score in zip(group.episodes, scores, strict=True)
        ]


class WeighsPrompts(GoodAlgorithm):
    def credit(self, branch, advantage):
        return Credit(
            advantages=[advantage] * len(branch.mask), rl_weights=[1.0] * len(branch.mask)
        )


class UndeclaredComponent(GoodAlgorithm):
    def credit(self, branch, advantage):
        return replace(super().credit(branch, advantage), ce_weights=[0.0] * len(branch.mask))


class PrefersBad(GoodAlgorithm):
    def credit(self, branch, advantage):
        return super().credit(branch, -advantage)


class NoBaseline(GoodAlgorithm):
    def score_group(self, group):
        return [
            [self.credit(branch, episode.reward) for branch in episode.branches]
            for episode in group.episodes
        ]


class FirstIsTheBaseline(GoodAlgorithm):
    def score_group(self, group):
        first = group.episodes[0].reward
        return [
            [self.credit(branch, episode.reward - first) for branch in episode.branches]
            for episode in group.episodes
        ]


class Forgets(GoodAlgorithm):
    """Keeps a running mean that its state leaves out."""

    def __init__(self, config):
        super().__init__(config)
        self.groups = 0

    def score_group(self, group):
        self.groups += 1
        return super().score_group(group)

    def credit(self, branch, advantage):
        return super().credit(branch, advantage / self.groups)


class StateIsNoJson(GoodAlgorithm):
    def state_dict(self):
        return {"seen": (1, 2)}

    def load_state_dict(self, state):
        pass


WRONG_ALGORITHMS = {
    OnlySampledTokens: "test_credit_has_the_shape_of_the_group",
    OneCreditPerEpisode: "test_credit_has_the_shape_of_the_group",
    DropsFailedEpisodes: "test_credit_has_the_shape_of_the_group",
    DividesByDeviation: "test_credit_is_finite",
    WeighsPrompts: "test_weights_stay_on_sampled_tokens",
    UndeclaredComponent: "test_uses_only_the_components_it_declares",
    PrefersBad: "test_better_episodes_get_more_credit",
    NoBaseline: "test_equal_rewards_give_no_advantage",
    FirstIsTheBaseline: "test_order_of_episodes_does_not_matter",
    Forgets: "test_state_survives_a_restart",
    StateIsNoJson: "test_state_survives_a_restart",
}


def test_good_algorithm_passes():
    assert failures(algorithm_kit(GoodAlgorithm)) == set()
    assert AlgorithmNeeds().components == frozenset({"rl"})


@pytest.mark.parametrize("wrong", WRONG_ALGORITHMS, ids=lambda algorithm: algorithm.__name__)
def test_wrong_algorithm_is_rejected(wrong):
    assert WRONG_ALGORITHMS[wrong] in failures(algorithm_kit(wrong))


def test_plugin_that_imports_torch_is_rejected(tmp_path, monkeypatch):
    from prime_rl.testing.distributions import LOSS_MODULE, write_distribution

    for name, first_line in (("kit_light", ""), ("kit_heavy", "import numpy\n")):
        entries = {"prime_rl.losses": {name: f"module_{name}:Plugin"}}
        source = first_line + LOSS_MODULE.format(name=name, class_name="Plugin")
        modules = {f"module_{name}": source}
        write_distribution(tmp_path, f"wheel-{name}", entry_points=entries, modules=modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Light(LossConformance):
        plugin_name = "kit_light"

    class Heavy(LossConformance):
        plugin_name = "kit_heavy"

    Light().test_importing_it_is_light()
    with pytest.raises(AssertionError, match="importing it loads numpy"):
        Heavy().test_importing_it_is_light()


def test_kits_import_without_torch():
    code = (
        "import sys, prime_rl.testing.loss, prime_rl.testing.algorithm\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
