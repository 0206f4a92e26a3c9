"""A world around the trainer for tests: tiny models, resolved runs, an orchestrator that only hands
out given batches and takes every version."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.batches.opening import open_batch_server
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.paths import RunPaths, StagePaths, stage_paths
from prime_rl.configs.run import RunConfig
from prime_rl.configs.saved import save_resolved
from prime_rl.control.broadcasts import BroadcastReceiver
from prime_rl.plugins import scan
from prime_rl.traces.metrics import read_metrics
from prime_rl.wire import BatchHeader, MicroBatch, RankBatch

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SFT_DATA = {
    "source": "prime_rl_environment_reverse_text:sft_rows",
    "arguments": {"count": 37, "min_length": 2, "max_length": 5},
    "batch_size": 12,
}
ORCHESTRATOR = {"train": {"source": [{"env": {"taskset": {"id": "x"}}}]}}


def make_run(
    folder: Path, stage_type: str, architecture: dict[str, Any] | None = None, **stage: Any
) -> RunConfig:
    """A resolved run of one stage below `folder`, its fresh model made when it is not there."""
    values = {
        "type": stage_type,
        "model": {
            "fresh": {
                "architecture": {**ARCHITECTURE, **(architecture or {})},
                "tokenizer": "letters",
            },
            **stage.pop("model", {}),
        },
        "tokenizer": {"renderer": "chatml"},
        "seq_len": 64,
        **stage,
    }
    values.setdefault("data" if stage_type == "sft" else "orchestrator", {})
    if stage_type == "sft":
        values["data"] = {**SFT_DATA, **values["data"]}
    else:
        values["orchestrator"] = {**ORCHESTRATOR, **values["orchestrator"]}
    registry = scan()
    run = RunConfig.model_validate(
        {"run": {"name": "run"}, "output_dir": str(folder), "stages": [values]},
        context=ValidationContext(registry.config_class),
    )
    directory = RunPaths(run.directory).fresh_model
    if not directory.exists():
        from prime_rl.models.fresh import make_fresh_model

        model = run.stages[0].model
        make_fresh_model(model.fresh, model, directory, registry)
    return run


def changed(run: RunConfig, **stage: Any) -> RunConfig:
    """The same run with other values in its stage."""
    registry = scan()
    values = run.model_dump()
    values["stages"][0] |= stage
    return RunConfig.model_validate(values, context=ValidationContext(registry.config_class))


def metrics_of(run: RunConfig) -> list[dict[str, Any]]:
    """What the trainer logged."""
    return read_metrics(stage_paths(run, 0).metrics / "trainer.jsonl")


def start_trainer(run: RunConfig, ranks: int = 1) -> subprocess.Popen[str]:
    """Start `prime trainer` on a resolved run, under torchrun when there are several ranks."""
    config = RunPaths(run.directory).resolved(1)
    save_resolved(run, config)
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "prime_rl.cli.main", "trainer", "--config", str(config)]
    return subprocess.Popen(
        [sys.executable, *command, "--stage", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_trainer_process(run: RunConfig, ranks: int = 1, timeout_s: float = 120.0) -> str:
    """Run `prime trainer` to its end and return its log; fails when it fails."""
    process = start_trainer(run, ranks)
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def train(run: RunConfig, ranks: int) -> None:
    """Run the stage's trainer: in this process when it has one rank."""
    if ranks > 1:
        run_trainer_process(run, ranks)
        return
    from prime_rl.trainer.main import run_trainer

    run_trainer(run, 0)


def random_micro_batch(
    seed: int, vocabulary: int, lengths: list[int], trained: bool = True, **changes: Any
) -> MicroBatch:
    """A row of random documents, the second half of each sampled; without training it is padding."""
    chance = np.random.default_rng(seed)
    count = sum(lengths)
    mask = np.concatenate([np.arange(length) >= (length + 1) // 2 for length in lengths])
    values: dict[str, Any] = {
        "input_ids": chance.integers(0, vocabulary, count).astype("<i4").tobytes(),
        "loss_mask": (mask & trained).astype("u1").tobytes(),
        "inference_logprobs": (-1 - 3 * chance.random(count)).astype("<f4").tobytes(),
        "temperatures": np.full(count, 0.8, "<f4").tobytes(),
        "lengths": lengths,
        "env_names": ["words"],
        "document_envs": [0] * len(lengths),
        "trace_ids": [f"trace-{seed}-{index}" for index in range(len(lengths))],
        "branch_indices": [0] * len(lengths),
        "padding_tokens": 0 if trained else lengths[-1],
        "advantages": chance.standard_normal(count).astype("<f4").tobytes(),
    }
    return MicroBatch(**{**values, **changes})


class ScriptedOrchestrator:
    """Sends the same rows of every step, dealt over the ranks, and acknowledges every version."""

    def __init__(self, run: RunConfig, rows: dict[int, list[MicroBatch]], ranks: int = 1) -> None:
        self.paths: StagePaths = stage_paths(run, 0)
        self.rows = rows
        self.ranks = ranks
        self.versions: list[int] = []
        """Versions taken, in order."""
        self._server = open_batch_server(
            run.stages[0].orchestrator.batch_transport, self.paths, ranks
        )
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._send, self._take)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        for step, rows in sorted(self.rows.items()):
            grid = [
                RankBatch(BatchHeader(step, step - 1), rows[rank :: self.ranks])
                for rank in range(self.ranks)
            ]
            sending = self._server.send(step, grid)
            asyncio.run(self._until_closed(sending))

    async def _until_closed(self, sending: Any) -> None:
        task = asyncio.ensure_future(sending)
        while not task.done() and not self._is_closed.is_set():
            await asyncio.wait([task], timeout=0.05)
        task.cancel()

    def _take(self) -> None:
        receiver = BroadcastReceiver(self.paths.broadcasts, 60)
        taken = -1
        while not self._is_closed.is_set():
            version = receiver.newest_offer(after=taken)
            if version is None:
                time.sleep(0.01)
                continue
            receiver.acknowledge(version)
            receiver.wait_finished(version)
            self.versions.append(version)
            taken = version

    def close(self) -> None:
        """Stop both threads."""
        time.sleep(0.05)
        self._is_closed.set()
        for thread in self._threads:
            thread.join(10)
        self._server.close()
