"""The whole loop with real processes: SFT, RL, evaluation, export, resume, interruption."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import prime, start_prime, write_recipe


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A complete run and what it printed."""
    folder = tmp_path_factory.mktemp("end_to_end")
    result = prime("run", write_recipe(folder))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "outputs" / "tiny", result.stdout


def test_a_person_sees_steps_results_and_where_things_are(finished):
    root, output = finished
    assert "step 3/3" in output
    assert "Held-out results" in output
    assert str(root) in output
    assert (root / "report.png").stat().st_size > 10_000
    assert "Traceback" not in output


def test_every_step_is_trained_once_and_versions_follow(finished):
    root, _ = finished
    trainer = read_lines(root / "rl" / "monitors" / "file" / "metrics" / "trainer.jsonl")
    assert [row["step"] for row in trainer] == [1, 2, 3]
    evaluated = read_lines(root / "rl" / "monitors" / "file" / "metrics" / "eval.jsonl")
    assert [row["step"] for row in evaluated] == [0, 3]
    assert evaluated[-1]["eval/held-out/policy_version"] == 3
    assert evaluated[-1]["eval/held-out/count"] == 8


def test_trainer_and_engine_agree(finished):
    root, _ = finished
    trainer = read_lines(root / "rl" / "monitors" / "file" / "metrics" / "trainer.jsonl")
    # Step 1 trains on episodes of version 0 with the weights of version 0.
    assert 0 <= trainer[0]["mismatch_kl/all"] <= 1e-9


def test_the_export_is_what_was_trained(finished):
    import torch
    import transformers

    root, _ = finished
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "rl" / "export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "rl" / "export")
    ids = tokenizer("abc", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    start = transformers.AutoModelForCausalLM.from_pretrained(root / "sft" / "export")
    assert not torch.equal(
        model.model.layers[0].mlp.down_proj.weight, start.model.layers[0].mlp.down_proj.weight
    )


def test_traces_hold_episodes_and_what_the_trainer_thought_of_them(finished):
    root, _ = finished
    traces = root / "rl" / "monitors" / "file" / "traces"
    episodes = read_lines(traces / "stream.jsonl")
    assert len(episodes) >= 3 * 16
    annotations = list((traces / "annotations").glob("trainer*.jsonl"))
    assert annotations and annotations[0].read_text()


def test_the_resolved_configuration_names_the_plugins(finished):
    root, _ = finished
    resolved = json.loads((root / "configs" / "latest" / "resolved" / "run.json").read_text())
    assert resolved["stages"][1]["trainer"]["loss"] == {
        **{"type": "ipo", "eps": 0.3, "adv_tau": 1.0},
        "max_importance_ratio": 10000.0,
    }
    distributions = {row["distribution"] for row in resolved["plugin_versions"]}
    assert {"prime-rl", "prime-rl-loss-ipo", "prime-rl-model-qwen3"} <= distributions


def test_a_used_directory_is_refused_and_resume_of_a_finished_run_does_nothing(finished):
    root, _ = finished
    recipe = root.parents[1] / "tiny.toml"
    refused = prime("run", recipe)
    assert refused.returncode != 0
    assert "--resume" in refused.stdout + refused.stderr
    before = (root / "rl" / "monitors" / "file" / "metrics" / "trainer.jsonl").read_text()
    again = prime("run", recipe, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert (root / "rl" / "monitors" / "file" / "metrics" / "trainer.jsonl").read_text() == before


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_ctrl_c_in_the_middle_then_resume_completes(tmp_path):
    recipe = write_recipe(tmp_path, rl_steps=4)
    root = tmp_path / "outputs" / "tiny"
    handle = start_prime("run", recipe)
    deadline = time.monotonic() + 400
    while not (root / "rl" / "checkpoints" / "step_1" / "trainer").exists():
        assert handle.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = descendants(handle.pid)
    assert len(children) >= 4
    os.kill(handle.pid, signal.SIGINT)
    assert handle.wait(30) == 130
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    resumed = prime("run", recipe, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows = read_lines(root / "rl" / "monitors" / "file" / "metrics" / "trainer.jsonl")
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
