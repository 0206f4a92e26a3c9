"""Checks of a validated run that span sections: names, links between stages, the model's plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from prime_rl.configs.base import PluginConfig, ValidationContext
from prime_rl.configs.fields import FieldType
from prime_rl.configs.orchestrator import RESERVED_SOURCE_NAMES, SourceConfig
from prime_rl.configs.paths import stage_name
from prime_rl.configs.problems import Problem, dotted, error_from, locate, section_problems
from prime_rl.configs.registry import PluginRegistry
from prime_rl.configs.resolve import replaced, stage_model_type
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.configs.tree import Node, Path
from prime_rl.configs.validate import Lookup
from prime_rl.errors import PluginError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]*")
_NAME_RULE = "letters, digits and . _ + - @, not starting with . or -"
_RESERVED_STAGE_NAMES = ("configs", "logs", "fresh_model", "latest")

Finding = tuple[Path, str]
"""Where, and what is wrong."""


def make_whole(run: RunConfig, registry: PluginRegistry, lookup: Lookup, root: Node) -> RunConfig:
    """The run with each stage's model plugin settled and its options complete.

    `root` is the raw run, for the places in messages. Raises ConfigError with everything found.
    """
    findings = [*_names(run), *_stages(run)]
    for index, stage in enumerate(run.stages):
        findings += _sources(index, stage)
    problems = [_problem(root, path, text) for path, text in findings]
    stages = list(run.stages)
    for index in range(len(stages)):
        try:
            stages[index] = _with_model_plugin(run, index, registry, lookup)
        except PluginError as error:
            problems.append(_problem(root, _model_place(run, index), str(error)))
        except ValidationError as error:
            place: Path = ("stages", index, "model", "options")
            kind = FieldType(section=_model_config(run, index, registry, lookup))
            problems += section_problems(error, root, place, kind, lookup.known)
    if problems:
        raise error_from(problems)
    return run.model_copy(update={"stages": stages})


def _problem(root: Node, path: Path, text: str) -> Problem:
    origin, shown = locate(root, path)
    return Problem(origin, dotted(shown), text)


def _names(run: RunConfig) -> Iterator[Finding]:
    for key in ("name", "dir"):
        value = getattr(run.run, key)
        if value is not None and not all(_NAME.fullmatch(part) for part in value.split("/")):
            text = f"found {value!r}, expected a path below output_dir whose parts are {_NAME_RULE}"
            yield ("run", key), text


def _stages(run: RunConfig) -> Iterator[Finding]:
    names = [stage_name(run, index) for index in range(len(run.stages))]
    for index, (stage, name) in enumerate(zip(run.stages, names, strict=True)):
        place: Path = ("stages", index)
        if not _NAME.fullmatch(name) or name in _RESERVED_STAGE_NAMES:
            taken = ", ".join(_RESERVED_STAGE_NAMES)
            yield (*place, "name"), f"found {name!r}, expected {_NAME_RULE}; not one of {taken}"
        if name in names[:index]:
            yield (*place, "name"), f"two stages are called {name!r}; give each its own name"
        model = stage.model
        if model.name is not None and model.fresh is not None:
            text = "model.name and model.fresh exclude each other; set one of them to None"
            yield (*place, "model"), text
        elif index == 0 and model.name is None and model.fresh is None:
            text = "the first stage needs model.name (a checkpoint's folder) or a [model.fresh]"
            yield (*place, "model"), text
        elif index > 0 and model.fresh is not None:
            text = "only the first stage can have a fresh model; this one goes on from its weights"
            yield (*place, "model", "fresh"), text
        if stage.resume is not None and stage.resume.step and stage.resume.dir:
            yield (*place, "resume"), "step and dir exclude each other"


def _sources(index: int, stage: SFTConfig | RLConfig) -> Iterator[Finding]:
    start: Path = ("stages", index)
    groups: list[tuple[Path, Any]] = (
        [
            ((*start, "orchestrator", "train"), stage.orchestrator.train),
            ((*start, "orchestrator", "eval"), stage.orchestrator.eval),
        ]
        if isinstance(stage, RLConfig)
        else [((*start, "eval"), stage.eval)]
    )
    for place, group in groups:
        sources: list[SourceConfig] = group.source if group is not None else []
        labels = [source.label for source in sources]
        for number, source in enumerate(sources):
            here = (*place, "source", number)
            if not source.task_set:
                yield (*here, "env"), "expected `taskset = {id = ...}`, the task set to load"
            elif not all(_NAME.fullmatch(part) for part in source.label.split("/")):
                yield here, f"name {source.label!r}: expected {_NAME_RULE}; set `name`"
            elif source.label in RESERVED_SOURCE_NAMES:
                yield here, f"name {source.label!r} is reserved; choose another `name`"
            elif source.label in labels[:number]:
                yield here, f"two sources are called {source.label!r}; set a unique `name`"


def _model_place(run: RunConfig, index: int) -> Path:
    """What chose the model plugin."""
    if run.stages[index].model.plugin is not None:
        return ("stages", index, "model", "plugin")
    return ("stages", index, "model")


def _with_model_plugin(
    run: RunConfig, index: int, registry: PluginRegistry, lookup: Lookup
) -> SFTConfig | RLConfig:
    """The stage with `model.plugin` named and `model.options` validated and complete.

    A stage whose `model_type` cannot be known yet stays as it is.
    """
    stage: SFTConfig | RLConfig = run.stages[index]
    name = _model_plugin(run, index, registry)
    if name is None:
        return stage
    config = _model_config(run, index, registry, lookup)
    context = ValidationContext(lookup)
    options = config.model_validate({**stage.model.options, "type": name}, context=context)
    complete = options.model_dump(mode="json", exclude={"type"})
    return replaced(replaced(stage, "model.plugin", name), "model.options", complete)


def _model_plugin(run: RunConfig, index: int, registry: PluginRegistry) -> str | None:
    """Its name as records spell it; qualified when the run says so or must."""
    asked = run.stages[index].model.plugin
    if asked is not None:
        record = registry.find("model", asked)
        return record.qualified_name if ":" in asked else record.name_in_config
    found = stage_model_type(run, index)
    return registry.model_for(found).name_in_config if found is not None else None


def _model_config(
    run: RunConfig, index: int, registry: PluginRegistry, lookup: Lookup
) -> type[PluginConfig]:
    """Config class of the stage's model plugin. Raises PluginError."""
    return registry.config_class("model", str(_model_plugin(run, index, registry)))
