"""The local launcher with real processes: failures end everything, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

from prime_rl.api import Process
from prime_rl.launch.local import LocalLauncher, LocalLauncherConfig


def child(tmp_path: Path, name: str, code: str, ends_run: bool = False) -> Process:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return Process(name, command, tmp_path / f"{name}.log", {"TEST_DIR": str(tmp_path)}, ends_run)


def launcher(grace_s: float = 3.0) -> LocalLauncher:
    return LocalLauncher(LocalLauncherConfig(grace_s=grace_s))


SLEEP = "import time; time.sleep(60)"
NOTE_PID = (
    "import os, pathlib; pathlib.Path(os.environ['TEST_DIR'], 'pid').write_text(str(os.getpid()))"
)


def wait_for(path: Path, timeout_s: float = 10.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()


def wait_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_the_run_ends_when_every_ending_process_is_done(tmp_path):
    processes = [
        child(tmp_path, "server", f"{NOTE_PID}\n{SLEEP}"),
        child(tmp_path, "worker", "print('done')", ends_run=True),
    ]
    assert launcher().run(processes) == 0
    assert (tmp_path / "worker.log").read_text() == "done\n"
    wait_gone(int(wait_for(tmp_path / "pid")))


def test_a_failure_ends_the_others_and_is_named(tmp_path, caplog):
    processes = [
        child(tmp_path, "survivor", f"{NOTE_PID}\n{SLEEP}", ends_run=True),
        child(tmp_path, "broken", "import time; time.sleep(.5); raise SystemExit('no disk')"),
    ]
    assert launcher().run(processes) == 1
    assert "broken failed with exit code 1" in caplog.text
    assert "no disk" in caplog.text
    wait_gone(int(wait_for(tmp_path / "pid")))


def test_a_killed_process_gives_128_plus_signal(tmp_path, caplog):
    code = "import os; os.kill(os.getpid(), 9)"
    processes = [
        child(tmp_path, "victim", code),
        child(tmp_path, "other", SLEEP, ends_run=True),
    ]
    assert launcher().run(processes) == 128 + 9
    assert "victim was killed by SIGKILL" in caplog.text


def test_a_server_that_ends_early_is_a_failure(tmp_path, caplog):
    processes = [child(tmp_path, "server", "pass"), child(tmp_path, "worker", SLEEP, True)]
    assert launcher().run(processes) == 1
    assert "ended although the run still needs it" in caplog.text


def test_a_process_that_ignores_sigterm_is_killed_within_the_bound(tmp_path):
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{NOTE_PID}\n{SLEEP}"
    worker = "import os, time, pathlib\nwhile not pathlib.Path(os.environ['TEST_DIR'], 'pid').exists(): time.sleep(.02)"
    processes = [child(tmp_path, "stubborn", stubborn), child(tmp_path, "worker", worker, True)]
    started = time.monotonic()
    assert launcher(grace_s=0.5).run(processes) == 0
    assert time.monotonic() - started < 15
    wait_gone(int((tmp_path / "pid").read_text()))


def test_grandchildren_end_too(tmp_path):
    parent = f"""
    import subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", {f"{NOTE_PID}; {SLEEP}"!r}])
    time.sleep(60)
    """
    worker = "import os, time, pathlib\nwhile not pathlib.Path(os.environ['TEST_DIR'], 'pid').exists(): time.sleep(.02)"
    processes = [child(tmp_path, "parent", parent), child(tmp_path, "worker", worker, True)]
    assert launcher().run(processes) == 0
    wait_gone(int((tmp_path / "pid").read_text()))


LAUNCH = """
import sys
from pathlib import Path
from prime_rl.api import Process
from prime_rl.launch.local import LocalLauncher, LocalLauncherConfig
folder = Path(sys.argv[1])
code = (
    "import os, pathlib, time\\n"
    "from prime_rl.control.lifetime import end_with_parent\\n"
    "end_with_parent()\\n"
    "pathlib.Path(os.environ['TEST_DIR'], 'pid').write_text(str(os.getpid()))\\n"
    "time.sleep(60)"
)
process = Process("p", [sys.executable, "-c", code], folder / "p.log", {"TEST_DIR": str(folder)}, True)
sys.exit(LocalLauncher(LocalLauncherConfig(grace_s=3)).run([process]))
"""


def start_launcher(tmp_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    handle = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path)])
    return handle, int(wait_for(tmp_path / "pid"))


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    handle, pid = start_launcher(tmp_path)
    os.kill(handle.pid, signal.SIGINT)
    assert handle.wait(10) == 130
    wait_gone(pid)


def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    handle, pid = start_launcher(tmp_path)
    handle.kill()
    handle.wait(10)
    wait_gone(pid)


def test_a_program_that_is_not_ours_ends_with_its_parent_too(tmp_path):
    code = """
    import os, subprocess, sys
    env = {**os.environ, "PRIME_RL_PARENT": str(os.getpid())}
    child = subprocess.Popen([sys.executable, "-m", "prime_rl.control.lifetime", "sleep", "60"], env=env)
    print(child.pid, flush=True)
    import time; time.sleep(1.5)
    os.kill(os.getpid(), 9)
    """
    handle = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert handle.stdout is not None
    pid = int(handle.stdout.readline())
    handle.wait(10)
    wait_gone(pid)
