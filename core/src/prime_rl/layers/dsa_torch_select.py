"""Index scores and top-k as one custom operator: compilers call it, recomputation keeps its result.

Names as in dsa_torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prime_rl.layers.dsa_torch import CHUNK_BYTES


@torch.library.custom_op("prime_rl::dsa_select_torch", mutates_args=())
def select(
    q_TJD: Tensor, k_SD: Tensor, w_TJ: Tensor, first_T: Tensor, last_T: Tensor, top_k: int
) -> Tensor:
    """int64 [T, min(top_k, S)]; -1 fills up."""
    tokens, heads, _ = q_TJD.shape
    keys = k_SD.shape[0]
    width = min(top_k, keys)
    rows_TN = torch.full((tokens, width), -1, dtype=torch.int64, device=q_TJD.device)
    if width == 0 or tokens == 0:
        return rows_TN
    step = max(1, CHUNK_BYTES // (4 * heads * keys))
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        _select_chunk(q_TJD[part], k_SD, w_TJ[part], first_T[part], last_T[part], rows_TN[part])
    return rows_TN


@select.register_fake
def _(
    q_TJD: Tensor, k_SD: Tensor, w_TJ: Tensor, first_T: Tensor, last_T: Tensor, top_k: int
) -> Tensor:
    shape = (q_TJD.shape[0], min(top_k, k_SD.shape[0]))
    return q_TJD.new_empty(shape, dtype=torch.int64)


def _select_chunk(
    q_TJD: Tensor,
    k_SD: Tensor,
    w_TJ: Tensor,
    first_T: Tensor,
    last_T: Tensor,
    out_TN: Tensor,
) -> None:
    """Writes the chosen rows of a chunk; looks only at the rows that some query may see."""
    low, high = int(first_T.min()), int(last_T.max())
    width = min(out_TN.shape[1], high - low)
    if width <= 0:
        return
    # Converted before the product: rounding the scores to bf16 would make most of them equal.
    dots_TJS = torch.einsum("tjd,sd->tjs", q_TJD.float(), k_SD[low:high].float()).relu_()
    scores_TS = torch.einsum("tj,tjs->ts", w_TJ.float(), dots_TJS)
    rows_S = torch.arange(low, high, device=q_TJD.device)
    is_visible = (rows_S >= first_T[:, None]) & (rows_S < last_T[:, None])
    keys_TS = _ordered(scores_TS.masked_fill_(~is_visible, -torch.inf))
    best_TN = keys_TS.topk(width, dim=-1).indices
    out_TN[:, :width] = torch.where(is_visible.gather(1, best_TN), best_TN + low, -1)


def _ordered(scores_TS: Tensor) -> Tensor:
    """Distinct int64 numbers in the order of the scores, the lower row first where they are equal.

    Many blocks score exactly 0 after relu, and topk takes any of equals, depending on what else
    stands in the batch; a document must choose the same rows wherever it is packed.
    """
    bits_TS = (scores_TS + 0.0).view(torch.int32)  # -0 becomes 0
    rank_TS = (bits_TS ^ ((bits_TS >> 31) & 0x7FFFFFFF)).long()
    keys = scores_TS.shape[1]
    return (rank_TS << 32) | torch.arange(keys - 1, -1, -1, device=scores_TS.device)
