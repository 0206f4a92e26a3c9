"""Writes a module's weights under their Hugging Face names: streamed, or as a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.api.layout import WeightLayout
from prime_rl.api.transport import NamedTensor
from prime_rl.errors import CheckpointError
from prime_rl.models.load import runtime_tensors
from prime_rl.models.sharded import is_sharded

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files beside the weights that an export copies from where the tokenizer came from."""
DEFAULT_SHARD_BYTES = 2 * 1024**3


@torch.no_grad()
def iter_checkpoint(
    module: nn.Module, layout: WeightLayout, dtype: torch.dtype | None = None
) -> Iterator[NamedTensor]:
    """Every checkpoint tensor of the module, in the layout's order, `dtype` applied.

    Sharded parameters are gathered one at a time: a collective, so all ranks must exhaust the
    iterator in step. Tensors may be views of live weights: consume or copy each before training on.
    """
    tensors = runtime_tensors(module)
    layout.check_runtime(tensors)
    yield from layout.stream(((name, _full(tensors[name])) for name in layout.entries), dtype)


def _full(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full.detach()


def save_checkpoint(
    directory: Path,
    named: Iterable[tuple[str, Tensor]],
    config_json: dict[str, Any],
    tokenizer_source: Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    write: bool = True,
) -> None:
    """Write a Hugging Face checkpoint: safetensors, config.json, and the tokenizer's files.

    Complete or absent: everything goes to a temporary folder beside it, which is renamed at the
    end; an older checkpoint of that name is replaced. `write=False` only exhausts `named`, for the
    ranks that take part in gathering but do not write.
    """
    if not write:
        for _ in named:
            pass
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _write_shards(temporary, named, shard_bytes)
        text = json.dumps(config_json, indent=2, ensure_ascii=False) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, temporary)
        os.chmod(temporary, 0o755)
        _replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer's files. Raises CheckpointError when there are none."""
    found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise CheckpointError(f"{source} holds no tokenizer; expected tokenizer.json or the like")
    for file in found:
        shutil.copyfile(file, destination / file.name)


def _write_shards(directory: Path, named: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        save_file(pending, _shard_path(directory, len(shards), 0), metadata={"format": "pt"})
        shards.append(list(pending))
        pending, pending_bytes = {}, 0

    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > shard_bytes:
            flush()
        # A copy of its own: views of one storage cannot share a file, and weights may move on.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += size
        total_bytes += size
    flush()
    if len(shards) == 1:
        os.rename(_shard_path(directory, 0, 0), directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        path = _shard_path(directory, index, len(shards))
        os.rename(_shard_path(directory, index, 0), path)
        weight_map.update((name, path.name) for name in names)
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def _shard_path(directory: Path, index: int, count: int) -> Path:
    """Hugging Face's name of a shard; count 0: not known yet."""
    return directory / f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _replace(temporary: Path, directory: Path) -> None:
    """Rename into place; an existing folder steps aside first, so the name is never half full."""
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
        os.rename(directory, old / "replaced")
        os.rename(temporary, directory)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(temporary, directory)
