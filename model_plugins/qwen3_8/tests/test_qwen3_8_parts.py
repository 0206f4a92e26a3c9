"""Every part of Qwen3.8 against its formulas written a second time, token by token in float64."""

from functools import partial

import pytest
import qwen3_8_cases as cases
import qwen3_8_slow as slow
import torch
from prime_rl_model_qwen3_8 import delta_rule
from prime_rl_model_qwen3_8.blocks import cut_blocks
from prime_rl_model_qwen3_8.chunks import cut_chunks
from prime_rl_model_qwen3_8.delta_rule import gated_delta_rule
from prime_rl_model_qwen3_8.streams import write
from torch.utils.checkpoint import checkpoint

from prime_rl.api import PackedBatch
from prime_rl.layers.routing import recording

LENGTHS = (37, 1, 5, 90)
LAYER = "model.language_model.layers."


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_document(function, *inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    parts = zip(*(tensor.double().split(LENGTHS) for tensor in inputs), strict=True)
    return torch.cat([function(*part) for part in parts])


@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_whole_model(variant: str) -> None:
    """All parts put together, packed, against one document at a time."""
    config, _, module, weights = cases.random_module(variant)
    with torch.no_grad():
        found = module(PackedBatch.from_documents(cases.documents()))
    expected = torch.cat([slow.hidden(text, weights, config) for text in cases.documents()])
    cases.assert_close(found.double(), expected, "hidden states", 2e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (3, 2, 16, 16), (64, 128, 1), (65, 200, 63)])
@pytest.mark.parametrize("strength", [0.1, 8.0])
def test_delta_rule(lengths: tuple[int, ...], strength: float) -> None:
    """Chunks against the recurrence: outputs and all gradients; weak and strong decays."""
    tokens, key_heads, value_heads = sum(lengths), 2, 6
    q, k = (
        torch.nn.functional.normalize(normal(tokens, key_heads, 8, seed=n), dim=-1) for n in (0, 1)
    )
    v, g, beta = normal(tokens, value_heads, 12), normal(tokens, value_heads), normal(tokens, 6)
    g = -strength * g.exp()
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta.sigmoid())]
    slow_inputs = [x.detach().double().requires_grad_() for x in inputs]
    found = gated_delta_rule(*inputs, cut_chunks(lengths, torch.device("cpu")))
    parts = zip(*(x.split(lengths) for x in slow_inputs), strict=True)
    expected = torch.cat([slow.recurrence(*part) for part in parts])
    cases.assert_close(found.double(), expected, "outputs", 2e-6)
    upstream = normal(*found.shape, seed=7)
    found.backward(upstream)
    expected.backward(upstream.double())
    names = ("q", "k", "v", "g", "beta")
    for name, one, other in zip(names, inputs, slow_inputs, strict=True):
        cases.assert_close(one.grad.double(), other.grad, f"gradient of {name}", 1e-5)


def test_delta_rule_in_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory asks for it: the same outputs and gradients, also inside recomputation."""
    texts, results = cases.documents(), []
    _, _, module, _ = cases.random_module()
    for limit in (2**31, 1, 1):
        monkeypatch.setattr(delta_rule, "GROUP_BYTES", limit)
        batch = PackedBatch.from_documents(texts)
        module.zero_grad()
        if len(results) == 2:
            layer = module.layers[0]
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        hidden = module(batch)
        hidden.square().sum().backward()
        named = module.named_parameters()
        results.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        results[-1]["hidden"] = hidden.detach()
    for other in results[1:]:
        for name, tensor in results[0].items():
            cases.assert_close(other[name], tensor, name, 1e-5)


def test_chunks_cover_every_token_once() -> None:
    """Chunks start at documents; a step's documents are the first ones of the step before."""
    for lengths in (LENGTHS, (1,), (64, 65, 63, 130)):
        chunks = cut_chunks(lengths, torch.device("cpu"))
        rows = chunks.rows_MC.flatten()
        assert rows[chunks.places_T].equal(torch.arange(sum(lengths)))
        assert (rows < sum(lengths)).sum() == sum(lengths)
        assert len(chunks.rows_MC) == sum(chunks.running)
        size = chunks.rows_MC.shape[1]
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        assert sorted(chunks.rows_MC[: len(lengths), 0].tolist()) == starts
        earlier = chunks.rows_MC[: chunks.running[0]]
        begin = chunks.running[0]
        for count in chunks.running[1:]:
            own = chunks.rows_MC[begin : begin + count]
            assert own[:, 0].equal(earlier[:count, 0] + size)
            earlier, begin = own, begin + count
    assert cut_chunks((5, 9), torch.device("cpu")).rows_MC.shape == (2, 16)


