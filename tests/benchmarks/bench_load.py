"""Loading a checkpoint of a few GB: seconds, and peak memory above the weights themselves.

    python tests/benchmarks/bench_load.py [--gigabytes 2] [--limit-gigabytes 2]

Writes a Qwen3 mixture-of-experts checkpoint with random bf16 weights, shaped so that nearly all of
it is experts (one checkpoint tensor each, stacked at run time), loads it in a fresh process and
streams it once more into the loaded module, as an engine does at a weight update.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.models.load import load_named, load_weights
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.models.tensor_files import TensorFiles
from prime_rl.plugins import scan

GIGABYTE = 1024**3
LAYER_BYTES = 2 * 3 * 32 * 768 * 2048
"""32 experts of 2048 x 768 in bf16: 288 MiB a layer."""


def architecture(layers: int) -> dict[str, Any]:
    """config.json."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 1024,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }


def set_up(directory: Path) -> ModelSetup:
    """The model in a directory."""
    registry = scan()
    model = ModelConfig.model_validate({}, context=ValidationContext(registry.config_class))
    return prepare(model, directory, registry)


def write(directory: Path, layers: int) -> None:
    """A checkpoint with random weights, in shards of 1 GiB."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(architecture(layers)))
    setup = set_up(directory)
    module = build(setup, "cpu", torch.bfloat16)
    setup.plugin.initialise(module, torch.Generator().manual_seed(0))
    named = iter_checkpoint(module, setup.layout)
    save_checkpoint(directory, named, setup.config_json, shard_bytes=GIGABYTE)


def peak_bytes() -> int:
    """Most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(directory: Path) -> dict[str, float]:
    """What the fresh process measures."""
    setup = set_up(directory)
    module = build(setup, "meta", torch.bfloat16)
    before = peak_bytes()
    start = time.perf_counter()
    load_weights(module, setup.layout, directory, "cpu")
    load_s = time.perf_counter() - start
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    load_extra = peak_bytes() - before - weights
    start = time.perf_counter()
    load_named(module, setup.layout, TensorFiles(directory).iterate())
    return {
        "weights_gigabytes": weights / GIGABYTE,
        "load_s": load_s,
        "load_extra_gigabytes": load_extra / GIGABYTE,
        "stream_s": time.perf_counter() - start,
        "stream_extra_gigabytes": (peak_bytes() - before - weights) / GIGABYTE,
    }


def measure(gigabytes: float) -> dict[str, float]:
    """Make the checkpoint, load it elsewhere, return the figures."""
    layers = max(1, round(gigabytes * GIGABYTE / LAYER_BYTES))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        for command in ("write", "load"):  # apart: writing needs more memory than loading
            done = subprocess.run(
                [sys.executable, __file__, "--child", command, str(directory), str(layers)],
                check=True,
                capture_output=True,
                text=True,
            )
        figures: dict[str, float] = json.loads(done.stdout)
        return figures


def main() -> int:
    """Print the figures; 1 when loading needs more than the limit above the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--limit-gigabytes", type=float, default=2.0)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        command, directory, layers = options.child
        if command == "write":
            write(Path(directory), int(layers))
        else:
            print(json.dumps(load(Path(directory))))
        return 0
    figures = measure(options.gigabytes)
    for name, value in figures.items():
        print(f"{name:24} {value:8.3f}")
    extra = max(figures["load_extra_gigabytes"], figures["stream_extra_gigabytes"])
    return int(extra > options.limit_gigabytes)


if __name__ == "__main__":
    sys.exit(main())
