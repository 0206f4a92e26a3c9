"""Credit onto samples, pruning, and the figures of steps and evaluations."""

import math

import pytest

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.api import Credit
from prime_rl.errors import RunError
from prime_rl.orchestrator.dispatch import GroupCancellation
from prime_rl.orchestrator.episode import AgentTrace, EpisodeRequest, EpisodeResult
from prime_rl.orchestrator.evaluate import EvalSink, evaluation_metrics, is_due, pass_metrics
from prime_rl.orchestrator.group import EpisodeFigures, apply_credit, score
from prime_rl.orchestrator.metrics import batch_metrics, no_signal_reason, spread
from prime_rl.orchestrator.policy import fillable_batches, gate_is_open, staleness
from prime_rl.orchestrator.sampling import sampling_settings
from prime_rl.orchestrator.sink import Batch, Observed
from prime_rl.wire import TrainingSample


def sample(name="t"):
    return TrainingSample(
        token_ids=[1, 2, 3, 4],
        mask=[False, False, True, True],
        logprobs=[0.0, 0.0, -1.0, -2.0],
        temperatures=[1.0] * 4,
        env_name="words",
        trace_id=name,
        branch_index=0,
    )


def result(member, reward, outcome="completed", group=0, samples=1, **figures):
    failed = outcome in ("error", "timeout")
    made = [] if failed else [sample(f"t{member}") for _ in range(samples)]
    trace = AgentTrace(f"t{member}", "agent", True, reward, made, max(0, samples - 1))
    return EpisodeResult(
        request=EpisodeRequest(
            "train", figures.pop("source", "words"), group, group, member, version=3, step=5
        ),
        id=f"e{member}",
        outcome=outcome,
        reward=reward,
        traces=[trace],
        output_tokens=figures.pop("output_tokens", 2),
        **figures,
    )


def scored(*results):
    return score(GRPO(GRPOConfig(type="grpo")), results, "task")


def test_live_episodes_are_those_with_an_advantage():
    group = scored(result(0, 1.0), result(1, 0.5), result(2, 0.0))
    assert [episode.is_live for episode in group.episodes] == [True, False, True]
    assert group.live == 2 and group.has_variance and group.version == 3
    [columns] = group.episodes[0].samples
    assert memoryview(columns.streams["advantages"]).cast("f").tolist() == [0, 0, 0.5, 0.5]
    assert "rl_weights" not in columns.streams


def test_members_keep_their_order_whatever_finished_first():
    group = scored(result(2, 0.0), result(0, 1.0), result(1, 1.0))
    assert [episode.figures.reward for episode in group.episodes] == [1.0, 1.0, 0.0]


def test_failed_members_train_nothing_and_leave_the_baseline_alone():
    group = scored(result(0, 1.0), result(1, 0.0), result(2, 0.0, "error"))
    assert [episode.is_live for episode in group.episodes] == [True, True, False]
    first = group.episodes[0].samples[0]
    assert memoryview(first.streams["advantages"]).cast("f").tolist() == [0, 0, 0.5, 0.5]


def test_a_group_of_failures_has_no_signal():
    group = scored(result(0, 0.0, "error"), result(1, 0.0, "timeout"))
    assert group.live == 0 and not group.has_variance


def test_annotations_have_null_off_the_mask():
    group = scored(result(0, 1.0), result(1, 0.0))
    [annotation] = group.episodes[1].annotations
    assert annotation.trace_id == "t1" and annotation.advantages == [None, None, -0.5, -0.5]


def test_single_tokens_without_advantage_get_no_weight():
    made = sample()
    assert apply_credit(made, Credit(advantages=[9.0, 9.0, 0.0, 1.0]))
    assert made.rl_weights == [0.0, 0.0, 0.0, 1.0]
    made = sample()
    assert apply_credit(made, Credit(advantages=[0, 0, 1.0, 1.0], rl_weights=[5, 5, 0.25, 0.5]))
    assert made.rl_weights == [0.0, 0.0, 0.25, 0.5]


def test_a_sample_without_any_component_is_dropped():
    assert not apply_credit(sample(), Credit())
    assert not apply_credit(sample(), Credit(advantages=[0.0] * 4))
    assert not apply_credit(sample(), Credit(advantages=[1.0] * 4, rl_weights=[0.0] * 4))
    assert not apply_credit(sample(), Credit(ce_weights=[0.0] * 4))


