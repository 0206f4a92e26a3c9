"""One guarded pass over the installed distributions: every plugin as a record, nothing imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import importlib_metadata
from importlib_metadata import Distribution

from prime_rl import __version__
from prime_rl.plugins.compatibility import reason_incompatible, requirement_on_core
from prime_rl.plugins.kinds import GROUPS
from prime_rl.plugins.metadata import (
    EntryLine,
    Headers,
    MalformedMetadata,
    distribution_name,
    entry_lines,
    entry_point_text,
    location_of,
    read_headers,
)
from prime_rl.plugins.records import (
    CONFLICTING,
    CORE_DISTRIBUTION,
    DISABLED,
    INCOMPATIBLE,
    OK,
    UNREADABLE,
    PluginRecord,
    Problem,
    ScriptClaim,
    normalise_name,
)
from prime_rl.plugins.registry import Registry
from prime_rl.plugins.switches import Switches

_NAME = re.compile(r"[a-z0-9_][a-z0-9_.]*$")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_OUR_GROUP = "prime_rl."
_OUR_SCRIPTS = ("prime", "prime-rl")

_registries: dict[tuple[int, tuple[str, ...], Switches], Registry] = {}


def scan(switches: Switches | None = None, *, refresh: bool = False) -> Registry:
    """Every plugin this process could use, under `switches` (None: what PRIME_PLUGINS says).

    Never raises for something that another distribution did wrong: that becomes a record's state
    or one of `Registry.problems`. The result is kept for the process; a forked or spawned child
    (another process id) or a changed `sys.path` scans again, and so does `refresh`.
    """
    if switches is None:
        switches = Switches.read()
    key = (os.getpid(), tuple(sys.path), switches)
    if refresh or key not in _registries:
        if refresh:
            importlib_metadata.MetadataPathFinder.invalidate_caches()
        found = _read_all()
        records = [_switched(record, switches) for record in found.records]
        _registries[key] = Registry(
            records=tuple(
                sorted(_with_conflicts(records), key=lambda r: r[:2] + (r.distribution,))
            ),
            problems=tuple(sorted(found.problems)),
            scripts=tuple(found.scripts),
            switches=switches,
        )
    return _registries[key]


class _Found(NamedTuple):
    records: list[PluginRecord]
    problems: list[Problem]
    scripts: list[ScriptClaim]


def _read_all() -> _Found:
    """The pass itself. The first copy of a distribution wins, as for the importer."""
    found = _Found([], [], [])
    first_copy: dict[str, str] = {}
    interesting: set[str] = {CORE_DISTRIBUTION}
    later_copies: list[tuple[str, str]] = []
    for distribution in _distributions(found.problems):
        location = _location(distribution)
        try:
            name = distribution_name(distribution)
        except Exception as error:  # any library may have damaged its own metadata
            found.problems.append(Problem("(unnamed)", location, f"no name: {error}"))
            continue
        if not name or name.startswith("~"):  # left behind by an interrupted uninstall
            continue
        is_copy = name in first_copy
        try:
            text = entry_point_text(distribution)
        except MalformedMetadata as error:
            found.problems.append(Problem(name, location, str(error)))
            text = ""
        if _OUR_GROUP in text:
            interesting.add(name)
        if is_copy:
            later_copies.append((name, location))
            continue
        first_copy[name] = location
        if text:
            _read_one(distribution, name, location, text, found)
    for name, location in later_copies:
        if name in interesting and os.path.realpath(location) != os.path.realpath(first_copy[name]):
            reason = f"a second copy, ignored; the one in use is at {first_copy[name]}"
            found.problems.append(Problem(name, location, reason, is_harmless=True))
    if CORE_DISTRIBUTION not in first_copy:
        reason = "core is not installed, so its own plugins are unknown: pip install prime-rl"
        found.problems.append(Problem(CORE_DISTRIBUTION, os.path.dirname(__file__), reason))
    return found


def _distributions(problems: list[Problem]) -> Iterator[Distribution]:
    """All distributions, in path order; a finder that raises ends the listing with a problem."""
    try:
        yield from cast(Iterable[Distribution], importlib_metadata.distributions())
    except Exception as error:  # a foreign finder on sys.meta_path
        problems.append(Problem("(finder)", "sys.meta_path", f"{type(error).__name__}: {error}"))


def _location(distribution: Distribution) -> str:
    try:
        return location_of(distribution)
    except Exception as error:  # a foreign Distribution class
        return f"(unknown: {error})"


def _read_one(
    distribution: Distribution, name: str, location: str, text: str, found: _Found
) -> None:
    """Add one distribution's records, scripts and problems."""
    damage = ""
    ours: list[EntryLine] = []
    try:
        for line in entry_lines(text):
            if line.group.startswith(_OUR_GROUP):
                ours.append(line)
            elif line.group == "console_scripts" and line.name in _OUR_SCRIPTS:
                found.scripts.append(ScriptClaim(line.name, name, line.target))
    except MalformedMetadata as error:
        damage = str(error)
        found.problems.append(Problem(name, location, damage))
    if not ours:
        return
    try:
        headers = read_headers(distribution)
        is_core = name == CORE_DISTRIBUTION
        requires_core = "" if is_core else requirement_on_core(headers.requirements)
        incompatible = reason_incompatible(requires_core, __version__)
    except ValueError as error:  # MalformedMetadata, InvalidSpecifier and InvalidVersion are such
        damage = damage or f"{error}"
        found.problems.append(Problem(name, location, damage))
        headers, requires_core, incompatible = Headers("", "", ()), "", ""
    for line in ours:
        kind = GROUPS.get(line.group)
        if kind is None:
            reason = f"entry-point group {line.group!r} is not one of {', '.join(GROUPS)}"
            found.problems.append(Problem(name, location, reason))
            continue
        reason = damage or _reason_unreadable(kind, line)
        state = UNREADABLE if reason else INCOMPATIBLE if incompatible else OK
        found.records.append(
            PluginRecord(
                kind=kind,
                name=normalise_name(line.name),
                target=line.target.partition("[")[0].strip(),
                distribution=name,
                version=headers.version or "unknown",
                location=location,
                requires_core=requires_core,
                state=state,
                reason=reason or incompatible,
                summary=headers.summary,
            )
        )


