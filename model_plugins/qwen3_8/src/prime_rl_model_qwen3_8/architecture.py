"""What config.json says about a Qwen3.8 Flash Next model, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError
from prime_rl.layers.rotary_settings import RotarySettings, read_rotary
from prime_rl_model_qwen3_8.hashing import NgramTable, make_table

TEXT_TYPES = ("qwen4_exp_text", "qwen3_8_flash_next_text")
OUTER_TYPES = ("qwen4_exp", "qwen3_8_flash_next")
LINEAR = "linear_attention"
SPARSE_NAMES = ("full_attention", "qwen_sparse_attention", "indexed_attention")
"""Three spellings of the same layer type."""


@dataclass(frozen=True)
class DeltaSizes:
    """Heads of the Gated DeltaNet layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate: str
    """sigmoid or silu."""

    @property
    def qkv_width(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        """All value heads together."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class SparseSizes:
    """Heads of the sparse attention layers and of their indexers."""

    heads: int
    key_value_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    budget: int
    """Tokens of complete blocks that a query reads at most."""
    block: int
    """Consecutive tokens that share one index key."""
    rotary: RotarySettings

    @property
    def top_blocks(self) -> int:
        """Blocks that a query reads at most."""
        return self.budget // self.block

    @property
    def rotary_dim(self) -> int:
        """Leading numbers of a head that turn."""
        return 2 * len(self.rotary.inverse_frequencies)


@dataclass(frozen=True)
class ExpertSizes:
    """The mixture of experts, alike in all layers."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    normalise: bool


@dataclass(frozen=True)
class Qwen38Architecture:
    """Sizes and switches."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    sparse_layers: tuple[int, ...]
    """Global numbers of the sparse attention layers; the others are Gated DeltaNet."""
    delta: DeltaSizes
    sparse: SparseSizes | None
    """None when no layer is sparse attention."""
    experts: ExpertSizes
    streams: int
    """Residual streams."""
    mix_rank: int
    tables: tuple[NgramTable, ...]
    """N-gram tables, in the order of their layers."""
    ngram_conv_kernel: int

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Global numbers of the Gated DeltaNet layers."""
        return tuple(i for i in range(self.num_layers) if i not in self.sparse_layers)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table with the language model's keys: config.json itself, or its `text_config`."""
    if config.get("model_type") in OUTER_TYPES and isinstance(config.get("text_config"), Mapping):
        inner: Mapping[str, Any] = config["text_config"]
        return inner
    return config


def read_architecture(config: dict[str, Any]) -> Qwen38Architecture:
    """Raises ConfigError naming the key that is missing, wrong or not implemented."""
    ConfigJson(config).expect("model_type", *OUTER_TYPES, *TEXT_TYPES)
    values = text_config(config)
    keys = ConfigJson(values, "" if values is config else "text_config.")
    keys.expect("model_type", *TEXT_TYPES, *OUTER_TYPES)
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    layers = keys.integer("num_hidden_layers")
    sparse_layers = _read_sparse_layers(keys, layers)
    tables = _read_tables(keys, layers, sparse_layers)
    outer = ConfigJson(config)
    return Qwen38Architecture(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=layers,
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        initializer_range=keys.number("initializer_range", default=0.02),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", default=None)
        or outer.boolean("tie_word_embeddings", default=False),
        sparse_layers=sparse_layers,
        delta=_read_delta(keys),
        sparse=_read_sparse(keys) if sparse_layers else None,
        experts=_read_experts(keys),
        streams=keys.integer("hc_count", default=4, minimum=2),
        mix_rank=keys.integer("hc_lowrank", default=320),
        tables=tables,
        ngram_conv_kernel=keys.integer("ple_conv_kernel_size", default=4),
    )


def _read_sparse_layers(keys: ConfigJson, layers: int) -> tuple[int, ...]:
    interval = keys.integer("full_attention_interval", default=4)
    found = keys.sequence("layer_types", default=())
    if not found:
        return tuple(layer for layer in range(layers) if (layer + 1) % interval == 0)
    unknown = sorted({str(kind) for kind in found} - {LINEAR, *SPARSE_NAMES})
    if unknown or len(found) != layers:
        raise ConfigError(
            f"config.json: {keys.path}layer_types: found {len(found)} entries"
            + (f" with {unknown}" if unknown else "")
            + f", expected {layers} of {LINEAR!r} or {' / '.join(map(repr, SPARSE_NAMES))}"
        )
    return tuple(layer for layer, kind in enumerate(found) if kind != LINEAR)


def _read_delta(keys: ConfigJson) -> DeltaSizes:
    key_heads = keys.integer("linear_num_key_heads", default=16)
    value_heads = keys.integer("linear_num_value_heads", default=32)
    _expect_multiple(keys, "linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    keys.expect("output_gate_type", None, "sigmoid", "silu")
    return DeltaSizes(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.integer("linear_key_head_dim", default=128),
        value_dim=keys.integer("linear_value_head_dim", default=128),
        conv_kernel=keys.integer("linear_conv_kernel_dim", default=4),
        gate=keys.text("output_gate_type", default="silu"),
    )


def _read_sparse(keys: ConfigJson) -> SparseSizes:
    heads = keys.integer("num_attention_heads")
    key_value_heads = keys.integer("num_key_value_heads")
    _expect_multiple(keys, "num_attention_heads", heads, "num_key_value_heads", key_value_heads)
    keys.expect("indexer_kv_heads", 1)
    head_dim = keys.integer("head_dim", default=256)
    budget, block = keys.integer("indexer_budget"), keys.integer("indexer_compress_ratio")
    _expect_multiple(keys, "indexer_budget", budget, "indexer_compress_ratio", block)
    sizes = SparseSizes(
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        index_heads=keys.integer("indexer_n_heads"),
        index_dim=keys.integer("indexer_head_dim"),
        budget=budget,
        block=block,
        rotary=_read_rotary(keys, head_dim),
    )
    if sizes.rotary_dim > sizes.index_dim:
        raise ConfigError(
            f"config.json: {keys.path}indexer_head_dim: found {sizes.index_dim}, expected at least "
            f"the {sizes.rotary_dim} numbers of an attention head that turn"
        )
    return sizes


def _read_rotary(keys: ConfigJson, head_dim: int) -> RotarySettings:
    """Text positions are the same on all three axes, so the sections only need to add up."""
    table = keys.table("rope_parameters") or ConfigJson({})
    part = table.number("partial_rotary_factor", default=None)
    if part is None:
        part = keys.number("partial_rotary_factor", default=1.0)
    dim = int(head_dim * part)
    if not 2 <= dim <= head_dim or dim % 2:
        raise ConfigError(
            f"config.json: {keys.path}partial_rotary_factor: found {part}, which turns {dim} of "
            f"{head_dim} numbers; expected an even number of them"
        )
    sections = table.sequence("mrope_section", default=())
    if sections and sum(sections) != dim // 2:
        raise ConfigError(
            f"config.json: {keys.path}{table.path}mrope_section: found {list(sections)}, expected "
            f"three numbers with the sum {dim // 2}"
        )
    return read_rotary(keys, dim, theta_default=1e7)


def _read_experts(keys: ConfigJson) -> ExpertSizes:
    count, per_token = keys.integer("num_experts"), keys.integer("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(
            f"config.json: {keys.path}num_experts_per_tok: found {per_token}, expected at most "
            f"{count}"
        )
    return ExpertSizes(
        count=count,
        per_token=per_token,
        intermediate=keys.integer("moe_intermediate_size"),
        shared_intermediate=keys.integer("shared_expert_intermediate_size"),
        normalise=keys.boolean("norm_topk_prob", default=True),
    )


def _read_tables(
    keys: ConfigJson, layers: int, sparse_layers: tuple[int, ...]
) -> tuple[NgramTable, ...]:
    """`ple_layer_ids` counts layers from 1."""
    numbers = sorted(set(keys.sequence("ple_layer_ids", default=())))
    wrong = [n for n in numbers if n not in range(1, layers + 1) or n - 1 in sparse_layers]
    if wrong:
        raise ConfigError(
            f"config.json: {keys.path}ple_layer_ids: found {wrong}, expected numbers from 1 to "
            f"{layers} of {LINEAR!r} layers"
        )
    if not numbers:
        return ()
    eos = keys.values.get("eos_token_id")
    if isinstance(eos, list | tuple) and eos:
        eos = eos[0]
    if isinstance(eos, bool) or not isinstance(eos, int):
        raise ConfigError(
            f"config.json: {keys.path}eos_token_id: found {eos!r}, expected the token that "
            "separates texts: n-grams end at it"
        )
    order = keys.integer("ngram_size", default=3, minimum=2)
    heads = (order - 1) * keys.integer("heads_per_ngram", default=8)
    width = keys.integer("ple_embed_dim", default=None) or keys.integer("hidden_size")
    _expect_multiple(keys, "ple_embed_dim", width, "number of n-gram heads", heads)
    return tuple(
        make_table(
            ordinal,
            number - 1,
            vocab_size=keys.integer("vocab_size"),
            eos_token=eos,
            order=order,
            heads=heads,
            width=width,
            base=keys.integer("ngram_vocab_size_base", default=20_000_000),
            multiple=keys.integer("make_ngram_vocab_size_divisible_by", default=128),
            seed=keys.integer("seed", default=1234, minimum=0),
            parts=keys.integer("split_ngram_parts", default=512),
        )
        for ordinal, number in enumerate(numbers)
    )


def _expect_multiple(keys: ConfigJson, key: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(
            f"config.json: {keys.path}{key}: found {value}, expected a multiple of {of} {divisor}"
        )
