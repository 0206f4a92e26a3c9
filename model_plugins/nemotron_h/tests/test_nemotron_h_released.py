"""Nano and Super in full size: built without memory, counted, every tensor named."""

import math
import time
from typing import Any

import nemotron_h_released as released
import pytest
import torch
from prime_rl_model_nemotron_h import NemotronH
from prime_rl_model_nemotron_h.flops import active_matrix_parameters, scan_flops

from prime_rl.api import Kernels
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.models.load import runtime_tensors

PLUGIN = NemotronH(NemotronH.Config())


@pytest.mark.parametrize(
    ("config", "billions", "kinds"),
    [(released.NANO, 31.58, (23, 23, 6)), (released.SUPER, 120.67, (40, 40, 8))],
    ids=["Nano", "Super"],
)
def test_full_size(config: dict[str, Any], billions: float, kinds: tuple[int, ...]) -> None:
    """Parameters to the four digits that are published; names and shapes both ways."""
    started = time.process_time()
    architecture = PLUGIN.architecture(config)
    found = tuple(len(architecture.layers(kind)) for kind in ("mamba", "moe", "attention"))
    assert found == kinds
    moe = [TorchMoE(TorchMoEConfig())] * architecture.num_layers
    with torch.device("meta"):
        module = PLUGIN.build(architecture, Kernels(TorchAttention(TorchAttentionConfig()), moe))
    layout = PLUGIN.layout(architecture)
    tensors = runtime_tensors(module)
    layout.check_runtime(tensors)
    assert time.process_time() - started < 30
    assert round(sum(tensor.numel() for tensor in tensors.values()) / 1e9, 2) == billions
    rows = layout.table({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert dict(released.tensors(config)) == {row.name: row.shape for row in rows}
    for row in rows:
        assert layout.runtime_for(row.name) == row.runtimes and row.runtimes
    assert layout.runtime_for("mtp.layers.0.eh_proj.weight") == ()
    assert layout.is_kept("mtp.layers.1.mixer.experts.7.up_proj.weight")


def test_a_full_layer_by_hand() -> None:
    """Rows of the input projections as released: 10304 and 18560."""
    nano, large = (PLUGIN.architecture(config) for config in (released.NANO, released.SUPER))
    assert nano.mamba.projected == 10304 and large.mamba.projected == 18560
    assert nano.mamba.step_limit == (0.0, math.inf)


@pytest.mark.parametrize(
    ("config", "matrices", "active"),
    [(released.NANO, 6.46, 3.23), (released.SUPER, 24.5, 12.23)],
    ids=["Nano", "Super"],
)
def test_flops(config: dict[str, Any], matrices: float, active: float) -> None:
    """Matrix products per token, in GFLOP, as published: three digits, hence 0.2 %. The active
    parameters add norms and the like to half of that. Scan and attention by hand."""
    architecture = PLUGIN.architecture(config)
    per_token = 2 * active_matrix_parameters(architecture)
    assert per_token / 1e9 == pytest.approx(matrices, rel=2e-3)
    assert per_token / 2e9 == pytest.approx(active, rel=2e-3)
    inner = architecture.mamba.inner
    scan = 2 * 128 * 8 * 128 + 2 * 128 * inner + 4 * inner * 128
    assert scan_flops(architecture.mamba) == scan
    layers = {kind: len(architecture.layers(kind)) for kind in ("mamba", "attention")}
    lengths = [8192, 1]
    pairs = 8192 * 8193 / 2 + 1
    expected = 8193 * (per_token + layers["mamba"] * scan)
    expected += layers["attention"] * 4 * 4096 * pairs
    assert PLUGIN.flops(architecture, lengths) == expected


def test_scan_flops_of_nano() -> None:
    """0.26 + 1.05 + 2.1 MFLOP per token and layer."""
    scan = scan_flops(PLUGIN.architecture(released.NANO).mamba)
    assert scan == 262_144 + 1_048_576 + 2_097_152
