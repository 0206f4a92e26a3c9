"""The scan: what is found, what is refused, and that nobody else's damage stops it."""

import os
import subprocess
import sys

import pytest

from prime_rl.plugins import KINDS, Registry, Switches, scan
from prime_rl.testing.distributions import write_distribution, write_loss

LOSSES = "prime_rl.losses"


def scan_with(monkeypatch: pytest.MonkeyPatch, *folders: os.PathLike, **switches) -> Registry:
    for folder in reversed(folders):
        monkeypatch.syspath_prepend(str(folder))
    return scan(Switches(**switches))


def only(registry: Registry, name: str):
    (record,) = [record for record in registry.records if record.name == name]
    return record


def problem_about(registry: Registry, distribution: str) -> str:
    (problem,) = [p for p in registry.problems if p.distribution == distribution]
    return problem.reason


def test_record_says_everything_without_an_import(tmp_path, monkeypatch):
    module = write_loss(tmp_path, "scan_one", distribution="Acme_Scan.One", version="3.2")
    record = only(scan_with(monkeypatch, tmp_path), "scan_one")
    assert record.kind == "loss"
    assert record.distribution == "acme-scan-one"
    assert record.version == "3.2"
    assert record.location == str(tmp_path)
    assert record.requires_core == ">=0.1,<1"
    assert (record.state, record.reason) == ("ok", "")
    assert record.summary == "What Acme_Scan.One is for"
    assert module not in sys.modules


def test_records_are_sorted_and_frozen(tmp_path, monkeypatch):
    for name in ("scan_z", "scan_a", "scan_m"):
        write_loss(tmp_path, name)
    registry = scan_with(monkeypatch, tmp_path)
    keys = [(record.kind, record.name, record.distribution) for record in registry.records]
    assert keys == sorted(keys)
    with pytest.raises(AttributeError):
        registry.records[0].name = "other"  # type: ignore[misc]


def test_core_lists_its_own_members_like_everybody():
    registry = scan(Switches())
    assert "grpo" in registry.names("algorithm")
    assert "local" in registry.names("launcher")
    assert {record.kind for record in registry.records if record.is_core} <= set(KINDS)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[console_scripts]\nthis line has no equals sign\n", "line 2"),
        (b"orphan = module:thing\n", "a [group] first"),
        (b"[x]\n= module:thing\n", "line 2"),
        (b"[x]\nname = \xff\xfe\n", "not UTF-8"),
        ("[x]\na = b:c\n".encode("utf-16"), "not UTF-8"),
    ],
)
def test_damaged_metadata_of_an_unrelated_distribution(tmp_path, monkeypatch, content, expected):
    """OWN-1: importlib.metadata, pluggy and stevedore all end here with an unrelated error."""
    write_distribution(tmp_path, "bystander", entry_points_bytes=content)
    write_loss(tmp_path, "scan_beside")
    registry = scan_with(monkeypatch, tmp_path)
    assert expected in problem_about(registry, "bystander")
    assert only(registry, "scan_beside").state == "ok"


def test_damaged_file_makes_its_own_plugins_unreadable(tmp_path, monkeypatch):
    content = f"[{LOSSES}]\nscan_torn = a_module:A\nno equals sign\n".encode()
    write_distribution(tmp_path, "torn", entry_points_bytes=content)
    record = only(scan_with(monkeypatch, tmp_path), "scan_torn")
    assert record.state == "unreadable"
    assert "line 3" in record.reason


@pytest.mark.parametrize(
    "target",
    ["module", "module:", ":Class", "a-b:Class", "mod ule:Class", "module:Class()", "module:1", ""],
)
def test_target_of_the_wrong_form(tmp_path, monkeypatch, target):
    write_distribution(tmp_path, "formless", entry_points={LOSSES: {"scan_formless": target}})
    record = only(scan_with(monkeypatch, tmp_path), "scan_formless")
    assert record.state == "unreadable"
    assert "module:Class" in record.reason


def test_name_of_the_wrong_form(tmp_path, monkeypatch):
    write_distribution(tmp_path, "misnamed", entry_points={LOSSES: {"scan two": "module:A"}})
    assert only(scan_with(monkeypatch, tmp_path), "scan two").state == "unreadable"


def test_group_that_is_none_of_ours_is_reported(tmp_path, monkeypatch):
    write_distribution(tmp_path, "old", entry_points={"prime_rl.losses.v1": {"a": "m:A"}})
    reason = problem_about(scan_with(monkeypatch, tmp_path), "old")
    assert "'prime_rl.losses.v1'" in reason and "prime_rl.losses," in reason


