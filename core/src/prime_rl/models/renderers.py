"""From the renderer's name in the config to what the `renderers` library takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    if "." in name:
        return {"name": "custom", "import_path": name}
    return {"name": name}


def load_renderer(directory: Path, name: str) -> Any:
    """A `renderers.Renderer` over the tokenizer saved in `directory`.

    Raises ValueError for a name that the library does not know.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig
    from renderers.base import create_renderer, load_tokenizer

    config = TypeAdapter(RendererConfig).validate_python(renderer_settings(name))
    return create_renderer(load_tokenizer(str(directory)), config)
