"""What config.json says about a Qwen3 model, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError
from prime_rl.layers.rotary_settings import RotarySettings, read_rotary


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a Qwen3-MoE model."""

    count: int
    per_token: int
    intermediate_size: int
    normalise_weights: bool


@dataclass(frozen=True)
class Qwen3Architecture:
    """Sizes and switches."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float
    rotary: RotarySettings
    attention_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    experts: Experts | None = None
    """None in a dense model."""
    moe_layers: tuple[int, ...] = ()
    """Global numbers of the layers with experts; the others are dense."""

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with an ordinary MLP."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.moe_layers)


def read_architecture(config: dict[str, Any]) -> Qwen3Architecture:
    """Raises ConfigError naming the key that is missing, wrong or not implemented."""
    keys = ConfigJson(config)
    keys.expect("model_type", "qwen3", "qwen3_moe")
    keys.expect("hidden_act", "silu")
    keys.expect("use_sliding_window", False)
    layer_types = keys.sequence("layer_types", default=())
    if set(layer_types) - {"full_attention"}:
        raise ConfigError(
            f"config.json: layer_types: found {sorted(set(layer_types))}, expected only "
            "'full_attention'; other kinds are not implemented"
        )
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    key_value_heads = keys.integer("num_key_value_heads", default=heads)
    if heads % key_value_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads: found {key_value_heads}, expected a divisor of "
            f"num_attention_heads {heads}"
        )
    head_dim = keys.integer("head_dim", default=hidden // heads, minimum=2)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim: found {head_dim}, expected an even number")
    layers = keys.integer("num_hidden_layers")
    is_moe = config.get("model_type") == "qwen3_moe"
    return Qwen3Architecture(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        rotary=read_rotary(keys, head_dim),
        attention_bias=keys.boolean("attention_bias", default=False),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", default=False),
        initializer_range=keys.number("initializer_range", default=0.02),
        experts=_read_experts(keys) if is_moe else None,
        moe_layers=_read_moe_layers(keys, layers) if is_moe else (),
    )


def _read_experts(keys: ConfigJson) -> Experts:
    count = keys.integer("num_experts", "num_local_experts")
    per_token = keys.integer("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(
            f"config.json: num_experts_per_tok: found {per_token}, expected at most {count}"
        )
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        normalise_weights=keys.boolean("norm_topk_prob", default=False),
    )


def _read_moe_layers(keys: ConfigJson, layers: int) -> tuple[int, ...]:
    """A layer has experts unless it is listed as dense or falls between the sparse steps."""
    dense = keys.sequence("mlp_only_layers", default=())
    step = keys.integer("decoder_sparse_step", default=1)
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