def test_metadata_that_is_missing_nameless_or_left_behind(tmp_path, monkeypatch):
    """Name and version can be None; pip leaves `~name` folders when it is interrupted."""
    entries = {LOSSES: {"scan_bare": "module:A"}}
    (write_distribution(tmp_path, "bare", entry_points=entries) / "METADATA").unlink()
    (tmp_path / "nothing.dist-info").mkdir()
    left = write_distribution(tmp_path, "~eft", entry_points={LOSSES: {"scan_left": "m:A"}})
    assert left.name.startswith("~")
    registry = scan_with(monkeypatch, tmp_path)
    assert only(registry, "scan_bare").version == "unknown"
    assert "scan_left" not in [record.name for record in registry.records]


def test_metadata_file_that_is_not_utf8(tmp_path, monkeypatch):
    info = write_distribution(tmp_path, "latin", entry_points={LOSSES: {"scan_latin": "m:A"}})
    (info / "METADATA").write_bytes(b"Name: latin\nVersion: 1\nAuthor: Ren\xe9\n\n")
    record = only(scan_with(monkeypatch, tmp_path), "scan_latin")
    assert record.state == "unreadable" and "METADATA is not UTF-8" in record.reason


@pytest.mark.parametrize(
    ("requires", "state", "reason"),
    [
        (["prime-rl>=0.1,<1"], "ok", ""),
        (["Prime_RL (>=0.1)"], "ok", ""),
        (["prime-rl[local] >=0.1"], "ok", ""),
        (["torch>=2"], "ok", ""),
        (["prime-rl"], "ok", ""),
        (["prime-rl-extras>=99"], "ok", ""),
        (['prime-rl>=99; extra == "new"'], "ok", ""),
        (['prime-rl>=99; python_version < "3"'], "ok", ""),
        (["prime-rl>=99"], "incompatible", "needs prime-rl>=99, this is prime-rl 0."),
        (["prime-rl<0.0.1"], "incompatible", "needs prime-rl<0.0.1"),
        (['prime-rl>=99; python_version > "3"'], "incompatible", ">=99"),
        (["prime-rl>=0.1", "prime-rl>=99"], "incompatible", ">=0.1,>=99"),
        (["prime-rl=>1"], "unreadable", "=>1"),
        (["prime-rl>=1; nonsense"], "unreadable", "marker"),
    ],
)
def test_version_range_of_the_wheel_decides(tmp_path, monkeypatch, requires, state, reason):
    entries = {LOSSES: {"scan_range": "module:A"}}
    write_distribution(tmp_path, "ranged", entry_points=entries, requires=requires)
    record = only(scan_with(monkeypatch, tmp_path), "scan_range")
    assert record.state == state
    assert reason in record.reason


def test_egg_info_with_requires_txt(tmp_path, monkeypatch):
    entries = {LOSSES: {"scan_egg": "module:A"}}
    info = write_distribution(tmp_path, "eggy", entry_points=entries, requires=(), egg=True)
    (info / "requires.txt").write_text("prime-rl>=99\n\n[extra]\nprime-rl>=0\n")
    assert only(scan_with(monkeypatch, tmp_path), "scan_egg").state == "incompatible"


def test_same_distribution_on_two_paths_is_one_plugin(tmp_path, monkeypatch):
    """BL-106: dist-info in a site folder and egg-info in a source folder."""
    entries = {LOSSES: {"scan_twice": "module:A"}}
    write_distribution(tmp_path / "site", "twice", entry_points=entries)
    write_distribution(tmp_path / "source", "twice", entry_points=entries, egg=True)
    registry = scan_with(monkeypatch, tmp_path / "site", tmp_path / "source")
    record = only(registry, "scan_twice")
    assert (record.state, record.location) == ("ok", str(tmp_path / "site"))
    assert str(tmp_path / "site") in problem_about(registry, "twice")
    assert [p.is_harmless for p in registry.problems if p.distribution == "twice"] == [True]


def test_superseded_copy_offers_nothing(tmp_path, monkeypatch):
    """BL-107: only the copy that would be imported counts."""
    one = {"scan_old": "module:A"}
    two = {"scan_old": "module:A", "scan_new": "module:B"}
    write_distribution(tmp_path / "a", "moved", version="1", entry_points={LOSSES: one})
    write_distribution(tmp_path / "b", "moved", version="2", entry_points={LOSSES: two})
    registry = scan_with(monkeypatch, tmp_path / "a", tmp_path / "b")
    assert only(registry, "scan_old").version == "1"
    assert "scan_new" not in registry.names("loss")


