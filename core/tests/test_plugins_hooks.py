"""Listeners: told everything, and dropped, not fatal, when they are wrong."""

import sys
import textwrap

import pytest

from prime_rl import hookspecs
from prime_rl.plugins import Switches, scan
from prime_rl.plugins.hooks import Hooks, load_hooks
from prime_rl.testing.distributions import write_distribution

GOOD = """
from prime_rl.api import hookimpl

heard = []

@hookimpl
def step_metrics(step, metrics):
    heard.append((step, dict(metrics)))

@hookimpl
def run_finished(exit_code):
    heard.append(exit_code)
"""


@pytest.fixture
def listen(tmp_path, monkeypatch):
    """Install listener modules by name, and return the loaded hooks."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def listened(sources: dict[str, str], targets: dict[str, str] | None = None) -> Hooks:
        for name, source in sources.items():
            target = (targets or {}).get(name, f"listener_{name}")
            write_distribution(
                tmp_path,
                f"wheel-{name}",
                entry_points={"prime_rl.hooks": {name: target}},
                modules={f"listener_{name}": textwrap.dedent(source)},
            )
        return load_hooks(scan(Switches(), refresh=True))

    yield listened
    for module in set(sys.modules) - before:
        if module.startswith("listener_"):
            del sys.modules[module]


def names(hooks: Hooks) -> list[str]:
    return sorted(record.name for record in hooks.listeners)


def tell_step(hooks: Hooks, step: int = 1) -> None:
    hooks.tell("step_metrics", step=step, metrics={"loss": 0.5}, role="trainer")


def test_listeners_hear_what_they_ask_for(listen):
    hooks = listen({"good": GOOD, "more": GOOD})
    tell_step(hooks, 3)
    hooks.tell("run_finished", run_dir="x", role="trainer", exit_code=0)
    hooks.tell("weight_update", version=1, seconds=0.1, role="trainer")
    for module in ("listener_good", "listener_more"):
        assert sys.modules[module].heard == [(3, {"loss": 0.5}), 0]


def test_listener_may_be_a_class_or_an_object(listen):
    source = """
    from prime_rl.api import hookimpl
    heard = []
    class Listener:
        @hookimpl
        def step_metrics(self, step):
            heard.append(step)
    ready = Listener()
    """
    targets = {"cls": "listener_cls:Listener", "obj": "listener_obj:ready"}
    hooks = listen({"cls": source, "obj": source}, targets)
    tell_step(hooks, 7)
    assert sys.modules["listener_cls"].heard == sys.modules["listener_obj"].heard == [7]


BAD = {
    "argument": (
        "from prime_rl.api import hookimpl\n@hookimpl\ndef step_metrics(step, gone): ...\n",
        "gone",
    ),
    "unknown_hook": (
        "from prime_rl.api import hookimpl\n@hookimpl\ndef step_metric(step): ...\n",
        "no hook 'step_metric'; did you mean step_metrics?",
    ),
    "half": (
        "from prime_rl.api import hookimpl\n"
        "@hookimpl\ndef run_finished(exit_code): ...\n"
        "@hookimpl\ndef step_metrics(gone): ...\n",
        "gone",
    ),
    "import": ("raise SystemExit(1)", "SystemExit"),
    "assertion": ("assert False, 'no'", "AssertionError"),
}


@pytest.mark.parametrize("how", BAD)
def test_bad_listener_is_disabled_and_named_and_nothing_of_it_remains(listen, how):
    """BL-112 (an argument the host no longer passes), BL-114 (half registered)."""
    source, expected = BAD[how]
    hooks = listen({"good": GOOD, how: source})
    assert names(hooks) == ["good"]
    (dropped,) = hooks.dropped
    assert (dropped.record.name, dropped.record.version) == (how, "1.0")
    assert dropped.record.distribution == f"wheel-{how}".replace("_", "-")
    assert expected in dropped.reason
    tell_step(hooks)
    hooks.tell("run_finished", run_dir="x", role="trainer", exit_code=0)
    assert len(sys.modules["listener_good"].heard) == 2


def test_constructor_that_raises_is_dropped(listen):
    source = "class Listener:\n    def __init__(self):\n        raise SystemExit(2)\n"
    hooks = listen({"ctor": source}, {"ctor": "listener_ctor:Listener"})
    assert names(hooks) == [] and "SystemExit" in hooks.dropped[0].reason


@pytest.mark.parametrize("raised", ["ValueError('bad')", "SystemExit(1)", "AssertionError('bad')"])
def test_listener_that_raises_is_dropped_and_the_others_still_hear(listen, raised, caplog):
    faulty = (
        "from prime_rl.api import hookimpl\ncalls = []\n@hookimpl\n"
        f"def step_metrics(step):\n    calls.append(step)\n    raise {raised}\n"
    )
    hooks = listen({"aaa": GOOD, "faulty": faulty, "zzz": GOOD})
    tell_step(hooks, 1)
    tell_step(hooks, 2)
    assert sys.modules["listener_faulty"].calls == [1]
    for module in ("listener_aaa", "listener_zzz"):
        assert [step for step, _ in sys.modules[module].heard] == [1, 2]
    assert names(hooks) == ["aaa", "zzz"]
    assert "step_metrics" in hooks.dropped[0].reason
    assert "wheel-faulty" in caplog.text


def test_keyboard_interrupt_passes_through_a_listener(listen):
    source = "from prime_rl.api import hookimpl\n@hookimpl\ndef step_metrics():\n    raise KeyboardInterrupt\n"
    hooks = listen({"stop": source})
    with pytest.raises(KeyboardInterrupt):
        tell_step(hooks)


def test_core_must_tell_a_hook_exactly_its_arguments(listen):
    hooks = listen({})
    with pytest.raises(TypeError, match="no hook is called 'step'"):
        hooks.tell("step", step=1)
    with pytest.raises(TypeError, match=r"takes .*metrics.* found \['step'\]"):
        hooks.tell("step_metrics", step=1)


def test_registered_listeners_are_in_the_runs_table(listen):
    listen({"good": GOOD, "argument": BAD["argument"][0]})
    table = scan(Switches()).table()
    hook_rows = [row for row in table if row["kind"] == "hook"]
    assert [(row["name"], row["distribution"]) for row in hook_rows] == [("good", "wheel-good")]
    scan(Switches()).verify_table(table)


def test_specification_stays_small():
    with open(hookspecs.__file__) as file:
        assert len(file.readlines()) < 60
