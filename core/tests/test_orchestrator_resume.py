"""Checkpoints of the orchestrator that are damaged or of another run: one error that says what."""

import json

import msgspec
import pytest
from orchestrator_world import make_stage, run_world

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.algorithms.rae import RAE, RAEConfig
from prime_rl.configs.curriculum import DifficultyPoolConfig, PoolConfig
from prime_rl.errors import CheckpointError
from prime_rl.orchestrator.curriculum import DifficultyPoolSampler
from prime_rl.orchestrator.source import SourceShare, TrainSource
from prime_rl.orchestrator.state import OrchestratorState, decode_leftover

SKIP = r"resume\.skip_dataloader = true"
GOOD = {"version": 1, "step": 1, "source": {}, "algorithms": {}, "counters": {}}


def state(**changes):
    source = {"drawn": 4, "counts": {"words": 4}, "open": [[3, "words", 3]], "samplers": {}}
    values = {"step": 1, "source": source, "algorithms": {}, "counters": {}, "leftover": b"\x90"}
    return OrchestratorState(**{**values, **changes}, origin="step_1/orchestrator/state.json")


def resume(tmp_path, found, algorithm=None):
    made = algorithm or GRPO(GRPOConfig(type="grpo"))
    stage = make_stage(max_steps=2)
    run_world(tmp_path, stage, resumed_after=1, state=found, algorithms={"words": made})


class Picky(GRPO):
    """Its state must hold a name."""

    def load_state_dict(self, state):
        state["name"].lower()


@pytest.mark.parametrize(
    ("algorithm", "found", "text"),
    [
        (GRPO(GRPOConfig(type="grpo")), {"baselines": {"a": 1.0}}, "GRPO has no state"),
        (RAE(RAEConfig()), {"baselines": {"a": None}}, "agent 'a' is None"),
        (RAE(RAEConfig()), {"baselines": 1}, "expected a table"),
        (Picky(GRPOConfig(type="grpo")), {"name": 1}, "AttributeError"),
    ],
)
def test_the_state_of_another_algorithm_is_refused(tmp_path, algorithm, found, text):
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path, state(algorithms={"words": found}), algorithm)
    message = str(caught.value)
    assert message.startswith("step_1/orchestrator/state.json: ")
    assert text in message and "source 'words'" in message and str(found) in message
    assert "Keep the algorithm" in message and "resume.skip_dataloader = true" in message


@pytest.mark.parametrize(
    "text",
    ["", "1", '"x"', "[]", "{", "null", json.dumps({"version": 1})]
    + [
        json.dumps({**GOOD, **change})
        for change in (
            {"source": []},
            {"algorithms": []},
            {"algorithms": {"words": 1}},
            {"counters": None},
            {"counters": {"total_tokens": -1}},
            {"counters": {"step": 7}},
            {"step": "1"},
            {"step": -1},
            {"version": "1"},
            {"more": 1},
        )
    ],
)
def test_a_damaged_state_file_is_named(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    (tmp_path / "leftover.msgpack").write_bytes(b"\x90")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        OrchestratorState.read(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(GOOD))
    assert OrchestratorState.read(tmp_path).origin == str(tmp_path / "state.json")


def sample(**changes):
    streams = {"token_ids": bytes(8), "mask": b"\x00\x01", "logprobs": bytes(8)}
    return {
        "length": 2,
        "streams": streams,
        "env_name": "words",
        "trace_id": "t",
        "branch_index": 0,
        "routed_experts": None,
        "sampling_mask": None,
    } | changes


def leftover(figures, *samples):
    group = {"group_id": 3, "source": "words", "version": 0, "has_variance": True}
    return msgspec.msgpack.encode(
        [{**group, "episodes": [{"figures": figures, "samples": samples}]}]
    )


FIGURES = dict.fromkeys(("input_tokens", "output_tokens", "turns", "forks", "version"), 1) | {
    "source": "words",
    "outcome": "completed",
    "reward": 1.0,
    "duration_s": 1.0,
}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90\x01",
        b"\x91\x80",
        b"\x91\x91\x01",
        leftover({}),
        leftover({**FIGURES, "more": 1}),
        leftover(FIGURES, sample(length=3)),
        leftover(FIGURES, sample(streams={"token_ids": bytes(8), "wishes": bytes(8)})),
    ],
)
def test_damaged_leftovers_are_refused(data):
    with pytest.raises(CheckpointError, match=f"leftover.msgpack.*{SKIP}"):
        decode_leftover(data)
    assert len(decode_leftover(leftover(FIGURES, sample()))) == 1


def test_an_unfinished_group_that_was_never_drawn_is_refused(tmp_path):
    source = {"drawn": 4, "counts": {"words": 4}, "open": []}
    found = state(source=source, leftover=leftover(FIGURES, sample()))
    with pytest.raises(CheckpointError, match=rf"state.json: unfinished groups \[3\].*{SKIP}"):
        resume(tmp_path, found)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"drawn": None}, "drawn"),
        ({"drawn": -1}, "drawn"),
        ({"counts": {"a": "x"}}, "counts"),
        ({"counts": {"a": -1}}, "counts"),
        ({"open": [[1]]}, "open"),
        ({"open": [[1, "a", -1]]}, "open"),
        ({"open": [[1, "b", 0]]}, "draw 1 is of source 'b'"),
        ({"open": [[9, "a", 0]]}, "3 were made"),
        ({"open": [[1, "a", 0], [1, "a", 1]]}, "3 were made"),
        ({"open": [[1, "a", 7]]}, "the task set has changed"),
        ({"samplers": 1}, "samplers"),
        ({"samplers": {"a": None}}, "samplers"),
    ],
)
def test_a_damaged_order_of_tasks_is_refused(change, text):
    good = {"drawn": 3, "counts": {"a": 3}, "open": [[1, "a", 1]], "samplers": {"a": {}}}
    TrainSource([SourceShare("a", 5, 1.0)], 0).load_state_dict(good)
    with pytest.raises(CheckpointError, match=SKIP) as caught:
        TrainSource([SourceShare("a", 5, 1.0)], 0).load_state_dict({**good, **change})
    assert text in str(caught.value)
    with pytest.raises(CheckpointError, match=SKIP):
        TrainSource([SourceShare("a", 5, 1.0)], 0).load_state_dict({})


@pytest.mark.parametrize(
    "rewards",
    [
        None,
        [["a", 1]],
        {"a": [1]},
        {"a": ["x", 1.0]},
        {"a": [-1, 1.0]},
        {"a": [0, 1.0]},
        {"a": [1, float("nan")]},
        {"a": [1, float("inf")]},
    ],
)
def test_damaged_pools_are_refused(rewards):
    config = DifficultyPoolConfig(
        pools=[
            PoolConfig(name="hard", max_reward=0.5, weight=1.0),
            PoolConfig(name="easy", max_reward=1.0, weight=1.0),
        ]
    )
    sampler = DifficultyPoolSampler(config, "words", ["a", "b"])
    with pytest.raises(CheckpointError, match=f"pools of source 'words' is damaged.*{SKIP}"):
        sampler.load_state_dict({"rewards": rewards})
    sampler.load_state_dict({"rewards": {"a": [1, 1.0]}})
