"""The roundings of an FP8 server: where they act, with which gradients, against slow maths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_oracle import directory_of, documents, theirs
from prime_rl_model_deepseek_v4.grouped import GroupedLinear
from prime_rl_model_deepseek_v4.model import DeepseekV4Module
from prime_rl_model_deepseek_v4.numerics import quantise_index, quantise_plain, round_rows
from torch import Tensor, nn

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.errors import ConfigError
from prime_rl.layers.dsa_torch import TorchDSA
from prime_rl.layers.float8 import float8_codes
from prime_rl.layers.float8_linear import Float8Experts, Float8Linear
from prime_rl.layers.float8_weights import round_blocks
from prime_rl.models.load import load_named
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan

SWITCHES = (
    "kv_precision",
    "indexer_precision",
    "linear_precision",
    "grouped_output_precision",
)
ALL = dict.fromkeys(SWITCHES, "fp8")


class Loader:
    """Our model with the weights of one of transformers', with any options."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.weights = model.state_dict()
        self.directory = directory_of(model, directory)

    def __call__(self, dtype: torch.dtype = torch.float32, **options: str) -> DeepseekV4Module:
        registry = scan()
        config = ModelConfig.model_validate(
            {"options": options}, context=ValidationContext(registry.config_class)
        )
        setup = prepare(config, self.directory, registry)
        module = build(setup, "cpu", dtype)
        load_named(module, setup.layout, self.weights.items())
        assert isinstance(module, DeepseekV4Module)
        return module


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return Loader(theirs(), tmp_path_factory.mktemp("float8"))


@pytest.fixture
def batch() -> PackedBatch:
    return PackedBatch.from_documents(documents())


