"""From the words of `prime run` to a resolved run: recipe, files, overrides, plugins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from prime_rl.configs.arguments import CommandLine, Override, RunArguments, known_types, parse
from prime_rl.configs.choices import chosen_plugins
from prime_rl.configs.compose import Draft, compose
from prime_rl.configs.model import ResumeConfig
from prime_rl.configs.overrides import BadValue, apply_overrides, read_value
from prime_rl.configs.problems import Problem, error_from
from prime_rl.configs.recipes import find_recipe
from prime_rl.configs.registry import PluginRecord, PluginRegistry
from prime_rl.configs.resolve import resolve
from prime_rl.configs.run import RunConfig
from prime_rl.configs.saved import load_resolved, save_resolved, under_switches
from prime_rl.configs.toml import read_toml
from prime_rl.configs.tree import COMMAND_LINE, Node, Origin
from prime_rl.configs.validate import Lookup, validate
from prime_rl.configs.wholeness import make_whole
from prime_rl.errors import ConfigError, PrimeError

__all__ = ["LoadedRun", "RunArguments", "load_resolved", "load_run", "save_resolved"]

DEFAULT_RECIPE = "quickstart"
"""What `prime run` without a recipe runs."""


Found = TypeVar("Found", bound=PluginRegistry)


@dataclass(frozen=True)
class LoadedRun(Generic[Found]):
    """Everything that the words of `prime run` say."""

    run: RunConfig | None
    """Resolved. None only when help was asked for and the rest makes no run."""
    arguments: RunArguments
    registry: Found
    """The registry under the run's own switches."""
    inputs: tuple[Path, ...]
    """The hand-written files, in the order they were laid over each other."""
    warnings: tuple[str, ...]


def load_run(
    words: list[str], registry: Found, *, default_recipe: str | None = DEFAULT_RECIPE
) -> LoadedRun[Found]:
    """Load, check and resolve. Raises ConfigError (or PluginError) that lists what is wrong."""
    line = parse(words)
    try:
        return _load(line, tuple(words), registry, default_recipe)
    except PrimeError:
        if not line.help:
            raise
        return LoadedRun(None, RunArguments(help=True), registry, (), ())


def _load(
    line: CommandLine,
    words: tuple[str, ...],
    registry: Found,
    default_recipe: str | None,
) -> LoadedRun[Found]:
    arguments = RunArguments(
        plugins=tuple(line.plugins),
        no_plugins=tuple(line.no_plugins),
        resume=_resume(line.resume),
        clean=line.clean,
        dry_run=line.dry_run,
        help=line.help,
        words=words,
    )
    if arguments.clean and arguments.resume is not None:
        raise ConfigError("--clean deletes what --resume would continue; use one of them")
    start = registry.with_switches(no_plugin=line.no_plugins) if line.no_plugins else registry
    inputs = _input_files(line, start, default_recipe)
    draft = compose([read_toml(path) for path in inputs])
    registry = _registry_for(draft, line, registry)
    warnings = registry.check_switches()
    lookup = Lookup(registry)
    chosen = [_as_override(registry, registry.choose(name)) for name in line.plugins]
    problems = apply_overrides(draft, [*chosen, *line.overrides], lookup.quiet)
    written = draft.run.get("plugin_versions")
    if written is not None:
        text = "unknown key: it is written when a recipe is resolved"
        problems.append(Problem(written.origin, "plugin_versions", text))
    run = validate(draft.root(), lookup, problems)
    run = make_whole(run, registry, lookup, draft.root())
    run = resolve(run).model_copy(update={"plugin_versions": _versions(run, registry)})
    run, resume = _with_resume(run, arguments.resume)
    arguments = replace(arguments, resume=resume)
    return LoadedRun(run, arguments, registry, inputs, tuple(warnings))


def _versions(run: RunConfig, registry: PluginRegistry) -> list[dict[str, str]]:
    """Rows of the registry's table for core, listeners, and what the stages chose."""
    chosen = {
        (choice.kind, choice.name.rpartition(":")[2])
        for stage in run.stages
        for choice in chosen_plugins(stage)
    }
    return [
        row
        for row in registry.table()
        if row["kind"] in ("core", "hook") or (row["kind"], row["name"]) in chosen
    ]