def test_imitation_alone_carries_no_rl_weight():
    made = sample()
    assert apply_credit(made, Credit(ce_weights=[0, 0, 1.0, 1.0]))
    assert made.rl_weights == [0.0] * 4 and made.ce_weights == [0, 0, 1.0, 1.0]
    made.check_aligned()


def test_spread_by_hand():
    assert spread("x", []) == {}
    found = spread("x", [4.0, 0.0, 2.0, 1.0, 3.0])
    assert found == pytest.approx(
        {"x/mean": 2.0, "x/max": 4.0, "x/min": 0.0, "x/p10": 0.4, "x/p90": 3.6}
    )


def test_lengths_come_from_all_tokens_not_from_what_trains():
    # Lengths 3 (ended) and 5 (cut off): both count, though neither carries signal.
    group = scored(result(0, 0.0, output_tokens=3), result(1, 0.0, "truncated", output_tokens=5))
    observed = Observed(
        episodes=[episode.figures for episode in group.episodes],
        groups=1,
        groups_without_variance=1,
    )
    found = batch_metrics(Batch([], observed), step=4)
    assert found["train/agg/all/length/min"] == 3 and found["train/agg/all/length/max"] == 5
    assert found["train/agg/all/length/mean"] == 4.0
    assert found["train/agg/all/truncated/mean"] == 0.5
    assert found["train/agg/zero_variance/mean"] == 1.0
    assert found["batch/episodes"] == 0


def test_batch_figures_by_hand():
    group = scored(result(0, 1.0, samples=2), result(1, 0.0))
    figures = [episode.figures for episode in group.episodes]
    found = batch_metrics(Batch(group.episodes, Observed(episodes=figures, groups=1)), step=6)
    assert found["train/agg/all/reward/mean"] == 0.5
    assert found["off_policy/mean"] == 2.0 and found["off_policy/max"] == 2
    assert (found["batch/episodes"], found["batch/samples"], found["batch/tokens"]) == (2, 3, 12)
    assert found["train/agg/all/forked/mean"] == 0.5


def test_failed_episodes_do_not_lower_the_reward_of_training_figures():
    group = scored(result(0, 1.0), result(1, 0.5), result(2, 0.0, "error"))
    figures = [episode.figures for episode in group.episodes]
    found = batch_metrics(Batch(group.episodes, Observed(episodes=figures, groups=1)), step=6)
    assert found["train/agg/all/reward/mean"] == 0.75
    assert found["train/agg/all/errors/mean"] == pytest.approx(1 / 3)


def test_failed_episodes_count_as_zero_in_an_evaluation():
    results = [
        result(0, 1.0, group=0, metrics={"exact": 1.0}),
        result(0, 0.0, "error", group=1),
        result(0, 0.5, "truncated", group=2, metrics={"exact": 0.0}),
    ]
    found = evaluation_metrics("held", results, version=7)
    assert found["eval/held/reward/mean"] == 0.5
    assert found["eval/held/exact/mean"] == pytest.approx(1 / 3)
    assert found["eval/held/errors/mean"] == pytest.approx(1 / 3)
    assert found["eval/held/truncated/mean"] == pytest.approx(1 / 3)
    assert found["eval/held/policy_version"] == 7 and found["eval/held/count"] == 3


def test_pass_at_k_by_hand():
    # Task 0: 1 of 4 succeed; task 1: all 4.
    results = [result(m, float(m == 0), group=0) for m in range(4)]
    results += [result(m, 1.0, group=1) for m in range(4)]
    found = pass_metrics(results)
    assert found["pass@1"] == (0.25 + 1) / 2 and found["pass^1"] == (0.25 + 1) / 2
    assert found["pass@2"] == (1 - math.comb(3, 2) / math.comb(4, 2) + 1) / 2
    assert found["pass^2"] == 0.5
    assert found["pass@4"] == 1.0 and found["pass^4"] == 0.5
    assert pass_metrics([result(0, 0.3), result(1, 1.0)]) == {}
    assert pass_metrics([result(0, 1.0)]) == {}


def test_when_evaluation_is_due():
    from prime_rl.configs.orchestrator import EvalSourcesConfig

    source = [{"env": {"taskset": {"id": "x"}}}]
    config = EvalSourcesConfig(source=source, interval=4)
    assert [v for v in range(11) if is_due(v, config, 10)] == [0, 4, 8, 10]
    skipping = EvalSourcesConfig(source=source, interval=4, skip_first_step=True)
    assert [v for v in range(11) if is_due(v, skipping, 10)] == [4, 8, 10]


