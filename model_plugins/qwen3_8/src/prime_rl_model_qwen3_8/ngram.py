"""N-gram embeddings: the look-up in a large table, and its injection into the residual streams.

T tokens, G heads of D numbers, E = G * D, S streams, H hidden size, W = S * H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.api.batch import PackedBatch
from prime_rl.errors import WeightError
from prime_rl.layers.causal_conv import causal_conv
from prime_rl.layers.row_table import RowTable
from prime_rl_model_qwen3_8.hashing import NgramTable, ngram_contexts, ngram_rows
from prime_rl_model_qwen3_8.streams import StreamNorm


class NgramLookup(nn.Module):
    """What the table holds for the n-grams that end at each token.

    The constants of the hash are part of checkpoints, hence buffers; they follow from config.json,
    and a checkpoint that says otherwise is refused at the first use.
    """

    def __init__(self, table: NgramTable, trainable: bool, on_cpu: bool) -> None:
        super().__init__()
        self.settings = table
        self.table = RowTable(table.rows, table.width // len(table.sizes), trainable, on_cpu)
        for name, values in self._constants().items():
            self.register_buffer(name, torch.empty(len(values), dtype=torch.int64))
        self.is_checked = False

    def forward(self, batch: PackedBatch) -> Tensor:
        """[T, G, D] in the table's dtype. Other ranks may still be answering: use it late."""
        if not self.is_checked:
            self._check()
        rows_TG = self.rows(batch.input_ids, batch.positions)
        found_TGD: Tensor = self.table(rows_TG)
        return found_TGD

    def rows(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """int64 [T, G]"""
        settings = self.settings
        contexts = ngram_contexts(tokens_T, positions_T, settings.order, settings.eos_token)
        constants = (self.get_buffer(name) for name in ("multipliers", "sizes", "offsets"))
        return ngram_rows(contexts, *constants)

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Write the constants that config.json implies."""
        for name, values in self._constants().items():
            self.get_buffer(name).copy_(torch.tensor(values, dtype=torch.int64))

    def _constants(self) -> dict[str, tuple[int, ...]]:
        table = self.settings
        return {
            "multipliers": table.multipliers,
            "sizes": table.sizes,
            "offsets": table.offsets,
        }

    def _check(self) -> None:
        for name, values in self._constants().items():
            found = self.get_buffer(name).tolist()
            if found != list(values):
                raise WeightError(
                    f"n-gram table of layer {self.settings.layer}: the checkpoint's {name} are "
                    f"{found}, but config.json implies {list(values)}"
                )
        self.is_checked = True


class NgramInjection(nn.Module):
    """Adds the looked-up numbers to every stream, gated by how well they fit it.

    `key_value` [W + H, E] fuses the keys of all streams and the value they share.
    """

    def __init__(
        self, hidden: int, streams: int, eps: float, table: NgramTable, kernel: int
    ) -> None:
        super().__init__()
        self.hidden, self.streams, self.dilation = hidden, streams, table.order
        width = streams * hidden
        self.key_value = nn.Linear(table.width, width + hidden, bias=False)
        self.key_norm = StreamNorm(hidden, streams, eps)
        self.query_norm = StreamNorm(hidden, streams, eps)
        self.conv_norm = StreamNorm(hidden, streams, eps)
        self.conv = nn.Parameter(torch.empty(width, kernel))

    def forward(self, x_TW: Tensor, found_TGD: Tensor, positions_T: Tensor) -> Tensor:
        """What is added to the streams, [T, W]."""
        key_value = self.key_value(found_TGD.flatten(1).to(x_TW.dtype))
        key_TW, value_TH = key_value.split((key_value.shape[1] - self.hidden, self.hidden), dim=1)
        keys_TSH, queries_TSH = self.key_norm(key_TW), self.query_norm(x_TW)
        fit_TS = (keys_TSH.float() * queries_TSH.float()).sum(-1) * self.hidden**-0.5
        gates_TS = (fit_TS.sign() * fit_TS.abs().clamp_min(1e-6).sqrt()).sigmoid()
        gated_TW = (gates_TS.to(x_TW.dtype)[..., None] * value_TH[:, None]).flatten(1)
        normed_TW = self.conv_norm(gated_TW).flatten(1)
        local_TW = causal_conv(normed_TW, self.conv, positions_T, dilation=self.dilation)
        return gated_TW + F.silu(local_TW)
