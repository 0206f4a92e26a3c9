"""`prime serve`: one engine, of a run or for a model directory."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.cli.component import start_component

if TYPE_CHECKING:
    from prime_rl.configs.base import PluginConfig
    from prime_rl.plugins import Registry


def command(arguments: list[str]) -> int:
    """Serve until interrupted."""
    # Read when numpy is imported. Its products here are rows times small matrices; threads of its
    # own would make them a hundred times slower on busy cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    options = _parser().parse_args(arguments)

    from prime_rl.errors import ConfigError

    if options.config is not None:
        if options.model is not None:
            raise ConfigError("give a model directory or --config, not both")
        return _serve_stage(options)
    if options.model is None:
        raise ConfigError("give a model directory, or --config with a resolved run")
    return _serve_directory(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prime serve", description="Serve a model with one engine, over vLLM's HTTP interface."
    )
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL_DIR", help="a Hugging Face checkpoint"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback)")
    parser.add_argument("--port", type=int, default=8000, help="0: chosen by the system")
    parser.add_argument("--name", help="name of the model in requests (default: the folder's)")
    parser.add_argument("--engine", default="embedded", help="engine plugin")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    parser.add_argument("--max-model-len", type=int, help="most tokens of prompt and completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weight-transport",
        metavar="NAME",
        help="take weight updates through this transport plugin",
    )
    parser.add_argument("--return-routed-experts", action="store_true")
    parser.add_argument("--return-sampling-mask", action="store_true")
    parser.add_argument(
        "--url-file",
        type=Path,
        metavar="FILE",
        help="write the URL here once requests are answered",
    )
    parser.add_argument(
        "--config", type=Path, metavar="RUN.JSON", help="serve an engine of this resolved run"
    )
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="its stage, from 0")
    parser.add_argument("--index", type=int, default=0, metavar="I", help="its engine, from 0")
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="weights instead of those the stage starts from",
    )
    return parser


def _serve_stage(options: argparse.Namespace) -> int:
    run = start_component(options, f"engine_{options.index}")
    from prime_rl.inference.main import run_engine

    run_engine(run, options.stage, options.index, options.model_dir)
    return 0


def _serve_directory(options: argparse.Namespace) -> int:
    from prime_rl.api.engine import EngineSpec
    from prime_rl.configs.base import ValidationContext
    from prime_rl.configs.model import ModelConfig
    from prime_rl.control.logs import setup_logging
    from prime_rl.inference.main import plugin_name, resolve_device, resolve_dtype
    from prime_rl.models.choose import read_config_json
    from prime_rl.plugins import scan

    setup_logging("engine", "info")
    registry = scan()
    directory = options.model.resolve()
    config = read_config_json(directory)
    device = resolve_device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        spec = EngineSpec(
            model_dir=directory,
            served_name=options.name or directory.name,
            host=options.host,
            port=options.port,
            url_file=options.url_file or Path(folder) / "engine.url",
            device=device,
            threads=options.threads or os.cpu_count() or 1,
            max_model_len=options.max_model_len or _context_length(config),
            compute_dtype=resolve_dtype(options.dtype, device),
            index=0,
            count=1,
            seed=options.seed,
            return_routed_experts=options.return_routed_experts,
            return_sampling_mask=options.return_sampling_mask,
            model_plugin=plugin_name(None, directory, registry),
            model_section=ModelConfig.model_validate(
                {"name": str(directory)}, context=ValidationContext(registry.config_class)
            ),
            weight_transport=_section(registry, "weight_transport", options.weight_transport),
        )
        engine_class = registry.load("engine", options.engine)
        engine_class(_section(registry, "engine", options.engine)).serve(spec)
    return 0


def _section(registry: Registry, kind: str, name: str | None) -> PluginConfig | None:
    """A plugin's default settings; None without a name."""
    return None if name is None else registry.config_class(kind, name)(type=name)


def _context_length(config: dict[str, Any], most: int = 8192) -> int:
    """Positions that the model knows, within what a first try should reserve."""
    known = config.get("max_position_embeddings")
    return min(known, most) if isinstance(known, int) and known > 1 else most
