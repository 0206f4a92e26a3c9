"""Entry of the engine process: one engine of one stage of a resolved run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from prime_rl.api.engine import Engine, EngineSpec
from prime_rl.configs.paths import stage_model_dir, stage_paths
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins import Registry, scan

SERVED_NAME = "policy"
"""Name of a model that the run made itself."""


def run_engine(run: RunConfig, stage: int, index: int, model_dir: Path | None = None) -> None:
    """Serve engine `index` of a stage until told to end. Raises PrimeError.

    `model_dir` replaces the weights that the stage starts from.
    """
    registry = scan()
    registry.verify_table(run.plugin_versions)
    config = run.stages[stage]
    engine_class = registry.load("engine", config.inference.engine.type)
    engine: Engine = engine_class(config.inference.engine)
    engine.serve(engine_spec(run, stage, index, registry, model_dir))


def engine_spec(
    run: RunConfig, stage: int, index: int, registry: Registry, model_dir: Path | None = None
) -> EngineSpec:
    """What the engine process is started with, all of it from the run."""
    config = run.stages[stage]
    inference = config.inference
    if not 0 <= index < inference.replicas:
        raise ConfigError(
            f"--index {index}: inference.replicas is {inference.replicas}, counted from 0"
        )
    directory = (model_dir or stage_model_dir(run, stage)).resolve()
    device = resolve_device(inference.device)
    return EngineSpec(
        model_dir=directory,
        served_name=Path(config.model.name).name if config.model.name else SERVED_NAME,
        host=inference.host,
        port=inference.port + index if inference.port else 0,
        url_file=stage_paths(run, stage).engine_url(index),
        device=device,
        threads=inference.threads,
        max_model_len=inference.max_model_len or config.seq_len,
        compute_dtype=resolve_dtype(config.model.compute_dtype, device),
        index=index,
        count=inference.replicas,
        seed=config.seed,
        return_routed_experts=inference.return_routed_experts is True,
        return_sampling_mask=_filters_candidates(config),
        model_plugin=plugin_name(config.model.plugin, directory, registry),
        model_section=config.model,
        weight_transport=config.weight_broadcast if isinstance(config, RLConfig) else None,
    )


def plugin_name(chosen: str | None, model_dir: Path, registry: Registry) -> str:
    """Qualified name of the model plugin."""
    from prime_rl.models.choose import plugin_name_for, read_config_json

    if chosen is None:
        chosen = plugin_name_for(str(read_config_json(model_dir).get("model_type")), registry)
    return registry.find("model", chosen).qualified_name


def resolve_device(wanted: str) -> Literal["cpu", "cuda"]:
    """`auto` is cuda when there is one. Raises ConfigError for a device that is not there."""
    import torch

    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("inference.device is cuda, but this machine has none; use cpu or auto")
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def resolve_dtype(wanted: str, device: str) -> Literal["float32", "bfloat16"]:
    """`auto` is bfloat16 on an accelerator and float32 on a CPU."""
    if wanted == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return "bfloat16" if wanted == "bfloat16" else "float32"


def _filters_candidates(config: SFTConfig | RLConfig) -> bool:
    """True when training samples with top-p or top-k, so that the trainer needs the candidates."""
    if not isinstance(config, RLConfig):
        return False
    sampling = [source.sampling for source in config.orchestrator.train.source]
    return any(s.top_p < 1 or s.top_k is not None for s in sampling)
