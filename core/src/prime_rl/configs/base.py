"""Base classes of every configuration model: extras forbidden, honest numbers, open plugin sections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError


class BaseConfig(BaseModel):
    """A configuration section. Unknown keys fail; defaults are validated; the object is frozen.

    Booleans and strings are refused where a number is expected, numbers where a boolean is, 2.0
    where an integer is, and NaN or infinity everywhere: each converts silently otherwise and each
    has ruined runs elsewhere.

    A class that lost a key says in `former` what to write instead: the message of the unknown key
    repeats it.
    """

    former: ClassVar[dict[str, str]] = {}
    """Key that this section does not have (any more) -> what to do: "write `.eps` instead", "remove
    it: ...". A name in backticks begins at this section when a dot stands in front, else at the
    stage. "table.key" is a key of a table that does not exist here."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_other_types(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        refused = {
            key: problem
            for key, value in data.items()
            if key in cls.model_fields
            and (problem := unfit(value, cls.model_fields[key].annotation))
        }
        if not refused:
            return handler(data)
        lines = [_refusal(key, data[key], problem) for key, problem in refused.items()]
        try:
            handler(data)
        except ValidationError as error:
            lines += [_again(line) for line in error.errors() if line["loc"][0] not in refused]
        raise ValidationError.from_exception_data(cls.__name__, lines)


def _refusal(key: str, value: Any, problem: str) -> InitErrorDetails:
    reason = PydanticCustomError("wrong_type", "{problem}", {"problem": problem})
    return InitErrorDetails(type=reason, loc=(key,), input=value)


def _again(line: ErrorDetails) -> InitErrorDetails:
    """A reported error in the form in which it can be raised once more."""
    reason = PydanticCustomError(
        line["type"], "{text}", {"text": line["msg"], **line.get("ctx", {})}
    )
    return InitErrorDetails(type=reason, loc=line["loc"], input=line["input"])


def unfit(value: Any, annotation: Any) -> str:
    """Why a value may not stand where `annotation` is expected although it could be converted.

    "" when it may, or when validation itself will refuse it. Looks into lists and mappings.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return unfit(value, get_args(annotation)[0])
    if origin in (list, tuple, set, frozenset, dict) and get_args(annotation):
        inner = get_args(annotation)[1 if origin is dict else 0]
        items = value.items() if isinstance(value, dict) else enumerate(as_list(value))
        found = ((key, unfit(item, inner)) for key, item in items)
        return next((f"item {key}: {problem}" for key, problem in found if problem), "")
    plain, literals = _accepted(annotation)
    if value in literals or type(value) in plain or plain - {int, float, bool, type(None)}:
        return ""
    for numbers, refused in (
        ({int, float}, (bool, str)),
        ({bool}, (int, float, str)),
        ({int}, (float,)),
    ):
        if plain & numbers and isinstance(value, refused):
            if type(value) is int and float in plain:
                return ""
            return f"found {describe_value(value)}, expected {_names_of(plain, literals)}"
    return ""


def as_list(value: Any) -> list[Any]:
    """The items of a list or tuple; [] for anything else."""
    return list(value) if isinstance(value, (list, tuple)) else []


_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a table",
    list: "a list",
    type(None): "null",
}


def describe_value(value: Any) -> str:
    """`the boolean True`, `the string '1'`, shortened: for messages."""
    name = _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")
    text = repr(value)
    if len(text) > 80:
        text = f"{text[:77]}..."
    if value is None or isinstance(value, (dict, list)):
        return name if value is None else f"{name} {text}"
    return f"the {name.partition(' ')[2]} {text}"


def _names_of(plain: set[Any], literals: tuple[Any, ...]) -> str:
    names = [_TYPE_NAMES[kind] for kind in (bool, int, float, type(None)) if kind in plain]
    return " or ".join([*names, *(repr(literal) for literal in literals)])


def _accepted(annotation: Any) -> tuple[set[Any], tuple[Any, ...]]:
    """(plain types, literal values) that a field accepts, through unions and Annotated."""
    origin = get_origin(annotation)
    if origin is Literal:
        return set(), get_args(annotation)
    if origin is Annotated:
        return _accepted(get_args(annotation)[0])
    if origin not in (Union, UnionType):
        return {origin or annotation}, ()
    plain: set[Any] = set()
    literals: tuple[Any, ...] = ()
    for member in get_args(annotation):
        more_plain, more_literals = _accepted(member)
        plain |= more_plain
        literals += more_literals
    return plain, literals


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

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """A mark that `prime_rl.configs.schema` replaces by the installed plugins' schemas."""
        return {PLUGIN_KIND_MARK: self.kind, "default_type": self.default}


PLUGIN_KIND_MARK = "x-plugin-kind"
"""Key of the mark that an open section leaves in a JSON schema."""


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
        pinned = config_class.model_fields["type"].default
        written = pinned if isinstance(pinned, str) else name  # normalised: a dash is an underscore
        try:
            return config_class.model_validate({**value, "type": written}, context=context)
        except ValidationError:
            raise
        except Exception as error:  # a third party's validator may raise anything
            raise ValueError(
                f"the Config of {kind} {name} raised {type(error).__name__}: {error}"
            ) from error

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


@dataclass(frozen=True)
class FillType:
    """Validator of a tagged union: a table without `type` is of the variant `name`."""

    name: str

    def __call__(self, value: Any) -> Any:
        """The table with its `type`; anything but a table unchanged."""
        if value is None:
            value = {}
        return {"type": self.name, **value} if isinstance(value, dict) else value


def default_type(name: str) -> BeforeValidator:
    """In a tagged union, a table without `type` is of the variant `name`."""
    return BeforeValidator(FillType(name))
