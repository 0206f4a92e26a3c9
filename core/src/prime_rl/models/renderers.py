"""From the renderer's name in the config to what the `renderers` library takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError

CHATML = "chatml"
"""Name of core's own renderer."""

_CHATML_CLASS = "prime_rl.models.chatml.ChatMLRenderer"


def renderer_settings(name: str) -> dict[str, str]:
    """Settings that verifiers' train client and `renderers` accept, as plain data.

    `chatml` is core's plain renderer; `module.Class` is anybody's; any other name is one of the
    library's own, and `auto` lets it choose by the tokenizer's directory.
    """
    if name == CHATML:
        return {"name": "custom", "import_path": _CHATML_CLASS}
    is_import_path = "." in name and all(part.isidentifier() for part in name.split("."))
    if is_import_path:  # the library's own names may hold a version: a-5.1
        return {"name": "custom", "import_path": name}
    return {"name": name}


def load_renderer(directory: Path, name: str) -> Any:
    """A `renderers.Renderer` over the tokenizer saved in `directory`.

    Raises ConfigError for a name that the library does not know, a directory whose tokenizer
    cannot be read, and a renderer that needs tokens which the tokenizer lacks.
    """
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig
    from renderers.base import create_renderer, load_tokenizer

    try:
        config = TypeAdapter(RendererConfig).validate_python(renderer_settings(name))
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(
            f"tokenizer.renderer {name!r}: {reason}; expected 'chatml', 'auto', "
            "a renderer of the `renderers` library or `module.Class`"
        ) from error
    try:
        tokenizer = load_tokenizer(str(directory))
    except Exception as error:  # the libraries below raise anything for a damaged file
        raise ConfigError(
            f"no tokenizer can be read from {directory}: {type(error).__name__}: {error}. Expected "
            "tokenizer.json and tokenizer_config.json; copy them there or set tokenizer.name"
        ) from error
    try:
        return create_renderer(tokenizer, config)
    except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        raise ConfigError(
            f"tokenizer.renderer {name!r} does not fit the tokenizer in {directory}: {error}"
        ) from error
