"""The kit of DSA back ends accepts core's own and rejects what is wrong in one way each."""

import inspect

import pytest
import torch

from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
from prime_rl.testing.dsa_backend import DSABackendConformance


def failures(backend: type) -> set[str]:
    class Kit(DSABackendConformance):
        plugin_name = "torch"

        def plugin_class(self) -> type:
            return backend

        def config_class(self) -> type:
            return TorchDSAConfig

    failed = set()
    for name, check in inspect.getmembers(Kit(), inspect.ismethod):
        if name.startswith("test_") and name != "test_importing_it_is_light":
            try:
                check()
            except Exception:
                failed.add(name)
    return failed


class DSA(TorchDSA):
    """Only float32, to keep the tests quick; the kit's own run has all dtypes."""

    capabilities = {"devices": ("cpu",), "dtypes": ("float32",)}


class ForgetsTheSink(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        return super().attend(q, k, v, rows, scale, None, value_size)


class ScalesTheSink(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        sink = None if sink is None else sink * scale
        return super().attend(q, k, v, rows, scale, sink, value_size)


class ReadsRowZeroWhereThereIsNone(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        return super().attend(q, k, v, rows.clamp_min(0), scale, sink, value_size)


class DetachesValues(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        values = k[..., :value_size] if v is None else v
        result = super().attend(q, k, values.detach(), rows, scale, sink)
        return result + 0 * values.sum()


class WholeRowAsValue(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        size = k.shape[-1] if v is None else None
        return super().attend(q, k, v, rows, scale, sink, size)


class WrongKeyHead(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        v = k[..., :value_size] if v is None else v
        return super().attend(q, k.flip(1), v.flip(1), rows, scale, sink)


class NotANumber(DSA):
    def attend(self, q, k, v, rows, scale, sink=None, value_size=None):
        result = super().attend(q, k, v, rows, scale, sink, value_size)
        return result / (rows >= 0).any(1)[:, None, None]


class LooksAhead(DSA):
    def select(self, q, k, w, first, last, top_k):
        return super().select(q, k, w, first, last + 1, top_k)


class LooksBack(DSA):
    def select(self, q, k, w, first, last, top_k):
        return super().select(q, k, w, 0 * first, last, top_k)


class ForgetsRelu(DSA):
    def select(self, q, k, w, first, last, top_k):
        query = (w[..., None] * q).sum(1, keepdim=True)
        both = torch.cat((query, -query), dim=1)
        signs = torch.tensor([[1.0, -1.0]]).expand(len(q), 2)
        return super().select(both, k, signs, first, last, top_k)


class ForgetsWeights(DSA):
    def select(self, q, k, w, first, last, top_k):
        return super().select(q, k, w.abs(), first, last, top_k)


class OneTooFew(DSA):
    def select(self, q, k, w, first, last, top_k):
        rows = super().select(q, k, w, first, last, top_k)
        if rows.shape[1] > 1:
            rows[:, 0] = -1
        return rows


ATTEND = "test_attend_forward_and_backward_match_the_reference"
SELECT = "test_select_takes_the_best_visible_rows"
WRONG = {
    ForgetsTheSink: ATTEND,
    ScalesTheSink: ATTEND,
    ReadsRowZeroWhereThereIsNone: ATTEND,
    DetachesValues: ATTEND,
    WholeRowAsValue: ATTEND,
    WrongKeyHead: ATTEND,
    NotANumber: "test_a_query_without_rows_gives_zero",
    LooksAhead: SELECT,
    LooksBack: SELECT,
    ForgetsRelu: SELECT,
    ForgetsWeights: SELECT,
    OneTooFew: SELECT,
}


def test_good_backend_passes() -> None:
    assert failures(DSA) == set()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda backend: backend.__name__)
def test_wrong_backend_is_rejected(wrong: type) -> None:
    assert WRONG[wrong] in failures(wrong)


class TestTorchDSA(DSABackendConformance):
    plugin_name = "torch"


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are taken in chunks; a chunk of one query gives what one large chunk gives."""
    from prime_rl.layers import dsa_torch_attend, dsa_torch_select

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(s, generator=generator) for s in ((11, 4, 8), (13, 1, 8)))
    w = torch.randn(11, 4, generator=generator)
    first = torch.zeros(11, dtype=torch.int64)
    last = torch.arange(2, 13)
    results = []
    for limit in (1, 2**26):
        monkeypatch.setattr(dsa_torch_attend, "CHUNK_BYTES", limit)
        monkeypatch.setattr(dsa_torch_select, "CHUNK_BYTES", limit)
        leaf = k.clone().requires_grad_()
        backend = TorchDSA(TorchDSAConfig())
        rows = backend.select(q, k[:, 0], w, first, last, 3)
        out = backend.attend(q, leaf, None, rows, 0.5, None, 8)
        out.square().sum().backward()
        results.append((rows.sort().values, out.detach(), leaf.grad))
    (rows, out, gradient), (other_rows, other_out, other_gradient) = results
    assert rows.equal(other_rows)
    torch.testing.assert_close(out, other_out)
    torch.testing.assert_close(gradient, other_gradient)
