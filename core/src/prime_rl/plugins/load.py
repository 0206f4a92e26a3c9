"""Loads one chosen plugin from its record, through stevedore, and checks what came out."""

from __future__ import annotations

import importlib
import traceback
from importlib.metadata import EntryPoint
from typing import Any, Literal, get_args, get_origin

from pydantic import create_model
from stevedore.driver import DriverManager

from prime_rl.configs.base import PluginConfig
from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import Kind
from prime_rl.plugins.records import CORE_DISTRIBUTION, PluginRecord, normalise_name


def load_record(kind: Kind, record: PluginRecord) -> type:
    """The class the record names, a subclass of the kind's contract.

    Raises PluginError whatever the plugin raised, SystemExit and AssertionError included.
    """
    loaded = load_object(record)
    problem = _reason_unfit(loaded, _contract(kind), record)
    if problem:
        raise failure(record, problem)
    return loaded


def load_object(record: PluginRecord) -> Any:
    """Import the record's target and return it unchecked; failures as in `load_record`."""
    entry = EntryPoint(record.name, record.target, record.kind)

    class RecordDriver(DriverManager[Any]):
        """Lists the one entry we scanned, so neither stevedore's scan nor its caches are used."""

        def list_entry_points(self) -> list[EntryPoint]:
            return [entry]

    try:
        manager = RecordDriver(record.kind, record.name, on_missing_entrypoints_callback=None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and AssertionError at import are failures too
        raise failure(record, _one_line(error), error) from error
    return manager.extensions[0].plugin


def config_class_as(plugin: type, record: PluginRecord, asked: str) -> type[PluginConfig]:
    """The plugin's Config, whose `type` is pinned to the name that was asked for.

    Usually the class itself. A derived one when the plugin does not pin `type` to this one name, or
    when the name was written as `distribution:name`: without the latter the saved configuration
    would forget which of two wheels was meant.
    """
    config: type[PluginConfig] = plugin.Config  # type: ignore[attr-defined]
    name = record.qualified_name if ":" in asked else record.name
    if _pinned_names(config) == (name,) and config.model_fields["type"].default == name:
        return config
    pinned: Any = Literal[name]
    derived: type[PluginConfig] = create_model(
        config.__name__,
        __base__=config,
        __module__=config.__module__,
        __doc__=config.__doc__,
        type=(pinned, name),
    )
    return derived


def failure(record: PluginRecord, reason: str, error: BaseException | None = None) -> PluginError:
    """The error for a plugin that is installed, was chosen, and does not work."""
    advice = f"Fix or update it (pip install -U {record.distribution})"
    if record.is_core and isinstance(error, ModuleNotFoundError):
        advice = f"Install what core needs on one machine: pip install '{CORE_DISTRIBUTION}[local]'"
    text = (
        f"{record.describe()} is installed but cannot be used: {reason}\n"
        f"It is {record.target!r} at {record.location}. {advice}, choose another {record.kind}, "
        f"or switch it off with --no-plugin {record.name}; `prime plugins doctor` shows the whole "
        "traceback."
    )
    return PluginError(
        text,
        kind=record.kind,
        name=record.name,
        distribution=record.distribution,
        version=record.version,
        target=record.target,
        original_traceback=_plugin_traceback(error) if error else "",
    )


def _plugin_traceback(error: BaseException) -> str:
    """The error's traceback without the frames of the loading machinery."""
    machinery = (__file__, "importlib", "stevedore")
    whole = traceback.TracebackException.from_exception(error)
    whole.stack = traceback.StackSummary.from_list(
        [frame for frame in whole.stack if not any(part in frame.filename for part in machinery)]
    )
    return "".join(whole.format())


def _contract(kind: Kind) -> type:
    module, _, name = kind.contract.partition(":")
    contract: type = getattr(importlib.import_module(module), name)
    return contract


def _reason_unfit(loaded: Any, contract: type, record: PluginRecord) -> str:
    """Why the loaded object is no member of the kind; "" when it is."""
    expected = f"expected a class that subclasses {contract.__module__}.{contract.__name__}"
    if not isinstance(loaded, type):
        return f"found {type(loaded).__name__} {loaded!r:.80}, {expected}"
    if not issubclass(loaded, contract):
        return f"found class {loaded.__qualname__}, {expected}"
    missing = missing_methods(loaded)
    if missing:
        return f"class {loaded.__qualname__} does not implement: {', '.join(missing)}"
    config = getattr(loaded, "Config", None)
    if not (isinstance(config, type) and issubclass(config, PluginConfig)):
        return f"its Config is {config!r}, expected a class that subclasses PluginConfig"
    names = _pinned_names(config)
    if names and record.name not in [normalise_name(name) for name in names]:
        return f"its Config has type {', '.join(map(repr, names))}, expected {record.name!r}"
    return ""


def missing_methods(plugin: type) -> list[str]:
    """Abstract methods of its contract that the class leaves out."""
    return [
        name
        for name in dir(plugin)
        if getattr(getattr(plugin, name, None), "__isabstractmethod__", False)
    ]


def _pinned_names(config: type[PluginConfig]) -> tuple[str, ...]:
    """The values that `type: Literal[...]` of a Config allows; () when it is a plain string."""
    annotation = config.model_fields["type"].annotation
    if get_origin(annotation) is not Literal:
        return ()
    return tuple(str(name) for name in get_args(annotation))


def _one_line(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return " ".join(text.split())
