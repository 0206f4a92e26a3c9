"""Where things lie in a packed row: local windows, compressed entries, what each token may see.

T tokens, W local keys, C compressed entries of one ratio (all documents, in order), M tokens per
entry, K documents. Windows of entries start at their document's first token, so an entry never
holds tokens of two documents; a document's last, unfinished window has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.api.batch import PackedBatch
from prime_rl.layers.rotary import PairRotation, Rotary
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture


@dataclass(frozen=True)
class Entries:
    """The compressed entries of one ratio."""

    tokens_CM: Tensor
    """int64, the tokens of each entry's window."""
    is_first_C: Tensor
    """bool, the window is its document's first."""
    first_T: Tensor
    """int64, first entry of each token's document."""
    last_T: Tensor
    """int64, end of the entries that each token sees: those whose window it has passed."""
    most: int
    """Entries of the longest document."""
    rotation: PairRotation
    """At the position of each window's first token, float32."""
    all_rows_TN: Tensor
    """int64, local keys and all visible entries in the keys of a layer, which are local rows first
    and entries after them; -1 for none."""


@dataclass(frozen=True)
class Places:
    """What the layers of one forward share.

    Not a tuple, so that nothing that converts the tensors of a layer's inputs rounds the angles.
    """

    input_ids: Tensor
    """int64 [T]"""
    window_rows_TW: Tensor
    """int64, the tokens that each token sees locally; -1 for none."""
    main_rotation: PairRotation
    """Angles of sliding layers, float32."""
    compress_rotation: PairRotation
    """Angles of CSA and HCA layers, float32."""
    entries: dict[int, Entries]
    """By ratio."""


def make_places(
    batch: PackedBatch, architecture: DeepseekV4Architecture, main: Rotary, compress: Rotary
) -> Places:
    """No size is read from a device: all follow from `batch.lengths`."""
    window_TW = _window_rows(batch, architecture.window)
    return Places(
        input_ids=batch.input_ids,
        window_rows_TW=window_TW,
        main_rotation=main.pairs(batch.positions, torch.float32),
        compress_rotation=compress.pairs(batch.positions, torch.float32),
        entries={
            ratio: _entries(batch, ratio, window_TW, compress) for ratio in architecture.ratios
        },
    )


def _window_rows(batch: PackedBatch, window: int) -> Tensor:
    tokens = batch.positions.shape[0]
    width = min(window, batch.max_length)
    back_W = torch.arange(width, device=batch.positions.device)
    rows_TW = torch.arange(tokens, device=batch.positions.device)[:, None] - back_W
    return rows_TW.masked_fill(back_W > batch.positions[:, None], -1)


def _entries(batch: PackedBatch, ratio: int, window_TW: Tensor, compress: Rotary) -> Entries:
    device = batch.positions.device
    tokens = batch.positions.shape[0]
    starts_K = batch.cu_seqlens[:-1].long()
    sizes_K = batch.cu_seqlens[1:].long() - starts_K
    counts_K = sizes_K // ratio
    base_K = counts_K.cumsum(0) - counts_K
    documents_K = torch.arange(len(batch.lengths), device=device)
    total = sum(length // ratio for length in batch.lengths)
    of_entry_C = documents_K.repeat_interleave(counts_K, output_size=total)
    of_token_T = documents_K.repeat_interleave(sizes_K, output_size=tokens)
    number_C = torch.arange(total, device=device) - base_K[of_entry_C]
    window_start_C = starts_K[of_entry_C] + number_C * ratio
    first_T = base_K[of_token_T]
    last_T = first_T + (batch.positions + 1) // ratio
    most = batch.max_length // ratio
    candidate_TN = first_T[:, None] + torch.arange(most, device=device)
    seen_TN = torch.where(candidate_TN < last_T[:, None], candidate_TN + tokens, -1)
    return Entries(
        tokens_CM=window_start_C[:, None] + torch.arange(ratio, device=device),
        is_first_C=number_C == 0,
        first_T=first_T,
        last_T=last_T,
        most=most,
        rotation=compress.pairs(number_C * ratio, torch.float32),
        all_rows_TN=torch.cat((window_TW, seen_TN), dim=1),
    )