def _reason_unreadable(kind: str, line: EntryLine) -> str:
    """Why this entry cannot be right; "" when its form is."""
    if not _NAME.match(normalise_name(line.name)):
        return f"name {line.name!r}: expected letters, digits and underscores"
    target = line.target.partition("[")[0].strip()
    if _TARGET.match(target) or (kind == "hook" and _MODULE.match(target)):
        return ""
    return f"target {target!r}: expected `module:Class`"


def _switched(record: PluginRecord, switches: Switches) -> PluginRecord:
    """The record, disabled if a switch says so."""
    reason = switches.reason_disabled(record)
    return record._replace(state=DISABLED, reason=reason) if reason else record


def _with_conflicts(records: list[PluginRecord]) -> Iterator[PluginRecord]:
    """The records, with the usable ones that share kind and name marked.

    Core's own name stays core's; another distribution's member of that name is reached by
    `distribution:name` only.
    """
    users: dict[tuple[str, str], list[PluginRecord]] = {}
    for record in dict.fromkeys(records):  # one entry written twice is one entry
        users.setdefault((record.kind, record.name), []).append(record)
    for same_name in users.values():
        usable = [record for record in same_name if record.state == OK]
        for record in same_name:
            others = [other for other in usable if other is not record]
            if (
                record.state != OK
                or not others
                or (record.is_core and not _is_twice(record, others))
            ):
                yield record
                continue
            yield record._replace(state=CONFLICTING, reason=_reason_conflict(record, others))


def _is_twice(record: PluginRecord, others: list[PluginRecord]) -> bool:
    return any(other.distribution == record.distribution for other in others)


def _reason_conflict(record: PluginRecord, others: list[PluginRecord]) -> str:
    if _is_twice(record, others):
        targets = sorted({record.target, *(other.target for other in others)})
        return f"its distribution lists the name more than once: {', '.join(targets)}"
    names = ", ".join(sorted(other.qualified_name for other in others))
    return f"the name is also used by {names}; write {record.qualified_name}"
