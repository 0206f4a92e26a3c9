"""Two ranks compute what one does, the experts divided between them or not; bfloat16 islands."""

from pathlib import Path
from typing import Any

import nemotron_h_cases as cases
import pytest
from trainer_world import make_run, metrics_of, train

NEMOTRON = {
    "model_type": "nemotron_h",
    **{name: value for name, value in cases.SIZES.items() if name != "vocab_size"},
    "num_hidden_layers": 6,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def fine_tuned(
    folder: Path, ranks: int, model: dict[str, Any] | None = None, **parallel: Any
) -> list[list[float]]:
    """Loss and gradient norm of four steps from the same weights on the same rows."""
    trainer = {
        "optim": {"lr": 3e-3},
        "schedule": {"type": "constant"},
        "parallel": {"ranks": ranks, **parallel},
    }
    run = make_run(folder, "sft", NEMOTRON, max_steps=4, trainer=trainer, model=model or {})
    train(run, ranks)
    return [[row["loss/mean"], row["optim/grad_norm"]] for row in metrics_of(run)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """One rank in float32."""
    return fine_tuned(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_two_ranks_compute_the_same(
    alone: list[list[float]], expert_parallel: int, tmp_path: Path
) -> None:
    found = fine_tuned(tmp_path, 2, expert_parallel=expert_parallel)
    assert len(alone) == 4 and alone[0][0] > alone[-1][0]
    for ours, theirs in zip(found, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)


@pytest.mark.slow
def test_sharded_training_in_bfloat16(alone: list[list[float]], tmp_path: Path) -> None:
    """Decays and routers are sharded as units of their own; the losses stay near float32's."""
    found = fine_tuned(tmp_path, 2, {"compute_dtype": "bfloat16"})
    assert found != alone
    for ours, theirs in zip(found, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
