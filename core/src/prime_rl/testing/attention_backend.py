"""Conformance kit of attention back ends: causal, inside documents, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from prime_rl.testing.backend import BackendConformance, leaves

if TYPE_CHECKING:
    from torch import Tensor

ROWS = ([5], [1], [1, 1, 1], [3, 7, 2], [8, 8], [1, 40, 2])
"""Lengths of the documents in each row that is tried."""


class AttentionBackendConformance(BackendConformance):
    """Checks of an attention back end."""

    kind = "attention_backend"
    head_dim: ClassVar[int] = 16
    value_dim: ClassVar[int] = 16
    """Sizes to test with; a back end that can have them differ should test that."""
    heads: ClassVar[tuple[tuple[int, int], ...]] = ((2, 2), (4, 2), (4, 1))
    """(query heads, key and value heads) to test with."""

    def inputs(self, tokens: int, heads: tuple[int, int]) -> list[Tensor]:
        """Random q, k, v in float64; the same at every call."""
        import torch

        generator = torch.Generator().manual_seed(tokens)
        queries, keys = heads
        shapes = (
            (tokens, queries, self.head_dim),
            (tokens, keys, self.head_dim),
            (tokens, keys, self.value_dim),
        )
        return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def run(self, qkv: list[Tensor], lengths: list[int], scale: float = 0.25) -> Tensor:
        """The back end on one row."""
        import torch

        borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(self.device)
        result: Tensor = self.plugin().attend(*qkv, borders, tuple(lengths), scale)
        return result

    def test_forward_and_backward_match_the_reference(self) -> None:
        import torch

        self.skip_without_device()
        for dtype in self.dtypes():
            for heads in self.heads:
                for lengths in ROWS:
                    what = f"documents {lengths}, heads {heads}"
                    ours = leaves(self.inputs(sum(lengths), heads), dtype, self.device)
                    theirs = [t.detach().double().cpu().requires_grad_() for t in ours]
                    found = self.run(ours, lengths)
                    expected = reference(theirs, lengths, 0.25)
                    assert found.dtype == dtype, f"{what}: result is {found.dtype} for {dtype}"
                    self.assert_close(found, expected, dtype, what)
                    upstream = torch.linspace(-1, 1, expected.numel()).view_as(expected).double()
                    found.backward(upstream.to(dtype).to(self.device))
                    expected.backward(upstream.to(dtype).double())
                    for name, one, other in zip("qkv", ours, theirs, strict=True):
                        assert one.grad is not None and other.grad is not None, f"{what}: {name}"
                        self.assert_close(
                            one.grad, other.grad, dtype, f"{what}: gradient of {name}"
                        )

    def test_the_scale_is_the_one_given(self) -> None:
        self.skip_without_device()
        dtype = self.dtypes()[0]
        qkv = leaves(self.inputs(6, self.heads[0]), dtype, self.device)
        for scale in (0.1, 1.0):
            expected = reference([t.detach().double().cpu() for t in qkv], [6], scale)
            self.assert_close(self.run(qkv, [6], scale), expected, dtype, f"scale {scale}")

    def test_nothing_crosses_a_document_border(self) -> None:
        """Changing one document leaves every bit of the others (BL-037)."""
        self.skip_without_device()
        dtype = self.dtypes()[0]
        lengths = [3, 7, 2]
        inputs = self.inputs(12, self.heads[-1])
        before = self.run(leaves(inputs, dtype, self.device), lengths)
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed:
            tensor[3:10] *= -2
        after = self.run(leaves(changed, dtype, self.device), lengths)
        for document in (slice(0, 3), slice(10, 12)):
            assert before[document].equal(after[document]), "another document's tokens show through"
        assert not before[3:10].equal(after[3:10])

    def test_later_tokens_do_not_show(self) -> None:
        self.skip_without_device()
        dtype = self.dtypes()[0]
        inputs = self.inputs(9, self.heads[0])
        before = self.run(leaves(inputs, dtype, self.device), [9])
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed:
            tensor[6:] += 3
        after = self.run(leaves(changed, dtype, self.device), [9])
        self.assert_close(after[:6], before[:6].double(), dtype, "tokens before the change")


def reference(qkv: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    """The definition: softmax over the keys of the same document up to the query."""
    import torch

    q_THD, k_TKD, v_TKE = qkv
    outputs = []
    repeats = q_THD.shape[1] // k_TKD.shape[1]
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        k_LHD = k_TKD[part].repeat_interleave(repeats, dim=1)
        v_LHE = v_TKE[part].repeat_interleave(repeats, dim=1)
        scores_HLL = torch.einsum("lhd,mhd->hlm", q_THD[part], k_LHD) * scale
        is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights_HLL = scores_HLL.masked_fill(is_later, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hlm,mhe->lhe", weights_HLL, v_LHE))
    return torch.cat(outputs)