def test_delta_net() -> None:
    config, _, module, weights = cases.random_module()
    batch = PackedBatch.from_documents(cases.documents())
    x = normal(sum(LENGTHS), 64)
    chunks = cut_chunks(batch.lengths, x.device)
    own = slow.below(weights, f"{LAYER}0.linear_attn.")
    for gate, function in (("sigmoid", torch.sigmoid), ("silu", torch.nn.functional.silu)):
        module.layers[0].delta.gate = function
        found = module.layers[0].delta(x, batch.positions, chunks)
        expected = by_document(
            lambda u, gate=gate: slow.delta_net(u, own, {**config, "output_gate_type": gate}), x
        )
        cases.assert_close(found.double(), expected, gate, 1e-5)


@pytest.mark.parametrize("variant", ["released", "other switches"])
def test_streams(variant: str) -> None:
    config, _, module, weights = cases.random_module(variant)
    streams = config["hc_count"]
    x, y = 3 * normal(20, streams * 64), normal(20, 64, seed=1)
    for ours, theirs in (
        (module.layers[0].mixer_streams, f"{LAYER}0.attn_hyper_connection."),
        (module.layers[1].mlp_streams, f"{LAYER}1.mlp_hyper_connection."),
        (module.final_streams, "model.language_model.hyper_connection_mixer."),
    ):
        found, strength = ours(x)
        own = slow.below(weights, theirs)
        expected, wanted = slow.read(x.double(), own, streams)
        cases.assert_close(found.double(), expected, "read", 1e-5)
        if "mixer" in theirs:
            assert strength.shape == (20, 0)
            continue
        cases.assert_close(strength.double(), wanted, "weights", 1e-5)
        assert (strength > 0).all() and (strength < 2).all()
        after = slow.write(x.double(), y.double(), wanted)
        cases.assert_close(write(x, y, strength).double(), after, "write", 1e-5)


@pytest.mark.parametrize("variant", ["released", "other switches"])
def test_indexer_and_attention(variant: str) -> None:
    """The sets of tokens, then what attention makes of them."""
    config, architecture, module, weights = cases.random_module(variant)
    batch = PackedBatch.from_documents(cases.documents())
    number = architecture.sparse_layers[-1]
    attention = module.layers[number].attention
    x = normal(sum(LENGTHS), 64)
    rotation = module.rotary(batch.positions, x.dtype)
    blocks = cut_blocks(batch, architecture.sparse.block)
    rows = blocks.rows_of(attention.indexer(x, rotation, blocks))
    width = config["indexer_budget"] + config["indexer_compress_ratio"] - 1
    assert rows.shape == (sum(LENGTHS), width)
    own = slow.below(weights, f"{LAYER}{number}.self_attn.")
    start = 0
    for part in x.double().split(LENGTHS):
        for token, wanted in enumerate(slow.chosen_tokens(part, own, config)):
            found = [row - start for row in rows[start + token].tolist() if row >= 0]
            assert len(found) == len(set(found)) and set(found) == wanted, f"{start}, {token}"
        start += len(part)
    found = attention(x, rotation, blocks, batch)
    expected = by_document(lambda u: slow.attention(u, own, config), x)
    cases.assert_close(found.double(), expected, "attention", 1e-5)


