"""The house's import arrows, read from the source of every file with `ast`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src" / "prime_rl"

ALLOWED = {
    "__init__": set(),
    "errors": set(),
    "configs": {"errors"},
    "wire": set(),
    "api": {"configs", "wire", "errors"},
    "layers": {"api", "configs", "errors"},
    "models": {"api", "configs", "errors", "layers", "plugins"},
    "algorithms": {"api", "configs", "wire"},
    "plugins": {"api", "configs", "errors", "hookspecs", "__init__"},
    "hookspecs": {"api", "configs", "errors"},
    "parallel": {"configs", "errors", "layers"},
    "batches": {"configs", "wire", "errors"},
    "traces": {"configs", "wire", "errors"},
    "control": {"configs", "wire", "errors"},
    "orchestrator": {
        *("api", "configs", "wire", "errors", "plugins", "algorithms"),
        *("batches", "traces", "control", "models"),
    },
    "trainer": {
        *("api", "configs", "wire", "errors", "plugins", "parallel"),
        *("batches", "traces", "control", "models", "layers"),
    },
    "inference": {"api", "configs", "wire", "errors", "plugins", "control", "models", "layers"},
    "launch": {"api", "configs", "errors", "plugins", "control", "models"},
    "testing": {"api", "configs", "wire", "errors", "plugins", "layers", "models"},
}
"""Room -> rooms it may import besides itself. `cli` may import anything in core."""

PLUGIN_MAY_IMPORT = ("prime_rl.api", "prime_rl.configs.base", "prime_rl.wire", "prime_rl.errors")
PLUGIN_MAY_IMPORT_TOO = ("prime_rl.layers",)
"""Building blocks for model plugins."""
TESTS_MAY_IMPORT = "prime_rl.testing"


def imported_modules(path: Path) -> set[str]:
    """Every absolute module name a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; imports are absolute"
            module = node.module or ""
            found.add(module)
            if module == "prime_rl":
                found |= {f"prime_rl.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    """`prime_rl.trainer.step` -> trainer; the package itself -> __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__version__" else "__init__"


def room_of_file(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def core_violations(path: Path, modules: set[str]) -> list[str]:
    own = room_of_file(path)
    if own == "cli":
        return [f"{path}: {m}" for m in modules if m.startswith("prime_rl_")]
    allowed = ALLOWED[own] | {own, "__init__"}
    wrong = [m for m in modules if m.split(".")[0] == "prime_rl" and room(m) not in allowed]
    wrong += [m for m in modules if m.startswith("prime_rl_")]
    return [f"{path.relative_to(ROOT)} ({own}) imports {m}" for m in wrong]


def plugin_violations(path: Path, modules: set[str], own: str, is_test: bool) -> list[str]:
    allowed = PLUGIN_MAY_IMPORT + PLUGIN_MAY_IMPORT_TOO
    wrong = []
    for module in modules:
        top = module.split(".")[0]
        if top.startswith("prime_rl_") and top != own:
            wrong.append(module)
        if top == "prime_rl" and not is_test:
            home = ".".join(module.split(".")[:3])
            if not any(home == a or module.startswith(a + ".") for a in allowed):
                wrong.append(module)
    return [f"{path.relative_to(ROOT)} imports {m}" for m in wrong]


def plugin_folders() -> list[Path]:
    rooms = ("plugins", "model_plugins", "loss_plugins", "kernel_plugins", "transport_plugins")
    return sorted(p.parent for r in rooms for p in (ROOT / r).glob("*/pyproject.toml"))


def test_core_imports_follow_the_arrows():
    files = sorted(CORE.rglob("*.py"))
    assert len(files) > 20
    violations = [v for f in files for v in core_violations(f, imported_modules(f))]
    assert violations == []


def test_plugins_import_only_what_is_public_and_no_other_plugin():
    violations = []
    for folder in plugin_folders():
        (package,) = (folder / "src").iterdir()
        for path in folder.rglob("*.py"):
            is_test = "tests" in path.relative_to(folder).parts
            violations += plugin_violations(path, imported_modules(path), package.name, is_test)
    assert violations == []


def test_the_checks_can_fail():
    trainer = CORE / "trainer" / "made_up.py"
    assert core_violations(trainer, {"prime_rl.orchestrator.pack"})
    assert core_violations(trainer, {"prime_rl_loss_ipo"})
    assert not core_violations(trainer, {"prime_rl.batches", "torch"})
    plugin = ROOT / "loss_plugins" / "ipo" / "src" / "prime_rl_loss_ipo" / "made_up.py"
    assert plugin_violations(plugin, {"prime_rl.trainer.loss"}, "prime_rl_loss_ipo", False)
    assert plugin_violations(plugin, {"prime_rl_model_qwen3"}, "prime_rl_loss_ipo", False)
    assert not plugin_violations(plugin, {"prime_rl.api", "torch"}, "prime_rl_loss_ipo", False)


def test_every_room_is_in_the_table():
    rooms = {p.name.removesuffix(".py") for p in CORE.iterdir() if p.suffix in ("", ".py")}
    assert rooms - {"__pycache__", "cli"} == set(ALLOWED)
