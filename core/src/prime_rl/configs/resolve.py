"""What follows from a validated run: its name, `auto` values, links between stages."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from prime_rl.configs.model import ModelConfig
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig

Section = TypeVar("Section", bound=BaseModel)
StageType = TypeVar("StageType", bound=RLConfig | SFTConfig)

_UNSAFE = re.compile(r"[^a-z0-9._+-]+")
_WEIGHT_DECAY = {"rl": 0.0, "sft": 0.01}


def resolve(run: RunConfig) -> RunConfig:
    """The run with everything filled in that depends on the configuration alone.

    Idempotent. Values that depend on the machine stay `auto`; see `resolve_devices`.
    """
    stages = [_resolve_stage(stage) for stage in run.stages]
    output_dir = Path(os.path.abspath(run.output_dir))
    resolved = run.model_copy(update={"stages": stages, "output_dir": output_dir})
    if run.run.name is None:
        identity = run.run.model_copy(update={"name": automatic_name(resolved)})
        resolved = resolved.model_copy(update={"run": identity})
    return resolved


def _resolve_stage(stage: StageType) -> StageType:
    is_rl = stage.type == "rl"
    updates: dict[str, Any] = {}
    if stage.trainer.optim.weight_decay == "auto":
        updates["trainer.optim.weight_decay"] = _WEIGHT_DECAY[stage.type]
    if stage.model.moe.freeze_router == "auto":
        updates["model.moe.freeze_router"] = is_rl
    if stage.model.moe.router_dtype == "auto":
        # In SFT it is the compute dtype, which may depend on the machine.
        updates["model.moe.router_dtype"] = "float32" if is_rl else stage.model.compute_dtype
    if stage.inference.return_routed_experts == "auto":
        updates["inference.return_routed_experts"] = is_rl and stage.trainer.enable_router_replay
    if stage.inference.max_model_len is None:
        updates["inference.max_model_len"] = stage.seq_len
    for path, value in updates.items():
        stage = replaced(stage, path, value)
    return stage


def resolve_devices(run: RunConfig, has_cuda: bool) -> RunConfig:
    """The run with the `auto` values filled in that depend on the machine."""
    return run.model_copy(update={"stages": [_on_machine(one, has_cuda) for one in run.stages]})


def _on_machine(stage: StageType, has_cuda: bool) -> StageType:
    automatic = "cuda" if has_cuda else "cpu"
    for path in ("trainer.device", "inference.device"):
        section, _, field = path.partition(".")
        if getattr(getattr(stage, section), field) == "auto":
            stage = replaced(stage, path, automatic)
    if stage.model.compute_dtype == "auto":
        dtype = "float32" if stage.trainer.device == "cpu" else "bfloat16"
        stage = replaced(stage, "model.compute_dtype", dtype)
    if stage.model.moe.router_dtype == "auto":
        stage = replaced(stage, "model.moe.router_dtype", stage.model.compute_dtype)
    return stage


def replaced(section: Section, path: str, value: Any) -> Section:
    """A copy of a section with the field at the dotted path set, without validating again."""
    field, _, rest = path.partition(".")
    if rest:
        value = replaced(getattr(section, field), rest, value)
    return section.model_copy(update={field: value})


def automatic_name(run: RunConfig) -> str:
    """`<sources joined by +>--<model>--<8 hex digits>`, lower case."""
    labels: list[str] = []
    for stage in run.stages:
        if isinstance(stage, RLConfig):
            labels += [source.label for source in stage.orchestrator.train.source]
        else:
            labels.append(Path(stage.data.source.rpartition(":")[0] or stage.data.source).stem)
    sources = "+".join(dict.fromkeys(_safe(label) for label in labels))
    return f"{sources[:80]}--{_safe(model_label(run))[:60]}--{secrets.token_hex(4)}"


def model_label(run: RunConfig) -> str:
    """The model's folder name, or its `model_type`."""
    model = run.stages[0].model
    if model.name is not None:
        return Path(model.name).name
    return model_type(model) or "model"


def model_type(model: ModelConfig) -> str | None:
    """`model_type` of the architecture or of the checkpoint's config.json; None when unknown."""
    if model.fresh is not None:
        found = model.fresh.architecture.get("model_type")
    elif model.name is not None:
        try:
            found = json.loads((Path(model.name) / "config.json").read_bytes()).get("model_type")
        except (OSError, ValueError, AttributeError):
            return None  # the launch checks the directory and says what is missing
    else:
        return None
    return found if isinstance(found, str) else None


def stage_model_type(run: RunConfig, index: int) -> str | None:
    """`model_type` of a stage's model; a stage that goes on from the previous one has its model."""
    for stage in reversed(run.stages[: index + 1]):
        if stage.model.name is not None or stage.model.fresh is not None:
            return model_type(stage.model)
    return None


def _safe(label: str) -> str:
    return _UNSAFE.sub("-", label.lower()).strip("-.") or "x"
