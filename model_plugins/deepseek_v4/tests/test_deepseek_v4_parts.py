"""Each part against the formulas, computed slowly; what a packed row does to them."""

from typing import Any

import deepseek_v4_slow as slow
import pytest
import torch
from deepseek_v4_oracle import CSA, HCA, SIZES, SLIDING, YARN, relative_error
from deepseek_v4_recording import RecordingDSA
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture, read_architecture
from prime_rl_model_deepseek_v4.attention import Attention
from prime_rl_model_deepseek_v4.compressor import Compressor
from prime_rl_model_deepseek_v4.feed_forward import HashMoEBlock, make_experts
from prime_rl_model_deepseek_v4.hyper_connection import HyperConnection, ReadNorm, StreamHead, write
from prime_rl_model_deepseek_v4.places import Places, make_places
from prime_rl_model_deepseek_v4.sinkhorn import sinkhorn
from torch import Tensor, nn

from prime_rl.api import PackedBatch
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.layers.rotary import Rotary

EPS = 1e-6
KIND_LAYER = {"sliding": 0, "csa": 1, "hca": 2}
LENGTHS = (21, 1, 33, 4, 3)


def architecture(**changes: Any) -> DeepseekV4Architecture:
    scaling = {**YARN, "type": "yarn"}
    return read_architecture(
        {"model_type": "deepseek_v4", **SIZES, "rope_scaling": scaling, **changes}
    )


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            drawn = torch.empty(tensor.shape).normal_(0.0, 0.3, generator=generator)
            tensor.copy_(drawn + (1.0 if "norm" in name or name == "scale" else 0.0))
    return module


def inputs(tokens: int, *sizes: int, seed: int = 5) -> Tensor:
    return torch.empty(tokens, *sizes).normal_(generator=torch.Generator().manual_seed(seed))


def places_of(arch: DeepseekV4Architecture, lengths: tuple[int, ...] = LENGTHS) -> Places:
    batch = PackedBatch.from_documents([[0] * length for length in lengths])
    return make_places(batch, arch, Rotary(arch.main_rotary), Rotary(arch.compress_rotary))


def compressor_weights(part: Compressor) -> dict[str, Tensor]:
    wkv, wgate = part.project.weight.chunk(2)
    return {"wkv": wkv, "wgate": wgate, "ape": part.position_bias.bias, "norm": part.norm.weight}


def attention_weights(part: Attention) -> dict[str, Any]:
    wq_a, wkv = part.latent.weight.split(part.ranks)
    weights = {
        "wq_a": wq_a,
        "wkv": wkv,
        "q_norm": part.query_norm.weight,
        "wq_b": part.query.weight,
        "kv_norm": part.key_norm.weight,
        "sink": part.sink.logit,
        "wo_a": part.out_groups.weight,
        "wo_b": part.out.weight,
    }
    if part.compressor is not None:
        weights["compressor"] = compressor_weights(part.compressor)
    if part.indexer is not None:
        weights["indexer"] = {
            "compressor": compressor_weights(part.indexer.compressor),
            "wq_b": part.indexer.query.weight,
            "weights_proj": part.indexer.weights.weight,
        }
    return weights


def slow_frequencies(arch: DeepseekV4Architecture, kind: str) -> list[float]:
    if kind == "sliding":
        return slow.frequencies(10000.0, arch.rotary_dim)
    yarn = tuple(YARN[k] for k in list(YARN)[1:])
    return slow.frequencies(160000.0, arch.rotary_dim, yarn)


