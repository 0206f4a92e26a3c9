"""The run directory: guard, attempts, links, and what --clean may delete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prime_rl.errors import RunError
from prime_rl.launch.attempts import check_inside, delete_run, point_latest, prepare_attempt


@pytest.fixture
def launch(load, flat, tmp_path):
    """launch(*words): load the recipe into tmp_path/out/mine and prepare an attempt."""

    def run(*words, name="mine"):
        base = ["--output-dir", str(tmp_path / "out")]
        base += ["--run.name", name] if name else []
        loaded = load(flat, *base, *words)
        return prepare_attempt(loaded.run, loaded.arguments, loaded.inputs), loaded.run.directory

    return run


def trained(directory: Path) -> Path:
    (directory / "checkpoints" / "step_1").mkdir(parents=True)
    return directory / "checkpoints" / "step_1"


def test_first_attempt(launch, tmp_path):
    number, directory = launch()
    assert number == 1
    assert directory == tmp_path / "out" / "mine"
    copied = directory / "configs" / "attempt_1" / "recipe.toml"
    assert copied.read_bytes() == (tmp_path / "recipe.toml").read_bytes()
    assert "--run.name mine" in (directory / "configs" / "attempt_1" / "command.txt").read_text()
    for parent in ("configs", "logs"):
        assert os.readlink(directory / parent / "latest") == "attempt_1"
        assert (directory / parent / "latest").is_dir()


def test_attempts_count_and_nothing_trained_is_no_use(launch):
    assert [launch()[0] for _ in range(11)] == list(range(1, 12))
    _, directory = launch()
    assert os.readlink(directory / "logs" / "latest") == "attempt_12"


def test_used_directory_is_refused(launch):
    _, directory = launch()
    trained(directory)
    with pytest.raises(RunError, match=r"already holds a run \(checkpoints\).*--resume.*--clean"):
        launch()
    assert launch("--resume")[0] == 2
    assert launch("--dry-run")[0] == 3
    assert trained_still(directory)
    assert launch("--clean")[0] == 1
    assert not (directory / "checkpoints").exists()


def trained_still(directory: Path) -> bool:
    return (directory / "checkpoints" / "step_1").is_dir()


def test_dry_run_never_deletes(launch):
    _, directory = launch()
    trained(directory)
    launch("--dry-run", "--clean")
    assert trained_still(directory)


def test_resume_needs_a_run(launch, tmp_path):
    launch(name="older")
    with pytest.raises(RunError, match=r"no run at .*mine to resume.*Newest runs in .*: older"):
        launch("--resume")
    assert launch("--resume.dir", str(tmp_path / "other" / "step_3"))[0] == 1


def test_two_inputs_of_one_name_are_both_kept(launch, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "recipe.toml").write_text("seed = 4\n")
    _, directory = launch("@", str(tmp_path / "sub" / "recipe.toml"))
    names = sorted(path.name for path in (directory / "configs" / "attempt_1").iterdir())
    assert names == ["2_recipe.toml", "command.txt", "recipe.toml"]


@pytest.mark.parametrize("directory", ["", ".", "../mine", "a/../../mine", "/elsewhere"])
def test_paths_that_leave_the_output_folder(tmp_path, directory):
    victim = tmp_path / "mine"
    (victim / "configs" / "attempt_1").mkdir(parents=True)
    (tmp_path / "out" / "a").mkdir(parents=True)
    target = tmp_path / "out" / directory
    with pytest.raises(RunError, match="is not below output_dir"):
        check_inside(tmp_path / "out", target)
    with pytest.raises(RunError):
        delete_run(tmp_path / "out", target)
    assert (victim / "configs").is_dir() and (tmp_path / "out").is_dir()


@pytest.mark.parametrize("link", ["mine", "a"])
def test_links_are_not_followed(launch, tmp_path, link):
    victim = tmp_path / "victim"
    (victim / "mine" / "configs" / "attempt_1").mkdir(parents=True)
    (victim / "configs" / "attempt_1").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / link).symlink_to(victim)
    name = "mine" if link == "mine" else "a/mine"
    for words in ([], ["--clean"], ["--resume"]):
        with pytest.raises(RunError, match="symbolic link"):
            launch(*words, name=name)
    assert (victim / "configs" / "attempt_1").is_dir()
    assert (victim / "mine" / "configs" / "attempt_1").is_dir()


def test_clean_spares_what_a_run_merely_links_to(launch, tmp_path):
    _, directory = launch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("x")
    (directory / "data").symlink_to(tmp_path / "data")
    launch("--clean")
    assert (tmp_path / "data" / "file").read_text() == "x"
    assert not (directory / "data").exists()


def test_clean_deletes_only_runs(launch, tmp_path):
    stranger = tmp_path / "out" / "mine"
    stranger.mkdir(parents=True)
    (stranger / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="does not look like a run"):
        launch("--clean")
    assert (stranger / "thesis.tex").exists()
    (stranger / "thesis.tex").unlink()
    assert launch("--clean")[0] == 1


def test_file_in_the_place_of_the_directory(launch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for words in ([], ["--clean"]):
        with pytest.raises(RunError, match="is a file"):
            launch(*words)


def test_latest_is_replaced_while_readers_look(tmp_path):
    import threading

    for name in ("attempt_1", "attempt_2"):
        (tmp_path / name).mkdir()
    point_latest(tmp_path, "attempt_1")
    seen: set[str] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add(os.readlink(tmp_path / "latest"))
            except FileNotFoundError:
                seen.add("missing")

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(300):
        point_latest(tmp_path, f"attempt_{1 + index % 2}")
    stop.set()
    reader.join()
    assert "missing" not in seen and seen <= {"attempt_1", "attempt_2"}
