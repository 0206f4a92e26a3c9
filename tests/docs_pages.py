"""Reads the repository's Markdown: fenced blocks with their marks, links, names in backticks.

A block may have marks in an HTML comment on the line above it, separated by semicolons:

    slow                     its commands run under the mark `slow`
    needs: WHAT              its commands are not run, only checked for existing
    exit: CODE               its commands end with this code instead of 0
    file: PATH               the block is written to PATH before the page's commands run
    not a recipe             a toml block that is no part of a run's configuration
    plugin: KIND NAME CLASS  the block is a plugin's module; it must load
    kit: KIND NAME           the block is a test file that such a plugin must pass
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKS = {"slow", "needs", "exit", "file", "not a recipe", "plugin", "kit"}

_FENCE = re.compile(r"```(\w*)")
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Command:
    """One `$ ...` line of a console block."""

    words: list[str]
    environment: dict[str, str]
    """`NAME=value` in front of the command."""
    output: list[str]
    """Lines that the page shows below it."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`docs/page.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """The commands of a console block with the output shown for each."""
        words: list[str] | None = None
        output: list[str] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                if words is not None:
                    yield _command(words, output)
                words, output = shlex.split(line[2:]), []
            else:
                output.append(line)
        assert words is not None, f"{self.place}: a console block without a `$ ` line"
        yield _command(words, output)


def _command(words: list[str], output: list[str]) -> Command:
    count = next((i for i, w in enumerate(words) if not _ASSIGNMENT.fullmatch(w)), len(words))
    environment = dict(word.split("=", 1) for word in words[:count])
    return Command(words[count:], environment, [line for line in output if line.strip()])


def pages() -> list[Path]:
    """Every page for people, in order."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    rooms = ("plugins", "model_plugins", "loss_plugins", "kernel_plugins", "transport_plugins")
    readmes = [page for room in rooms for page in sorted((ROOT / room).glob("*/README.md"))]
    return [*top, ROOT / "core" / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *readmes]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        if fence := _FENCE.fullmatch(lines[number].strip()):
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
            text = "\n".join(lines[number + 1 : end]) + "\n"
            found.append(Block(page, number + 1, fence[1], text, marks))
            number = end
        if comment := _COMMENT.fullmatch(lines[number].strip()):
            marks = _marks(comment[1])
        elif lines[number].strip():
            marks = {}
        number += 1
    return found


def _marks(text: str) -> dict[str, str]:
    parts = (part.partition(":") for part in text.split(";"))
    return {name.strip(): value.strip() for name, _, value in parts}


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    return [one or other for one, other in _LINK.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def code_names(page: Path) -> set[str]:
    """Everything in single backticks."""
    return set(_CODE.findall(prose(page)))
