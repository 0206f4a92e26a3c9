"""Each mixer against the formulas of its definition, in float64, one token at a time."""

import math
from typing import Any

import nemotron_h_cases as cases
import pytest
import torch
from prime_rl_model_nemotron_h import NemotronH
from prime_rl_model_nemotron_h.chunks import make_chunks
from torch import Tensor

from prime_rl.api import Kernels, PackedBatch
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig

LENGTHS = (6, 1, 13)


def block(symbol: str, **changes: Any) -> Any:
    """One block with random weights; those that act exponentially are moderate."""
    config = {"model_type": "nemotron_h", **cases.SIZES, **changes}
    config["hybrid_override_pattern"] = symbol
    plugin = NemotronH(NemotronH.Config())
    architecture = plugin.architecture(config)
    kernels = Kernels(TorchAttention(TorchAttentionConfig()), [TorchMoE(TorchMoEConfig())])
    made: Any = plugin.build(architecture, kernels).layers[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            spread = 0.5 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
            tensor.normal_(0.0, spread, generator=generator)
    return made


def rows(width: int = 64) -> Tensor:
    return torch.empty(sum(LENGTHS), width).normal_(generator=torch.Generator().manual_seed(1))


def batch() -> PackedBatch:
    return PackedBatch.from_documents([[0] * length for length in LENGTHS])


def spans() -> list[range]:
    """Token numbers of each document."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [range(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


def weights(module: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().double() for name, tensor in module.state_dict().items()}


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, 0)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.3, 0.9)])
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba(groups: int, limit: tuple[float, float]) -> None:
    """8 heads of 16 channels, state 16, 4 taps."""
    made = block("M", n_groups=groups, time_step_limit=list(limit)).mamba
    w, x = weights(made), rows()
    projected = x.double() @ w["project.weight"].T
    z, mixed, raw = projected.split((128, 128 + 2 * groups * 16, 8), dim=1)
    out = []
    for span in spans():
        states = torch.zeros(8, 16, 16, dtype=torch.float64)
        for token in span:
            convolved = w["conv.bias"].clone()
            for lag in range(min(4, token - span.start + 1)):
                convolved += w["conv.weight"][:, 3 - lag] * mixed[token - lag]
            channels, b, c = silu(convolved).split((128, groups * 16, groups * 16))
            y = torch.zeros(128, dtype=torch.float64)
            for head in range(8):
                group = slice(16 * (head // (8 // groups)), 16 * (head // (8 // groups)) + 16)
                own = slice(16 * head, 16 * head + 16)
                dt = (raw[token, head] + w["recurrence.dt_bias"][head]).exp().log1p()
                dt = dt.clamp(*limit)
                decay = (-w["recurrence.A_log"][head].exp() * dt).exp()
                states[head] = decay * states[head] + dt * torch.outer(channels[own], b[group])
                y[own] = states[head] @ c[group] + w["recurrence.D"][head] * channels[own]
            gated = (y * silu(z[token])).view(groups, -1)
            normal = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            out.append(w["out.weight"] @ (normal.flatten() * w["norm.weight"]))
    found = made(x, batch(), make_chunks(batch().positions, 8))
    assert_equal(found, torch.stack(out))


def test_attention() -> None:
    """4 query heads over 2 key heads of 16; positions do not enter."""
    made = block("*").attention
    w, x = weights(made), rows()
    q, k, v = (x.double() @ w["qkv.weight"].T).split((64, 32, 32), dim=1)
    out = []
    for span in spans():
        for token in span:
            seen = slice(span.start, token + 1)
            heads = []
            for head in range(4):
                own, shared = slice(16 * head, 16 * head + 16), head // 2
                key = slice(16 * shared, 16 * shared + 16)
                chances = (k[seen, key] @ q[token, own] / 4).softmax(0)
                heads.append(chances @ v[seen, key])
            out.append(w["out.weight"] @ torch.cat(heads))
    assert_equal(made(x, batch()), torch.stack(out))


def test_dense() -> None:
    made = block("-").mlp
    w, x = weights(made), rows().double()
    expected = squared_relu(x @ w["up.weight"].T) @ w["down.weight"].T
    assert_equal(made(x.float()), expected)


@pytest.mark.parametrize("latent", [24, None])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_experts(latent: int | None, normalise: bool, grouped: bool) -> None:
    """8 experts, 3 of them; in groups of 2, of which the 2 best. The bias is so negative that
    choices are below 0: experts of dropped groups must not come back with a score of 0."""
    groups = {"n_group": 4, "topk_group": 2} if grouped else {}
    made = block("E", moe_latent_size=latent, norm_topk_prob=normalise, **groups).mlp
    with torch.no_grad():
        made.router.selection_bias.sub_(3.0)
    w, x = weights(made), rows().double()
    out, chosen = [], []
    for token in x:
        scores = (1 + (-w["router.weight"] @ token).exp()).reciprocal()
        choice = scores + w["router.selection_bias"]
        assert (choice < 0).all()
        allowed = set(range(8))
        if grouped:
            rating = [float(choice[2 * g] + choice[2 * g + 1]) for g in range(4)]
            best = sorted(range(4), key=lambda g: -rating[g])[:2]
            allowed = {2 * g + i for g in best for i in (0, 1)}
        experts = sorted(allowed, key=lambda e: -float(choice[e]))[:3]
        chosen.append(sorted(experts))
        share = scores[experts]
        share = 2.5 * (share / (share.sum() + 1e-20) if normalise else share)
        u = token if latent is None else w["compress.weight"] @ token
        routed = sum(
            weight * (w["experts.down"][e] @ squared_relu(w["experts.gate_up"][e] @ u))
            for e, weight in zip(experts, share, strict=True)
        )
        if latent is not None:
            routed = w["expand.weight"] @ routed
        shared = w["shared.down.weight"] @ squared_relu(w["shared.up.weight"] @ token)
        out.append(routed + shared)
    indices, _ = made.router(x.float())
    assert indices.sort(-1).values.tolist() == chosen
    assert_equal(made(x.float()), torch.stack(out))


@pytest.mark.parametrize("symbol", ["M", "*", "-", "E"])
def test_block_is_one_mixer_on_the_norm_plus_the_input(symbol: str) -> None:
    made = block(symbol)
    x = rows()
    mixer = next(child for name, child in made.named_children() if name != "norm")
    norm = made.norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    chunks = make_chunks(batch().positions, 8)
    arguments = {"M": (batch(), chunks), "*": (batch(),)}.get(symbol, ())
    assert [name for name, _ in made.named_children()][0] == "norm"
    assert len(list(made.children())) == 2
    assert_equal(made(x, batch(), chunks, None), x + mixer(norm, *arguments))


def test_mamba_compiles_to_few_whole_graphs() -> None:
    """One for the first row, then one for rows that fill their last chunk and one for those that do
    not, whatever their number of chunks."""
    from torch._dynamo.testing import CompileCounter

    made, counter = block("M"), CompileCounter()
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for tokens in (64, 100, 37, 200, 128):
        row = PackedBatch.from_documents([[0] * (tokens - 5), [0] * 5])
        arguments = (row, make_chunks(row.positions, 8), None)
        x = torch.empty(tokens, 64).normal_(generator=torch.Generator().manual_seed(tokens))
        with torch.no_grad():
            assert_equal(compiled(x, *arguments), made(x, *arguments))
    assert counter.frame_count <= 3
