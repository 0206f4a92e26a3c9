"""Runs Triton kernels out of the sources of an unpacked vLLM wheel: on a GPU, or interpreted.

    python tests/vllm_triton.py FOLDER OUTPUT_FOLDER

Records what they make of fixed numbers, for what vLLM has no compiled CPU operators for: GLM-5's
cache, inputs of 8-bit layers. The files in the tests were made on an H200 (torch 2.11, triton 3.6).
Needs triton; on a machine without a GPU set TRITON_INTERPRET=1, which gives the same bytes with
torch's rounding in place of the interpreter's own, which is not to nearest even.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from prime_rl.testing.fixed_numbers import fixed_numbers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, HEADS, INDEX_HEADS = 6, 2, 3
EXPONENTS = torch.tensor([0, -14, -3, 2, 5, -6])
POSITIONS = torch.arange(ROWS) * 7
ROOT = Path(__file__).resolve().parents[1]
STORED = {
    "core": ROOT / "core" / "tests" / "data" / "vllm_activations.safetensors",
    "deepseek_v4": ROOT
    / "model_plugins"
    / "deepseek_v4"
    / "tests"
    / "data"
    / "vllm_gpu.safetensors",
    "glm5": ROOT / "model_plugins" / "glm5" / "tests" / "data" / "vllm_gpu.safetensors",
}
"""Where the recordings of each owner are kept; a run writes OUTPUT_FOLDER/OWNER.safetensors."""


def scaled(*shape: int, seed: int) -> Tensor:
    """bfloat16 numbers whose rows are of very different magnitude."""
    powers = torch.exp2(EXPONENTS.float()).view(-1, *[1] * (len(shape) - 1))
    return (fixed_numbers(*shape, seed=seed) * powers).bfloat16()


def angles(positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines, then sines [P, 64]; theta 8e6."""
    frequencies = 8e6 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    turns = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((turns.cos(), turns.sin()), dim=1).to(dtype)


class Kernels:
    """Kernels of the wheel unpacked in a folder."""

    def __init__(self, folder: Path) -> None:
        import triton
        import triton.language as tl

        if triton.knobs.runtime.interpret:
            _round_as_torch()
        self.vllm = folder / "vllm"
        self.triton, self.tl = triton, tl
        _stand_in("vllm.platforms", current_platform=_Platform)
        _stand_in("vllm.triton_utils", tl=tl, triton=triton)
        _stand_in("vllm.utils.torch_utils", is_quantized_kv_cache=lambda kind: "fp8" in kind)

    def latent_rows(self) -> dict[str, Tensor]:
        """GLM-5's cache rows [T, 656] and indexer rows [T, 132], with a bfloat16 angle table."""
        module = _load(self.vllm / "models" / "deepseek_v32" / "common" / "kernels.py")
        table = angles(36, torch.bfloat16)
        cache = torch.zeros(1, 64, 656, dtype=torch.uint8, device=DEVICE)
        index_cache = torch.zeros(1, 64, 132, dtype=torch.uint8, device=DEVICE)
        module.fused_norm_rope(
            POSITIONS.to(DEVICE),
            fixed_numbers(ROWS, 128, seed=1).bfloat16().to(DEVICE),
            torch.ones(128, dtype=torch.bfloat16, device=DEVICE),
            1e-5,
            scaled(ROWS, 512, seed=2).to(DEVICE),
            (1 + fixed_numbers(512, seed=3) / 8).bfloat16().to(DEVICE),
            1e-5,
            scaled(ROWS, 64, seed=4).to(DEVICE),
            table.to(DEVICE),
            scaled(ROWS, 128, seed=5).to(DEVICE),
            1 + fixed_numbers(128, seed=6).to(DEVICE) / 8,
            fixed_numbers(128, seed=7).to(DEVICE) / 8,
            1e-6,
            table.to(DEVICE),
            torch.zeros(ROWS, 64, dtype=torch.int32, device=DEVICE),
            slot_mapping=torch.arange(ROWS, device=DEVICE),
            indexer_k_cache=index_cache,
            mla_kv_cache=cache,
            mla_kv_cache_dtype="fp8_ds_mla",
            index_rope_interleave=True,
        )
        flat = index_cache.flatten()
        codes = flat[: 64 * 128].view(64, 128)[:ROWS]
        scales = flat[64 * 128 :].view(64, 4)[:ROWS]
        return {
            "angles": table,
            "latent_rows": cache[0, :ROWS],
            "index_rows": torch.cat((codes, scales), dim=1),
        }

    def queries(self) -> dict[str, Tensor]:
        """GLM-5's rotated queries, index codes and head weights."""
        module = _load(self.vllm / "models" / "deepseek_v32" / "common" / "kernels.py")
        table = angles(36, torch.bfloat16).to(DEVICE)
        codes, weights, rotated = module.fused_q(
            POSITIONS.to(DEVICE),
            scaled(ROWS, HEADS, 64, seed=8).to(DEVICE),
            table,
            scaled(ROWS, INDEX_HEADS, 128, seed=9).to(DEVICE),
            table,
            torch.zeros(ROWS, HEADS, 512, dtype=torch.bfloat16, device=DEVICE),
            torch.ones(1, device=DEVICE),
            fixed_numbers(ROWS, INDEX_HEADS, seed=10).bfloat16().to(DEVICE),
            128**-0.5,
            INDEX_HEADS**-0.5,
            index_rope_interleave=True,
            quantize_mqa=False,
        )
        return {"index_codes": codes, "index_weights": weights, "rotated_queries": rotated}

    def activations(self, power_of_two: bool) -> tuple[Tensor, Tensor]:
        """Codes [6, 256] and scales [6, 2] of inputs of a linear layer."""
        path = self.vllm / "model_executor" / "layers" / "quantization" / "utils" / "fp8_utils.py"
        kernel = _extract(path, "_per_token_group_quant_fp8")
        x = scaled(ROWS, 256, seed=11).to(DEVICE)
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
        scales = torch.empty(ROWS, 2, device=DEVICE)
        kernel[(ROWS * 2,)](
            x, codes, scales, 128, 256, 256, 1e-10, -448.0, 448.0, power_of_two, BLOCK=128
        )
        return codes, scales

    def grouped_inputs(self) -> dict[str, Tensor]:
        """DeepSeek V4's attention output [6, 2 heads, 512], turned back and quantised: codes and
        scales [6, 8]; angles are float32."""
        path = self.vllm / "models" / "deepseek_v4" / "common" / "ops"
        kernel = _extract(path / "fused_inv_rope_fp8_quant.py", "kernel")
        table = angles(36, torch.float32).to(DEVICE)
        o = scaled(ROWS, 2, 512, seed=12).to(DEVICE)
        codes = torch.empty(1, ROWS, 1024, dtype=torch.float8_e4m3fn, device=DEVICE)
        scales = torch.empty(1, 8, ROWS, device=DEVICE)
        kernel[(ROWS, 2)](
            o,
            POSITIONS.to(DEVICE),
            table,
            codes,
            scales,
            ROWS,
            2,
            o.stride(0),
            o.stride(1),
            table.stride(0),
            codes.stride(0),
            codes.stride(1),
            scales.stride(0),
            scales.stride(1),
            448.0,
            1e-10,
            QUANT_GROUP_SIZE=128,
            CHUNKS_PER_HEAD=4,
            NOPE_DIM=448,
            HALF_ROPE=32,
            QUANTIZE=True,
            TMA_ALIGNED_SCALES=False,
            launch_pdl=False,
        )
        return {"angles": table, "grouped.codes": codes[0], "grouped.scales": scales[0].T}

    def deepseek_rows(self) -> dict[str, Tensor]:
        """DeepSeek V4's cache rows [6, 584] of keys that are normalised and rotated already."""
        path = self.vllm / "models" / "deepseek_v4" / "common" / "ops" / "cache_utils.py"
        kernel = _extract(path, "quantize_and_insert_k_kernel")
        x = scaled(ROWS, 512, seed=13).to(DEVICE)
        cache = torch.zeros(1, 64 * 584 + 64, dtype=torch.uint8, device=DEVICE)
        slots = torch.arange(ROWS, device=DEVICE)
        kernel[(ROWS,)](
            x,
            slots,
            cache,
            ROWS,
            input_dim=512,
            fp8_dim=448,
            bf16_dim=64,
            scale_dim=8,
            quant_block=64,
            cache_block_size=64,
            token_data_size=576,
            block_stride=cache.stride(0),
            fp8_max=448.0,
            n_quant_blocks=8,
        )
        data = cache[0, : 64 * 576].view(64, 576)[:ROWS]
        scales = cache[0, 64 * 576 : 64 * 584].view(64, 8)[:ROWS]
        return {"rows": torch.cat((data, scales), dim=1)}


