"""Distillation with real processes: a served teacher, a student that has never seen a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from taught_model import teach
from tiny_run import RECIPE, prime

from prime_rl.testing.served_engine import EngineClient, serve_engine

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    """A teacher that knows which tokens answers are made of, started by hand as a user would."""
    directory = teach(tmp_path_factory.mktemp("teacher"), steps=25)
    with serve_engine(directory, "--name", "teacher", "--max-model-len", "64") as engine:
        yield engine


def student(folder: Path, algorithm: str, *words: str) -> list[dict[str, float]]:
    """Rows of the trainer's metrics of one RL stage from random weights."""
    text = RECIPE.format(seed=0, output=folder / "outputs", sft_steps=1, rl_steps=STEPS)
    start, rl = text.index("[[stages]]"), text.index('[[stages]]\ntype = "rl"')
    end = text.index("[[stages.orchestrator.eval.source]]")
    recipe = folder / "student.toml"
    recipe.write_text(
        text[:start] + text[rl:end] + f"\n[stages.orchestrator.train.algo]\n{algorithm}\n"
    )
    result = prime(
        *("run", recipe, "--trainer.optim.lr", "1e-2", "--trainer.schedule.warmup-steps", "0"),
        *("--orchestrator.batch-size", "32", *words),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    metrics = folder / "outputs" / "tiny" / "monitors" / "file" / "metrics"
    return [json.loads(line) for line in (metrics / "trainer.jsonl").read_text().splitlines()]


def falls(values: list[float], share: float) -> bool:
    """The last quarter's mean is below `share` of the first's."""
    part = max(1, len(values) // 4)
    return sum(values[-part:]) < share * sum(values[:part])


def test_opd_brings_the_policy_to_the_teacher(teacher, tmp_path):
    rows = student(tmp_path, f'type = "opd"\nteacher = {{ base_url = "{teacher.url}/v1" }}')
    found = [row["ref_kl/mean"] for row in rows]
    assert len(found) == STEPS and falls(found, 0.5), found


def test_sft_learns_what_the_teacher_says(teacher, tmp_path):
    rows = student(
        tmp_path,
        f'type = "sft"\nteacher = {{ base_url = "{teacher.url}", name = "teacher" }}',
        *("--orchestrator.train.sampling.top-p", "0.95"),
    )
    # Cross-entropy is the KL plus the teacher's entropy, which its own log-probabilities give.
    stream = next((tmp_path / "outputs").rglob("stream.jsonl"))
    entropy = -mean_sampled_logprob(stream)
    found = [row["nll/mean"] - entropy for row in rows]
    assert len(found) == STEPS and falls(found, 0.5), found


def mean_sampled_logprob(stream: Path) -> float:
    """Over all tokens that the episodes' player sampled."""
    found = [
        logprob
        for line in stream.read_text().splitlines()
        for trace in json.loads(line)["traces"]
        for node in trace["nodes"]
        for logprob in node["logprobs"]
    ]
    return sum(found) / len(found)


def test_a_teacher_that_is_not_there_is_named(tmp_path):
    text = RECIPE.format(seed=0, output=tmp_path / "outputs", sft_steps=1, rl_steps=1)
    recipe = tmp_path / "student.toml"
    recipe.write_text(
        text[: text.index("[[stages]]")]
        + text[text.index('[[stages]]\ntype = "rl"') :]
        + '\n[stages.orchestrator.train.algo]\ntype = "opd"\n'
        + 'teacher = { base_url = "http://127.0.0.1:9" }\n'
    )
    result = prime("run", recipe)
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert "the teacher of source 'reverse' at http://127.0.0.1:9 does not answer" in said
    assert "prime serve" in said


def test_opsd_scores_with_the_policy_itself(tmp_path):
    rows = student(
        tmp_path,
        'type = "opsd"\ndemo_key = "answer"\ntemplate = "{demonstration}"',
        *("--max-steps", "2", "--inference.max-model-len", "64"),
    )
    # Without the hint the policy would find its own tokens exactly as likely as the trainer does.
    assert len(rows) == 2 and all(abs(row["ref_kl/mean"]) > 1e-5 for row in rows), rows