def test_stale_copy_without_entry_points_is_named_when_the_plugin_is_missed(tmp_path, monkeypatch):
    """BL-108: a stale egg-info hides the new entry point; asking for it says so at once."""
    write_distribution(tmp_path / "a", "stale", version="1", egg=True)
    entries = {LOSSES: {"scan_hidden": "module:A"}}
    write_distribution(tmp_path / "b", "stale", version="2", entry_points=entries)
    registry = scan_with(monkeypatch, tmp_path / "a", tmp_path / "b")
    with pytest.raises(Exception, match="scan_hidden") as caught:
        registry.find("loss", "scan_hidden")
    assert str(tmp_path / "b") in str(caught.value) and str(tmp_path / "a") in str(caught.value)


def test_two_distributions_with_one_name_conflict(tmp_path, monkeypatch):
    write_loss(tmp_path, "scan_same", distribution="first-wheel")
    write_loss(tmp_path, "scan_same", distribution="second-wheel")
    write_loss(tmp_path, "scan_between", distribution="in-between")
    registry = scan_with(monkeypatch, tmp_path)
    same = [record for record in registry.records if record.name == "scan_same"]
    assert [record.state for record in same] == ["conflicting", "conflicting"]
    assert "second-wheel:scan_same" in same[0].reason
    assert registry.names("loss").count("first-wheel:scan_same") == 1
    with pytest.raises(Exception, match="first-wheel:scan_same, second-wheel:scan_same"):
        registry.find("loss", "scan_same")
    assert registry.find("loss", "second-wheel:scan_same").distribution == "second-wheel"


def test_conflict_ends_when_one_of_the_two_is_switched_off(tmp_path, monkeypatch):
    write_loss(tmp_path, "scan_same", distribution="first-wheel")
    write_loss(tmp_path, "scan_same", distribution="second-wheel")
    registry = scan_with(monkeypatch, tmp_path, deny=("first-wheel",))
    assert registry.find("loss", "scan_same").distribution == "second-wheel"


def test_same_name_in_two_kinds_is_no_conflict(tmp_path, monkeypatch):
    entries = {LOSSES: {"scan_both": "m:A"}, "prime_rl.routers": {"scan_both": "m:B"}}
    write_distribution(tmp_path, "both", entry_points=entries)
    registry = scan_with(monkeypatch, tmp_path)
    assert [r.state for r in registry.records if r.name == "scan_both"] == ["ok", "ok"]


def test_core_name_cannot_be_taken_over(tmp_path, monkeypatch):
    entries = {"prime_rl.algorithms": {"grpo": "thief:GRPO"}}
    write_distribution(tmp_path, "thief", entry_points=entries)
    registry = scan_with(monkeypatch, tmp_path)
    assert registry.find("algorithm", "grpo").is_core
    assert registry.find("algorithm", "thief:grpo").distribution == "thief"


def test_name_twice_in_one_file(tmp_path, monkeypatch):
    twice = f"[{LOSSES}]\nscan_dup = module:A\nscan-dup = module:B\n".encode()
    write_distribution(tmp_path, "careless", entry_points_bytes=twice)
    same = f"[{LOSSES}]\nscan_again = module:A\nscan_again = module:A\n".encode()
    write_distribution(tmp_path, "repeating", entry_points_bytes=same)
    registry = scan_with(monkeypatch, tmp_path)
    assert {r.state for r in registry.records if r.name == "scan_dup"} == {"conflicting"}
    assert only(registry, "scan_again").state == "ok"


def test_registry_is_kept_per_switches_and_path(tmp_path, monkeypatch):
    first = scan(Switches())
    assert scan(Switches()) is first
    assert scan(Switches(deny=("x",))) is not first
    write_loss(tmp_path, "scan_later")
    assert "scan_later" in scan_with(monkeypatch, tmp_path).names("loss")


def test_refresh_sees_what_was_installed_meanwhile(tmp_path, monkeypatch):
    """OWN-2: stevedore's disk cache would answer from before the change."""
    registry = scan_with(monkeypatch, tmp_path)
    write_loss(tmp_path, "scan_fresh")
    assert "scan_fresh" not in registry.names("loss")
    assert "scan_fresh" in scan(Switches(), refresh=True).names("loss")


CHILDREN = """
import multiprocessing, os
from prime_rl.plugins import scan

def look(queue):
    registry = scan()
    queue.put((os.getpid(), id(registry), registry.load("loss", "scan_child").__name__))

if __name__ == "__main__":
    parent = scan()
    parent.load("loss", "scan_child")
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=look, args=(queue,))
        child.start()
        pid, registry, name = queue.get(timeout=60)
        child.join()
        own_scan = method == "spawn" or registry != id(parent)
        print(method, pid != os.getpid(), own_scan, name)
"""


def test_spawned_and_forked_children_scan_for_themselves(tmp_path):
    """BL-111: nothing is inherited; a child resolves by name from its own scan."""
    write_loss(tmp_path, "scan_child")
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert child.stdout.splitlines() == [
        "spawn True True ScanChild",
        "fork True True ScanChild",
    ], child.stderr
