"""What all model families share: sharded and divided over ranks they compute what one rank does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_of_families import architectures
from trainer_world import changed, make_run, metrics_of, train

SCRIPT = Path(__file__).with_name("ranks_of_families.py")
FAMILIES = {"qwen3", "deepseek_v4", "glm5", "nemotron_h", "qwen3_8"}


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """One JSON line per comparison, of two ranks with one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(tmp_path_factory.mktemp("models"))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_two_ranks_compute_what_one_does(comparisons):
    """Every gradient of every family, experts divided or not, to 1e-5 of its norm."""
    exact = [each for each in comparisons if "dtype" not in each]
    assert {each["model"].partition(":")[0] for each in exact} >= FAMILIES
    divided = {each["model"].partition(":")[0] for each in exact if "expert_parallel" in each}
    assert divided >= FAMILIES
    for each in exact:
        assert each["loss"] < 1e-5 and each["gradient"] < 1e-5, each


def test_bfloat16_over_ranks_is_near_and_finite(comparisons):
    """Weighted log-probabilities of random models; bfloat16 has 8 bits."""
    rounded = [each for each in comparisons if "dtype" in each]
    assert {each["model"].partition(":")[0] for each in rounded} >= FAMILIES
    for each in rounded:
        assert each["finite"] and each["loss"] < 0.03, each


DEBUG = [pair for pair in architectures() if pair[0] in {f"{name}:debug" for name in FAMILIES}]


@pytest.mark.parametrize(("name", "architecture"), DEBUG, ids=[name for name, _ in DEBUG])
def test_one_rank_trains_in_bfloat16(name, architecture, tmp_path):
    """Float32 weights behind sharding of one rank, optimizer steps, export, resume."""
    fresh = {"architecture": architecture, "tokenizer": "letters"}
    model = {"fresh": fresh, "compute_dtype": "bfloat16"}
    trainer = {"optim": {"lr": 1e-2}, "schedule": {"type": "constant"}}
    run = make_run(tmp_path, "sft", max_steps=4, model=model, trainer=trainer, ckpt={"interval": 2})
    train(run, 1)
    losses = [row["loss/mean"] for row in metrics_of(run)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    resumed = changed(run, resume={"step": 2})
    train(resumed, 1)
    again = [row["loss/mean"] for row in metrics_of(run)][-2:]
    assert again == pytest.approx(losses[2:], rel=1e-2)
