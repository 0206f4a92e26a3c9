"""Compiled blocks of every family have the gradients of plain ones."""

import ast
from pathlib import Path

import pytest
import torch
from compiled_families import differences, trained_rows
from ranks_of_families import architectures
from trainer_world import make_run

from prime_rl.configs.paths import RunPaths
from prime_rl.trainer.setup import leave_kernels_alone

ROOT = Path(__file__).resolve().parents[1]
DEBUG = [(name, each) for name, each in architectures() if name.endswith(":debug")]


def compile_blocks(module, kernels):
    """Traced as for the trainer, run without a compiler: what tracing loses shows the same."""
    leave_kernels_alone(kernels)
    for block in module.layers:
        block.forward = torch.compile(block.forward, backend="eager")


@pytest.mark.parametrize(("name", "architecture"), DEBUG, ids=[name for name, _ in DEBUG])
def test_gradients_survive_tracing(name, architecture, tmp_path):
    if name == "deepseek_v4:debug":
        architecture = {**architecture, "hc_sinkhorn_iters": 2}  # most of its tracing
    model = {"fresh": {"architecture": architecture, "tokenizer": "letters"}}
    run = make_run(tmp_path, "sft", max_steps=1, model=model)
    (found,), (expected,) = (
        trained_rows(
            run, RunPaths(run.directory).fresh_model, "cpu", torch.float32, [[100, 21]], how
        )
        for how in (compile_blocks, None)
    )
    logprobs, gradient, parameter = differences(found, expected)
    assert logprobs < 1e-6
    assert gradient < 1e-4, parameter


def risky_returns(source: str) -> list[str]:
    """Classes whose `forward` returns what torch 2.11 would lose the gradients of: a tensor that
    was changed in place, or a conversion that may return its own input."""
    found = []
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef):
            continue
        if not any(ast.unparse(base).endswith("autograd.Function") for base in kind.bases):
            continue
        (forward,) = (
            each
            for each in kind.body
            if isinstance(each, ast.FunctionDef) and each.name == "forward"
        )
        for node in ast.walk(forward):
            if not isinstance(node, ast.Return) or not isinstance(node.value, ast.Call):
                continue
            call = ast.unparse(node.value.func).rpartition(".")[2]
            copies = any(keyword.arg == "copy" for keyword in node.value.keywords)
            if call.endswith("_") or (call in ("to", "float", "contiguous") and not copies):
                found.append(kind.name)
    return found


def test_functions_return_tensors_of_their_own():
    """torch 2.11 loses gradients otherwise, and values still agree (pytorch issue 180642)."""
    sources = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("*_plugins/*/src/**/*.py")]
    texts = [path.read_text() for path in sources]
    assert sum("autograd.Function)" in text for text in texts) > 5
    assert [name for text in texts for name in risky_returns(text)] == []


@pytest.mark.parametrize("ending", ["x.mul_(2)", "x.to(x.dtype)", "x.contiguous()"])
def test_the_check_of_functions_can_fail(ending):
    source = "class Twice(autograd.Function):\n    def forward(ctx, x):\n        return " + ending
    assert risky_returns(source) == ["Twice"]
