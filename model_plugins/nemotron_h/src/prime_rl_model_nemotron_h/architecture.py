"""What config.json says about a Nemotron-H model, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError
from prime_rl_model_nemotron_h.pattern import LayerKind, read_pattern


@dataclass(frozen=True)
class MambaSettings:
    """A Mamba-2 layer."""

    heads: int
    head_dim: int
    groups: int
    """Heads of a group share B and C; the gated norm works within a group."""
    state: int
    taps: int
    """Length of the causal convolution."""
    conv_bias: bool
    chunk: int
    """Tokens of one chunk of the scan; changes rounding only."""
    step_limit: tuple[float, float]
    """Bounds of the time step."""
    start_steps: tuple[float, float, float]
    """Smallest and largest time step of fresh weights, and their floor."""

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Rows of the input projection: z, the convolution's channels, one time step per head."""
        return self.inner + self.conv_channels + self.heads


@dataclass(frozen=True)
class AttentionSettings:
    """An attention layer."""

    heads: int
    key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture-of-experts layer."""

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    """Width that the routed experts read and write; None: the hidden size."""
    scale: float
    normalise: bool
    groups: int
    top_groups: int


@dataclass(frozen=True)
class NemotronHArchitecture:
    """Sizes and switches; a part is None when no layer is of its kind."""

    vocab_size: int
    hidden_size: int
    kinds: tuple[LayerKind, ...]
    """Kind of every layer, by global number."""
    norm_eps: float
    initializer_range: float
    mamba: MambaSettings | None
    attention: AttentionSettings | None
    experts: ExpertSettings | None
    mlp_size: int | None
    """Intermediate size of the dense layers."""
    tie_word_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        """Length of the pattern."""
        return len(self.kinds)

    def layers(self, kind: LayerKind) -> tuple[int, ...]:
        """Global numbers of the layers of a kind."""
        return tuple(layer for layer, found in enumerate(self.kinds) if found == kind)


def read_architecture(config: dict[str, Any]) -> NemotronHArchitecture:
    """Raises ConfigError naming the key that is missing, wrong or not implemented."""
    keys = ConfigJson(config)
    _refuse_unknown(keys)
    kinds = read_pattern(keys)
    return NemotronHArchitecture(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        kinds=kinds,
        norm_eps=keys.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
        initializer_range=keys.number("initializer_range", default=0.02),
        mamba=_read_mamba(keys) if "mamba" in kinds else None,
        attention=_read_attention(keys) if "attention" in kinds else None,
        experts=_read_experts(keys) if "moe" in kinds else None,
        mlp_size=keys.integer("intermediate_size") if "mlp" in kinds else None,
    )


def _refuse_unknown(keys: ConfigJson) -> None:
    keys.expect("model_type", "nemotron_h")
    keys.expect("mlp_hidden_act", "relu2")
    keys.expect("mamba_hidden_act", "silu")
    keys.expect("sliding_window", None)
    keys.expect("block_configs", None)
    for switch in (
        "tie_word_embeddings",
        "use_bias",
        "mlp_bias",
        "attention_bias",
        "mamba_proj_bias",
        "residual_in_fp32",
    ):
        keys.expect(switch, False)
    for rate in ("attention_dropout", "hidden_dropout"):
        keys.expect(rate, 0)


def _read_mamba(keys: ConfigJson) -> MambaSettings:
    heads = keys.integer("mamba_num_heads")
    groups = keys.integer("n_groups", "mamba_n_groups", default=8)
    _expect_divisor("n_groups", groups, "mamba_num_heads", heads)
    return MambaSettings(
        heads=heads,
        head_dim=keys.integer("mamba_head_dim"),
        groups=groups,
        state=keys.integer("ssm_state_size", default=128),
        taps=keys.integer("conv_kernel", "mamba_d_conv", default=4),
        conv_bias=keys.boolean("use_conv_bias", "mamba_conv_bias", default=True),
        chunk=keys.integer("chunk_size", "mamba_chunk_size", default=128),
        step_limit=_read_step_limit(keys),
        start_steps=(
            keys.number("time_step_min", "mamba_dt_min", default=0.001),
            keys.number("time_step_max", "mamba_dt_max", default=0.1),
            keys.number("time_step_floor", "mamba_dt_init_floor", default=1e-4),
        ),
    )


def _read_step_limit(keys: ConfigJson) -> tuple[float, float]:
    """JSON has no infinity: files write it as a table {"__float__": "Infinity"}."""
    key = "time_step_limit"
    found = keys.sequence(key, "mamba_dt_limit", default=(0.0, math.inf))
    bounds: list[Any] = [
        item.get("__float__") if isinstance(item, dict) else item for item in found
    ]
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 <= low < high:
        raise ConfigError(
            f"config.json: {key}: found {list(found)!r}, expected two numbers, the smaller first"
        )
    return low, high


def _read_attention(keys: ConfigJson) -> AttentionSettings:
    heads = keys.integer("num_attention_heads")
    key_value_heads = keys.integer("num_key_value_heads")
    _expect_divisor("num_key_value_heads", key_value_heads, "num_attention_heads", heads)
    head_dim = keys.integer("head_dim", "attention_head_dim", default=128)
    return AttentionSettings(heads, key_value_heads, head_dim)


def _read_experts(keys: ConfigJson) -> ExpertSettings:
    keys.expect("n_shared_experts", 1)
    count = keys.integer("n_routed_experts", "num_local_experts")
    groups = keys.integer("n_group", default=1)
    top_groups = keys.integer("topk_group", default=1)
    per_token = keys.integer("num_experts_per_tok")
    _expect_divisor("n_group", groups, "n_routed_experts", count)
    if top_groups > groups:
        raise ConfigError(
            f"config.json: topk_group: found {top_groups}, expected at most n_group {groups}"
        )
    reachable = count // groups * top_groups
    if per_token > reachable:
        raise ConfigError(
            f"config.json: num_experts_per_tok: found {per_token}, expected at most {reachable}, "
            "the experts that can be chosen"
        )
    return ExpertSettings(
        count=count,
        per_token=per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_intermediate_size=keys.integer("moe_shared_expert_intermediate_size"),
        latent_size=keys.integer("moe_latent_size", default=None),
        scale=keys.number("routed_scaling_factor", default=1.0),
        normalise=keys.boolean("norm_topk_prob", default=True),
        groups=groups,
        top_groups=top_groups,
    )


def _expect_divisor(key: str, value: int, whole_key: str, whole: int) -> None:
    if whole % value:
        raise ConfigError(
            f"config.json: {key}: found {value}, expected a divisor of {whole_key} {whole}"
        )
