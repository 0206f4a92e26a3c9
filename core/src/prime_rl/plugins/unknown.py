"""The errors for plugins that cannot be had: near matches, what is known, what to install."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import KINDS
from prime_rl.plugins.records import (
    CONFLICTING,
    CORE_DISTRIBUTION,
    DISABLED,
    INCOMPATIBLE,
    OK,
    PluginRecord,
    normalise_distribution,
    split_name,
)

if TYPE_CHECKING:
    from prime_rl.plugins.registry import Registry

_EXTRA_LINE = re.compile(r"\s*([A-Za-z0-9._-]+)[^;]*;.*\bextra\s*==\s*['\"]([^'\"]+)['\"]")

_WHAT_TO_DO = {
    DISABLED: "Change that switch to use it.",
    INCOMPATIBLE: "Install a version of it that accepts this core: pip install -U {distribution}",
    CONFLICTING: "",
    "unreadable": "Report it to the distribution's author, or reinstall it.",
}


def not_found(registry: Registry, kind: str, name: str) -> PluginError:
    """No plugin of the kind has this name."""
    distribution, plain = split_name(name)
    known = registry.of_kind(kind)
    lines = [f"no {kind} plugin is called {name!r}.{_did_you_mean(name, _all_names(known))}"]
    other_kinds = [r.kind for r in registry.records if r.name == plain and r.kind != kind]
    if other_kinds:
        lines.append(f"A {' and a '.join(dict.fromkeys(other_kinds))} has that name.")
    listed = ", ".join(
        f"{r.name} ({r.distribution} {r.version}{'' if r.state == OK else ', ' + r.state})"
        for r in known
    )
    lines.append(f"Known: {listed or 'none'}.")
    extra = extra_with(kind, plain)
    if extra:
        lines.append(f"To install it: pip install '{CORE_DISTRIBUTION}[{extra}]'")
    lines += [f"Note: {problem.describe()}" for problem in registry.problems]
    return PluginError("\n".join(lines), kind=kind, name=plain, distribution=distribution)


def not_usable(kind: str, name: str, records: list[PluginRecord]) -> PluginError:
    """The name is known, but every plugin that has it is switched off, too old, or ambiguous."""
    first = records[0]
    conflicting = [record for record in records if record.state == CONFLICTING]
    if len(conflicting) > 1:
        choices = ", ".join(record.qualified_name for record in conflicting)
        text = f"{kind} {name!r} is offered by more than one distribution; write one of: {choices}"
        return PluginError(text, kind=kind, name=first.name)
    lines = []
    for record in records:
        advice = _WHAT_TO_DO[record.state].format(distribution=record.distribution)
        lines.append(f"{record.describe()} is {record.state}: {record.reason}. {advice}".rstrip())
    return _about(first, "\n".join(lines))


def required_missing(registry: Registry, item: str) -> PluginError:
    """`[plugins] required` names something that is not installed."""
    lines = [f"[plugins] required: {item!r} is not installed.{_suggestion(registry, item)}"]
    for kind in KINDS:
        extra = extra_with(kind, split_name(item)[1])
        if extra:
            lines.append(f"To install it: pip install '{CORE_DISTRIBUTION}[{extra}]'")
            break
    return PluginError("\n".join(lines), name=item)


def required_not_usable(item: str, records: list[PluginRecord]) -> PluginError:
    """`[plugins] required` names something that is installed and cannot be used."""
    states = "; ".join(f"{r.describe()} is {r.state}: {r.reason}" for r in records)
    return _about(records[0], f"[plugins] required: {item!r} cannot be used: {states}")


def unknown_item(registry: Registry, switch: str, item: str) -> str:
    """One warning line for a name in a switch that no installed plugin has."""
    return f"{switch} names {item!r}, which is not installed.{_suggestion(registry, item)}"


def table_differs(differences: list[str]) -> PluginError:
    """A worker would use other plugins than the run resolved."""
    return PluginError(
        "this process would use other plugins than the run was started with:\n  "
        + "\n  ".join(differences)
        + "\nInstall the same versions everywhere, or start the run again."
    )


def near_matches(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names close to `name`, best first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)


def extra_with(kind: str, name: str) -> str:
    """The smallest extra of core that installs the plugin; "" when none does.

    Read from core's own metadata: an extra of the plugin's name, or one that requires
    `prime-rl-<word of the kind>-<name>` (or a family of which `name` is a member: `big_moe` is
    offered by prime-rl-model-big).
    """
    members = _extras()
    dashed = normalise_distribution(name)
    prefix = f"{CORE_DISTRIBUTION}-{KINDS[kind].word}-"
    found: list[tuple[int, str]] = []
    for extra, distributions in members.items():
        of_kind = [d.removeprefix(prefix) for d in distributions if d.startswith(prefix)]
        if any(dashed == member or dashed.startswith(f"{member}-") for member in of_kind):
            found.append((len(distributions), extra))
    return min(found)[1] if found else ""


def _extras() -> dict[str, list[str]]:
    """Extra of core -> distributions it requires."""
    import importlib_metadata

    try:
        requirements = importlib_metadata.distribution(CORE_DISTRIBUTION).requires or []
    except importlib_metadata.PackageNotFoundError:
        return {}
    extras: dict[str, list[str]] = {}
    for line in requirements:
        if match := _EXTRA_LINE.match(line):
            extras.setdefault(match[2], []).append(normalise_distribution(match[1]))
    return extras


def _about(record: PluginRecord, text: str) -> PluginError:
    return PluginError(
        text,
        kind=record.kind,
        name=record.name,
        distribution=record.distribution,
        version=record.version,
        target=record.target,
    )


def _all_names(records: Iterable[PluginRecord]) -> list[str]:
    return [text for r in records for text in (r.name, r.qualified_name)]


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    matches = near_matches(split_name(name)[1] if ":" not in name else name, known)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def _suggestion(registry: Registry, item: str) -> str:
    known = [text for r in registry.records for text in (r.name, r.distribution, r.qualified_name)]
    return _did_you_mean(item, known)
