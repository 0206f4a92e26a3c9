"""Roles of tokens, answers that echo learns, hints that a reference is shown: through scoring."""

import pytest

from prime_rl.algorithms.echo import Echo, EchoConfig
from prime_rl.algorithms.opsd import OPSD, OPSDConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.columns import ReferenceView
from prime_rl.orchestrator.episode import EpisodeRequest
from prime_rl.orchestrator.group import score
from prime_rl.orchestrator.records import read_episode
from prime_rl.orchestrator.samples import content_roles, samples_with_paths


def node(role, token_ids, parent=None, sampled=0, content=None):
    """A message; its last `sampled` tokens are the model's."""
    given = len(token_ids) - sampled
    made = {
        "parent": parent,
        "sampled": sampled > 0,
        "message": {"role": role, "content": "x"},
        "token_ids": list(token_ids),
        "mask": [False] * given + [True] * sampled,
        "logprobs": [-0.5] * sampled,
    }
    if content is not None:
        made["is_content"] = [bool(flag) for flag in content]
    return made


def conversation():
    """question, reply, a tool's answer (frame, two tokens, frame), reply."""
    return [
        node("user", [1, 2, 3], content=[0, 1, 0]),
        node("assistant", [4, 5, 6], 0, sampled=2, content=[0, 1, 1]),
        node("tool", [7, 8, 9, 10], 1, content=[0, 1, 1, 0]),
        node("assistant", [11, 12], 2, sampled=1, content=[0, 1]),
    ]


ROLES = ["", "user", "", "", "assistant", "assistant", "", "tool", "tool", "", "", "assistant"]


def record(number, reward=0.0, nodes=None):
    trace = {
        "id": f"t{number}",
        "ok": True,
        "agent": {"name": "agent"},
        "rewards": {"r": {"score": reward}},
        "metrics": {},
        "calls": [],
        "nodes": nodes or conversation(),
    }
    return {"id": f"e{number}", "ok": True, "traces": [trace]}


def episode(number, reward=0.0, nodes=None, seq_len=64, is_frozen=False):
    return read_episode(
        record(number, reward, nodes),
        EpisodeRequest("train", "tools", 0, 0, number, version=1, step=2),
        temperature=0.5,
        seq_len=seq_len,
        end_version=1,
        duration_s=0.1,
        is_frozen=is_frozen,
    )


def test_roles_follow_the_tokens_of_the_merged_sequence():
    [(sample, path)] = samples_with_paths("t", conversation(), "tools", 1.0, 64)
    assert sample.token_ids == list(range(1, 13))
    assert content_roles(path, 12) == ROLES
    [(cut, path)] = samples_with_paths("t", conversation(), "tools", 1.0, 8)
    assert content_roles(path, len(cut.token_ids)) == ROLES[:8]


def test_a_rewritten_history_has_the_roles_of_its_own_path():
    nodes = conversation()
    nodes += [
        node("tool", [7, 90], 1, content=[0, 1]),
        node("assistant", [11, 13], 4, sampled=1, content=[0, 1]),
    ]
    samples = samples_with_paths("t", nodes, "tools", 1.0, 64)
    found = [content_roles(path, len(sample.token_ids)) for sample, path in samples]
    assert found == [ROLES, [*ROLES[:6], "", "tool", "", "assistant"]]


def test_messages_without_attribution_have_no_content():
    nodes = conversation()
    del nodes[2]["is_content"]
    assert content_roles(nodes, 12) == [*ROLES[:6], "", "", "", "", "", "assistant"]
    for each in nodes:
        each["is_content"] = []
    assert content_roles(nodes, 12) == []


def weights(columns, name):
    return [round(value, 6) for value in columns.values(name)]


def test_echo_learns_a_tools_answer_at_temperature_one():
    group = score(Echo(EchoConfig()), [episode(0, 1.0), episode(1, 0.0)], "t")
    assert group.live == 2
    for each, advantage in zip(group.episodes, (0.5, -0.5), strict=True):
        [columns] = each.samples
        assert weights(columns, "ce_weights") == [0.0] * 7 + [0.1, 0.1] + [0.0] * 3
        assert weights(columns, "temperatures") == [0.5] * 7 + [1.0, 1.0] + [0.5] * 3
        assert weights(columns, "advantages")[4:6] == [advantage] * 2


def test_echo_teaches_where_all_rewards_are_equal():
    group = score(Echo(EchoConfig()), [episode(0, 1.0), episode(1, 1.0)], "t")
    assert group.live == 2 and not group.has_variance
    [columns] = group.episodes[0].samples
    assert not any(columns.values("rl_weights")) and any(columns.values("ce_weights"))


def test_what_a_frozen_model_chose_is_not_replayed():
    nodes = conversation()
    for each in nodes:
        count = len(each["token_ids"])
        each["routed_experts"] = {"dtype": "uint8", "shape": [count, 1, 1], "data": bytes(count)}
    played = episode(0, nodes=nodes)
    assert played.traces[0].samples[0].routed_experts is not None
    frozen = episode(0, nodes=nodes, is_frozen=True)
    [sample] = frozen.traces[0].samples
    assert sample.routed_experts is None and sample.sampling_mask is None
    assert set(sample.temperatures) == {1.0} and sample.mask == played.traces[0].samples[0].mask


def test_the_hint_of_the_task_is_kept_with_the_sample():
    seen = []

    def view(context, token_ids):
        seen.append((context, list(token_ids)))
        return ReferenceView((50,), 0)

    algorithm = OPSD(OPSDConfig(demo_key="answer", template="{demonstration}"))
    group = score(algorithm, [episode(0), episode(1)], "t", task={"answer": "ab"}, view=view)
    assert seen == [([{"role": "system", "content": "ab"}], list(range(1, 13)))] * 2
    for each in group.episodes:
        [columns] = each.samples
        assert columns.reference_view == ReferenceView((50,), 0)
        assert weights(columns, "ref_kl_weights") == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]


def test_a_task_without_demonstration_ends_the_run_and_is_named():
    with pytest.raises(
        RunError, match=r"source 'tools', task t7: .*'answer'.*Keys of this task: x"
    ):
        score(
            OPSD(OPSDConfig(demo_key="answer")), [episode(0)], "t7", task={"x": 1},
            view=lambda context, token_ids: ReferenceView((), 0),
        )  # fmt: skip
