"""Loads one plugin and reports on it as JSON; `prime plugins doctor` runs it in a child process.

python -m prime_rl.plugins.check loss prime-rl-loss-ipo:ipo
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import COMMAND, HOOK
from prime_rl.plugins.records import OK, PluginRecord
from prime_rl.plugins.registry import Registry
from prime_rl.plugins.scan import scan

HEAVY_MODULES = ("torch", "triton", "numpy", "transformers", "vllm", "verifiers")
"""What importing a plugin must not import: its heavy libraries belong inside its methods."""


def check(registry: Registry, kind: str, name: str) -> dict[str, str]:
    """Load the plugin and try it as far as possible without knowing its settings.

    Returns {"error", "traceback", "warning"}, each "" when there is nothing to say.
    """
    result = {"error": "", "traceback": "", "warning": ""}
    already = set(sys.modules)
    try:
        _try(registry, kind, name)
    except PluginError as error:
        result["error"] = str(error).splitlines()[0]
        result["traceback"] = error.original_traceback
    except Exception as error:  # whatever a third party's constructor or schema raises
        result["error"] = f"{type(error).__name__}: {error}"
        result["traceback"] = traceback.format_exc()
    heavy = [m for m in HEAVY_MODULES if m in sys.modules and m not in already]
    if heavy and kind != COMMAND:
        result["warning"] = (
            f"importing it loads {', '.join(heavy)}; import them inside the methods that need them"
        )
    return result


def _try(registry: Registry, kind: str, name: str) -> None:
    if kind in (HOOK, COMMAND):
        from prime_rl.plugins.load import load_object

        record = _record(registry, kind, name)
        loaded = load_object(record)
        if kind == HOOK:
            from prime_rl.plugins.hooks import Hooks

            hooks = Hooks()
            if not hooks.add(record, loaded):
                raise PluginError(hooks.dropped[0].reason)
        return
    plugin = registry.load(kind, name)
    config = registry.config_class(kind, name)
    config.model_json_schema()
    if not any(field.is_required() for field in config.model_fields.values()):
        plugin(config.model_validate({}))


def _record(registry: Registry, kind: str, name: str) -> PluginRecord:
    for record in registry.of_kind(kind):
        if record.qualified_name == name and record.state == OK:
            return record
    raise PluginError(f"no usable {kind} {name}")


if __name__ == "__main__":
    # What the plugin prints goes to stderr, so that stdout holds the result alone.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(check(scan(), sys.argv[1], sys.argv[2])))
    answer.close()
    os._exit(0)  # a plugin's threads and exit handlers must not delay the answer
