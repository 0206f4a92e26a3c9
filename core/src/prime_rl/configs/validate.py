"""Validates a raw run against the configuration classes, plugins' own included."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from prime_rl.configs import former_keys
from prime_rl.configs.base import PluginConfig, ValidationContext
from prime_rl.configs.problems import Problem, error_from, problems_of, unsuitable_values
from prime_rl.configs.registry import PluginRegistry
from prime_rl.configs.run import RunConfig
from prime_rl.configs.tree import Node
from prime_rl.errors import PluginError


class Lookup:
    """Finds plugins' Config classes; what cannot be had becomes a validation error in its place."""

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry
        self._classes: dict[tuple[str, str], type[PluginConfig]] = {}
        self._failures: dict[tuple[str, str], PluginError] = {}

    def __call__(self, kind: str, name: str) -> type[PluginConfig]:
        """The class. Raises an error that pydantic collects with all others."""
        found = self.quiet(kind, name)
        if found is None:
            text = str(self._failures[kind, name])
            if former := former_keys.CHOICES.get((kind, name)):
                text = f"no {kind} plugin is called {name!r}: {former}"
            raise PydanticCustomError("plugin_error", "{text}", {"text": text})
        return found

    def quiet(self, kind: str, name: str) -> type[PluginConfig] | None:
        """The class; None when it cannot be had."""
        key = (kind, name)
        if key not in self._classes and key not in self._failures:
            try:
                self._classes[key] = self._registry.config_class(kind, name)
            except PluginError as error:
                self._failures[key] = error
        return self._classes.get(key)

    def known(self, kind: str, name: str) -> type[PluginConfig] | None:
        """The class if it was asked for already; loads nothing."""
        return self._classes.get((kind, name))

    @property
    def first_failure(self) -> PluginError | None:
        """The first plugin that could not be had."""
        return next(iter(self._failures.values()), None)


def validate(root: Node, lookup: Lookup, found_before: list[Problem]) -> RunConfig:
    """The run. Raises ConfigError with `found_before` and everything else that is wrong."""
    problems = [*found_before, *unsuitable_values(root)]
    named = {problem.path for problem in problems}
    try:
        run = RunConfig.model_validate(root.plain(), context=ValidationContext(lookup))
    except ValidationError as error:
        more = problems_of(error, root, lookup.known)
        problems += [problem for problem in more if problem.path not in named]
        raise error_from(problems) from (lookup.first_failure or error)
    if problems:
        raise error_from(problems)
    return run
