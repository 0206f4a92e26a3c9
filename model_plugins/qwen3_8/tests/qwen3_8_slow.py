"""The parts of Qwen3.8 written a second time, token by token, from their formulas alone."""

from __future__ import annotations

import torch
from torch import Tensor


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
