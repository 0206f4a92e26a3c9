"""What config.json says about a GLM-5 model, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError
from prime_rl.layers.rotary_settings import RotarySettings, read_rotary
from prime_rl_model_glm5.schedule import read_full_layers


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of the attention."""

    heads: int
    query_rank: int
    """Width of the latent that queries are made from."""
    latent_dim: int
    """Width of the latent that keys and values of all heads are made from."""
    plain_dim: int
    """Part of a head's query and key without positions."""
    rotary_dim: int
    """Part of a head's query and key that is rotated; the key's is shared by all heads."""
    value_dim: int

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return float((self.plain_dim + self.rotary_dim) ** -0.5)


@dataclass(frozen=True)
class Indexing:
    """How keys are selected."""

    heads: int
    head_dim: int
    top_k: int
    """Keys a query attends to, at most."""
    full_layers: tuple[int, ...]
    """Layers with an indexer of their own; the others use the keys of the last such layer."""


@dataclass(frozen=True)
class ExpertSizes:
    """The mixture of experts."""

    count: int
    per_token: int
    intermediate_size: int
    shared_count: int
    """The shared expert is this many times as wide as a routed one."""
    normalise_weights: bool
    scale: float
    groups: int
    top_groups: int


@dataclass(frozen=True)
class Glm5Architecture:
    """Sizes and switches."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    norm_eps: float
    tie_word_embeddings: bool
    initializer_range: float
    attention: LatentAttention
    rotary: RotarySettings
    indexing: Indexing
    experts: ExpertSizes
    moe_layers: tuple[int, ...]
    """Global numbers of the layers with experts; the others are dense."""
    draft_layers: int
    """Layers after the last one that only a speculating server uses."""

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with an ordinary MLP."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.moe_layers)


def read_architecture(config: dict[str, Any]) -> Glm5Architecture:
    """Raises ConfigError naming the key that is missing, wrong or not implemented."""
    keys = ConfigJson(config)
    keys.expect("model_type", "glm_moe_dsa")
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    keys.expect("attention_dropout", 0.0, 0)
    keys.expect("scoring_func", "sigmoid")
    keys.expect("topk_method", "noaux_tc")
    keys.expect("moe_layer_freq", 1)
    keys.expect("indexer_rope_interleave", True)
    layers = keys.integer("num_hidden_layers")
    attention = _read_attention(keys)
    indexing = Indexing(
        heads=keys.integer("index_n_heads"),
        head_dim=keys.integer("index_head_dim", minimum=attention.rotary_dim),
        top_k=keys.integer("index_topk"),
        full_layers=read_full_layers(keys, layers),
    )
    return Glm5Architecture(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", default=False),
        initializer_range=keys.number("initializer_range", default=0.02),
        attention=attention,
        rotary=_read_plain_rotary(keys, attention.rotary_dim),
        indexing=indexing,
        experts=_read_experts(keys),
        moe_layers=_read_moe_layers(keys, layers),
        draft_layers=keys.integer("num_nextn_predict_layers", default=0, minimum=0),
    )


def _read_attention(keys: ConfigJson) -> LatentAttention:
    heads = keys.integer("num_attention_heads")
    keys.expect("num_key_value_heads", heads)
    rotary_dim = keys.integer("qk_rope_head_dim", minimum=2)
    if rotary_dim % 2:
        raise ConfigError(
            f"config.json: qk_rope_head_dim: found {rotary_dim}, expected an even number"
        )
    return LatentAttention(
        heads=heads,
        query_rank=keys.integer("q_lora_rank"),
        latent_dim=keys.integer("kv_lora_rank"),
        plain_dim=keys.integer("qk_nope_head_dim"),
        rotary_dim=rotary_dim,
        value_dim=keys.integer("v_head_dim"),
    )


def _read_plain_rotary(keys: ConfigJson, rotary_dim: int) -> RotarySettings:
    """The releases differ in theta, so it must be stated."""
    table = keys.table("rope_parameters") or keys.table("rope_scaling") or ConfigJson({})
    table.expect("rope_type", "default")
    if table.number("rope_theta", default=None) is None:
        keys.number("rope_theta")
    return read_rotary(keys, rotary_dim)


def _read_experts(keys: ConfigJson) -> ExpertSizes:
    count = keys.integer("n_routed_experts", "num_experts")
    per_token = keys.integer("num_experts_per_tok")
    groups = keys.integer("n_group", default=1)
    top_groups = keys.integer("topk_group", default=1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise ConfigError(
            f"config.json: n_group: found {groups}, expected a divisor of n_routed_experts {count} "
            "with at least two experts in a group"
        )
    if top_groups > groups:
        raise ConfigError(f"config.json: topk_group: found {top_groups}, expected at most {groups}")
    if per_token > count // groups * top_groups:
        raise ConfigError(
            f"config.json: num_experts_per_tok: found {per_token}, expected at most "
            f"{count // groups * top_groups}, the experts of {top_groups} of {groups} groups"
        )
    return ExpertSizes(
        count=count,
        per_token=per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_count=keys.integer("n_shared_experts"),
        normalise_weights=keys.boolean("norm_topk_prob", default=True),
        scale=keys.number("routed_scaling_factor"),
        groups=groups,
        top_groups=top_groups,
    )


def _read_moe_layers(keys: ConfigJson, layers: int) -> tuple[int, ...]:
    types = keys.sequence("mlp_layer_types", default=None)
    if types is None:
        first = keys.integer("first_k_dense_replace", minimum=0)
        return tuple(range(first, layers))
    if len(types) != layers or set(types) - {"dense", "sparse"}:
        raise ConfigError(
            f"config.json: mlp_layer_types: found {len(types)} entries of {sorted(set(types))}, "
            f"expected {layers} of 'dense' and 'sparse'"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