def _with_resume(
    run: RunConfig, asked: ResumeConfig | None
) -> tuple[RunConfig, ResumeConfig | None]:
    """The run whose stages know how to resume, and the wish itself: the command line's, or that of
    the first stage that has one."""
    written = [stage.resume for stage in run.stages if stage.resume is not None]
    if asked is None:
        return run, written[0] if written else None
    one_step = asked.step is not None or asked.dir is not None
    if one_step and len(run.stages) > 1:
        raise ConfigError(
            f"--resume: this run has {len(run.stages)} stages; say which one a step or dir is for: "
            f"--{run.stages[-1].type}.resume.step N"
        )
    said = {key: getattr(asked, key) for key in asked.model_fields_set}
    stages = [
        stage.model_copy(update={"resume": (stage.resume or asked).model_copy(update=said)})
        for stage in run.stages
    ]
    return run.model_copy(update={"stages": stages}), asked


def _input_files(
    line: CommandLine, registry: PluginRegistry, default_recipe: str | None
) -> tuple[Path, ...]:
    if line.recipe is None and line.files:
        return tuple(line.files)
    models = [r for r in map(registry.choose, line.plugins) if r.kind == "model"]
    if line.recipe is not None:
        return (find_recipe(line.recipe, registry, models), *line.files)
    if len(models) > 1:
        names = ", ".join(record.name for record in models)
        raise ConfigError(f"--plugin names {len(models)} models: {names}; which recipe is meant?")
    if models:
        recipe = registry.load("model", models[0].name_in_config).debug_recipe
        return (find_recipe(f"{models[0].qualified_name}:{recipe}", registry),)
    if default_recipe is None:
        raise ConfigError("no recipe: give a TOML file, an installed recipe's name, or --plugin")
    return (find_recipe(default_recipe, registry),)


def _registry_for(draft: Draft, line: CommandLine, registry: Found) -> Found:
    """Read `[plugins]` before any plugin is imported; `--no-plugin` is kept in `deny`."""
    switches = [one for one in line.overrides if "plugins" in one.parts[:3]]
    apply_overrides(draft, switches, lambda kind, name: None)
    registry = under_switches(draft.root().plain(), registry, line.no_plugins)
    if not line.no_plugins:
        return registry
    origin = Origin(COMMAND_LINE, None, ("no-plugin",))
    for index, stage in enumerate(draft.stages):
        section = stage.get("plugins") if stage.is_table else None
        section = section or Node({}, origin)
        if stage.is_table and section.is_table:
            listed = section.get("deny")
            old = listed.value if listed is not None and listed.is_list else []
            names = Node([*old, *(Node(name, origin) for name in line.no_plugins)], origin)
            draft.stages[index] = stage.with_key("plugins", section.with_key("deny", names))
    return registry


def _as_override(registry: PluginRegistry, record: PluginRecord) -> Override:
    """`--plugin NAME` as the override of the field that chooses its kind."""
    return Override(tuple(registry.config_field(record.kind).split(".")), record.name_in_config)


def _resume(overrides: list[Override]) -> ResumeConfig | None:
    if not overrides:
        return None
    values = {}
    problems = []
    origin = Origin(COMMAND_LINE, None, ())
    for override in overrides:
        if not override.parts:
            continue
        shown = f"--resume.{'.'.join(override.parts)}"
        types = known_types(override.parts, ResumeConfig)
        if len(override.parts) != 1 or not types or override.file is not None:
            known = ", ".join(ResumeConfig.model_fields)
            problems.append(Problem(origin, shown, f"unknown; known: {known}"))
            continue
        key = override.parts[0].replace("-", "_")
        try:
            if override.text is None and not types[0].is_switch:
                raise BadValue(f"needs a value: {types[0].describe()}")
            value = True if override.text is None else read_value(override.text, types[0])
        except BadValue as error:
            problems.append(Problem(origin, shown, str(error)))
            continue
        values[key] = value
    if values.get("step") is not None and values.get("dir") is not None:
        problems.append(Problem(origin, "--resume", "give a step or a dir, not both"))
    if problems:
        raise error_from(problems)
    try:
        return ResumeConfig.model_validate(values)
    except ValidationError as error:
        details = "; ".join(f"{line['loc'][0]}: {line['msg']}" for line in error.errors())
        raise ConfigError(f"--resume: {details}") from error