def test_gates_by_hand():
    assert staleness(step=5, version=3) == 1
    # Batch 5 ships once version 3 is there; in synchronous training once version 4 is.
    assert gate_is_open(5, 3, target_lag=1) and not gate_is_open(5, 2, target_lag=1)
    assert gate_is_open(5, 4, target_lag=0) and not gate_is_open(5, 3, target_lag=0)
    assert fillable_batches(step=1, version=0, target_lag=1, max_steps=9) == 2
    assert fillable_batches(step=3, version=1, target_lag=1, max_steps=9) == 1
    assert fillable_batches(step=4, version=1, target_lag=1, max_steps=9) == 0
    assert fillable_batches(step=9, version=8, target_lag=1, max_steps=9) == 1


def test_sampling_salt_is_the_version_and_seeds_differ_inside_a_group():
    from prime_rl.configs.orchestrator import SamplingConfig

    config = SamplingConfig(seed=5, top_k=3, max_completion_tokens=9)
    requests = [EpisodeRequest("train", "w", 0, 2, member, 4, 1) for member in range(3)]
    found = [sampling_settings(config, request, 3) for request in requests]
    assert [each["seed"] for each in found] == [11, 12, 13]
    assert found[0]["cache_salt"] == "4" and found[0]["top_k"] == 3
    assert found[0]["max_tokens"] == 9
    plain = sampling_settings(SamplingConfig(), requests[0], 3)
    assert "seed" not in plain and "max_tokens" not in plain and "top_k" not in plain


class Careless(GRPO):
    """Returns what it was told to, whatever the group."""

    answer: list = []

    def score_group(self, group):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[Credit()]], r"credit for \[1\] branches per episode, expected \[1, 1\]"),
        ([[Credit()], []], r"credit for \[1, 0\]"),
        ([[Credit(advantages=[1.0])], [Credit()]], "1 advantages for a branch of 4 tokens"),
        ([[Credit(ce_weights=[math.nan] * 4)], [Credit()]], "ce_weights that are not finite"),
    ],
)
def test_credit_of_another_shape_is_refused(answer, message):
    algorithm = Careless(GRPOConfig(type="grpo"))
    algorithm.answer = answer
    with pytest.raises(RunError, match=message):
        score(algorithm, [result(0, 1.0), result(1, 0.0)], "task")


def test_an_evaluation_cut_short_leaves_no_row():
    rows = []
    sink = EvalSink({"held": 2}, {"held": 1}, lambda step, row: rows.append(step))
    sink.start(3, 3)
    sink.finished(result(0, 1.0, group=0, source="held"))
    sink.cancelled(GroupCancellation("eval", "held", 1, 1, "stopped"))
    assert rows == [] and sink.is_idle
    sink.start(4, 4)
    sink.finished(result(0, 1.0, group=2, source="held"))
    assert not sink.is_idle
    sink.finished(result(0, 0.0, group=3, source="held"))
    assert rows == [4] and sink.latest == {"held": 0.5}


@pytest.mark.parametrize(
    ("outcomes", "advice"),
    [
        (["error", "timeout", "error"], "environment server's log"),
        (["truncated", "truncated", "ok"], "max_completion_tokens"),
        (["ok", "truncated", "error"], "group_size"),
    ],
)
def test_a_run_without_signal_says_what_to_do_about_it(outcomes, advice):
    episodes = [EpisodeFigures("s", outcome, 0.5, 1, 1, 1, 0, 1.0, 0) for outcome in outcomes]
    text = no_signal_reason(1, episodes, ["BadError: too long."])
    assert advice in text and "last error: BadError: too long. " in text


class ReferenceEverywhere(GRPO):
    """Compares with a reference on every token."""

    def score_group(self, group):
        return [
            [Credit(ref_kl_weights=[1.0] * len(branch.token_ids)) for branch in episode.branches]
            for episode in group.episodes
        ]


def test_a_reference_weight_on_a_token_nobody_sampled_is_refused():
    with pytest.raises(RunError, match="ref_kl_weights on tokens that the policy did not sample"):
        score(ReferenceEverywhere(GRPOConfig(type="grpo")), [result(0, 1.0)], "task")
