"""Base classes of every configuration model: extras forbidden, honest numbers, open plugin sections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    model_validator,
)


class BaseConfig(BaseModel):
    """A configuration section. Unknown keys fail; defaults are validated; the object is frozen.

    Booleans are refused where a number is expected and NaN or infinity where a finite one is: TOML
    accepts both silently and each has ruined runs elsewhere.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_for_numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key, value in data.items():
            field = cls.model_fields.get(key)
            if field is None or not isinstance(value, bool):
                continue
            accepted = _leaf_types(field.annotation)
            if accepted & {int, float} and bool not in accepted:
                raise ValueError(f"{key}: found the boolean {value}, expected a number")
        return data


def _leaf_types(annotation: Any) -> set[Any]:
    """The plain types a field accepts, through unions and Annotated."""
    arguments = getattr(annotation, "__args__", None)
    origin = getattr(annotation, "__origin__", None)
    if origin in (list, dict, tuple) or arguments is None:
        return {annotation}
    found: set[Any] = set()
    for argument in arguments:
        found |= _leaf_types(argument)
    return found


class PluginConfig(BaseConfig):
    """Base of the `Config` class a plugin brings. `type` is the plugin's name."""

    type: str
    """Name of the plugin, as `prime plugins list` prints it (or `distribution:name`)."""


ConfigLookup = Callable[[str, str], type[PluginConfig]]
"""(kind, name) -> the plugin's Config class; raises PluginError when it cannot be had."""


@dataclass(frozen=True)
class ValidationContext:
    """Passed as pydantic validation context so that open sections can find their plugin."""

    config_class: ConfigLookup


@dataclass(frozen=True)
class PluginKind:
    """Marks a field as an open plugin section of the given kind; default is the name used when
    `type` is omitted."""

    kind: str
    default: str


def _resolve_section(kind: str, default: str) -> Callable[[Any, ValidationInfo], Any]:
    def resolve(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, PluginConfig):
            return value
        if value is None:
            value = {}
        if isinstance(value, str):
            value = {"type": value}
        if not isinstance(value, dict):
            raise ValueError(f"expected a table with a `type`, found {type(value).__name__}")
        name = value.get("type", default)
        if not isinstance(name, str):
            raise ValueError(f"type: expected a plugin name, found {name!r}")
        context = info.context
        if not isinstance(context, ValidationContext):
            raise ValueError(
                f"the {kind} section needs the plugin registry; validate through "
                "prime_rl.configs.load"
            )
        config_class = context.config_class(kind, name)
        return config_class.model_validate({**value, "type": name}, context=context)

    return resolve


def plugin_section(kind: str, default: str) -> Any:
    """Type of an open plugin section: validated by the chosen plugin's own `Config`, dumped whole.

    Use as `loss: plugin_section("loss", default="ipo") = defaults()`.
    """
    return Annotated[
        SerializeAsAny[PluginConfig],
        BeforeValidator(_resolve_section(kind, default)),
        PluginKind(kind, default),
    ]


def defaults() -> Any:
    """Default of a nested section: its own defaults, validated like written ones."""
    return Field(default_factory=dict, validate_default=True)


def default_type(name: str) -> BeforeValidator:
    """In a tagged union, a table without `type` is of the variant `name`."""

    def fill(value: Any) -> Any:
        if value is None:
            value = {}
        return {"type": name, **value} if isinstance(value, dict) else value

    return BeforeValidator(fill)
