"""Mismatch KL of truncated sampling, temperature 0.7, top-p 0.9, top-k 50, with and without replay.

The quickstart's model, with the tokenizer of all bytes, is fine-tuned and then plays the episodes of one
RL step with every process real. With replay: what the trainer reports, which renormalises over the kept
candidates that the engine recorded. Without: r - 1 - log r, with r the same weights' full softmax over the
probability the engine reported. Wanted: at most 1e-9 in float32; without: reported.

Run: python tests/benchmarks/bench_replay.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from learning import fine_tuned, metrics, one_stage, run_once
from torch import Tensor

from prime_rl.api.batch import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_weights
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan

WANTED = 1e-9
TEMPERATURE = 0.7
SOURCE = "--orchestrator.train.source.0"


def main() -> int:
    """0 when replay is as exact as wanted."""
    with tempfile.TemporaryDirectory() as folder:
        start = fine_tuned(Path(folder), "quickstart", 0, None, "--model.fresh.tokenizer", "bytes")
        run = Path(folder) / "truncated"
        settings = ["--model.name", str(start), "--max-steps", "1"]
        settings += ["--orchestrator.eval", "None", "--trainer.schedule.warmup-steps", "0"]
        settings += [f"{SOURCE}.sampling.temperature", str(TEMPERATURE)]
        settings += [f"{SOURCE}.sampling.top-p", "0.9", f"{SOURCE}.sampling.top-k", "50"]
        run_once(one_stage(Path(folder), "quickstart", "rl"), run, settings)
        replayed = metrics(run, "trainer")[0]["mismatch_kl/all"]
        without, tokens, vocabulary = full_softmax_mismatch(run, start)
    print(f"{tokens} tokens, vocabulary of {vocabulary}; mismatch KL with replay {replayed:.1e}")
    print(f"without replay: mean {without.mean():.3g}, largest {without.max():.3g}")
    return 0 if 0 <= replayed <= WANTED else 1


def full_softmax_mismatch(run: Path, model_dir: Path) -> tuple[Tensor, int, int]:
    """(mismatch KL per sampled token, their number, size of the vocabulary) without kept sets."""
    registry = scan()
    context = ValidationContext(registry.config_class)
    model = ModelConfig.model_validate({"name": str(model_dir)}, context=context)
    setup = prepare(model, model_dir, registry)
    module = build(setup)
    load_weights(module, setup.layout, model_dir, "cpu")
    head = head_weight(module).float()
    stream = run / "monitors" / "file" / "traces" / "stream.jsonl"
    found = []
    for line in stream.read_text().splitlines():
        asked, said = json.loads(line)["traces"][0]["nodes"]
        ids = [*asked["token_ids"], *said["token_ids"]]
        with torch.no_grad():
            hidden = setup.plugin.forward(module, PackedBatch.from_documents([ids]))
        scores = (hidden.float() @ head.T / TEMPERATURE).log_softmax(-1)
        first = len(ids) - len(said["logprobs"])
        own = scores[range(first - 1, len(ids) - 1), ids[first:]].double()
        log_ratio = own - torch.tensor(said["logprobs"], dtype=torch.float64)
        found.append(log_ratio.expm1() - log_ratio)
    mismatch = torch.cat(found)
    return mismatch, mismatch.numel(), head.shape[0]


if __name__ == "__main__":
    sys.exit(main())
