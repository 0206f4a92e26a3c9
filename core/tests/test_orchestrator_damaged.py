"""Damaged episodes and engines that return too little: one episode fails, or the run ends, never
silence."""

import asyncio
import copy

import numpy as np
import pytest
from orchestrator_world import make_record, make_stage, make_tasks, run_world

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.algorithms.opd import OPD
from prime_rl.algorithms.rae import RAE, RAEConfig
from prime_rl.algorithms.sft import SFT
from prime_rl.api import Algorithm, Credit
from prime_rl.configs.orchestrator import SamplingConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.episode import EpisodeRequest
from prime_rl.orchestrator.group import score
from prime_rl.orchestrator.needs import EpisodeNeeds
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.records import read_episode, stored_record
from prime_rl.orchestrator.runner import LoadedSource, ServedEpisodeRunner

TOP_P = EpisodeNeeds(kept_tokens="top_p = 0.9")
ROUTES = EpisodeNeeds(routed_experts=True)
REWARD = EpisodeNeeds(reward=True)


def wire(array):
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def kept(*rows, counts=None):
    counts = [len(row) for row in rows] if counts is None else counts
    ids = [token for row in rows for token in row]
    return {"ids": wire(np.array(ids, np.int32)), "counts": wire(np.array(counts, np.int32))}


def record(reward=1.0, node=None, **trace):
    """Two sampled tokens, 4 and 5."""
    made = make_record("t", reward, [4, 5], trace=trace)
    made["traces"][0]["nodes"][1] |= node or {}
    return made


def request(split="train", member=0):
    return EpisodeRequest(split, "words", 0, 0, member, version=0, step=1)


def read(found, needs=None, split="train", member=0, **settings):
    settings |= {} if needs is None else {"needs": needs}
    return read_episode(
        found,
        request(split, member),
        temperature=1.0,
        seq_len=64,
        end_version=0,
        duration_s=0.1,
        **settings,
    )


def run_one(found, needs=None, split="train"):
    """What the runner makes of a record."""

    class Call:
        trace_ids = ()

        async def result(self):
            return found

    class Environment:
        def start(self, task, model, sampling):
            return Call()

    stage = make_stage()
    source = LoadedSource(stage.orchestrator.train.source[0], make_tasks(1), Environment())
    runner = ServedEpisodeRunner(
        {(split, "words"): source},
        Policy(0, 0, "tiny"),
        lambda ids: None,
        64,
        5.0,
        {"words": needs} if needs else None,
    )
    return asyncio.run(runner._run(request(split)))


# Nothing to replay


def test_a_reply_without_kept_tokens_ends_the_run():
    found = record(node={"sampling_mask": None})
    text = (
        r"train source 'words' samples with top_p = 0.9.*\(sampling_mask\) for trace.*"
        "--return-sampling-mask"
    )
    with pytest.raises(RunError, match=text):
        run_one(found, TOP_P)
    assert read(found).outcome == "completed"
    assert read(found, TOP_P, is_frozen=False, split="eval").outcome == "completed"


@pytest.mark.parametrize("lists", [([4, 7], [5]), ([4, 7], []), ([], [])])
def test_recorded_kept_tokens_are_enough_and_none_mean_the_full_vocabulary(lists):
    assert read(record(node={"sampling_mask": kept(*lists)}), TOP_P).outcome == "completed"


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_run_whose_engine_returns_no_kept_tokens_ends(tmp_path, setting):
    source = {"name": "words", "env": {"taskset": {"id": "x"}}, "group_size": 4}
    stage = make_stage(train={"source": [{**source, "sampling": setting}]})
    with pytest.raises(RunError, match="returned no kept tokens") as caught:
        run_world(tmp_path, stage)
    assert not caught.value.world.trainer.batches


def test_no_routes_at_all_end_a_run_that_replays_routing():
    with pytest.raises(RunError, match=r"source 'words'.*--return-routed-experts"):
        run_one(record(), ROUTES)
    found = record()
    for node in found["traces"][0]["nodes"]:
        node["routed_experts"] = wire(np.zeros((len(node["token_ids"]), 1, 1), np.uint8))
    assert read(found, ROUTES).traces[0].samples[0].routed_experts is not None


def test_what_a_source_needs():
    def of(algorithm, is_frozen=False, replays=True, **sampling):
        needs = algorithm.requirements
        return EpisodeNeeds.of_source(SamplingConfig(**sampling), needs, is_frozen, replays, 9)

    assert of(GRPO, top_p=0.5) == EpisodeNeeds("top_p = 0.5", True, True, 9)
    assert of(GRPO, top_k=8, replays=False) == EpisodeNeeds("top_k = 8", False, True, 9)
    assert of(GRPO) == EpisodeNeeds("", True, True, 9)
    assert of(OPD, top_k=8) == EpisodeNeeds("top_k = 8", True, False, 9)
    assert of(SFT, is_frozen=True, top_p=0.5) == EpisodeNeeds("", False, False, 9)


# Damaged records


@pytest.mark.parametrize(
    ("sampling_mask", "text"),
    [
        (kept([4], counts=[1]), "1 counts, which add up to 1, and 1 ids for 2 sampled tokens"),
        (kept([4], counts=[1, 1]), "add up to 2, and 1 ids"),
        (kept([4], counts=[-1, 2]), "2 counts, which add up to 1"),
        (kept([4, -1], [5]), "position 3: found id -1, expected ids from 0 to 9"),
        (kept([4], [5, 10]), "position 4: found id 10, expected ids from 0 to 9"),
        (kept([4], [5, 7, 5]), "position 4: id 5 is there more than once"),
        (kept([4], [4]), "position 4: the sampled token 5 is not among them"),
    ],
)
def test_damaged_kept_tokens_fail_one_episode(sampling_mask, text):
    found = record(node={"sampling_mask": sampling_mask})
    result = run_one(found, EpisodeNeeds(vocabulary=10))
    assert result.outcome == "error"
    assert result.error.startswith("DamagedEpisode: ") and text in result.error