def test_no_blocks_where_everything_is_read() -> None:
    """Documents up to budget + block - 1 tokens: dense attention equals the sparse one."""
    _, architecture, module, _ = cases.random_module()
    attention = module.layers[3].attention
    batch = PackedBatch.from_documents([list(range(11)), list(range(7))])
    x = normal(18, 64)
    rotation = module.rotary(batch.positions, x.dtype)
    blocks = cut_blocks(batch, 4)
    counts = (blocks.rows_of(attention.indexer(x, rotation, blocks)) >= 0).sum(1)
    assert counts.equal(batch.positions + 1)
    dense, sparse = (attention(x, rotation, b, batch) for b in (None, blocks))
    cases.assert_close(dense, sparse, "dense", 1e-6)
    longer = PackedBatch.from_documents([list(range(12))])
    shared = [module._shared(one, x) for one in (batch, longer)]
    assert shared[0].blocks is None and shared[1].blocks is not None
    assert architecture.sparse.budget + architecture.sparse.block == 12


def test_ngram_rows() -> None:
    """With end-of-text tokens, at borders, and with products that wrap around at 64 bits."""
    for variant, changes in (("released", {}), ("two tables", {}), ("released", {"seed": 99})):
        config, architecture, module, weights = cases.random_module(variant, **changes)
        batch = PackedBatch.from_documents(cases.documents())
        for lookup, table in zip(module.ngrams, architecture.tables, strict=True):
            own = slow.below(weights, f"{LAYER}{table.layer}.ple.")
            expected = [
                row for text in cases.documents() for row in slow.ngram_rows(text, own, config)
            ]
            assert lookup.rows(batch.input_ids, batch.positions).tolist() == expected
    large = [126 * 2**56, -5, 2**62 + 3, 7]
    config, _, module, weights = cases.random_module()
    own = slow.below(weights, f"{LAYER}1.ple.")
    batch = PackedBatch.from_documents([large])
    found = module.ngrams[0].rows(batch.input_ids, batch.positions).tolist()
    assert found == slow.ngram_rows(large, own, config)
    assert min(min(row) for row in found) >= 0


def test_ngram_injection() -> None:
    config, _, module, weights = cases.random_module()
    batch = PackedBatch.from_documents(cases.documents())
    x = normal(sum(LENGTHS), 256)
    own = slow.below(weights, f"{LAYER}1.ple.")
    found = module.layers[1].ngram(x, module.ngrams[0](batch), batch.positions)
    parts = zip(x.double().split(LENGTHS), cases.documents(), strict=True)
    expected = torch.cat([slow.ngram(part, text, own, config) for part, text in parts])
    cases.assert_close(found.double(), expected, "injection", 1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_experts(normalise: bool) -> None:
    config, _, module, weights = cases.random_module(norm_topk_prob=normalise)
    x = normal(30, 64)
    with recording() as record:
        found = module.layers[0].mlp(x)
    assert record.stacked(5).shape == (30, 5, 3)
    expected = slow.experts(x.double(), slow.below(weights, f"{LAYER}0.mlp."), config)
    cases.assert_close(found.double(), expected, "experts", 1e-5)


def test_state_ends_with_its_document() -> None:
    """Recurrent state, both convolutions and the n-gram context: the first token of a document does
    not depend on the tokens before it (BL-037)."""
    _, _, module, _ = cases.random_module(layer_types=[cases.LINEAR] * 5)
    texts = cases.documents()
    with torch.no_grad():
        before = module(PackedBatch.from_documents(texts))
        changed = [[9, 9, 9, 9], *texts[1:]]
        after = module(PackedBatch.from_documents(changed))
        alone = module(PackedBatch.from_documents(texts[1:]))
    cases.assert_close(after[4:], before[37:], "after other documents", 1e-5)
    cases.assert_close(alone, before[37:], "alone", 1e-5)
