"""Layers that treat every token alone: the dense one and the mixture of experts.

T tokens, H hidden size, I intermediate size, k experts per token.
"""

from __future__ import annotations

from torch import Tensor, nn

from prime_rl.api.backends import ExpertActivation, MoEBackend
from prime_rl.layers.moe import MoEBlock, RouterSettings
from prime_rl.layers.moe_torch import activate
from prime_rl_model_nemotron_h.architecture import ExpertSettings

SQUARED_RELU = ExpertActivation("squared_relu")


class SquaredReluMLP(nn.Module):
    """down( relu(up(x))^2 )."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        result: Tensor = self.down(activate(self.up(x_TH), SQUARED_RELU))
        return result


class ExpertLayer(MoEBlock):
    """Sigmoid routing with a selection bias, squared-relu experts, a shared expert.

    With a latent size, tokens are projected once before the experts and once after their sum;
    router and shared expert see the full width.
    """

    def __init__(
        self, hidden: int, settings: ExpertSettings, layer: int, backend: MoEBackend
    ) -> None:
        router = RouterSettings(
            experts=settings.count,
            per_token=settings.per_token,
            scoring="sigmoid",
            normalise=settings.normalise,
            scale=settings.scale,
            has_selection_bias=True,
            groups=settings.groups,
            top_groups=settings.top_groups,
        )
        super().__init__(
            hidden,
            settings.intermediate_size,
            router,
            layer,
            backend,
            activation=SQUARED_RELU,
            shared=SquaredReluMLP(hidden, settings.shared_intermediate_size),
            expert_hidden=settings.latent_size,
        )
        self.router.float()
        latent = settings.latent_size
        self.compress = None if latent is None else nn.Linear(hidden, latent, bias=False)
        self.expand = None if latent is None else nn.Linear(latent, hidden, bias=False)

    def mix(self, x_TH: Tensor, indices_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        if self.compress is None or self.expand is None:
            return super().mix(x_TH, indices_Tk, weights_Tk)
        result: Tensor = self.expand(super().mix(self.compress(x_TH), indices_Tk, weights_Tk))
        return result
