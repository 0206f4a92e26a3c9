"""Choices that are made without naming a kind: `--plugin NAME`, and a checkpoint's `model_type`."""

from __future__ import annotations

from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import KINDS
from prime_rl.plugins.records import CONFLICTING, OK, PluginRecord, split_name
from prime_rl.plugins.registry import Registry
from prime_rl.plugins.unknown import extra_with, near_matches, not_usable


def choose(registry: Registry, name: str) -> PluginRecord:
    """The usable plugin called `name` or `distribution:name`, of whatever kind. Imports nothing.

    Raises PluginError when there is none, none that can be used, or several kinds have one.
    """
    distribution, plain = split_name(name)
    named = [
        record
        for record in registry.records
        if record.kind in KINDS
        and record.name == plain
        and distribution in ("", record.distribution)
    ]
    if not named:
        raise _not_found(registry, name)
    states = (OK, CONFLICTING) if distribution else (OK,)
    usable = [record for record in named if record.state in states]
    if not usable:
        raise not_usable(named[0].kind, name, named)
    if len(usable) > 1:
        fields = " or ".join(f"`{KINDS[record.kind].config_field}`" for record in usable)
        raise PluginError(
            f"{name!r} is the name of {' and '.join(record.describe() for record in usable)}; "
            f"set {fields} instead of --plugin.",
            name=plain,
        )
    return usable[0]


def model_for(registry: Registry, model_type: str) -> PluginRecord:
    """The model plugin that serves checkpoints of this `model_type`.

    The plugin of that name, else the only one that lists it in `Model.model_types` (to know, every
    model plugin is loaded). Raises PluginError.
    """
    records = [record for record in registry.of_kind("model") if record.state in (OK, CONFLICTING)]
    exact = [record for record in records if record.name == model_type]
    broken = []
    if not exact:
        for record in records:
            try:
                plugin = registry.load("model", record.qualified_name)
            except PluginError as error:
                broken.append(str(error))
                continue
            if model_type in plugin.model_types:  # type: ignore[attr-defined]
                exact.append(record)
    if len(exact) == 1:
        return exact[0]
    if exact:
        choices = ", ".join(record.name_in_config for record in exact)
        raise PluginError(
            f"model_type {model_type!r} is served by more than one plugin; set `model.plugin` to "
            f"one of: {choices}",
            kind="model",
            name=model_type,
        )
    try:
        registry.find("model", model_type)
    except PluginError as error:
        notes = "\n".join(f"Note: {text}" for text in broken)
        raise PluginError(
            f"no usable model plugin serves model_type {model_type!r}: {error}\n{notes}".rstrip(),
            kind="model",
            name=model_type,
        ) from error
    raise AssertionError("a model of exactly this name was found after all")


def _not_found(registry: Registry, name: str) -> PluginError:
    plain = split_name(name)[1]
    known = [record for record in registry.records if record.kind in KINDS]
    matches = near_matches(
        plain if ":" not in name else name, (n for r in known for n in (r.name, r.qualified_name))
    )
    hint = f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
    lines = [f"no installed plugin is called {name!r}.{hint}"]
    for kind in KINDS:
        listed = ", ".join(record.name for record in known if record.kind == kind)
        if listed:
            lines.append(f"Known {kind}: {listed}")
    extras = [extra for kind in KINDS if (extra := extra_with(kind, plain))]
    if extras:
        lines.append(f"To install it: pip install 'prime-rl[{extras[0]}]'")
    return PluginError("\n".join(lines), name=plain)
