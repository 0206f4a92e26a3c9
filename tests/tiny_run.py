"""A recipe small enough for tests: a few steps of fine-tuning, then a few of RL, real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RECIPE = """
seq_len = 48
seed = {seed}
output_dir = "{output}"

[run]
name = "tiny"

[tokenizer]
renderer = "chatml"

[log]
interval_s = 0.5

[model.fresh]
tokenizer = "letters"

[model.fresh.architecture]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
rope_theta = 10000.0
rms_norm_eps = 1e-6
tie_word_embeddings = true
max_position_embeddings = 64

[[stages]]
type = "sft"
max_steps = {sft_steps}
eval_after = false

[stages.data]
source = "prime_rl_environment_reverse_text:sft_rows"
arguments = {{ count = 256, prompt = "{{word}}", min_length = 2, max_length = 3 }}
batch_size = 32

[stages.trainer.optim]
lr = 3e-3

[stages.ckpt]
interval = 2

[[stages]]
type = "rl"
max_steps = {rl_steps}

[stages.ckpt]
interval = 1

[stages.trainer.optim]
lr = 1e-3

[stages.orchestrator]
batch_size = 16
constant_batch_size = false

[stages.orchestrator.concurrency]
max_inflight = 16

[[stages.orchestrator.train.source]]
name = "reverse"
group_size = 4
env = {{ taskset = {{ id = "prime_rl_environment_reverse_text", prompt = "{{word}}", num_tasks = 500, min_length = 2, max_length = 3 }} }}
sampling = {{ max_completion_tokens = 5 }}

[[stages.orchestrator.eval.source]]
name = "held-out"
env = {{ taskset = {{ id = "prime_rl_environment_reverse_text", prompt = "{{word}}", split = "held_out", num_tasks = 8, min_length = 2, max_length = 3 }} }}
sampling = {{ max_completion_tokens = 5 }}
"""


def write_recipe(folder: Path, *, sft_steps: int = 2, rl_steps: int = 3, seed: int = 0) -> Path:
    """Write the recipe; its runs go to `folder`/outputs."""
    path = folder / "tiny.toml"
    text = RECIPE.format(
        seed=seed, output=folder / "outputs", sft_steps=sft_steps, rl_steps=rl_steps
    )
    path.write_text(text)
    return path


def prime(*arguments: str | Path, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run `prime` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "prime_rl.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
    )


def start_prime(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start `prime` and return at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "prime_rl.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
    )
