"""Kills processes of a short run at random moments, resumes it, and checks that nothing was lost.

    python tests/chaos.py --kills 20 --seed 0

Each kill is SIGKILL to one kind of process (trainer, orchestrator, engine, environment server,
launcher, in turn) a random time after the RL stage began to train. At the end: the run completed,
every step was trained exactly once on the way to the final weights, tasks came in the order of an
undisturbed run, and no process is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from tiny_run import prime, start_prime, write_recipe

KINDS = {
    "trainer": "trainer",
    "orchestrator": "orchestrator",
    "engine": "serve",
    "environment server": "env-server",
    "launcher": "run",
}
"""Kind of process -> the `prime` command it runs."""
END_BOUND_S = 20.0
"""Time within which every process must be gone after one was killed."""
START_BOUND_S = 180.0


def command_of(process: psutil.Process) -> str:
    """The `prime` command a process runs, or ""."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return words[words.index("prime_rl.cli.main") + 1] if "prime_rl.cli.main" in words else ""


def completed_steps(root: Path) -> list[int]:
    """Steps of the RL stage whose checkpoint has the trainer's part."""
    found = (root / "rl" / "checkpoints").glob("step_*/trainer.done")
    return sorted(int(path.parent.name.removeprefix("step_")) for path in found)


def run_until_kill(
    recipe: Path, root: Path, kind: str, delay_s: float, resume: bool
) -> tuple[bool, str]:
    """Start (or resume) the run, kill one process of `kind`, wait until all are gone.

    Returns whether the kill came before the run ended by itself, and the output.
    """
    before = len(completed_steps(root))
    handle = start_prime("run", recipe, *(["--resume"] if resume else []))
    deadline = time.monotonic() + START_BOUND_S
    while len(completed_steps(root)) <= before and handle.poll() is None:
        assert time.monotonic() < deadline, f"no step within {START_BOUND_S:g} s"
        time.sleep(0.02)
    time.sleep(delay_s)
    if handle.poll() is not None:
        return False, handle.communicate()[0]
    launcher = psutil.Process(handle.pid)
    everyone = [launcher, *launcher.children(recursive=True)]
    victims = [p for p in everyone if command_of(p) == KINDS[kind]]
    if not victims:
        return False, handle.communicate()[0]
    victims[0].send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(everyone[1:], timeout=END_BOUND_S)
    assert alive == [], f"after killing the {kind}: {alive} still run"
    try:
        output = handle.communicate(timeout=END_BOUND_S)[0]
    except subprocess.TimeoutExpired:
        handle.kill()
        raise
    return True, output


def task_of_group(root: Path) -> dict[int, str]:
    """Group number -> task key over all attempts; fails when two attempts disagree."""
    found: dict[int, str] = {}
    for line in (root / "rl/monitors/file/traces/stream.jsonl").read_text().splitlines():
        episode = json.loads(line)
        if episode["split"] == "train":
            key = found.setdefault(episode["group"], episode["task_key"])
            assert key == episode["task_key"], f"group {episode['group']} changed its task"
    return found


def optimizer_steps(checkpoint: Path) -> int:
    """How many times the optimizer stepped on the way to a checkpoint."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(checkpoint / "trainer" / "state", file.name)
        state = torch.load(file.name, weights_only=False)
    counts = {int(value) for value in _values_named(state, "step") if float(value) == int(value)}
    assert len(counts) == 1, f"found step counts {counts}"
    return counts.pop()


def _values_named(tree: object, name: str) -> list:
    if not isinstance(tree, dict):
        return []
    found = [
        v for k, v in tree.items() if str(k).split(".")[-1] == name and not isinstance(v, dict)
    ]
    for value in tree.values():
        found += _values_named(value, name)
    return found


def check_finished(root: Path, reference: Path, steps: int) -> None:
    """The invariants of a completed run."""
    assert json.loads((root / "rl" / "finished.json").read_text())["steps"] == steps
    assert optimizer_steps(root / "rl" / "checkpoints" / f"step_{steps}") == steps
    order, expected = task_of_group(root), task_of_group(reference)
    shared = order.keys() & expected.keys()
    assert len(shared) >= steps * 4
    assert [order[g] for g in sorted(shared)] == [expected[g] for g in sorted(shared)]


def chaos(folder: Path, kills: int, seed: int, steps: int) -> dict[str, int]:
    """Run everything; returns the kills that hit, by kind."""
    rng = random.Random(seed)
    reference = folder / "reference"
    reference.mkdir(parents=True)
    result = prime("run", write_recipe(reference, rl_steps=steps), timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    hits = dict.fromkeys(KINDS, 0)
    attempt = 0
    while sum(hits.values()) < kills:
        attempt += 1
        disturbed = folder / f"disturbed_{attempt}"
        disturbed.mkdir()
        recipe, root = write_recipe(disturbed, rl_steps=steps), disturbed / "outputs" / "tiny"
        is_first = True
        while not (root / "rl" / "finished.json").exists() and sum(hits.values()) < kills:
            kind = list(KINDS)[sum(hits.values()) % len(KINDS)]
            hit, output = run_until_kill(recipe, root, kind, rng.uniform(0, 2), not is_first)
            assert "Traceback" not in output, output
            hits[kind] += hit
            is_first = False
            print(f"{'killed' if hit else 'missed'} {kind}; steps {completed_steps(root)[-3:]}")
        result = prime("run", recipe, "--resume", timeout_s=600)
        assert result.returncode == 0, result.stdout + result.stderr
        check_finished(root, reference / "outputs" / "tiny", steps)
        print(f"run {attempt} completed and checked")
    return hits


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(chaos(Path(folder), arguments.kills, arguments.seed, arguments.steps))


if __name__ == "__main__":
    main()
