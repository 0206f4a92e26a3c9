"""DeepSeek V4 against transformers: logits, gradients, chosen entries."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_oracle import (
    by_their_names,
    documents,
    logits_of_ours,
    logits_of_theirs,
    ours,
    relative_error,
    theirs,
)
from deepseek_v4_recording import RecordingDSA

from prime_rl.api import PackedBatch

VARIANTS: dict[str, dict[str, Any]] = {
    "spec": {},
    "clipped experts": {"swiglu_limit": 0.05, "hc_mult": 2, "index_topk": 2},
    "plain rope": {
        "rope_parameters": None,
        "hc_sinkhorn_iters": 3,
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 7,
        },
        "mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe", "hash_moe"],
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients(name: str, tmp_path: Path) -> None:
    """Packed here, one document at a time there: transformers' packed rows leak."""
    model = theirs(**VARIANTS[name])
    setup, module = ours(model, tmp_path)
    texts = documents()
    found, expected = logits_of_ours(module, texts), logits_of_theirs(model, texts)
    assert relative_error(found, expected) <= 1e-4
    upstream = torch.linspace(-1, 1, expected.numel()).sin().view_as(expected)
    found.backward(upstream)
    expected.backward(upstream)
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    by_name = by_their_names(setup, gradients)
    worst = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            assert ".indexer." in key and key not in by_name, key
            continue
        gradient = by_name.pop(key)
        assert gradient.abs().max() > 0, f"{key} has no gradient"
        worst[key] = relative_error(gradient, parameter.grad)
    assert not by_name, f"gradients transformers does not have: {sorted(by_name)}"
    key = max(worst, key=lambda k: worst[k])
    assert worst[key] <= 1e-4, f"gradient of {key}: off by {worst[key]:.3g}"


def test_chosen_entries(tmp_path: Path) -> None:
    """The same sets for every token of every CSA layer, most of them a real choice."""
    model = theirs()
    recorded: list[torch.Tensor] = []
    for layer in model.model.layers:
        indexer = getattr(layer.self_attn.compressor, "indexer", None)
        if indexer is not None:
            indexer.register_forward_hook(lambda *call: recorded.append(call[-1][0]))
    setup, module = ours(model, tmp_path)
    backend = RecordingDSA()
    for block in module.layers:
        block.attention.backend = backend
    texts = documents()
    with torch.no_grad():
        logits_of_theirs(model, texts)
        module(PackedBatch.from_documents(texts))
    layers = [n for n, layer in enumerate(setup.architecture.layers) if layer.kind == "csa"]
    assert len(backend.selected) == len(layers) == 2
    assert len(recorded) == len(layers) * len(texts)
    real = 0
    for index, rows_TN in enumerate(backend.selected):
        base, ours_by_text = 0, rows_TN.split([len(text) for text in texts])
        for number, (text, rows) in enumerate(zip(texts, ours_by_text, strict=True)):
            expected = recorded[number * len(layers) + index].tolist()
            for token, (own, other) in enumerate(zip(rows.tolist(), expected, strict=True)):
                assert {r - base for r in own if r >= 0} == {r for r in other if r >= 0}
                real += (token + 1) // 4 > 4
            base += len(text) // 4
    assert real > 100
