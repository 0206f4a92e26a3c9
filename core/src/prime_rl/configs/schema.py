"""JSON schema of a run, with the settings of every installed plugin in the open sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from prime_rl.configs.base import PLUGIN_KIND_MARK
from prime_rl.configs.registry import PluginRegistry
from prime_rl.configs.run import RunConfig
from prime_rl.errors import PluginError


def run_schema(registry: PluginRegistry) -> dict[str, Any]:
    """JSON schema (2020-12) of a resolved run.

    Every usable plugin is imported; one that fails is left out and named under `x-problems`.
    """
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(mode="validation"),
    }
    builder = _Builder(schema, registry)
    builder.fill()
    if builder.problems:
        schema["x-problems"] = builder.problems
    return schema


class _Builder:
    def __init__(self, schema: dict[str, Any], registry: PluginRegistry) -> None:
        self.problems: list[str] = []
        self._schema = schema
        self._registry = registry
        self._definitions: dict[str, Any] = schema.setdefault("$defs", {})
        self._of_kind: dict[str, list[dict[str, Any]]] = {}

    def fill(self) -> None:
        """Replace every mark by the plugins of its kind; give `model.options` the models' fields."""
        for definition in list(self._definitions.values()):
            self._replace(definition)
        models = self._plugins_of("model")
        options = self._definitions.get("ModelConfig", {}).get("properties", {}).get("options")
        if options is not None and models:
            options["anyOf"] = [self._optional_type(one) for one in models] + [{"type": "object"}]

    def _replace(self, node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                self._replace(one)
        if not isinstance(node, dict):
            return
        kind = node.pop(PLUGIN_KIND_MARK, None)
        if kind is not None:
            default = node.pop("default_type")
            plugins = self._plugins_of(kind)
            names = self._registry.names(kind)
            node["anyOf"] = [*plugins, {"type": "string", "enum": names}] if plugins else [{}]
            node["default"] = {"type": default}
            return
        for value in node.values():
            self._replace(value)

    def _plugins_of(self, kind: str) -> list[dict[str, Any]]:
        """References to the Config of every usable plugin of the kind."""
        if kind not in self._of_kind:
            names = self._registry.names(kind)
            found = [self._reference(kind, name) for name in names]
            self._of_kind[kind] = [one for one in found if one is not None]
        return self._of_kind[kind]

    def _reference(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            config: type[BaseModel] = self._registry.config_class(kind, name)
        except PluginError as error:
            self.problems.append(str(error))
            return None
        key = f"{kind}.{name}"
        template = f"#/$defs/{key}.{{model}}"
        schema = config.model_json_schema(mode="validation", ref_template=template)
        for inner, definition in schema.pop("$defs", {}).items():
            self._definitions[f"{key}.{inner}"] = definition
        self._definitions[key] = schema
        self._replace(schema)
        return {"$ref": f"#/$defs/{key}"}

    def _optional_type(self, reference: dict[str, Any]) -> dict[str, Any]:
        """A model plugin's Config as `model.options` holds it: without `type`."""
        schema = self._definitions[reference["$ref"].removeprefix("#/$defs/")]
        properties = {k: v for k, v in schema.get("properties", {}).items() if k != "type"}
        required = [name for name in schema.get("required", []) if name != "type"]
        return {**schema, "properties": properties, "required": required}
