"""The roundings of an FP8 server: where they act, with which gradients, against slow maths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prime_rl_model_glm5.attention import Attention
from prime_rl_model_glm5.model import Glm5Module
from prime_rl_model_glm5.numerics import quantise_index, quantise_latents, round_latents
from torch import Tensor

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.errors import ConfigError
from prime_rl.layers.dsa_torch import TorchDSA
from prime_rl.layers.float8_linear import Float8Experts, Float8Linear
from prime_rl.models.load import load_weights
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan

ALL = {"kv_precision": "fp8", "indexer_precision": "fp8", "linear_precision": "fp8"}


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: str) -> Glm5Module:
    """The model of a checkpoint with these options."""
    registry = scan()
    config = ModelConfig.model_validate(
        {"options": options}, context=ValidationContext(registry.config_class)
    )
    setup = prepare(config, directory, registry)
    module = build(setup, dtype=dtype)
    load_weights(module, setup.layout, directory)
    assert isinstance(module, Glm5Module)
    return module


class Watching:
    """Keeps what the DSA back end is given, by name of the operation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, list[tuple[Any, ...]]] = {"select": [], "attend": []}
        for name in self.calls:
            monkeypatch.setattr(TorchDSA, name, self._wrapped(name, getattr(TorchDSA, name)))

    def _wrapped(self, name: str, original: Any) -> Any:
        def call(backend: TorchDSA, *arguments: Any, **more: Any) -> Tensor:
            self.calls[name].append(arguments)
            result: Tensor = original(backend, *arguments, **more)
            return result

        return call


def power_ceil(x: float) -> float:
    power = 2.0**-40
    while power < x:
        power *= 2
    return power


def test_latents_by_hand() -> None:
    """Largest magnitudes 448, 448.5, 3e-6 and 0 in groups of 128: the scale, not the magnitude, is
    at least 1e-4, which is 2^-13 as a power of two."""
    latent = torch.zeros(1, 512)
    latent[0, 5], latent[0, 130], latent[0, 256] = 448.0, -448.5, 3e-6
    codes, scales = quantise_latents(latent)
    assert scales.tolist() == [[1.0, 2.0, 2.0**-13, 2.0**-13]]
    # 448.5 / 2 lies between 224 and 240; 3e-6 2^13 = 0.0246 between 12 and 13 steps of 2^-9.
    assert codes[0, [5, 130, 256]].float().tolist() == [448.0, -224.0, 13 * 2.0**-9]
    assert round_latents(latent)[0, [5, 130, 256]].tolist() == [448.0, -448.0, 13 * 2.0**-22]


def test_index_scores_are_the_servers_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(shape, generator=generator) for shape in ((3, 4, 16), (5, 16), (3, 4)))
    q[0, 0] = 0
    codes, keys, weights = quantise_index(q, k, w)
    for t in range(3):
        for s in range(5):
            k_scale = power_ceil(k[s].abs().max().item() / 448)
            k8 = (k[s] / k_scale).to(torch.float8_e4m3fn).double()
            total = 0.0
            for j in range(4):
                q_scale = power_ceil(max(q[t, j].abs().max().item(), 1e-4) / 448)
                q8 = (q[t, j] / q_scale).to(torch.float8_e4m3fn).double()
                factor = w[t, j].item() * q_scale * 16**-0.5 * 4**-0.5
                total += factor * max(0.0, float(q8 @ k8))
            found = float(weights[t].double() @ (codes[t].double() @ keys[s].double()).relu())
            assert found == pytest.approx(total * k_scale, rel=1e-6, abs=1e-12)


def test_nothing_is_rounded_by_default(checkpoint: Path, documents: list[list[int]]) -> None:
    batch = PackedBatch.from_documents(documents)
    module = load(checkpoint)
    assert not any(isinstance(part, Float8Linear) for part in module.modules())
    off = {"kv_precision": "full", "indexer_precision": "full", "linear_precision": "full"}
    assert module(batch).equal(load(checkpoint, **off, weight_scales="two_step")(batch))


