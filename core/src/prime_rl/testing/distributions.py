"""Writes installed distributions as plain folders, to try discovery on whatever can be on a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

LOSS_MODULE = '''\
"""A loss with one setting."""

from typing import Literal

from prime_rl.api import Loss, LossInputs, LossOutput, PluginConfig


class {class_name}Config(PluginConfig):
    type: Literal["{name}"] = "{name}"
    strength: float = 1.0
    """Factor of the loss."""


class {class_name}(Loss):
    Config = {class_name}Config

    def compute(self, inputs: LossInputs) -> LossOutput:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).clamp(max=5.0).exp()
        return LossOutput(-self.config.strength * inputs.advantages * ratio)
'''


def write_distribution(
    folder: Path,
    name: str,
    *,
    version: str = "1.0",
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    entry_points_bytes: bytes | None = None,
    modules: Mapping[str, str] | None = None,
    requires: Sequence[str] = ("prime-rl>=0.1,<1",),
    metadata: str | None = None,
    egg: bool = False,
) -> Path:
    """Write `name`'s metadata folder, and its modules, into `folder`; returns the metadata folder.

    `entry_points` is group -> entry name -> target; `entry_points_bytes` replaces the whole file;
    `metadata` replaces the METADATA text; `egg` writes an egg-info folder as old tools do.
    """
    stem = name.replace("-", "_")
    info = folder / (f"{stem}.egg-info" if egg else f"{stem}-{version}.dist-info")
    info.mkdir(parents=True, exist_ok=True)
    if metadata is None:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Summary: What {name} is for"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        metadata = "\n".join(lines) + "\n\n"
    (info / ("PKG-INFO" if egg else "METADATA")).write_text(metadata)
    if entry_points_bytes is None:
        text = "".join(
            f"[{group}]\n" + "".join(f"{entry} = {target}\n" for entry, target in entries.items())
            for group, entries in (entry_points or {}).items()
        )
        entry_points_bytes = text.encode()
    if entry_points_bytes:
        (info / "entry_points.txt").write_bytes(entry_points_bytes)
    for module, source in (modules or {}).items():
        path = folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return info


def write_loss(folder: Path, name: str, *, distribution: str = "", version: str = "1.0") -> str:
    """Write a working loss plugin called `name`; returns its module's name."""
    distribution = distribution or f"acme-{name.replace('_', '-')}"
    module = distribution.replace("-", "_")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    write_distribution(
        folder,
        distribution,
        version=version,
        entry_points={"prime_rl.losses": {name: f"{module}:{class_name}"}},
        modules={module: LOSS_MODULE.format(name=name, class_name=class_name)},
    )
    return module
