"""opd, opsd and sft by hand: which tokens get which weight, hints, what they ask of a run."""

import pytest
from pydantic import ValidationError

from prime_rl.algorithms.opd import OPD, OPDConfig
from prime_rl.algorithms.opsd import OPSD, OPSDConfig
from prime_rl.algorithms.sft import SFT, SFTAlgorithmConfig
from prime_rl.api import Branch, Episode, Group
from prime_rl.configs.frozen import FrozenModelConfig
from prime_rl.testing.algorithm import AlgorithmConformance

TEACHER = {"base_url": "http://127.0.0.1:8001"}


class TestOPD(AlgorithmConformance):
    plugin_name = "opd"
    settings = {"teacher": TEACHER}
    prefers_reward = False


class TestOPSD(AlgorithmConformance):
    plugin_name = "opsd"
    prefers_reward = False


class TestSFT(AlgorithmConformance):
    plugin_name = "sft"
    settings = {"teacher": TEACHER}
    prefers_reward = False


def opd(**settings):
    return OPD(OPDConfig(teacher=FrozenModelConfig(**TEACHER), **settings))


def sft(**settings):
    return SFT(SFTAlgorithmConfig(teacher=FrozenModelConfig(**TEACHER), **settings))


def opsd(**settings):
    return OPSD(OPSDConfig(**settings))


MAKERS = {"ref_kl_weights": (opd, opsd), "ce_weights": (sft,)}
EVERY = [(make, stream) for stream, makers in MAKERS.items() for make in makers]


def episode(outcome="completed", reward=0.0):
    """Two branches: two replies, of which the second branch trains the last only."""
    return Episode(
        "e",
        outcome,
        reward,
        [
            Branch("agent", [1, 2, 3], [False, True, True], reward),
            Branch("agent", [1, 9, 2, 4], [False, False, False, True], reward),
        ],
    )


def weights(algorithm, *episodes):
    credits = algorithm.score_group(Group("words", "t", episodes))
    for branches in credits:
        assert all(credit.advantages is None for credit in branches)
    return [
        [credit.ref_kl_weights or credit.ce_weights for credit in branches] for branches in credits
    ]


@pytest.mark.parametrize(("make", "stream"), EVERY)
def test_weight_one_on_every_sampled_token_whatever_the_rewards(make, stream):
    expected = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    for rewards in ([0.5], [1.0, 1.0], [-3.0, 7.0]):
        found = weights(make(), *[episode(reward=reward) for reward in rewards])
        assert found == [expected] * len(rewards)
    (branches,) = make().score_group(Group("words", "t", [episode()]))
    assert [getattr(credit, stream) for credit in branches] == expected


@pytest.mark.parametrize(("make", "stream"), EVERY)
def test_failed_episodes_teach_nothing(make, stream):
    for outcome in ("error", "timeout", "cancelled"):
        found = weights(make(), episode(), episode(outcome))
        assert found[0][0] == [0.0, 1.0, 1.0] and found[1] == [None, None]
        found = weights(make(failed="drop_group"), episode(), episode(outcome))
        assert found == [[None, None], [None, None]]


@pytest.mark.parametrize(("make", "stream"), EVERY)
def test_truncation_is_a_setting(make, stream):
    assert weights(make(), episode("truncated"))[0][0] == [0.0, 1.0, 1.0]
    assert weights(make(truncated="exclude"), episode("truncated")) == [[None, None]]
    with pytest.raises(ValidationError):
        make(truncated="zero")  # there is no reward that could be 0


def test_what_they_ask_of_a_run():
    assert opd().requirements.reference == "teacher"
    assert opsd().requirements.reference == "policy" and opsd().teacher is None
    assert sft().requirements.sampled_by == "frozen"
    assert opd().teacher == sft().teacher == FrozenModelConfig(**TEACHER)


def test_a_teacher_must_be_named():
    for config in (OPDConfig, SFTAlgorithmConfig):
        with pytest.raises(ValidationError, match="teacher"):
            config()
        with pytest.raises(ValidationError, match="base_url"):
            config(teacher={})


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000", "http://10.0.0.1:8000/", "http://10.0.0.1:8000/v1"]
)
def test_urls_of_a_frozen_model_mean_the_same(url):
    assert FrozenModelConfig(base_url=url).base_url == "http://10.0.0.1:8000"


def test_a_url_needs_its_scheme():
    with pytest.raises(ValidationError, match="expected http://HOST:PORT"):
        FrozenModelConfig(base_url="10.0.0.1:8000")


BRANCH = Branch("agent", [1, 2], [False, True], 0.0)


def test_the_hint_holds_the_demonstration_as_it_is():
    algorithm = opsd(demo_key="answer", template="{x} {demonstration}!", role="user")
    context = algorithm.reference_context(BRANCH, {"answer": "a {b} c"})
    assert context == [{"role": "user", "content": "{x} a {b} c!"}]
    assert opd().reference_context(BRANCH, {}) == ()


@pytest.mark.parametrize(
    ("task", "found"), [({"prompt": "p"}, "nothing"), ({"answer": 3}, "3"), ({"answer": ""}, "''")]
)
def test_a_task_without_demonstration_is_named(task, found):
    with pytest.raises(ValueError, match=f"'answer'.*found {found} there.*Set algo.demo_key"):
        opsd(demo_key="answer").reference_context(BRANCH, task)


def test_a_template_without_a_place_is_refused():
    with pytest.raises(ValidationError, match="demonstration"):
        OPSDConfig(template="be good")
