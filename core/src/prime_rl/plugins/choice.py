"""Choices that are made without naming a kind: `--plugin NAME`, and a checkpoint's `model_type`."""

from __future__ import annotations

from typing import Any

from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import KINDS
from prime_rl.plugins.records import CONFLICTING, OK, PluginRecord, normalise_name, split_name
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

    The plugin of that very name is asked first, so that usually nothing else is imported. Raises
    PluginError when none serves it, when the one of that name may not be used, or when several of
    other names serve it.
    """
    records = [record for record in registry.of_kind("model") if record.state in (OK, CONFLICTING)]
    own_name = normalise_name(model_type)
    serving: list[PluginRecord] = []
    served: list[str] = []
    broken: list[str] = []
    for record in sorted(records, key=lambda record: record.name != own_name):
        if serving and record.name != own_name and serving[0].name == own_name:
            break
        try:
            plugin: Any = registry.load("model", record.qualified_name)
        except PluginError as error:
            broken.append(f"{record.name} could not be asked: {error}")
            continue
        served += plugin.model_types
        if model_type in plugin.model_types:
            serving.append(record)
    if len(serving) == 1:
        return serving[0]
    if serving:
        text = (
            f"model_type {model_type!r} is served by more than one plugin; set model.plugin to one "
            f"of: {', '.join(record.name_in_config for record in serving)}"
        )
        raise PluginError(text, kind="model", name=model_type)
    unusable = [record for record in registry.of_kind("model") if record not in records]
    if own := [record for record in unusable if record.name == own_name]:
        raise not_usable("model", model_type, own)
    broken += [f"{record.name} was not asked: {record.reason}" for record in unusable]
    detail = "; ".join([f"served: {', '.join(sorted(served)) or 'none'}", *broken])
    extra = extra_with("model", own_name)
    advice = f"To install one: pip install 'prime-rl[{extra}]'" if extra else "Set model.plugin."
    raise PluginError(
        f"no installed model plugin serves model_type {model_type!r}"
        f"{_did_you_mean(model_type, served)} ({detail}). {advice}",
        kind="model",
        name=model_type,
    )


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


def _did_you_mean(name: str, known: list[str]) -> str:
    matches = near_matches(name, known)
    return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""
