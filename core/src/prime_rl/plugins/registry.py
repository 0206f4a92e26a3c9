"""The plugins of this process: looked up by kind and name, loaded one at a time, written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prime_rl import __version__
from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import KINDS, Kind
from prime_rl.plugins.records import (
    CONFLICTING,
    CORE_DISTRIBUTION,
    OK,
    PluginRecord,
    Problem,
    ScriptClaim,
    split_name,
)
from prime_rl.plugins.switches import Switches, item_names_record

if TYPE_CHECKING:
    from pathlib import Path

    from prime_rl.configs.base import PluginConfig


class Registry:
    """What one scan found. Get one from `prime_rl.plugins.scan`."""

    def __init__(
        self,
        records: tuple[PluginRecord, ...],
        problems: tuple[Problem, ...],
        scripts: tuple[ScriptClaim, ...],
        switches: Switches,
    ) -> None:
        self.records = records
        """Every entry point, sorted by kind, name, distribution."""
        self.problems = problems
        """Distributions with broken or doubled metadata."""
        self.scripts = scripts
        """Who installs the scripts `prime` and `prime-rl`, first on the path first."""
        self.switches = switches
        self._loaded: dict[PluginRecord, type] = {}
        self._configs: dict[tuple[PluginRecord, bool], type[PluginConfig]] = {}
        self._hooks: list[PluginRecord] = []

    def names(self, kind: str) -> list[str]:
        """Names of a kind that can be loaded now; ambiguous ones as `distribution:name`."""
        _kind(kind)
        usable = [record for record in self.of_kind(kind) if record.state in (OK, CONFLICTING)]
        return [r.name if r.state == OK else r.qualified_name for r in usable]

    def of_kind(self, kind: str) -> list[PluginRecord]:
        """All records of a kind, whatever their state."""
        return [record for record in self.records if record.kind == kind]

    def find(self, kind: str, name: str) -> PluginRecord:
        """The usable record called `name` or `distribution:name`. Imports nothing.

        Raises PluginError, naming what is known, near matches, or why the plugin cannot be used.
        """
        _kind(kind)
        distribution, plain = split_name(name)
        same_name = [record for record in self.of_kind(kind) if record.name == plain]
        if distribution:
            same_name = [record for record in same_name if record.distribution == distribution]
        for record in same_name:
            if record.state == OK:
                return record
        qualified = [record for record in same_name if record.state == CONFLICTING]
        if distribution and len(qualified) == 1:
            return qualified[0]
        from prime_rl.plugins import unknown

        if same_name:
            raise unknown.not_usable(kind, name, same_name)
        raise unknown.not_found(self, kind, name)

    def load(self, kind: str, name: str) -> type:
        """The plugin's class, imported and checked against the kind's contract.

        Raises PluginError for whatever goes wrong, with wheel, version, target and the original
        traceback; KeyboardInterrupt passes.
        """
        record = self.find(kind, name)
        if record not in self._loaded:
            from prime_rl.plugins.load import load_record

            self._loaded[record] = load_record(_kind(kind), record)
        return self._loaded[record]

    def config_class(self, kind: str, name: str) -> type[PluginConfig]:
        """The `Config` of the plugin. Its `type` has exactly one value, which is also its default:
        the plugin's name, or `distribution:name` if it was asked for that way."""
        from prime_rl.plugins.load import config_class_as

        plugin = self.load(kind, name)
        key = (self.find(kind, name), ":" in name)
        if key not in self._configs:
            self._configs[key] = config_class_as(plugin, key[0], name)
        return self._configs[key]

    def with_switches(
        self,
        *,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] = (),
        required: Iterable[str] = (),
        no_plugin: Iterable[str] = (),
    ) -> Registry:
        """The registry of this process under these switches and the environment's."""
        from prime_rl.plugins.scan import scan

        return scan(Switches.read(allow=allow, deny=deny, required=required, no_plugin=no_plugin))

    def config_field(self, kind: str) -> str:
        """Where a configuration chooses a plugin of this kind; dotted path."""
        return _kind(kind).config_field

    def choose(self, name: str) -> PluginRecord:
        """The usable plugin called `name` of whatever kind; see `prime_rl.plugins.choice`."""
        from prime_rl.plugins.choice import choose

        return choose(self, name)

    def model_for(self, model_type: str) -> PluginRecord:
        """The model plugin that serves this `model_type`; see `prime_rl.plugins.choice`."""
        from prime_rl.plugins.choice import model_for

        return model_for(self, model_type)

    def recipes(self) -> list[tuple[PluginRecord, str, Path]]:
        """(plugin, recipe name, file) of every recipe that a usable plugin ships."""
        from prime_rl.plugins.recipes import find_recipes

        return [
            (record, name, path)
            for record in self.records
            if record.state in (OK, CONFLICTING)
            for name, path in find_recipes(record).items()
        ]

    def remember_hook(self, record: PluginRecord) -> None:
        """Note a listener that was registered, so that the run's table names it."""
        if record not in self._hooks:
            self._hooks.append(record)

    def check_switches(self) -> list[str]:
        """Warnings for unknown names in any switch, with near matches.

        Raises PluginError when a `required` plugin is missing or cannot be used.
        """
        from prime_rl.plugins import unknown

        for item in self.switches.required:
            named = [record for record in self.records if item_names_record(item, record)]
            if not named:
                raise unknown.required_missing(self, item)
            if not any(record.state == OK for record in named):
                raise unknown.required_not_usable(item, named)
        return [
            unknown.unknown_item(self, switch, item)
            for switch, item in self.switches.items()
            if not any(item_names_record(item, record) for record in self.records)
        ]

    def table(self) -> list[dict[str, str]]:
        """Core and every plugin loaded so far, with distribution and version, to save with a run."""
        core = {
            "kind": "core",
            "name": CORE_DISTRIBUTION,
            "distribution": CORE_DISTRIBUTION,
            "version": __version__,
            "target": "",
        }
        resolved = sorted([*self._loaded, *self._hooks])
        keys = ("kind", "name", "distribution", "version", "target")
        return [core, *({key: getattr(record, key) for key in keys} for record in resolved)]

    def verify_table(self, table: Iterable[Mapping[str, Any]]) -> None:
        """Refuse to work with other plugins than those in `table` (from `table()`).

        Called by every worker before it starts. Raises PluginError that lists each difference.
        """
        from prime_rl.plugins import unknown

        differences: list[str] = []
        for row in table:
            found = self._version_here(row)
            if found != row["version"]:
                differences.append(
                    f"{row['kind']} {row['name']}: the run resolved {row['distribution']} "
                    f"{row['version']}, this process finds {found or 'none'}"
                )
        if differences:
            raise unknown.table_differs(differences)

    def _version_here(self, row: Mapping[str, Any]) -> str:
        """Version of the table row's plugin in this process; "" when it cannot be used."""
        if row["kind"] == "core":
            return __version__
        for record in self.of_kind(row["kind"]):
            same = record.name == row["name"] and record.distribution == row["distribution"]
            if same and record.state in (OK, CONFLICTING):
                return record.version
        return ""


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise PluginError(f"there is no plugin kind {name!r}; kinds: {', '.join(KINDS)}", kind=name)
    return KINDS[name]