@pytest.mark.parametrize("switch", [*ALL, "all"])
def test_every_switch_changes_the_result_a_little(
    checkpoint: Path, documents: list[list[int]], switch: str
) -> None:
    """And the model still has every gradient: rounding does not cut one."""
    batch = PackedBatch.from_documents(documents)
    plain = load(checkpoint)(batch).detach()
    options = ALL if switch == "all" else {switch: "fp8"}
    module = load(checkpoint, **options)
    result = module(batch)
    error = ((result - plain).norm() / plain.norm()).item()
    assert 1e-4 < error < 0.7
    result.square().sum().backward()
    for name, parameter in module.named_parameters():
        if ".indexer." not in name and name != "lm_head.weight":
            assert parameter.grad is not None, name
            assert parameter.grad.norm() > 0, name


def test_cached_rows_are_rounded_once_from_float32(
    checkpoint: Path, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the rows handed to attention are e4m3 numbers times powers of two, and not what
    rounding the bfloat16 latents would give."""
    seen = Watching(monkeypatch)
    batch = PackedBatch.from_documents(documents)
    module = load(checkpoint, torch.bfloat16, kv_precision="fp8")
    attention = module.layers[0].attention
    assert isinstance(attention, Attention)
    inputs: list[Tensor] = []
    attention.latents.register_forward_hook(lambda *call: inputs.append(call[2]))
    module(batch)
    rows = seen.calls["attend"][0][1][:, 0]
    assert rows.dtype == torch.bfloat16
    latent = inputs[0][:, 48:80].double()
    weight = attention.latent_norm.weight.double()
    normal = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert rows[:, :32].float().equal(round_latents(normal.float()))
    assert not rows[:, :32].float().equal(round_latents(normal.bfloat16().float()))


def test_selection_uses_rounded_numbers(
    checkpoint: Path, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Watching(monkeypatch)
    batch = PackedBatch.from_documents(documents)
    load(checkpoint)(batch)
    plain = seen.calls["select"][0]
    load(checkpoint, indexer_precision="fp8")(batch)
    rounded = seen.calls["select"][3]
    expected = quantise_index(*plain[:3])
    assert all(one.equal(other) for one, other in zip(rounded[:3], expected, strict=True))


def test_linear_precision_reaches_the_layers_the_server_quantises(checkpoint: Path) -> None:
    module = load(checkpoint, linear_precision="fp8", weight_scales="two_step")
    found = {name for name, part in module.named_modules() if isinstance(part, Float8Linear)}
    expected = set()
    for layer in range(6):
        parts = {"attention.latents", "attention.query", "attention.out"}
        parts |= (
            {"mlp.gate_up", "mlp.down"}
            if layer < 2
            else {
                "mlp.shared.gate_up",
                "mlp.shared.down",
            }
        )
        parts |= {"attention.indexer.query"} if layer in (0, 1, 3) else set()
        expected |= {f"layers.{layer}.{part}" for part in parts}
    assert found == expected
    assert all(
        isinstance(module.layers[layer].mlp.experts.backend, Float8Experts)
        and module.layers[layer].mlp.experts.backend.scales == "two_step"
        for layer in range(2, 6)
    )


def test_scale_policies_differ(checkpoint: Path, documents: list[list[int]]) -> None:
    batch = PackedBatch.from_documents(documents)
    results = [
        load(checkpoint, linear_precision="fp8", weight_scales=scales)(batch)
        for scales in ("exact", "power_of_two", "two_step")
    ]
    assert not results[0].equal(results[1])
    assert not results[1].equal(results[2])


def test_packed_documents_do_not_mix(checkpoint: Path, documents: list[list[int]]) -> None:
    """Every rounding is per token and layer, so packing changes nothing."""
    module = load(checkpoint, **ALL)
    packed = module(PackedBatch.from_documents(documents)).split([len(d) for d in documents])
    for one, document in zip(packed, documents, strict=True):
        alone = module(PackedBatch.from_documents([document]))
        # A float32 sum in another order can move a code to its neighbour.
        assert (one - alone).norm() / alone.norm() < 0.05


def test_unknown_precision_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="kv_precision"):
        load(checkpoint, kv_precision="fp4")
