"""config.json of Nemotron-H: spellings that are read, values that are refused."""

import math
from typing import Any

import nemotron_h_cases as cases
import nemotron_h_released as released
import pytest
from prime_rl_model_nemotron_h import NemotronH
from transformers import NemotronHConfig

from prime_rl.errors import ConfigError

PLUGIN = NemotronH(NemotronH.Config())
TINY = {"model_type": "nemotron_h", **cases.SIZES}
NEW = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]
OLD = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {**{name: value for name, value in TINY.items() if name not in names}, **changes}


@pytest.mark.parametrize(
    "config",
    [
        without("hybrid_override_pattern", layers_block_type=NEW),
        without("hybrid_override_pattern", layers_block_type=OLD),
        without("hybrid_override_pattern", layer_types=NEW),
        {**TINY, "layers_block_type": OLD, "num_hidden_layers": 6},
    ],
)
def test_spellings_of_the_pattern(config: dict[str, Any]) -> None:
    architecture = PLUGIN.architecture(config)
    assert architecture == PLUGIN.architecture(TINY)
    assert architecture.kinds == ("mamba", "moe", "attention", "mlp", "mamba", "moe")
    assert architecture.num_layers == 6 and architecture.layers("moe") == (1, 5)


@pytest.mark.parametrize("config", [released.NANO, released.SUPER, TINY])
def test_what_transformers_makes_of_it_is_the_same(config: dict[str, Any]) -> None:
    """transformers saves only `layers_block_type`, and infinity as a table."""
    limits = {"time_step_limit": (0.0, math.inf)}
    given = {k: v for k, v in config.items() if k not in ("rope_theta", "partial_rotary_factor")}
    rewritten = NemotronHConfig(**{**given, **limits}).to_dict()
    assert "hybrid_override_pattern" not in rewritten
    rewritten["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    assert PLUGIN.architecture(rewritten) == PLUGIN.architecture(config)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.0, math.inf], (0.0, math.inf)),
        ((0.001, 0.1), (0.001, 0.1)),
        (None, (0.0, math.inf)),
    ],
)
def test_time_step_limits(written: Any, read: tuple[float, float]) -> None:
    assert PLUGIN.architecture({**TINY, "time_step_limit": written}).mamba.step_limit == read
    assert PLUGIN.architecture({**TINY, "mamba_dt_limit": written}).mamba.step_limit == read


def test_older_names() -> None:
    renamed = {
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "chunk_size": "mamba_chunk_size",
    }
    values = {"n_groups": 4, "conv_kernel": 3, "use_conv_bias": False, "chunk_size": 5}
    steps = {"time_step_min": 0.002, "time_step_max": 0.2, "time_step_floor": 0.003}
    old_steps = dict(
        zip(("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor"), steps.values(), strict=True)
    )
    old = without(*renamed, **{renamed[name]: value for name, value in values.items()}, **old_steps)
    new = PLUGIN.architecture({**TINY, **values, **steps})
    assert PLUGIN.architecture(old) == new != PLUGIN.architecture(TINY)
    assert (new.mamba.groups, new.mamba.taps, new.mamba.chunk) == (4, 3, 5)
    assert new.mamba.start_steps == (0.002, 0.2, 0.003) and not new.mamba.conv_bias


def test_the_inert_expansion_is_inert() -> None:
    """The inner width is heads times head size, whatever `expand` says."""
    assert PLUGIN.architecture({**TINY, "expand": 7}) == PLUGIN.architecture(TINY)
    assert PLUGIN.architecture(TINY).mamba.inner == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hybrid_override_pattern", "MEX"),
        ("hybrid_override_pattern", ""),
        ("hybrid_override_pattern", 5),
        ("layers_block_type", ["mamba", "sliding"]),
        ("layers_block_type", OLD[:5]),
        ("num_hidden_layers", 5),
        ("n_groups", 3),
        ("num_key_value_heads", 3),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 9),
        ("time_step_limit", [0.1, 0.1]),
        ("time_step_limit", [0.0, "nan"]),
        ("time_step_limit", [0.0]),
        ("time_step_limit", [0.0, {"__float__": None}]),
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("use_bias", True),
        ("mlp_bias", True),
        ("attention_bias", True),
        ("residual_in_fp32", True),
        ("n_shared_experts", 2),
        ("sliding_window", 4096),
        ("block_configs", [{}]),
        ("hidden_dropout", 0.1),
        ("moe_latent_size", 0),
    ],
)
def test_what_is_refused_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        PLUGIN.architecture({**TINY, key: value})


def test_only_what_the_pattern_needs_is_asked_for() -> None:
    small = {
        "model_type": "nemotron_h",
        "vocab_size": 32,
        "hidden_size": 16,
        "hybrid_override_pattern": "--",
        "intermediate_size": 8,
    }
    architecture = PLUGIN.architecture(small)
    assert architecture.mamba is architecture.attention is architecture.experts is None
    with pytest.raises(ConfigError, match="mamba_num_heads"):
        PLUGIN.architecture({**small, "hybrid_override_pattern": "-M"})
