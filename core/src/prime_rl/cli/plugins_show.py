"""`prime plugins show NAME`: where a plugin comes from, its settings, capabilities and recipes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from prime_rl.cli.plugins_list import table
from prime_rl.errors import PluginError
from prime_rl.plugins import KINDS, PluginRecord, Registry, scan
from prime_rl.plugins.recipes import find_recipes
from prime_rl.plugins.records import split_name
from prime_rl.plugins.unknown import near_matches

SCHEMA_VERSION = 1

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Plugin name, or distribution:name.")],
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a plugin: its settings with defaults, capabilities, recipes and origin."""
    registry = scan()
    described = [describe(registry, record) for record in named(registry, name, kind)]
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "plugins": described}, indent=2))
    else:
        typer.echo("\n\n".join(as_text(plugin) for plugin in described))
    if any(plugin["error"] for plugin in described):
        raise typer.Exit(1)


def named(registry: Registry, name: str, kind: str | None) -> list[PluginRecord]:
    """Every record called `name`. Raises PluginError with near matches when there is none."""
    if kind is not None:
        registry.names(kind)  # refuses an unknown kind
    distribution, plain = split_name(name)
    candidates = [r for r in registry.records if kind in (None, r.kind)]
    found = [r for r in candidates if r.name == plain and distribution in ("", r.distribution)]
    if not found:
        matches = near_matches(plain, [record.name for record in candidates])
        hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
        raise PluginError(
            f"no installed plugin is called {name!r}.{hint} prime plugins list shows all.",
            name=name,
        )
    return found


def describe(registry: Registry, record: PluginRecord) -> dict[str, Any]:
    """Everything about one plugin. One that cannot be loaded has the reason under `error`."""
    described: dict[str, Any] = {
        **record._asdict(),
        "config_field": KINDS[record.kind].config_field if record.kind in KINDS else "",
        "recipes": {recipe: str(path) for recipe, path in find_recipes(record).items()},
        "capabilities": {},
        "needs": {},
        "config_schema": {},
        "doc": "",
        "error": "",
    }
    if record.kind not in KINDS:
        return described
    try:
        plugin: Any = registry.load(record.kind, record.qualified_name)
        config = registry.config_class(record.kind, record.name_in_config)
    except PluginError as error:
        described["error"] = str(error)
        return described
    described["capabilities"] = _plain(plugin.capabilities)
    described["needs"] = _plain(plugin.needs)
    described["config_schema"] = config.model_json_schema()
    described["doc"] = (plugin.__doc__ or "").strip()
    return described


def as_text(plugin: dict[str, Any]) -> str:
    """The description for a person."""
    lines = [f"{plugin['kind']} {plugin['name']}: {plugin['doc'] or plugin['summary']}", ""]
    facts = [
        ("distribution", f"{plugin['distribution']} {plugin['version']}"),
        ("target", plugin["target"]),
        ("location", plugin["location"]),
        (
            "accepts core",
            f"prime-rl{plugin['requires_core']}" if plugin["requires_core"] else "any",
        ),
        ("state", f"{plugin['state']} {plugin['reason']}".strip()),
        ("chosen by", plugin["config_field"]),
    ]
    lines += [f"{label:<13} {value}" for label, value in facts if value]
    if plugin["error"]:
        return "\n".join([*lines, "", f"error: {plugin['error']}"])
    for title, values in (("Capabilities", plugin["capabilities"]), ("Needs", plugin["needs"])):
        if values:
            lines += ["", f"{title}:", *(f"  {key} = {value}" for key, value in values.items())]
    lines += ["", "Settings:", *_settings(plugin["config_schema"])]
    if plugin["recipes"]:
        lines += ["", "Recipes:"]
        lines += [f"  {recipe}  {path}" for recipe, path in plugin["recipes"].items()]
    return "\n".join(lines)


def _settings(schema: dict[str, Any]) -> list[str]:
    """The fields of a JSON schema as a table: name, type, default, help."""
    properties = schema.get("properties", {})
    if not properties:
        return ["  none"]
    required = set(schema.get("required", ()))
    rows = [("setting", "type", "default", "what it does")]
    for name, field in properties.items():
        default = "(required)" if name in required else json.dumps(field.get("default"))
        rows.append(
            (name, _type_name(field), default, " ".join(field.get("description", "").split()))
        )
    return [f"  {line}" for line in table(rows)]


def _type_name(field: dict[str, Any]) -> str:
    """A short name for the type of a JSON-schema field."""
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return " | ".join(json.dumps(value) for value in field["enum"])
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type_name(option) for option in field["anyOf"]))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type_name(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _plain(values: Any) -> dict[str, Any]:
    """Capabilities as JSON values."""
    return {str(key): _json_value(value) for key, value in dict(values).items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