def test_token_ids_that_no_embedding_has_fail_one_episode():
    assert "expected ids from 0 to 4" in run_one(record(), EpisodeNeeds(vocabulary=5)).error
    assert run_one(record(), EpisodeNeeds(vocabulary=6)).outcome == "completed"
    assert "expected ids from 0 on" in run_one(record(node={"token_ids": [3, -4, 5]})).error


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.pop("traces"),
        lambda found: found.update(traces=[None]),
        lambda found: found["traces"][0].update(rewards={"r": {"score": None}}),
        lambda found: found["traces"][0].update(rewards={"r": {"score": "x"}}),
        lambda found: found["traces"][0].update(rewards={"r": {"weight": 1.0}}),
        lambda found: found["traces"][0].update(metrics={"m": {}}),
        lambda found: found["traces"][0].update(calls=[None]),
        lambda found: found["traces"][0]["nodes"][1].update(mask=None),
    ],
)
def test_a_damaged_record_is_one_failed_episode(damage, split, caplog):
    found = copy.deepcopy(record())
    damage(found)
    result = run_one(found, split=split)
    assert result.outcome == "error" and result.error.startswith("DamagedEpisode: ")
    assert "source 'words', task task-0" in caplog.text


def test_a_record_that_cannot_be_stored_is_stored_without_traces(caplog):
    result = read(record(node={"logprobs": None}), split="eval")
    assert stored_record(result, "k")["traces"] == []
    assert "stored without traces: TypeError" in caplog.text


# Rewards


@pytest.mark.parametrize("rewards", [{}, {"accuracy": None}, {"accuracy": None, "style": None}])
def test_an_episode_without_reward_fails_where_rewards_are_learned(rewards):
    found = record(rewards=rewards)
    result = read(found, REWARD)
    assert result.outcome == "error" and result.error.startswith("NoReward: ")
    assert read(found).outcome == "completed"
    assert read(found, split="eval").reward == 0.0


def test_an_agent_without_reward_functions_beside_a_scored_one_is_fine():
    found = record()
    other = copy.deepcopy(found["traces"][0])
    found["traces"].append({**other, "id": "u", "rewards": {}})
    assert read(found, REWARD).outcome == "completed"
    found["traces"][1]["rewards"] = {"accuracy": None}
    assert read(found, REWARD).outcome == "error"
    found["traces"][1]["rewards"] = {"accuracy": None, "style": {"score": 1.0}}
    assert read(found, REWARD).outcome == "completed"


def test_a_run_without_rewards_ends_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.runner.FAILED_EPISODE_S", 0.0)
    monkeypatch.setattr(
        "orchestrator_world.make_record",
        lambda trace_id, reward, tokens, **changes: make_record(
            trace_id, reward, tokens, trace={"rewards": {}}
        ),
    )
    with pytest.raises(RunError, match="NoReward: the episode ended without a reward"):
        run_world(tmp_path, make_stage())


@pytest.mark.parametrize("reward", [1e39, -1e39, 1e308])
def test_a_reward_beyond_float32_is_one_damaged_episode(reward, caplog):
    result = run_one(record(reward))
    assert result.error.startswith(f"DamagedEpisode: rewards [{reward}]: float32")
    assert "source 'words', task task-0" in caplog.text
    assert read(record(reward), split="eval").reward == reward
    assert read(record(3e38)).reward == 3e38


def test_rewards_whose_sum_overflows_are_damaged():
    two = {"a": {"score": 1e308, "weight": 1.0}, "b": {"score": 1e308, "weight": 1.0}}
    assert "not all finite" in run_one(record(rewards=two), split="eval").error
    assert "not all finite" in run_one(record(node={"logprobs": [-1.0, -1e39]})).error


@pytest.mark.parametrize("algorithm", [GRPO(GRPOConfig(type="grpo")), RAE(RAEConfig())])
def test_advantages_beyond_float32_fail_their_group(algorithm, caplog):
    """One reward far from a baseline of the other sign: the difference overflows."""
    if isinstance(algorithm, RAE):
        algorithm.load_state_dict({"baselines": {"agent": -3e38}})
    rewards = [3e38, -3e38, -3e38, -3e38]
    results = [read(record(reward), member=member) for member, reward in enumerate(rewards)]
    group = score(algorithm, results, "task-7")
    assert group.live == 0 and not group.has_variance
    assert [episode.figures.outcome for episode in group.episodes] == ["error"] * 4
    assert "source 'words', task task-7" in caplog.text and "-3e+38" in caplog.text


class Squares(Algorithm):
    """Advantages that a float cannot hold."""

    Config = RAEConfig

    def score_group(self, group):
        return [
            [Credit(advantages=[branch.reward**9] * len(branch.token_ids)) for branch in e.branches]
            for e in group.episodes
        ]


def test_an_algorithm_that_overflows_fails_its_group(caplog):
    group = score(Squares(RAEConfig()), [read(record(3e38))], "task-7")
    assert group.live == 0 and "task task-7" in caplog.text


class Heavy(Algorithm):
    """Weights that float32 does not hold."""

    Config = RAEConfig

    def score_group(self, group):
        return [
            [Credit(ce_weights=[1e300] * len(branch.token_ids)) for branch in e.branches]
            for e in group.episodes
        ]


def test_weights_beyond_float32_are_the_algorithm_s_fault():
    with pytest.raises(RunError, match=r"Heavy.score_group returned ce_weights up to 1e\+300"):
        score(Heavy(RAEConfig()), [read(record())], "task-7")
