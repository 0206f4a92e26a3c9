"""Code of the user's that fails while it is loaded or called is one error, which says where."""

from __future__ import annotations

import sys

import pytest

from prime_rl.configs.orchestrator import SourceConfig
from prime_rl.configs.run import SFTDataConfig
from prime_rl.errors import ConfigError, what_was_raised
from prime_rl.launch.checks import _check_data
from prime_rl.orchestrator.tasks import load_tasks
from prime_rl.trainer.sft_rows import load_rows

FAILURES = {
    "raise RuntimeError('no key')": "RuntimeError: no key",
    "{}['absent']": "KeyError: 'absent'",
    "assert False": "AssertionError",
    "open('/no/such/file')": "FileNotFoundError",
    "1 / 0": "ZeroDivisionError: division by zero",
}

TASK_SET = """
import verifiers.v1 as vf

__all__ = ["Words"]


class Config(vf.TasksetConfig):
    count: int = 3


class Words(vf.Taskset[vf.Task, Config]):
    def load(self):
        {failure}
        for index in range(self.config.count):
            yield vf.Task(vf.TaskData(name=str(index), prompt="a"), self.config.task)
"""


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module that can be imported; it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_what_was_raised_is_one_line_with_its_place(write_module):
    name = write_module("code_that_fails", "def run():\n    raise ValueError('a\\n  b')\n")
    with pytest.raises(ValueError) as caught:
        __import__(name).run()
    assert what_was_raised(caught.value).startswith("ValueError: a b (")
    assert what_was_raised(caught.value).endswith("code_that_fails.py, line 2)")
    assert what_was_raised(ValueError()) == "ValueError"


@pytest.mark.parametrize("failure", FAILURES)
def test_rows_function_that_raises(write_module, failure):
    name = write_module("rows_that_fail", f"def rows():\n    yield {{}}\n    {failure}\n")
    with pytest.raises(ConfigError, match=FAILURES[failure]):
        load_rows(SFTDataConfig(source=f"{name}:rows"))


@pytest.mark.parametrize("failure", [*FAILURES, "def"])
def test_rows_module_that_raises(write_module, stage_with, failure):
    name = write_module("module_that_fails", failure)
    for load in (load_rows, lambda data: _check_data(stage_with(data), "stage sft", False, [])):
        sys.modules.pop(name, None)
        with pytest.raises(ConfigError, match=FAILURES.get(failure, "SyntaxError")):
            load(SFTDataConfig(source=f"{name}:rows"))


@pytest.fixture
def stage_with():
    """What the check of a stage's data looks at."""

    class Stage:
        def __init__(self, data):
            self.data = data

    return Stage


def source_of(module, **settings):
    return SourceConfig(name="words", env={"taskset": {"id": module, **settings}})


@pytest.mark.parametrize("failure", FAILURES)
def test_task_set_that_raises(write_module, failure):
    name = write_module("tasks_that_fail", TASK_SET.format(failure=failure))
    with pytest.raises(ConfigError, match=rf"source 'words'.*{FAILURES[failure]}"):
        load_tasks(source_of(name))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"cuont": 3}, r"env\.taskset\.cuont: .*found 3"),
        ({"count": "many"}, r"env\.taskset\.count: .*found 'many'"),
        ({"count": 0}, "has no tasks"),
    ],
)
def test_settings_that_the_task_set_refuses(write_module, settings, expected):
    name = write_module("tasks_of_words", TASK_SET.format(failure="pass"))
    with pytest.raises(ConfigError, match=rf"source 'words'.*{expected}") as caught:
        load_tasks(source_of(name, **settings))
    assert "\n" not in str(caught.value)
