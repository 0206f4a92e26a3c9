"""The parts of Qwen3.8 written a second time: one document, token by token, float64.

Each function takes the weights under their released names (`w`, with the part's own prefix taken
off) and the keys of config.json (`c`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, Any]


def below(weights: Weights, prefix: str) -> Weights:
    """The weights under a prefix, without it, float64."""
    return {
        name.removeprefix(prefix): tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def rms(x: Tensor, factor: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * factor


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The delta rule of one document: a state per value head, decayed, corrected, read.

    The four products with the state are batched matrix products, so that a count sees them.
    """
    group = v.shape[1] // k.shape[1]
    keys, queries = k.repeat_interleave(group, 1), q.repeat_interleave(group, 1)
    state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
    outputs = []
    for t in range(v.shape[0]):
        shrink = g[t].exp()[:, None, None]
        state = torch.bmm(shrink, state.flatten(1)[:, None]).view_as(state)
        known = torch.bmm(keys[t][:, None], state)[:, 0]
        change = beta[t][:, None] * (v[t] - known)
        state = state + torch.bmm(keys[t][:, :, None], change[:, None])
        outputs.append(torch.bmm(queries[t][:, None], state)[:, 0])
    return torch.stack(outputs)


def convolve(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """weight [C, 1, K]; the last tap is the token itself."""
    taps = weight.shape[-1]
    rows = []
    for t in range(len(x)):
        total = torch.zeros_like(x[0])
        for k in range(taps):
            source = t - (taps - 1 - k) * dilation
            if source >= 0:
                total = total + weight[:, 0, k] * x[source]
        rows.append(total)
    return torch.stack(rows)


def delta_net(u: Tensor, w: Weights, c: Config) -> Tensor:
    key_heads, value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
    mixed = silu(convolve(u @ w["in_proj_qkv.weight"].T, w["conv1d.weight"]))
    q = mixed[:, : key_heads * dk].view(-1, key_heads, dk)
    k = mixed[:, key_heads * dk : 2 * key_heads * dk].view(-1, key_heads, dk)
    v = mixed[:, 2 * key_heads * dk :].view(-1, value_heads, dv)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(dk)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    a, b = u @ w["in_proj_a.weight"].T, u @ w["in_proj_b.weight"].T
    g = -w["A_log"].exp() * (1 + (a + w["dt_bias"]).exp()).log()
    o = rms(recurrence(q, k, v, g, 1 / (1 + (-b).exp())), w["norm.weight"])
    z = (u @ w["in_proj_z.weight"].T).view_as(o)
    gate = z.sigmoid() if c["output_gate_type"] == "sigmoid" else silu(z)
    return (o * gate).flatten(1) @ w["out_proj.weight"].T


def read(x: Tensor, w: Weights, streams: int) -> tuple[Tensor, Tensor]:
    """Input of the block [T, H] and weights of the writing [T, S]."""
    parts = x.view(len(x), streams, -1)
    normed = rms(parts, 1 + w["hc_norm.weight"].view(streams, -1))
    flat = normed.flatten(1)
    z = silu(flat @ w["input_mix_weight_down.weight"].T / streams)
    gates = (z @ w["input_mix_weight_up.weight"].T).sigmoid().view_as(normed)
    inject = w.get("block_inject_weight.weight", flat.new_zeros(0, flat.shape[1]))
    return (gates * normed).mean(1), 2 * (flat @ inject.T / streams).sigmoid()


def write(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    size = y.shape[1]
    out = x.clone()
    for stream in range(weights.shape[1]):
        out[:, stream * size : (stream + 1) * size] += weights[:, stream : stream + 1] * y
    return out


def turn(x: Tensor, position: int, c: Config) -> Tensor:
    """x [heads, D]: pairs (i, i + R) of the leading 2R numbers."""
    rope = c["rope_parameters"]
    dim = int(c["head_dim"] * rope["partial_rotary_factor"])
    out = x.clone()
    for i in range(dim // 2):
        angle = position * rope["rope_theta"] ** (-2 * i / dim)
        first, second = x[:, i], x[:, i + dim // 2]
        out[:, i] = first * math.cos(angle) - second * math.sin(angle)
        out[:, i + dim // 2] = second * math.cos(angle) + first * math.sin(angle)
    return out


def chosen_tokens(u: Tensor, w: Weights, c: Config) -> list[set[int]]:
    """What every token may read, ties to the earlier block."""
    heads, size = c["indexer_n_heads"], c["indexer_head_dim"]
    block = c["indexer_compress_ratio"]
    fused = u @ w["indexer.index_qk_proj.weight"].T
    raw_k = fused[:, heads * size :]
    block_keys = []
    for start in range(0, len(u) - block + 1, block):
        mean = raw_k[start : start + block].mean(0)
        normed = rms(mean, 1 + w["indexer.k_layernorm.weight"])
        block_keys.append(turn(normed[None], start, c)[0])
    chosen = []
    for t in range(len(u)):
        q = rms(fused[t, : heads * size].view(heads, size), 1 + w["indexer.q_layernorm.weight"])
        q = turn(q, t, c)
        complete = (t + 1) // block
        scores = [sum(max(float(h @ k), 0.0) for h in q) for k in block_keys[:complete]]
        best = sorted(range(complete), key=lambda j: (-scores[j], j))
        kept = best[: c["indexer_budget"] // block]
        tokens = {block * j + i for j in kept for i in range(block)}
        chosen.append(tokens | set(range(block * complete, t + 1)))
    return chosen


def attention(u: Tensor, w: Weights, c: Config) -> Tensor:
    heads, key_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    fused = (u @ w["q_proj.weight"].T).view(len(u), heads, 2 * size)
    q = rms(fused[..., :size], 1 + w["q_norm.weight"])
    k = rms((u @ w["k_proj.weight"].T).view(len(u), key_heads, size), 1 + w["k_norm.weight"])
    v = (u @ w["v_proj.weight"].T).view(len(u), key_heads, size)
    q = torch.stack([turn(row, t, c) for t, row in enumerate(q)])
    k = torch.stack([turn(row, t, c) for t, row in enumerate(k)])
    rows = []
    for t, tokens in enumerate(chosen_tokens(u, w, c)):
        own = sorted(tokens)
        for head in range(heads):
            keys, values = (x[own, head // (heads // key_heads)] for x in (k, v))
            weights = (keys @ q[t, head] / math.sqrt(size)).softmax(0)
            rows.append(weights @ values)
    mixed = torch.stack(rows).view(len(u), heads, size) * fused[..., size:].sigmoid()
    return mixed.flatten(1) @ w["o_proj.weight"].T


def experts(u: Tensor, w: Weights, c: Config) -> Tensor:
    rows = []
    for x in u:
        scores = (w["gate.weight"] @ x).softmax(0)
        best = scores.topk(c["num_experts_per_tok"]).indices.tolist()
        total = sum(scores[best]) if c["norm_topk_prob"] else 1.0
        out = torch.zeros_like(x)
        for expert in best:
            gate, up = (w["experts.gate_up_proj"][expert] @ x).chunk(2)
            inner = w["experts.down_proj"][expert] @ (silu(gate) * up)
            out = out + scores[expert] / total * inner
        gate, up = (w[f"shared_expert.{name}_proj.weight"] @ x for name in ("gate", "up"))
        shared = w["shared_expert.down_proj.weight"] @ (silu(gate) * up)
        rows.append(out + (w["shared_expert_gate.weight"] @ x).sigmoid() * shared)
    return torch.stack(rows)


def ngram_rows(tokens: list[int], w: Weights, c: Config) -> list[list[int]]:
    """Python integers, cut to 64 signed bits by hand."""
    eos = c["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) else eos
    multipliers = w["ple_embedding.layer_multipliers"].tolist()
    sizes = w["ple_embedding.ngram_heads_vocab_sizes"].tolist()
    offsets = w["ple_embedding.ngram_heads_offsets"].tolist()
    heads = c["heads_per_ngram"]
    rows = []
    for t in range(len(tokens)):
        context, is_over = [tokens[t]], False
        for lag in range(1, c["ngram_size"]):
            is_over = is_over or t - lag < 0 or tokens[t - lag] == eos
            context.append(eos if is_over else tokens[t - lag])
        products = [(x * m) % 2**64 for x, m in zip(context, multipliers, strict=True)]
        row = []
        for order in range(2, c["ngram_size"] + 1):
            mixed = products[0]
            for product in products[1:order]:
                mixed ^= product
            signed = mixed - 2**64 if mixed >= 2**63 else mixed
            for head in range((order - 2) * heads, (order - 1) * heads):
                row.append(signed % sizes[head] + offsets[head])
        rows.append(row)
    return rows


def ngram(x: Tensor, tokens: list[int], w: Weights, c: Config) -> Tensor:
    """What is added to the streams."""
    streams, size = c["hc_count"], c["hidden_size"]
    shards = [name for name in w if "shard_" in name]
    shards.sort(key=lambda name: int(name.split("shard_")[1].split(".")[0]))
    table = torch.cat([w[name] for name in shards])
    e = torch.stack([table[row].flatten() for row in ngram_rows(tokens, w, c)])

    def normed(y: Tensor, name: str) -> Tensor:
        return rms(y.view(len(y), streams, size), 1 + w[name].view(streams, size))

    keys = normed(e @ w["key_proj.weight"].T, "norm_key.weight")
    queries = normed(x, "norm_query.weight")
    fit = (keys * queries).sum(-1) / math.sqrt(size)
    root = fit.sign() * fit.abs().clamp_min(1e-6).sqrt()
    value = e @ w["value_proj.weight"].T
    gated = (root.sigmoid()[..., None] * value[:, None]).flatten(1)
    local = normed(gated, "norm_conv.weight").flatten(1)
    return gated + silu(convolve(local, w["conv1d.weight"], c["ngram_size"]))


def hidden(tokens: list[int], weights: Weights, c: Config) -> Tensor:
    """The whole model on one document: final hidden states [T, H]."""
    w = below(weights, "model.language_model.")
    streams = c["hc_count"]
    x = w["embed_tokens.weight"][tokens].repeat(1, streams)
    for layer, kind in enumerate(c["layer_types"]):
        own = below(w, f"layers.{layer}.")
        if layer + 1 in c["ple_layer_ids"]:
            x = x + ngram(x, tokens, below(own, "ple."), c)
        u, strength = read(x, below(own, "attn_hyper_connection."), streams)
        if kind == "linear_attention":
            y = delta_net(u, below(own, "linear_attn."), c)
        else:
            y = attention(u, below(own, "self_attn."), c)
        x = write(x, y, strength)
        u, strength = read(x, below(own, "mlp_hyper_connection."), streams)
        x = write(x, experts(u, below(own, "mlp."), c), strength)
    return read(x, below(w, "hyper_connection_mixer."), streams)[0]