def _load(path: Path) -> Any:
    """A source file as a module; what it imports of vLLM stands in already."""
    spec = importlib.util.spec_from_file_location(f"sources_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _extract(path: Path, name: str) -> Any:
    """One kernel of a file, at top level or static in a class, without the rest of the file."""
    text = path.read_text()
    found = [n for n in ast.walk(ast.parse(text)) if getattr(n, "name", "") == name]
    node = found[0]
    assert isinstance(node, ast.FunctionDef)
    jit = next(d for d in node.decorator_list if "jit" in ast.unparse(d))
    lines = text.splitlines()[jit.lineno - 1 : node.end_lineno]
    source = "import triton\nimport triton.language as tl\n\n" + textwrap.dedent("\n".join(lines))
    file = Path(tempfile.mkdtemp()) / f"{name.strip('_')}.py"
    file.write_text(source)
    return getattr(_load(file), name)


def _stand_in(name: str, **members: Any) -> None:
    """A module under this name, and packages above it, in place of vLLM's."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    sys.modules[name].__dict__.update(members)


class _Platform:
    @staticmethod
    def fp8_dtype() -> torch.dtype:
        return torch.float8_e4m3fn

    @staticmethod
    def is_arch_support_pdl() -> bool:
        return False

    @staticmethod
    def is_cuda() -> bool:
        return False


def _round_as_torch() -> None:
    """Replace the interpreter's conversions of float32 to e4m3 and bfloat16."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    targets = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    }

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target not in targets or source != tl.float32:
            return original(data, source, target, rounding)
        dtype, bits, stored = targets[target]
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(dtype)
        return rounded.view(bits).numpy().view(stored)

    interpreter._convert_float = convert


def main(folder: Path, output: Path) -> None:
    kernels = Kernels(folder)
    core: dict[str, Tensor] = {}
    for name, power_of_two in (("exact", False), ("power_of_two", True)):
        core[f"{name}.codes"], core[f"{name}.scales"] = kernels.activations(power_of_two)
    made = {
        "core": core,
        "deepseek_v4": {**kernels.grouped_inputs(), **kernels.deepseek_rows()},
        "glm5": {**kernels.latent_rows(), **kernels.queries()},
    }
    for owner, tensors in made.items():
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, output / f"{owner}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
