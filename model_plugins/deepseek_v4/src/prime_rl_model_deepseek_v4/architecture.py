"""What config.json says about a DeepSeek V4 model, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError
from prime_rl.layers.rotary_settings import RotarySettings, plain_frequencies, read_rotary
from prime_rl_model_deepseek_v4.schedule import HASH_MOE, read_layers, read_mlp_types

LayerKind = Literal["sliding", "csa", "hca"]


@dataclass(frozen=True)
class LayerSchedule:
    """What attention one layer has."""

    kind: LayerKind
    ratio: int
    """Tokens per compressed entry; 0 in a sliding layer."""


@dataclass(frozen=True)
class IndexerSizes:
    """The lightning indexer of the CSA layers."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class ExpertSizes:
    """The mixture of experts, in every layer."""

    count: int
    per_token: int
    intermediate_size: int
    scale: float
    limit: float


@dataclass(frozen=True)
class HyperConnectionSizes:
    """Residual streams and their mixing."""

    streams: int
    sinkhorn_iterations: int
    eps: float


@dataclass(frozen=True)
class DeepseekV4Architecture:
    """Sizes and switches."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    """Numbers per group of heads between the two output projections."""
    window: int
    """Keys of the local attention, the query's own token included."""
    layers: tuple[LayerSchedule, ...]
    hash_layers: tuple[int, ...]
    """Global numbers of the layers whose experts are looked up by token id."""
    indexer: IndexerSizes
    experts: ExpertSizes
    hyper: HyperConnectionSizes
    norm_eps: float
    main_rotary: RotarySettings
    """Rope of the sliding layers."""
    compress_rotary: RotarySettings
    """Rope of everything in CSA and HCA layers."""
    initializer_range: float
    tie_word_embeddings: bool = False

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios in use, each once."""
        return tuple(sorted({layer.ratio for layer in self.layers if layer.ratio}))


def read_architecture(config: dict[str, Any]) -> DeepseekV4Architecture:
    """Reads the original keys (`compress_ratios`, ...) and those of transformers (`layer_types`,
    ...). Raises ConfigError naming the key that is missing, wrong or not implemented."""
    keys = ConfigJson(config)
    _refuse_other_models(keys)
    layers = keys.integer("num_hidden_layers")
    heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", minimum=2)
    groups = keys.integer("o_groups")
    if heads % groups:
        raise ConfigError(
            f"config.json: o_groups: found {groups}, expected a divisor of "
            f"num_attention_heads {heads}"
        )
    rotary_dim = _read_rotary_dim(keys, head_dim)
    return DeepseekV4Architecture(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        query_rank=keys.integer("q_lora_rank"),
        output_groups=groups,
        output_rank=keys.integer("o_lora_rank"),
        window=keys.integer("sliding_window"),
        layers=tuple(LayerSchedule(*layer) for layer in read_layers(keys, layers)),
        hash_layers=tuple(
            number for number, kind in enumerate(read_mlp_types(keys, layers)) if kind == HASH_MOE
        ),
        indexer=_read_indexer(keys, rotary_dim),
        experts=_read_experts(keys),
        hyper=HyperConnectionSizes(
            streams=keys.integer("hc_mult"),
            sinkhorn_iterations=keys.integer("hc_sinkhorn_iters", default=20),
            eps=keys.number("hc_eps", default=1e-6),
        ),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        main_rotary=_read_main_rotary(keys, rotary_dim),
        compress_rotary=_read_compress_rotary(keys, rotary_dim),
        initializer_range=keys.number("initializer_range", default=0.02),
    )


def _refuse_other_models(keys: ConfigJson) -> None:
    """Keys that would ask for something this plugin does not compute."""
    keys.expect("model_type", "deepseek_v4")
    keys.expect("hidden_act", "silu")
    keys.expect("num_key_value_heads", 1)
    keys.expect("n_shared_experts", 1)
    keys.expect("scoring_func", "sqrtsoftplus")
    keys.expect("topk_method", "noaux_tc")
    keys.expect("norm_topk_prob", True)
    keys.expect("n_group", None, 0, 1)
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    keys.expect("attention_dropout", 0)
    keys.expect("router_jitter_noise", 0)
    keys.expect("tie_word_embeddings", False)
    keys.expect("vision_n_layers", None, 0)


def _read_rotary_dim(keys: ConfigJson, head_dim: int) -> int:
    size = keys.integer("qk_rope_head_dim", default=None)
    if size is None:
        factor = keys.number("partial_rotary_factor", default=None)
        if factor is None:
            raise ConfigError("config.json: qk_rope_head_dim is missing")
        size = round(head_dim * factor)
    if size % 2 or not 2 <= size <= head_dim:
        raise ConfigError(
            f"config.json: qk_rope_head_dim: found {size}, expected an even number up to head_dim "
            f"{head_dim}"
        )
    return int(size)


def _read_indexer(keys: ConfigJson, rotary_dim: int) -> IndexerSizes:
    head_dim = keys.integer("index_head_dim")
    if head_dim < rotary_dim:
        raise ConfigError(
            f"config.json: index_head_dim: found {head_dim}, expected at least the rope's "
            f"{rotary_dim}"
        )
    return IndexerSizes(keys.integer("index_n_heads"), head_dim, keys.integer("index_topk"))


def _read_experts(keys: ConfigJson) -> ExpertSizes:
    count = keys.integer("n_routed_experts", "num_local_experts")
    per_token = keys.integer("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(
            f"config.json: num_experts_per_tok: found {per_token}, expected at most {count}"
        )
    return ExpertSizes(
        count=count,
        per_token=per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        scale=keys.number("routed_scaling_factor"),
        limit=keys.number("swiglu_limit"),
    )


def _read_main_rotary(keys: ConfigJson, dim: int) -> RotarySettings:
    theta = keys.number("rope_theta", default=10000.0)
    nested = _nested(keys, "main")
    if nested is not None:
        nested.expect("rope_type", "default")
        theta = nested.number("rope_theta", default=theta)
    return RotarySettings(plain_frequencies(dim, theta))


def _read_compress_rotary(keys: ConfigJson, dim: int) -> RotarySettings:
    """YaRN without its magnitude factor: servers leave it out, so it may not be asked for."""
    theta = keys.number("compress_rope_theta", default=160000.0)
    table = _nested(keys, "compress") or keys.table("rope_scaling") or keys.table("rope_parameters")
    if table is None:
        return RotarySettings(plain_frequencies(dim, theta))
    table.expect("attention_factor", 1.0, None)
    if table.path.endswith("compress."):
        theta = table.number("rope_theta", default=theta)
    # A flat table's rope_theta is that of the sliding layers.
    settings = {**table.values, "rope_theta": theta}
    return replace(
        read_rotary(ConfigJson({**keys.values, "rope_parameters": settings}), dim), scale=1.0
    )


def _nested(keys: ConfigJson, name: str) -> ConfigJson | None:
    """A table of `rope_parameters` as transformers writes them."""
    both = keys.table("rope_parameters")
    return None if both is None else both.table(name)
