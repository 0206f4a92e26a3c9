"""bfloat16: near float32, and float32 where servers compute in float32."""

from dataclasses import replace
from typing import Any

import deepseek_v4_slow as slow
import pytest
import torch
import torch.nn.functional as F
from deepseek_v4_oracle import documents, logits_of_ours, ours, relative_error, theirs
from deepseek_v4_recording import RecordingDSA
from prime_rl_model_deepseek_v4.attention import Sink
from prime_rl_model_deepseek_v4.compressor import Compressor, PositionBias
from prime_rl_model_deepseek_v4.hyper_connection import HyperConnection, StreamHead, write
from prime_rl_model_deepseek_v4.places import make_places
from prime_rl_model_deepseek_v4.rope import rotate_tail
from torch import Tensor, nn

from prime_rl.api import PackedBatch
from prime_rl.layers.norms import rms_norm_late
from prime_rl.layers.routing import recording
from prime_rl.models.load import load_named
from prime_rl.models.setup import ModelSetup, build

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSetup, nn.Module, nn.Module]:
    """The float32 model and its bfloat16 copy; the indexer keeps all entries."""
    model = theirs(index_topk=64)
    setup, module = ours(model, tmp_path_factory.mktemp("numerics"))
    small = build(setup, "cpu", BF16)
    load_named(small, setup.layout, model.state_dict().items())
    return setup, module, small


def test_bfloat16_is_near_float32(both: Any) -> None:
    """8 bits of mantissa through six layers with the same experts: 4 % in the norm (2.7 % seen), and
    no logit off by more than 8 % of the largest (4.3 % seen)."""
    _, module, small = both
    texts = documents()
    with recording() as record, torch.no_grad():
        expected = logits_of_ours(module, texts)
    batch = replace(PackedBatch.from_documents(texts), routed_experts=record.stacked(6))
    with torch.no_grad():
        found = (small(batch) @ small.lm_head.weight.T).float()
    assert 1e-3 < (found - expected).norm() / expected.norm() <= 0.04
    assert relative_error(found, expected) <= 0.08


def test_what_stays_float32(both: Any) -> None:
    """Parameters of the float32 modules, their outputs and the router's bias; the rest is not."""
    setup, _, small = both
    islands = setup.plugin.float32_modules(small)
    kinds = {type(module) for module in islands}
    assert kinds == {HyperConnection, StreamHead, Sink, PositionBias}
    inside = {id(p) for module in islands for p in module.parameters()}
    for name, parameter in small.named_parameters():
        assert parameter.dtype == (FP32 if id(parameter) in inside else BF16), name
    for name, buffer in small.named_buffers():
        expected = torch.int64 if name.endswith("token_experts") else FP32
        assert buffer.dtype == expected, name
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.extend(output if isinstance(output, tuple) else (output,))

    hooks = [module.register_forward_hook(keep) for module in islands]
    backend = RecordingDSA()
    for block in small.layers:
        block.attention.backend = backend
    streams: list[Tensor] = []
    hooks.append(small.layers[3].register_forward_hook(lambda *call: streams.append(call[-1])))
    with torch.no_grad():
        final = small(PackedBatch.from_documents(documents()))
    for hook in hooks:
        hook.remove()
    assert len(outputs) >= len(islands) and {tensor.dtype for tensor in outputs} == {FP32}
    assert final.dtype == streams[0].dtype == BF16
    assert backend.dtypes == [{"q": BF16, "k": BF16, "sink": FP32, "out": BF16}] * 6


def test_gradients_of_islands_are_float32(both: Any) -> None:
    _, _, small = both
    small.zero_grad()
    hidden = small(PackedBatch.from_documents(documents()))
    hidden.backward(torch.linspace(-1, 1, hidden.numel()).sin().view_as(hidden).to(BF16))
    for name, parameter in small.named_parameters():
        if parameter.dtype == FP32 and ".indexer." not in name:
            assert parameter.grad is not None and parameter.grad.dtype == FP32, name
            assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name
    small.zero_grad()


def differing(found: Tensor, expected: Tensor) -> float:
    """Part of the numbers whose bits differ."""
    return (found != expected.to(found.dtype)).float().mean().item()


def test_compressor_rounds_once(both: Any) -> None:
    """float32 from the product to the cached row: from the same bfloat16 inputs, float64 rounds to
    the same numbers but for ties; products rounded to bfloat16 change more than a tenth of them."""
    setup, _, small = both
    batch = PackedBatch.from_documents([[0] * 61])
    places = make_places(batch, setup.architecture, small.main_rotary, small.compress_rotary)
    x_TH = torch.randn(61, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    freqs = list(setup.architecture.compress_rotary.inverse_frequencies)
    for layer, overlap in ((1, True), (2, False)):
        part = small.layers[layer].attention.compressor
        assert isinstance(part, Compressor)
        wkv, wgate = part.project.weight.double().chunk(2)
        ape, norm = part.position_bias.bias.double(), part.norm.weight.double()
        weights = {"wkv": wkv, "wgate": wgate, "ape": ape, "norm": norm}
        ratio = ape.shape[0]
        with torch.no_grad():
            found = part(x_TH, places.entries[ratio])
            exact = slow.compress(x_TH.double(), weights, ratio, overlap, 1e-6, freqs)
            assert differing(found, exact) <= 0.01
            early = F.linear(x_TH, part.project.weight).float().chunk(2, dim=-1)
            pooled = part._pool(*early, part.position_bias(torch.empty(0)), places.entries[ratio])
            normal = rms_norm_late(pooled, part.norm.weight, 1e-6)
            rounded = rotate_tail(normal, places.entries[ratio].rotation).to(BF16)
            assert differing(rounded, exact) > 0.1


def test_streams_are_mixed_in_float32() -> None:
    """Maps rounded to bfloat16 before mixing, as transformers does, change 40 % of the numbers."""
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(64, 4, 64, generator=generator).to(BF16)
    y = torch.randn(64, 64, generator=generator).to(BF16)
    post = torch.rand(64, 4, generator=generator) * 2
    comb = torch.rand(64, 4, 4, generator=generator).softmax(-1)
    exact = post.double()[..., None] * y.double()[:, None] + torch.einsum(
        "tij,tid->tjd", comb.double(), streams.double()
    )
    early = post.to(BF16)[..., None] * y[:, None] + comb.to(BF16).transpose(1, 2) @ streams
    assert differing(write(streams, y, post, comb), exact) <= 0.002
    assert differing(early, exact) > 0.2
