"""Every recipe that a wheel ships resolves and fits together; dry runs say what they cannot check."""

from pathlib import Path

import pytest

from prime_rl.cli.main import main
from prime_rl.plugins import scan
from prime_rl.plugins.recipes import find_recipes

SHIPPED = sorted(
    {
        (record.name_in_config, recipe)
        for record in scan().records
        if record.kind == "model" and record.distribution.startswith("prime-rl-")
        for recipe in find_recipes(record)
    }
)
SMALL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def run(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["run", *words, "--output-dir", str(tmp_path / "outputs")])
    out, error = capsys.readouterr()
    return code, out + error


def recipe(
    tmp_path: Path, model: str, source: str = "prime_rl_environment_reverse_text:sft_rows"
) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"{model}\n[[stages]]\ntype = 'sft'\nmax_steps = 2\n"
        f"[stages.data]\nsource = '{source}'\nbatch_size = 8\n"
    )
    return str(path)


@pytest.mark.parametrize(("plugin", "name"), SHIPPED, ids=lambda part: part)
def test_shipped_recipe_passes_a_dry_run(plugin, name, tmp_path, capsys):
    code, text = run(["--plugin", plugin, name, "--dry-run"], tmp_path, capsys)
    assert code == 0, text
    assert "resolved configuration:" in text


def test_dry_run_without_the_checkpoint_warns(tmp_path, capsys):
    """A full-size recipe can be checked on a machine that does not hold the model."""
    path = recipe(tmp_path, "[model]\nname = 'nowhere/Big'", "no.jsonl")
    code, text = run(["--plugin", "qwen3", path, "--dry-run"], tmp_path, capsys)
    assert code == 0, text
    assert "nowhere/Big/config.json does not exist; the model was not checked" in text
    assert "'no.jsonl' does not exist; the data was not checked" in text
    code, text = run(["--plugin", "qwen3", path], tmp_path, capsys)
    assert code == 1 and "nowhere/Big/config.json does not exist; expected" in text


def fresh(**changes: object) -> str:
    lines = [f"{key} = {value!r}" for key, value in {**SMALL, **changes}.items() if value]
    return "[model.fresh]\n[model.fresh.architecture]\n" + "\n".join(lines)


def test_an_architecture_that_cannot_be_built_stops_before_anything_starts(tmp_path, capsys):
    path = recipe(tmp_path, fresh(intermediate_size=None))
    code, text = run([path, "--dry-run"], tmp_path, capsys)
    assert code == 1 and "stage sft: config.json: intermediate_size is missing" in text
    assert not (tmp_path / "outputs").exists()


def test_sequences_longer_than_the_model_was_made_for_are_warned_of(tmp_path, capsys):
    path = recipe(tmp_path, "seq_len = 65\n" + fresh())
    code, text = run([path, "--dry-run"], tmp_path, capsys)
    assert code == 0 and "seq_len is 65, but the model was made for 64 positions" in text
    code, text = run([path, "--seq-len", "64", "--dry-run"], tmp_path, capsys)
    assert code == 0 and "warning" not in text


def test_a_recipe_name_means_that_of_the_named_plugin(tmp_path, capsys):
    """Several wheels ship a recipe `debug`."""
    code, text = run(["debug", "--dry-run"], tmp_path, capsys)
    assert code == 1 and "more than one installed recipe is called 'debug'" in text
    code, text = run(["--plugin", "qwen3", "debug", "--dry-run"], tmp_path, capsys)
    assert code == 0, text
