"""What `prime run` asks of environments and teachers before it starts the first process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import RECIPE

from prime_rl.cli.run import command
from prime_rl.cli.sources import check_sources
from prime_rl.configs.load import load_run
from prime_rl.errors import ConfigError, RunError
from prime_rl.plugins import scan

TEACHER = "--rl.orchestrator.train.algo.teacher.base-url"


@pytest.fixture
def check(tmp_path):
    """check(*words, dry_run=False): warnings for the small recipe of two stages."""

    def run(*words: str, dry_run: bool = False) -> list[str]:
        recipe = write(tmp_path)
        loaded = load_run([str(recipe), *words], scan())
        return check_sources(loaded.run, loaded.registry, dry_run=dry_run)

    return run


def write(folder: Path) -> Path:
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE.format(seed=0, output=folder / "outputs", sft_steps=1, rl_steps=1))
    return recipe


OPSD = ("--rl.orchestrator.train.algo", "opsd", "--rl.inference.max-model-len", "64")


def test_a_demonstration_is_looked_for_in_the_tasks(check):
    assert check(*OPSD, "--rl.orchestrator.train.algo.demo-key", "answer") == []
    for key, found in (("nothing_here", "found nothing there"), ("idx", "found 0 there")):
        with pytest.raises(ConfigError, match=f"source 'reverse', task .*{key}.*{found}.*demo_key"):
            check(*OPSD, "--rl.orchestrator.train.algo.demo-key", key, dry_run=True)


def test_agents_of_the_settings_play_in_the_environment(check):
    words = ("--rl.orchestrator.train.algo", "hierarchical_grpo")
    named = "--rl.orchestrator.train.algo.episode-agents"
    assert check(*words, named, '["agent"]') == []
    with pytest.raises(ConfigError, match="names the agent 'agnet'.* has agent. Did you mean 'ag"):
        check(*words, named, '["agnet"]')


def test_a_missing_teacher_is_found_before_the_first_stage(check, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.frozen.RETRY_S", 0.0)
    words = ("--rl.orchestrator.train.algo", "opd", TEACHER, "http://127.0.0.1:9")
    warning = check(*words, dry_run=True)
    assert len(warning) == 1 and "stage rl: the teacher of source 'reverse'" in warning[0]
    with pytest.raises(RunError, match="'reverse' at http://127.0.0.1:9 does not answer"):
        check(*words)


def test_nothing_is_written_where_a_teacher_is_missing(tmp_path):
    words = ["--rl.orchestrator.train.algo", "opd", TEACHER, "http://127.0.0.1:9"]
    with pytest.raises(RunError, match="does not answer"):
        command([str(write(tmp_path)), *words])
    assert not (tmp_path / "outputs").exists()