def assert_same_gradients(module: nn.Module, found: Tensor, expected: Tensor) -> None:
    upstream = torch.linspace(-1, 1, expected.numel()).cos().view_as(expected)
    gradients = []
    for result in (found, expected):
        module.zero_grad()
        result.backward(upstream, retain_graph=True)
        gradients.append(
            {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        )
    ours, theirs = gradients
    assert ours and ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert relative_error(ours[name], gradient) <= 1e-4, name


def test_released_frequencies() -> None:
    """YaRN of the released models: pairs 0 to 15 as they are, 25 to 31 divided by 16."""
    released = {
        "head_dim": 512,
        "partial_rotary_factor": 64 / 512,
        "index_head_dim": 128,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    rotary = architecture(**released).compress_rotary
    plain = slow.frequencies(160000.0, 64)
    found = rotary.inverse_frequencies
    assert rotary.scale == 1.0 and len(found) == 32
    assert found[:16] == pytest.approx(plain[:16]) and found[0] == 1.0
    assert found[25:] == pytest.approx([f / 16 for f in plain[25:]])
    assert all(plain[k] / 16 < found[k] < plain[k] for k in range(16, 25))
    assert found[31] == pytest.approx(5.6805e-7, rel=1e-4)
    assert found == pytest.approx(slow.frequencies(160000.0, 64, (16, 65536, 32, 1)))


def test_places_by_hand() -> None:
    """Documents of 5 and 9 tokens, window 3, four tokens per entry: entries 0 | 1, 2."""
    arch = architecture(
        num_hidden_layers=1, layer_types=[CSA], mlp_layer_types=["moe"], sliding_window=3
    )
    places = places_of(arch, (5, 9))
    assert [sorted(row) for row in places.window_rows_TW.tolist()][:6] == [
        [-1, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [-1, -1, 5],
    ]  # fmt: skip
    entries = places.entries[4]
    assert entries.tokens_CM.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert entries.is_first_C.tolist() == [True, True, False]
    assert entries.first_T.tolist() == [0] * 5 + [1] * 9
    assert entries.last_T.tolist() == [0, 0, 0, 1, 1] + [1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert entries.most == 2
    seen = [sorted(set(row[3:]) - {-1}) for row in entries.all_rows_TN.tolist()]
    assert seen[:5] == [[], [], [], [14], [14]]
    assert seen[5:] == [[], [], [], [15], [15], [15], [15], [15, 16], [15, 16]]
    angle = entries.rotation.sin_TR[:, 0].asin().tolist()
    assert angle == pytest.approx([0.0, 0.0, torch.tensor(4.0).sin().asin().item()])


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_compressor(kind: str) -> None:
    arch = architecture(compress_rates={CSA: 4, HCA: 7})
    ratio = {"csa": 4, "hca": 7}[kind]
    part = Compressor(64, 32, ratio, overlap=kind == "csa", eps=EPS)
    randomise(part)
    x_TH, entries = inputs(sum(LENGTHS), 64), places_of(arch).entries[ratio]
    found = part(x_TH, entries)
    freqs = slow_frequencies(arch, kind)
    expected = torch.cat(
        [
            slow.compress(x, compressor_weights(part), ratio, kind == "csa", EPS, freqs)
            for x in x_TH.split(LENGTHS)
        ]
    )
    assert found.shape == expected.shape == (sum(n // ratio for n in LENGTHS), 32)
    assert relative_error(found, expected) <= 1e-5
    assert_same_gradients(part, found, expected)


def test_broken_document_stays_alone() -> None:
    """NaN in one document: a masked gate alone would not do, for 0 * NaN is NaN."""
    part = randomise(Compressor(64, 32, 4, overlap=True, eps=EPS))
    x_TH = inputs(16, 64)
    x_TH[:8] = torch.nan
    found = part(x_TH, places_of(architecture(), (8, 8)).entries[4])
    assert found[:2].isnan().all() and found[2:].isfinite().all()


def test_no_entry_at_all() -> None:
    """Documents shorter than a window: nothing, and every parameter still gets a gradient."""
    part = randomise(Compressor(64, 32, 4, overlap=True, eps=EPS))
    found = part(inputs(4, 64), places_of(architecture(), (3, 1)).entries[4])
    assert found.shape == (0, 32)
    found.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in part.parameters())


@pytest.mark.parametrize("kind", KIND_LAYER)
def test_attention(kind: str) -> None:
    """All of a layer's attention, and the entries the indexer chooses; 16 of them, 4 chosen."""
    arch = architecture(compress_rates={CSA: 2, HCA: 7})
    ratio = {"sliding": 0, "csa": 2, "hca": 7}[kind]
    backend = RecordingDSA()
    part = randomise(Attention(arch, KIND_LAYER[kind], backend))
    x_TH, places = inputs(sum(LENGTHS), 64), places_of(arch)
    found = part(x_TH, places)
    outputs, chosen = [], []
    for x in x_TH.split(LENGTHS):
        out, rows = slow.attention(
            x,
            attention_weights(part),
            heads=4,
            groups=2,
            window=8,
            eps=EPS,
            freqs=slow_frequencies(arch, kind),
            kind=kind,
            ratio=ratio,
            index_heads=16,
            top_k=4,
        )
        outputs.append(out)
        chosen += rows
    expected = torch.cat(outputs)
    assert relative_error(found, expected) <= 1e-5
    assert_same_gradients(part, found, expected)
    if kind == "csa":
        (rows_TN,) = backend.selected
        first = places.entries[2].first_T.tolist()
        ours = [
            {r - base for r in row if r >= 0}
            for row, base in zip(rows_TN.tolist(), first, strict=True)
        ]
        assert ours == chosen
        assert max(map(len, chosen)) == 4 and any(4 not in c and 5 in c for c in chosen)
        assert all(p.grad is None for n, p in part.named_parameters() if n.startswith("indexer."))


def test_nothing_is_scored_where_all_entries_fit() -> None:
    """33 tokens have 8 entries of 4: with top_k 8 the indexer is not asked; with 7 it is, and only
    the two last tokens, which see all 8, read less."""
    x_TH, found = inputs(33, 64), {}
    for top_k, times in ((8, 0), (7, 1)):
        arch, backend = architecture(index_topk=top_k), RecordingDSA()
        part = randomise(Attention(arch, 1, backend))
        found[top_k] = part(x_TH, places_of(arch, (33,)))
        assert len(backend.selected) == times
    assert relative_error(found[7][:31], found[8][:31]) <= 1e-6
    assert (found[7][31:] - found[8][31:]).abs().amax(1).min() > 1e-4


def test_hyper_connection_maps() -> None:
    arch = architecture()
    part = randomise(HyperConnection(64, arch.hyper, EPS))
    streams_TND = inputs(9, 4, 64)
    found = part(streams_TND)
    slowly = [
        slow.hyper_maps(streams, part.fn, part.base, part.scale, 20, arch.hyper.eps, EPS)
        for streams in streams_TND
    ]
    for ours, theirs in zip(found, map(torch.stack, zip(*slowly, strict=True)), strict=True):
        assert relative_error(ours, theirs) <= 1e-5
    assert_same_gradients(
        part,
        torch.cat([x.flatten() for x in found]),
        torch.cat([torch.stack(x).flatten() for x in zip(*slowly, strict=True)]),
    )
    comb_TNN = found[2]
    assert (comb_TNN.sum(1) - 1).abs().max() <= 2e-5  # columns come last
    assert (comb_TNN.sum(2) - 1).abs().max() > 1e-4  # 20 rounds do not finish peaked rows


def test_stream_head() -> None:
    arch = architecture()
    part = randomise(StreamHead(64, arch.hyper, EPS))
    streams_TND = inputs(5, 4, 64)
    for streams, found in zip(streams_TND, part(streams_TND), strict=True):
        v = streams.reshape(-1)
        mix = (part.fn @ v) * torch.rsqrt((v * v).mean() + EPS)
        expected = torch.sigmoid(mix * part.scale[0] + part.base) + arch.hyper.eps
        assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_sinkhorn_gradient(iterations: int, eps: float) -> None:
    """Finite differences, and the unrolled steps, in float64."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64) * 2
    start = (raw.softmax(-1) + eps).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: sinkhorn(m, iterations, eps), (start,))
    unrolled = start / (start.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        unrolled = unrolled / (unrolled.sum(2, keepdim=True) + eps)
        unrolled = unrolled / (unrolled.sum(1, keepdim=True) + eps)
    torch.testing.assert_close(sinkhorn(start, iterations, eps), unrolled)


def test_write_is_transposed_and_differentiable() -> None:
    """X'[j] = post[j] y + sum over i of comb[i, j] X[i]."""
    parts = [inputs(3, *s, seed=i) for i, s in enumerate([(4, 8), (8,), (4,), (4, 4)])]
    streams, y, post, comb = (p.requires_grad_() for p in parts)
    found = write(streams, y, post, comb)
    expected = post[:, :, None] * y[:, None] + torch.einsum("tij,tid->tjd", comb, streams)
    torch.testing.assert_close(found, expected)
    upstream = inputs(3, 4, 8, seed=9)
    ours = torch.autograd.grad(found, (streams, y, post, comb), upstream)
    theirs = torch.autograd.grad(expected, (streams, y, post, comb), upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_read_and_norm() -> None:
    part = randomise(ReadNorm(64, EPS))
    streams_TND, pre_TN = inputs(3, 4, 64), inputs(3, 4, seed=6)
    expected = slow.rms(torch.einsum("tn,tnd->td", pre_TN, streams_TND), part.weight, EPS)
    assert relative_error(part(streams_TND, pre_TN), expected) <= 1e-5


@pytest.mark.parametrize("is_hashed", [False, True])
@pytest.mark.parametrize("limit", [10.0, 0.3])
def test_experts(is_hashed: bool, limit: float) -> None:
    arch = architecture(swiglu_limit=limit)
    block = make_experts(arch, 0 if is_hashed else 2, TorchMoE(TorchMoEConfig()))
    randomise(block)
    x_TH = inputs(9, 64)
    ids = torch.arange(9)
    routes_Tk = None
    if is_hashed:
        assert isinstance(block, HashMoEBlock) and block.router.selection_bias is None
        block.token_experts.copy_(inputs(128, 8).topk(2).indices)
        routes_Tk = block.fixed_routes(ids, None)
        assert "token_experts" in dict(block.named_buffers())
    else:
        block.router.selection_bias.normal_(generator=torch.Generator().manual_seed(3))
    found = block(x_TH, routes_Tk)
    rows = []
    for token, x in zip(ids.tolist(), x_TH, strict=True):
        scores = torch.log1p((block.router.weight @ x).exp()).sqrt()
        if is_hashed:
            chosen = block.token_experts[token]
        else:
            chosen = (scores + block.router.selection_bias).topk(2).indices
        weights = scores[chosen] / scores[chosen].sum() * 1.5
        w1, w3 = block.shared.gate_up.weight.chunk(2)
        y = slow.expert(x, w1, block.shared.down.weight, w3, limit)
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            w1, w3 = block.experts.gate_up[e].chunk(2)
            y = y + weight * slow.expert(x, w1, block.experts.down[e], w3, limit)
        rows.append(y)
    expected = torch.stack(rows)
    assert relative_error(found, expected) <= 1e-5
    assert_same_gradients(block, found, expected)


def test_replayed_routes_stand_before_the_table() -> None:
    arch = architecture()
    block = make_experts(arch, 0, TorchMoE(TorchMoEConfig()))
    assert isinstance(block, HashMoEBlock)
    block.token_experts[:] = torch.tensor([1, 2])
    replayed = torch.tensor([[5, 6], [-1, -1]])
    found = block.fixed_routes(torch.tensor([0, 3]), replayed)
    assert found.tolist() == [[5, 6], [1, 2]]


def test_every_kind_of_layer_is_tried() -> None:
    kinds = [layer.kind for layer in architecture().layers]
    assert SIZES["layer_types"][:3] == [SLIDING, CSA, HCA]
    assert [kinds[number] for number in KIND_LAYER.values()] == list(KIND_LAYER)
