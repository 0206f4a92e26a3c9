"""Reads one distribution's metadata files without the cost, or the surprises, of a full parse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from importlib_metadata import Distribution

from prime_rl.plugins.records import normalise_distribution


class EntryLine(NamedTuple):
    """One line of an entry-point file."""

    group: str
    name: str
    target: str


class Headers(NamedTuple):
    """The few headers of a METADATA file that the scan needs."""

    version: str
    summary: str
    requirements: tuple[str, ...]


class MalformedMetadata(ValueError):
    """A metadata file that cannot be understood; the text says which line."""


def distribution_name(distribution: Distribution) -> str:
    """Normalised name; taken from the folder's name where possible (no file is read)."""
    name = getattr(distribution, "_normalized_name", None) or distribution.metadata["Name"]
    return normalise_distribution(name or "")


def location_of(distribution: Distribution) -> str:
    """The folder that holds the distribution's metadata folder, such as site-packages."""
    return str(distribution.locate_file(""))


def entry_point_text(distribution: Distribution) -> str:
    """The entry-point file; "" when there is none. Raises MalformedMetadata unless it is UTF-8."""
    try:
        return distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        raise MalformedMetadata(
            f"entry_points.txt is not UTF-8 (byte {error.start}: {error.reason})"
        ) from error
    except OSError as error:
        raise MalformedMetadata(f"entry_points.txt cannot be read: {error}") from error


def entry_lines(text: str) -> Iterator[EntryLine]:
    """The entries of an entry-point file, in order.

    Raises MalformedMetadata at a line that is neither blank, comment, `[group]` nor `name = value`.
    """
    group = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        if line[0] == "[" and line[-1] == "]":
            group = line[1:-1].strip()
            continue
        name, separator, target = line.partition("=")
        if not separator or not group or not name.strip():
            expected = "`name = module:object`" if group else "a [group] first"
            raise MalformedMetadata(
                f"entry_points.txt line {number}: found {line[:60]!r}, expected {expected}"
            )
        yield EntryLine(group, name.strip(), target.strip())


def read_headers(distribution: Distribution) -> Headers:
    """Version, summary and requirements. Raises MalformedMetadata when the file is not UTF-8."""
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except UnicodeDecodeError as error:
        raise MalformedMetadata(f"METADATA is not UTF-8 (byte {error.start})") from error
    version = summary = ""
    requirements: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        key = key.lower()
        if key == "version":
            version = value.strip()
        elif key == "summary":
            summary = value.strip()
        elif key == "requires-dist":
            requirements.append(value.strip())
    if not requirements:
        requirements = _egg_requirements(distribution)
    return Headers(version, summary, tuple(requirements))


def _egg_requirements(distribution: Distribution) -> list[str]:
    """Unconditional requirements of an old egg-info folder."""
    lines: list[str] = []
    for line in (distribution.read_text("requires.txt") or "").splitlines():
        if line.startswith("["):
            break
        if line.strip():
            lines.append(line.strip())
    return lines
