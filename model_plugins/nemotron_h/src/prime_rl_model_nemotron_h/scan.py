"""The Mamba-2 recurrence over packed documents, computed chunk by chunk as matrix products.

    state_t = exp(a_t) * state_(t-1) + B_t (x) u_t        y_t = C_t . state_t

T tokens, C chunks, L tokens of a chunk, G groups, R heads of a group, N = G * R heads, P channels
of a head, S state size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl_model_nemotron_h.carry import states_before
from prime_rl_model_nemotron_h.chunks import Chunks


def scan(u_TNP: Tensor, decay_TN: Tensor, b_TGS: Tensor, c_TGS: Tensor, chunks: Chunks) -> Tensor:
    """y [T, N, P] in float32, as all inputs are. `decay` is the logarithm a of the factor that the
    state is multiplied with before a token; head n reads group n // R. The state starts at 0 in
    every document.
    """
    tokens, groups = b_TGS.shape[:2]
    b_CGLS = chunks.split(b_TGS).transpose(1, 2)
    c_CGLS = chunks.split(c_TGS).transpose(1, 2)
    u_CLGRP = chunks.split(u_TNP).unflatten(2, (groups, -1))
    exact_CLN = running_sums(chunks.split(decay_TN).double(), chunks.before_CL)
    sum_CLN = exact_CLN.float()
    kept_CGRLL = _kept(sum_CLN, (exact_CLN.detach() - sum_CLN.detach()).float(), chunks).unflatten(
        1, (groups, -1)
    )
    scores_CGLL = c_CGLS @ b_CGLS.transpose(2, 3)
    y_CGRLP = (scores_CGLL[:, :, None] * kept_CGRLL) @ u_CLGRP.permute(0, 2, 3, 1, 4)
    y_CLGRP = y_CGRLP.permute(0, 3, 1, 2, 4)
    if chunks.number > 1:
        # The chunk's last row of `kept` says what is left at its end of each token's contribution.
        u_CLGRP = u_CLGRP * kept_CGRLL[:, :, :, -1].permute(0, 3, 1, 2)[..., None]
        added_CGSX = b_CGLS.transpose(2, 3) @ u_CLGRP.transpose(1, 2).flatten(3)
        factor_CLN = sum_CLN.exp() * chunks.began_earlier_CL[..., None]
        factor_CLGR1 = factor_CLN.unflatten(2, (groups, -1))[..., None]
        added_CGSRP = added_CGSX.unflatten(3, u_CLGRP.shape[3:])
        state_CGSRP = states_before(added_CGSRP, factor_CLGR1[:, -1, :, None])
        read_CGLX = c_CGLS @ state_CGSRP.flatten(3)
        read_CLGRP = read_CGLX.unflatten(3, u_CLGRP.shape[3:]).transpose(1, 2)
        y_CLGRP = torch.addcmul(y_CLGRP, read_CLGRP, factor_CLGR1)
    return y_CLGRP.flatten(2, 3).flatten(0, 1)[:tokens]


def running_sums(values_CLN: Tensor, before_CL: Tensor) -> Tensor:
    """Sums over the token itself and the `before` tokens before it.

    Log-many steps; each sum adds only numbers of its own document, so that its last bits depend on
    no other, and pairs them, which is more exact than a plain running sum.
    """
    shift = 1
    while shift < values_CLN.shape[1]:
        earlier_CLN = F.pad(values_CLN[:, :-shift], (0, 0, shift, 0))
        reaches_CL1 = (before_CL >= shift)[..., None]
        values_CLN = values_CLN + torch.where(reaches_CL1, earlier_CLN, 0)
        shift *= 2
    return values_CLN


def _kept(sum_CLN: Tensor, rest_CLN: Tensor, chunks: Chunks) -> Tensor:
    """[C, N, L, L]: the factor that token j's contribution has at token i; 0 where j is not seen.

    After a strong decay the sums are large, and the difference of two rounded ones would miss what
    weak decays add; `rest` is what rounding took from each.
    """
    difference_CNLL = _differences(sum_CLN).add_(_differences(rest_CLN))
    return difference_CNLL.masked_fill(~chunks.visible_CLL[:, None], -math.inf).exp()


def _differences(values_CLN: Tensor) -> Tensor:
    values_CNL = values_CLN.transpose(1, 2)
    return values_CNL[..., :, None] - values_CNL[..., None, :]
