"""The loop with a reference that scores and with a model that plays in the policy's place."""

import asyncio

import pytest
from orchestrator_world import make_stage, run_world

from prime_rl.algorithms.opd import OPD, OPDConfig
from prime_rl.algorithms.sft import SFT, SFTAlgorithmConfig
from prime_rl.configs.frozen import FrozenModelConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.reference import Endpoint, References
from prime_rl.orchestrator.scorer import ScoringFailed
from prime_rl.traces import read_metrics

TEACHER = FrozenModelConfig(base_url="http://127.0.0.1:8001")
TRAIN = ("train", "words")


class Scorer:
    """Implements TokenScorer: -token / 10 everywhere; fails where it is told to."""

    def __init__(self, fails=lambda number: False, delay_s=0.001):
        self.asked = []
        self.fails = fails
        self.delay_s = delay_s

    async def score(self, token_ids, session_id=""):
        self.asked.append(token_ids)
        number = len(self.asked)
        await asyncio.sleep(self.delay_s)
        if self.fails(number):
            raise ScoringFailed("out of order")
        return [0.0, *(-token / 10 for token in token_ids[1:])]


def run_opd(folder, scorer, most_failures=1000, **settings):
    return run_world(
        folder,
        make_stage(**settings),
        algorithms={"words": OPD(OPDConfig(teacher=TEACHER))},
        references=References({"words": Endpoint(scorer)}, most_failures),
    )


def rows_of(world):
    return [
        row
        for ranks in world.trainer.batches.values()
        for batch in ranks
        for row in batch.micro_batches
    ]


def documents(world, step):
    [batch] = world.trainer.batches[step]
    return sum(bool(name) for row in batch.micro_batches for name in row.trace_ids)


def check_rows(world):
    """Every weighted token has its reference's number, and rl trains nothing."""
    for row in rows_of(world):
        ids = memoryview(row.input_ids).cast("i").tolist()
        weights = memoryview(row.ref_kl_weights).cast("f").tolist()
        found = memoryview(row.ref_logprobs).cast("f").tolist()
        assert any(weights) and not any(memoryview(row.rl_weights).cast("f"))
        for token, weight, logprob in zip(ids, weights, found, strict=True):
            if weight:
                assert logprob == pytest.approx(-token / 10)


def test_every_weighted_token_ships_with_its_reference(tmp_path):
    world = run_opd(tmp_path, Scorer())
    assert list(world.trainer.batches) == [1, 2, 3, 4]
    assert [documents(world, step) for step in (1, 2, 3, 4)] == [8] * 4
    check_rows(world)


def test_episodes_that_cannot_be_scored_are_replaced(tmp_path):
    scorer = Scorer(fails=lambda number: number % 3 == 0)
    world = run_opd(tmp_path, scorer)
    assert [documents(world, step) for step in (1, 2, 3, 4)] == [8] * 4
    check_rows(world)
    assert len(scorer.asked) > 4 * 8
    rows = read_metrics(world.paths.metrics / "orchestrator.jsonl")
    assert all(row["batch/episodes"] == 8 for row in rows)


@pytest.mark.parametrize("lag", [0, 1])
def test_replacements_come_with_and_without_lag(tmp_path, lag):
    scorer = Scorer(fails=lambda number: number <= 20)
    world = run_opd(tmp_path, scorer, target_lag=lag, max_steps=2)
    assert [documents(world, step) for step in (1, 2)] == [8, 8]


def test_with_a_batch_size_that_varies_they_are_left_out(tmp_path):
    scorer = Scorer(fails=lambda number: number % 4 == 0)
    world = run_opd(tmp_path, scorer, constant_batch_size=False)
    assert [documents(world, step) for step in (1, 2, 3, 4)] == [6] * 4
    check_rows(world)


def test_a_teacher_that_is_gone_ends_the_run(tmp_path):
    with pytest.raises(RunError, match="none of the last .* episodes.*out of order"):
        run_opd(tmp_path, Scorer(fails=lambda number: True), most_failures=24)


def test_scoring_that_hangs_does_not_hide_what_breaks_elsewhere(tmp_path):
    async def break_something(orchestrator):
        while not orchestrator._awaiting_references:
            await asyncio.sleep(0.01)
        orchestrator.dispatcher.failure = RunError("the router is gone")

    with pytest.raises(RunError, match="the router is gone"):
        run_world(
            tmp_path,
            make_stage(),
            algorithms={"words": OPD(OPDConfig(teacher=TEACHER))},
            references=References({"words": Endpoint(Scorer(delay_s=3600))}, 10),
            during=break_something,
        )


def test_a_checkpoint_in_between_repeats_and_skips_nothing(tmp_path):
    from prime_rl.orchestrator.state import OrchestratorState

    settings = {"ckpt": {"interval": 1}, "max_steps": 2, "batch_size": 8}
    scorer = Scorer(fails=lambda number: number % 5 == 0)
    first = run_opd(tmp_path / "a", scorer, **settings)
    state = OrchestratorState.read(first.paths.checkpoint(2) / "orchestrator")
    shipped = {name for row in rows_of(first) for name in row.trace_ids if name}
    assert len(shipped) == 16
    second = run_world(
        tmp_path / "b",
        make_stage(**{**settings, "max_steps": 4}),
        algorithms={"words": OPD(OPDConfig(teacher=TEACHER))},
        references=References({"words": Endpoint(Scorer())}, 100),
        resumed_after=2,
        state=state,
    )
    assert list(second.trainer.batches) == [3, 4]
    check_rows(second)


def run_sft(folder, stage=None, **changes):
    return run_world(
        folder,
        stage or make_stage(max_off_policy_steps=0),
        algorithms={"words": SFT(SFTAlgorithmConfig(teacher=TEACHER))},
        frozen_model="big",
        **changes,
    )


def test_what_a_frozen_model_played_teaches_its_tokens(tmp_path):
    world = run_sft(tmp_path)
    for row in rows_of(world):
        weights = memoryview(row.ce_weights).cast("f").tolist()
        mask = list(row.loss_mask)
        assert [bool(weight) for weight in weights] == [bool(flag) for flag in mask]
        assert not any(memoryview(row.rl_weights).cast("f"))
    salts = {settings["cache_salt"] for settings in world.environments[TRAIN].samplings}
    assert salts == {"frozen"}


def test_it_is_sampled_as_told_and_learned_at_temperature_one(tmp_path):
    stage = make_stage(
        train={
            "source": [
                {
                    "name": "words",
                    "env": {"taskset": {"id": "x"}},
                    "group_size": 4,
                    "sampling": {"temperature": 0.5},
                }
            ]
        }
    )
    world = run_sft(tmp_path, stage)
    assert {s["temperature"] for s in world.environments[TRAIN].samplings} == {0.5}
    for row in rows_of(world):
        assert set(memoryview(row.temperatures).cast("f")) == {1.0}


def test_it_never_grows_stale(tmp_path):
    # With lag 1 and no staleness allowed, every other batch of the policy's would be dropped.
    world = run_sft(tmp_path, make_stage(max_off_policy_steps=0, max_steps=6))
    rows = read_metrics(world.paths.metrics / "orchestrator.jsonl")
    assert [row["off_policy/dropped"] for row in rows] == [0] * 6
    assert all("off_policy/mean" not in row for row in rows)


def test_equal_rewards_are_no_reason_to_warn(tmp_path, caplog):
    run_sft(tmp_path, replies={TRAIN: lambda task, draw: 1.0})
    assert "every group has equal rewards" not in caplog.text