def watch(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """Arguments of every later call of one operation of the DSA back end."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(TorchDSA, name)

    def call(backend: TorchDSA, *arguments: Any, **more: Any) -> Tensor:
        calls.append(arguments)
        result: Tensor = original(backend, *arguments, **more)
        return result

    monkeypatch.setattr(TorchDSA, name, call)
    return calls


def test_rows_by_hand() -> None:
    """Largest magnitudes 448, 450, 1e-6 and 0 in groups of 64: the magnitude counts as at least
    1e-4, so the smallest scale is 2^-22."""
    row = torch.zeros(1, 4 * 64 + 8)
    row[0, 5], row[0, 70], row[0, 128], row[0, 256:] = 448.0, 450.0, 1e-6, 1 / 3
    codes, scales = quantise_plain(row[:, :256])
    assert scales.tolist() == [[1.0, 2.0, 2.0**-22, 2.0**-22]]
    # 450 / 2 is 225, near 224; 1e-6 in bfloat16 times 2^22 is 4.1875, between 4 and 4.5.
    assert codes[0, [5, 70, 128]].float().tolist() == [448.0, 224.0, 4.0]
    read = round_rows(row, 8)
    assert read[0, [5, 70, 128]].tolist() == [448.0, 448.0, 4 * 2.0**-22]
    assert read[0, 256:].equal(torch.full((8,), 1 / 3).bfloat16().float())


def test_rows_pass_gradients_unchanged() -> None:
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    upstream = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    round_rows(rows, 8).backward(upstream)
    assert rows.grad is not None
    assert rows.grad.equal(upstream)


@pytest.mark.parametrize("scales", ["exact", "power_of_two", "two_step"])
def test_grouped_projection_head_by_head(scales: Any) -> None:
    """Two groups of two heads of 160: scales per head and 128 numbers, powers of two whatever the
    weights'; blocks of weights start anew in each group."""
    generator = torch.Generator().manual_seed(0)
    part = GroupedLinear(2, 320, 130, scales)
    part.weight.data = torch.randn(260, 320, generator=generator) * 0.05
    x_THD = torch.randn(3, 4, 160, generator=generator)
    found = part(x_THD)
    for t in range(3):
        for g in range(2):
            rounded = []
            for h in (2 * g, 2 * g + 1):
                for numbers in (x_THD[t, h, :128], x_THD[t, h, 128:]):
                    scale = 1.0
                    while numbers.abs().max() / 448 <= scale / 2:
                        scale /= 2
                    rounded.append(float8_codes(numbers / scale).float() * scale)
            matrix = round_blocks(part.weight[130 * g : 130 * (g + 1)].detach(), scales)
            expected = matrix.double() @ torch.cat(rounded).double()
            piece = found[t, 130 * g : 130 * (g + 1)].double()
            torch.testing.assert_close(piece, expected, rtol=1e-5, atol=1e-5)


def test_grouped_projection_rounds_the_float32_rotation_once(
    load: Loader, batch: PackedBatch
) -> None:
    """In bfloat16 its inputs arrive in float32, and leave in bfloat16."""
    seen: list[Tensor] = []
    module = load(torch.bfloat16, grouped_output_precision="fp8")
    projection = module.layers[0].attention.out_groups
    projection.register_forward_hook(lambda _, inputs, out: seen.extend((*inputs, out)))
    module(batch)
    assert [tensor.dtype for tensor in seen] == [torch.float32, torch.bfloat16]


def test_nothing_is_rounded_by_default(load: Loader, batch: PackedBatch) -> None:
    module = load()
    assert not any(isinstance(part, Float8Linear) for part in module.modules())
    off = dict.fromkeys(SWITCHES, "full")
    assert module(batch).equal(load(**off, weight_scales="two_step")(batch))


@pytest.mark.parametrize("switch", [*SWITCHES, "all"])
def test_every_switch_changes_the_result_a_little(
    load: Loader, batch: PackedBatch, switch: str
) -> None:
    """And the model still has every gradient: rounding does not cut one."""
    plain = load()(batch).detach()
    module = load(**(ALL if switch == "all" else {switch: "fp8"}))
    result = module(batch)
    assert 1e-4 < ((result - plain).norm() / plain.norm()).item() < 0.7
    result.square().sum().backward()
    for name, parameter in module.named_parameters():
        if ".indexer." not in name and name != "lm_head.weight":
            assert parameter.grad is not None, name
            assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_rounded_rows_of_every_kind(
    load: Loader, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Layer 0 reads local rows; 1 and 2 entries as well. Rounding rounded rows changes nothing."""
    calls = watch(monkeypatch, "attend")
    load(dtype)(batch)
    load(dtype, kv_precision="fp8")(batch)
    for layer in range(3):
        plain, rounded = (calls[start + layer][1][:, 0] for start in (0, 6))
        assert rounded.dtype == dtype
        assert rounded.equal(round_rows(rounded, 8))
        assert not plain.equal(round_rows(plain, 8))
    assert calls[6][1][:, 0].equal(round_rows(calls[0][1][:, 0], 8))


def test_selection_uses_rounded_numbers(
    load: Loader, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch, "select")
    load()(batch)
    load(indexer_precision="fp8")(batch)
    expected = quantise_index(*calls[0][:3])
    assert all(one.equal(other) for one, other in zip(calls[2][:3], expected, strict=True))


def test_linear_precision_reaches_the_layers_the_server_quantises(load: Loader) -> None:
    module = load(linear_precision="fp8", weight_scales="two_step")
    found = {name for name, part in module.named_modules() if isinstance(part, Float8Linear)}
    expected = {f"layers.{layer}.attention.indexer.query" for layer in (1, 3)}
    parts = ("attention.latent", "attention.query", "attention.out")
    parts += ("mlp.shared.gate_up", "mlp.shared.down")
    expected |= {f"layers.{layer}.{part}" for layer in range(6) for part in parts}
    assert found == expected
    for block in module.layers:
        assert isinstance(block.mlp.experts.backend, Float8Experts)
        assert block.mlp.experts.backend.scales == "two_step"
        assert block.attention.out_groups.scales is None


def test_packed_documents_do_not_mix(load: Loader, batch: PackedBatch) -> None:
    """Every rounding is per token, entry or matrix, so packing changes nothing."""
    module = load(**ALL)
    texts = documents()
    for one, text in zip(module(batch).split([len(t) for t in texts]), texts, strict=True):
        alone = module(PackedBatch.from_documents([text]))
        # A float32 sum in another order can move a code to its neighbour.
        assert (one - alone).norm() / alone.norm() < 0.05


def test_unknown_precision_is_refused(load: Loader) -> None:
    with pytest.raises(ConfigError, match="kv_precision"):
        load(kv_precision="fp4")
