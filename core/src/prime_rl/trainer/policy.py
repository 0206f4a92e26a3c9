"""The trained policy: model and head as one module, from packed rows to log-probabilities.

Head and blocks are inside one forward so that sharding sees all of them; a tied embedding stays in
the root.
"""

from __future__ import annotations

from torch import Tensor, nn

from prime_rl.api import Model
from prime_rl.models.head import head_weight
from prime_rl.trainer.batch import Row
from prime_rl.trainer.logprobs import token_logprobs


class Policy(nn.Module):
    """Scores the tokens of a row that count."""

    def __init__(
        self, plugin: Model, model: nn.Module, chunk_tokens: int, with_entropy: bool
    ) -> None:
        super().__init__()
        self.plugin = plugin
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.with_entropy = with_entropy

    def forward(self, row: Row) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies), float32 [N], of the row's scored tokens.

        Both are attached to every parameter of the model, also when N is 0.
        """
        hidden_TH = self.plugin.forward(self.model, row.packed)
        return token_logprobs(
            hidden_TH.index_select(0, row.sources),
            head_weight(self.model),
            row.targets,
            row.temperatures,
            row.kept,
            self.chunk_tokens,
            self.with_entropy,
        )
