"""Rotary frequencies against transformers and by hand; rotation by complex numbers."""

import math

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError
from prime_rl.layers.rotary import Rotary, rotate
from prime_rl.layers.rotary_settings import plain_frequencies, read_rotary, yarn

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0}


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        {**YARN, "original_max_position_embeddings": 4096},
        {**YARN, "original_max_position_embeddings": 4096, "truncate": False},
        {**YARN, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
        {**YARN, "original_max_position_embeddings": 4096, "attention_factor": 1.3},
        {**YARN, "original_max_position_embeddings": 65536, "beta_fast": 64, "beta_slow": 2},
    ],
)
def test_frequencies_equal_transformers(table: dict) -> None:
    keys = {"max_position_embeddings": 163840, "head_dim": 64, "rope_parameters": table}
    theirs = Qwen3Config(hidden_size=256, num_attention_heads=4, **keys)
    frequencies, factor = ROPE_INIT_FUNCTIONS[table["rope_type"]](theirs, torch.device("cpu"))
    ours = read_rotary(ConfigJson(keys), 64)
    assert torch.allclose(torch.tensor(ours.inverse_frequencies), frequencies, rtol=2e-6)
    assert ours.scale == pytest.approx(factor, rel=1e-12)


def given(**changes: object) -> dict:
    return {
        "factor": 40.0,
        "original_length": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        **changes,
    }


def test_yarn_range_is_limited_to_the_last_dimension() -> None:
    """BL-042: head size 64, original context 131072: the raw upper end 34.55 survives. The ramp is
    then open at the last frequency, index 31; a limit of 31 would close it there."""
    upper = 64 * math.log(131072 / (2 * math.pi)) / (2 * math.log(10000))
    assert upper == pytest.approx(34.55, abs=0.01)
    lower = 64 * math.log(131072 / (32 * 2 * math.pi)) / (2 * math.log(10000))
    settings = yarn(64, 10000.0, **given(original_length=131072, truncate=False))
    plain = plain_frequencies(64, 10000.0)[31]
    stretched = (31 - lower) / (upper - lower)
    assert stretched < 1
    expected = plain / 40 * stretched + plain * (1 - stretched)
    assert settings.inverse_frequencies[31] == pytest.approx(expected, rel=1e-12)
    truncated = yarn(64, 10000.0, **given(original_length=131072))
    stretched = (31 - math.floor(lower)) / (35 - math.floor(lower))
    expected = plain / 40 * stretched + plain * (1 - stretched)
    assert truncated.inverse_frequencies[31] == pytest.approx(expected, rel=1e-12)


def test_yarn_ignores_the_length_of_the_run() -> None:
    """BL-043: the range comes from the original 4096, whatever the limit is set to."""
    settings = [
        read_rotary(
            ConfigJson(
                {
                    "max_position_embeddings": limit,
                    "rope_scaling": {**YARN, "original_max_position_embeddings": 4096},
                }
            ),
            64,
        )
        for limit in (163840, 512)
    ]
    assert settings[0] == settings[1]
    assert settings[0] == yarn(64, 10000.0, **given())


def test_what_is_not_implemented_is_named() -> None:
    with pytest.raises(ConfigError, match="rope_parameters.rope_type: found 'llama3'"):
        read_rotary(ConfigJson({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}), 64)
    with pytest.raises(ConfigError, match="rope_scaling.factor is missing"):
        read_rotary(ConfigJson({"rope_scaling": {"type": "linear"}}), 64)


def test_rotation_is_multiplication_by_complex_numbers() -> None:
    """Pair (i, i + D/2) turns by position * theta^(-2i/D)."""
    settings = read_rotary(ConfigJson({"rope_theta": 100.0}), 8)
    positions = torch.tensor([0, 1, 5, 1000])
    generator = torch.Generator().manual_seed(0)
    x_THD = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    rotation = Rotary(settings)(positions, torch.float64)
    found = rotate(x_THD, rotation)
    angles = positions[:, None].double() * torch.tensor(
        [100.0 ** (-i / 4) for i in range(4)], dtype=torch.float64
    )
    turned = torch.view_as_complex(torch.stack([x_THD[..., :4], x_THD[..., 4:]], dim=-1))
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    assert torch.allclose(found, expected, atol=3e-4)  # angles are float32: 1000 * 6e-8


def test_documents_start_at_position_zero() -> None:
    rotation = Rotary(read_rotary(ConfigJson({}), 4))(torch.tensor([0, 1, 0]), torch.float32)
    assert rotation.cos_TD[0].equal(rotation.cos_TD[2]) and (rotation.cos_TD[0] == 1).all()
