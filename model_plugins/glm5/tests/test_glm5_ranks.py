"""Two ranks compute what one does, the experts divided between them or not; recomputation and
bfloat16 with float32 routers."""

import tomllib
from pathlib import Path
from typing import Any

import prime_rl_model_glm5
import pytest
from trainer_world import make_run, metrics_of, train

RECIPE = Path(prime_rl_model_glm5.__file__).parent / "recipes" / "debug.toml"
ARCHITECTURE = tomllib.loads(RECIPE.read_text())["model"]["fresh"]["architecture"]


def fine_tuned(
    folder: Path,
    ranks: int,
    model: dict[str, Any] | None = None,
    memory: Any = None,
    **parallel: Any,
) -> list[list[float]]:
    """Loss and gradient norm of four steps from the same weights on the same rows."""
    trainer = {
        "optim": {"lr": 1e-3},
        "schedule": {"type": "constant"},
        "parallel": {"ranks": ranks, **parallel},
        "memory": memory or {},
    }
    run = make_run(folder, "sft", ARCHITECTURE, max_steps=4, trainer=trainer, model=model or {})
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
def test_recomputation_changes_nothing(alone: list[list[float]], tmp_path: Path) -> None:
    """Layers that share keys are recomputed with the keys they were given."""
    found = fine_tuned(tmp_path, 1, memory={"activation_checkpointing": "full"})
    assert found == alone


@pytest.mark.slow
def test_sharded_training_in_bfloat16(alone: list[list[float]], tmp_path: Path) -> None:
    """Routers are sharded as units of their own, once though model and run both ask for float32.
    Losses stay near float32's, gradients a little less: other keys and experts are chosen."""
    model = {"compute_dtype": "bfloat16", "moe": {"router_dtype": "float32"}}
    found = fine_tuned(tmp_path, 2, model)
    assert found != alone
    for (loss, gradient), (exact_loss, exact_gradient) in zip(found, alone, strict=True):
        assert loss == pytest.approx(exact_loss, rel=0.01)
        assert gradient == pytest.approx(exact_gradient, rel=0.05)


OPTIONS = dict.fromkeys(("kv_precision", "indexer_precision", "linear_precision"), "fp8")


@pytest.mark.slow
def test_fp8_roundings_on_two_ranks(tmp_path: Path) -> None:
    """Roundings are of whole matrices and rows, so dividing weights and experts changes nothing but
    the order of sums, which moves a code now and then."""
    model = {"options": {**OPTIONS, "weight_scales": "two_step"}}
    exact = fine_tuned(tmp_path / "alone", 1, model)
    divided = fine_tuned(tmp_path / "ranks", 2, model, expert_parallel=2)
    for ours, theirs in zip(divided, exact, strict=True):
        assert ours == pytest.approx(theirs, rel=5e-3)
