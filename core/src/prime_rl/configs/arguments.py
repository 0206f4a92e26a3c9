"""Splits the words of `prime run` into recipe, files, overrides and options of the run itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.configs.fields import FieldType, child_type
from prime_rl.configs.model import ResumeConfig
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.errors import ConfigError

BOOLEAN_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class Override:
    """One `--a.b value` of the command line."""

    parts: tuple[str, ...]
    """Path as spelled, without the dashes in front."""
    text: str | None = None
    """Value; None: the bare option."""
    file: Path | None = None
    """`--section @ part.toml`."""

    @property
    def spelled(self) -> str:
        """As the user wrote it."""
        return "--" + ".".join(self.parts)


@dataclass(frozen=True)
class RunArguments:
    """What the command line says beside the configuration."""

    plugins: tuple[str, ...] = ()
    """`--plugin NAME`"""
    no_plugins: tuple[str, ...] = ()
    """`--no-plugin NAME`"""
    resume: ResumeConfig | None = None
    """`--resume [STEP]`, `--resume.dir DIR`, ...; None: not asked for."""
    clean: bool = False
    """`--clean`: delete what the run directory holds."""
    dry_run: bool = False
    """`--dry-run`: resolve, check and write the configuration; start nothing."""
    help: bool = False
    """`--help`"""
    words: tuple[str, ...] = ()
    """The command line itself, kept with the run."""


@dataclass
class CommandLine:
    """The words, sorted."""

    recipe: str | None = None
    """Path, `plugin:recipe` or name."""
    files: list[Path] = field(default_factory=list)
    """`@ file`, in order."""
    overrides: list[Override] = field(default_factory=list)
    resume: list[Override] = field(default_factory=list)
    """`--resume...`; the part `resume` is removed."""
    plugins: list[str] = field(default_factory=list)
    no_plugins: list[str] = field(default_factory=list)
    clean: bool = False
    dry_run: bool = False
    help: bool = False


def parse(words: list[str]) -> CommandLine:
    """Sort the words. Raises ConfigError for what has no meaning whatever the recipe says."""
    return _Parser(words).parse()


class _Parser:
    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0
        self._found = CommandLine()

    def parse(self) -> CommandLine:
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            if word == "@":
                self._found.files.append(self._file("@"))
            elif word in ("-h", "--help"):
                self._found.help = True
            elif word.startswith("--"):
                self._option(word)
            else:
                self._positional(word)
        return self._found

    def _positional(self, word: str) -> None:
        if word.startswith("@"):
            raise ConfigError(f"{word}: write a space after the @: `@ {word[1:]}`")
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such option; options start with two dashes")
        if self._found.recipe is not None:
            raise ConfigError(
                f"found two recipes, {self._found.recipe!r} and {word!r}; "
                "to lay one file over another write `@ first.toml @ second.toml`"
            )
        self._found.recipe = word

    def _option(self, word: str) -> None:
        name, equals, text = word[2:].partition("=")
        value = text if equals else None
        if name in ("plugin", "no-plugin", "no_plugin"):
            names = self._found.plugins if name == "plugin" else self._found.no_plugins
            names.append(value if value is not None else self._required(word, "a plugin's name"))
        elif name in ("clean", "dry-run", "dry_run"):
            if value is not None:
                raise ConfigError(f"--{name} takes no value, found {value!r}")
            setattr(self._found, name.replace("-", "_"), True)
        else:
            parts = tuple(name.split("."))
            if not all(part.strip() for part in parts):
                raise ConfigError(f"{word}: a part of the path is empty; write --section.key value")
            if parts[0] == "resume":
                self._found.resume.append(self._resume(parts[1:], value))
            else:
                self._found.overrides.append(self._override(parts, value))

    def _resume(self, parts: tuple[str, ...], value: str | None) -> Override:
        if parts:
            return self._override(parts, value, ResumeConfig)
        if value is None and self._next().isdecimal():
            value = self._take()
        return Override(("step",), value) if value is not None else Override(())

    def _override(
        self, parts: tuple[str, ...], value: str | None, root: type | None = None
    ) -> Override:
        if value is not None:
            return Override(parts, value)
        if self._next() == "@":
            self._take()
            return Override(parts, file=self._file("--" + ".".join(parts) + " @"))
        if self._at < len(self._words) and self._is_value(parts, self._next(), root):
            return Override(parts, self._take())
        return Override(parts)

    def _is_value(self, parts: tuple[str, ...], word: str, root: type | None) -> bool:
        """Whether the word after an option belongs to it."""
        if word.startswith("--"):
            return False
        types = known_types(parts, root)
        if not types:
            return not _is_negation(parts, root)
        kind = types[0]
        if kind.is_switch:
            words = [*BOOLEAN_WORDS, *map(str, kind.literals), "none"]
            return word.lower() in words
        if kind.plugin is not None:
            return not word.endswith(".toml")
        return not kind.is_section or word == "None" or word.startswith("{")

    def _next(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _take(self) -> str:
        self._at += 1
        return self._words[self._at - 1]

    def _required(self, option: str, what: str) -> str:
        if not self._next() or self._next().startswith("--"):
            raise ConfigError(f"{option} needs {what}")
        return self._take()

    def _file(self, option: str) -> Path:
        return Path(self._required(option, "a file: `@ recipe.toml`"))


def known_types(parts: tuple[str, ...], root: type | None = None) -> list[FieldType]:
    """Types a path may have, as far as core's own classes tell; [] inside a plugin's section."""
    if root is not None:
        starts = [(root, parts)]
    else:
        inner = parts[2:] if parts[0] == "stages" else parts
        starts = [(RunConfig, parts)]
        starts += [(section, inner) for section in (RLConfig, SFTConfig)]
        starts += [(section, parts[1:]) for section in (RLConfig, SFTConfig)]
    found = []
    for section, path in starts:
        here: FieldType | None = FieldType(section=section)
        for part in path:
            here = child_type(here, None, snake(part), _no_plugin_class) if here else None
        if here is not None and path:
            found.append(here)
    return found


def _is_negation(parts: tuple[str, ...], root: type | None) -> bool:
    return any(kind.is_switch for path in negations(parts) for kind in known_types(path, root))


def negations(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths that `--no-a.b` or `--a.no-b` may switch off."""
    found = []
    for index in dict.fromkeys((0, len(parts) - 1)):
        part = parts[index]
        if part.startswith(("no-", "no_")):
            found.append((*parts[:index], part[3:], *parts[index + 1 :]))
    return found


def snake(part: str) -> str:
    """`max-steps` -> `max_steps`."""
    return part.replace("-", "_")


def _no_plugin_class(kind: str, name: str) -> None:
    return None
