"""Whether a wheel accepts the running core, read from its own requirement on prime-rl."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prime_rl.plugins.records import CORE_DISTRIBUTION, normalise_distribution

_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?$"
)


_ONLY_EXTRA = re.compile(r"extra\s*==\s*(['\"])[^'\"]+\1\s*$")


def requirement_on_core(requirements: Iterable[str]) -> str:
    """The specifier of the `prime-rl` line that applies here; "" when there is none.

    A line with a marker (`prime-rl>=2; extra == "x"`) counts only when the marker holds without
    any extra.
    """
    specifiers: list[str] = []
    for line in requirements:
        match = _REQUIREMENT.match(line)
        if match is None or normalise_distribution(match[1]) != CORE_DISTRIBUTION:
            continue
        if match[3] and not _marker_holds(match[3].lstrip("; ")):
            continue
        if match[2].strip():
            specifiers.append(match[2].strip())
    return ",".join(specifiers)


def reason_incompatible(requires_core: str, core_version: str) -> str:
    """Why a wheel with this requirement cannot be used with this core; "" when it can.

    Raises ValueError when the specifier or the version is not a valid one.
    """
    if not requires_core:
        return ""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(requires_core).contains(core_version, prereleases=True):
        return ""
    return f"needs prime-rl{requires_core}, this is prime-rl {core_version}"


def _marker_holds(text: str) -> bool:
    if _ONLY_EXTRA.match(text):  # by far the most common; spares a 20 ms import
        return False
    from packaging.markers import InvalidMarker, Marker

    try:
        return Marker(text).evaluate({"extra": ""})
    except InvalidMarker as error:
        raise ValueError(f"invalid marker {text!r} in its requirement on prime-rl") from error
