"""The formulas of DeepSeek V4 once more, one document, one token, one window at a time."""

import math

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def frequencies(theta: float, dim: int, yarn: tuple | None = None) -> list[float]:
    """yarn: (factor, original length, beta_fast, beta_slow)."""
    plain = [theta ** (-2 * k / dim) for k in range(dim // 2)]
    if yarn is None:
        return plain
    factor, original, fast, slow = yarn

    def turns(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(turns(fast)), 0), min(math.ceil(turns(slow)), dim - 1)
    mixed = []
    for k, f in enumerate(plain):
        ramp = min(max((k - low) / max(high - low, 1e-3), 0.0), 1.0)
        mixed.append(f / factor * ramp + f * (1 - ramp))
    return mixed


def rope_tail(x: Tensor, position: int, freqs: list[float], sign: float = 1.0) -> Tensor:
    """x [..., D] of one token; the pairs are the last 2 * len(freqs) numbers."""
    still = x.shape[-1] - 2 * len(freqs)
    parts = [x[..., :still]]
    for k, f in enumerate(freqs):
        angle = torch.tensor(float(position)) * f
        c, s = angle.cos(), sign * angle.sin()
        even, odd = x[..., still + 2 * k], x[..., still + 2 * k + 1]
        parts.append(torch.stack((even * c - odd * s, odd * c + even * s), -1))
    return torch.cat(parts, -1)


def compress(
    x: Tensor, w: dict[str, Tensor], ratio: int, overlap: bool, eps: float, freqs
) -> Tensor:
    """Entries [C, D] of one document. w: wkv, wgate, ape, norm."""
    size = w["norm"].shape[0]
    entries = []
    for j in range(x.shape[0] // ratio):
        keys, gates = [], []
        for place in range(ratio):
            for window, cut in (
                ((j - 1, slice(0, size)), (j, slice(size, None)))
                if overlap
                else ((j, slice(None)),)
            ):
                if window < 0:
                    continue
                token = x[window * ratio + place]
                keys.append((w["wkv"] @ token)[cut])
                gates.append((w["wgate"] @ token + w["ape"][place])[cut])
        weights = torch.stack(gates).softmax(0)
        entry = rms((weights * torch.stack(keys)).sum(0), w["norm"], eps)
        entries.append(rope_tail(entry, j * ratio, freqs))
    return torch.stack(entries) if entries else x.new_zeros(0, size)


def index_scores(
    x: Tensor, latent: Tensor, w: dict, ratio: int, heads: int, eps: float, freqs
) -> list[Tensor]:
    """Scores of the entries that each token of a document sees."""
    keys = compress(x, w["compressor"], ratio, True, eps, freqs)
    size = w["compressor"]["norm"].shape[0]
    scores = []
    for t in range(x.shape[0]):
        q = rope_tail((w["wq_b"] @ latent[t]).view(heads, size), t, freqs)
        weight = w["weights_proj"] @ x[t] * heads**-0.5
        visible = keys[: (t + 1) // ratio]
        scores.append((weight @ torch.relu(q @ visible.T)) * size**-0.5)
    return scores


def attention(
    x: Tensor,
    w: dict,
    *,
    heads: int,
    groups: int,
    window: int,
    eps: float,
    freqs,
    kind: str,
    ratio: int = 0,
    index_heads: int = 0,
    top_k: int = 0,
) -> tuple[Tensor, list[set[int]]]:
    """Output [T, hidden] of one document and the entries each token reads."""
    size = w["kv_norm"].shape[0]
    latent = rms(x @ w["wq_a"].T, w["q_norm"], eps)
    keys = [
        rope_tail(rms(w["wkv"] @ token, w["kv_norm"], eps), t, freqs) for t, token in enumerate(x)
    ]
    entries = x.new_zeros(0, size)
    if kind != "sliding":
        entries = compress(x, w["compressor"], ratio, kind == "csa", eps, freqs)
    scores = (
        index_scores(x, latent, w["indexer"], ratio, index_heads, eps, freqs)
        if kind == "csa"
        else None
    )
    rows, chosen = [], []
    for t in range(x.shape[0]):
        q = rope_tail(rms((w["wq_b"] @ latent[t]).view(heads, size), None, eps), t, freqs)
        visible = set(range((t + 1) // ratio)) if ratio else set()
        if scores is not None:
            visible = set(scores[t].topk(min(top_k, len(visible))).indices.tolist())
        chosen.append(visible)
        own = [keys[s] for s in range(max(0, t - window + 1), t + 1)] + [
            entries[j] for j in sorted(visible)
        ]
        own = torch.stack(own)
        logits = q @ own.T * size**-0.5
        weights = torch.cat((logits, w["sink"][:, None]), 1).softmax(1)[:, :-1]
        mixed = rope_tail(weights @ own, t, freqs, -1.0)
        z = [
            w["wo_a"].view(groups, -1, w["wo_a"].shape[1])[g] @ mixed.view(groups, -1)[g]
            for g in range(groups)
        ]
        rows.append(w["wo_b"] @ torch.cat(z))
    return torch.stack(rows), chosen


def hyper_maps(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
):
    """(pre, post, comb) of one token's streams [N, D]."""
    n = streams.shape[0]
    v = streams.reshape(-1)
    mix = (fn @ v) * torch.rsqrt((v * v).mean() + norm_eps)
    pre = torch.stack([torch.sigmoid(mix[i] * scale[0] + base[i]) + eps for i in range(n)])
    post = torch.stack([2 * torch.sigmoid(mix[n + i] * scale[1] + base[n + i]) for i in range(n)])
    comb = (mix[2 * n :] * scale[2] + base[2 * n :]).view(n, n).softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return pre, post, comb


def expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    gate, up = w1 @ x, w3 @ x
    gate = torch.minimum(gate, torch.tensor(limit))
    return w2 @ (gate * torch.sigmoid(gate) * up.clamp(-limit, limit))
