"""Conformance kit of DSA back ends: selection, sparse attention with sink, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from prime_rl.testing.backend import BackendConformance, leaves

if TYPE_CHECKING:
    from torch import Tensor


class Sizes(NamedTuple):
    """One shape of inputs."""

    queries: int
    keys: int
    heads: int
    key_heads: int
    rows: int
    """Places for rows per query; some stay empty."""
    shared: bool
    """Values are the first numbers of the key rows."""
    sink: bool


class DSABackendConformance(BackendConformance):
    """Checks of a DSA back end."""

    kind = "dsa_backend"
    key_size: ClassVar[int] = 24
    value_size: ClassVar[int] = 16
    """Sizes of a key row and of a value; a shared row's value is its first numbers."""
    cases: ClassVar[tuple[Sizes, ...]] = (
        Sizes(1, 1, 2, 1, 1, True, False),
        Sizes(9, 14, 4, 1, 6, True, True),
        Sizes(9, 9, 4, 2, 5, False, False),
        Sizes(7, 30, 6, 2, 11, False, True),
    )
    index_heads: ClassVar[int] = 16
    index_size: ClassVar[int] = 16

    def attend_inputs(self, sizes: Sizes) -> tuple[list[Tensor], Tensor]:
        """(q, k, v or k again, sink) in float64, and rows; the same at every call. The first query
        of more than one has no rows."""
        import torch

        generator = torch.Generator().manual_seed(sizes.queries)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q = random(sizes.queries, sizes.heads, self.key_size)
        k = random(sizes.keys, sizes.key_heads, self.key_size)
        v = random(sizes.keys, sizes.key_heads, self.value_size)
        rows = torch.full((sizes.queries, sizes.rows), -1, dtype=torch.int64)
        for query in range(sizes.queries):
            chosen = torch.randperm(sizes.keys, generator=generator)[: sizes.rows]
            count = min(len(chosen), query + (sizes.queries == 1))
            places = torch.randperm(sizes.rows, generator=generator)[:count]
            rows[query, places] = chosen[:count]
        return [q, k, v, random(sizes.heads)], rows

    def run_attend(
        self, tensors: list[Tensor], rows: Tensor, sizes: Sizes, scale: float = 0.3
    ) -> Tensor:
        """The back end on one case."""
        q, k, v, sink = tensors
        result: Tensor = self.plugin().attend(
            q,
            k,
            None if sizes.shared else v,
            rows.to(self.device),
            scale,
            sink if sizes.sink else None,
            self.value_size if sizes.shared else None,
        )
        return result

    def test_attend_forward_and_backward_match_the_reference(self) -> None:
        import torch

        self.skip_without_device()
        for dtype in self.dtypes():
            for sizes in self.cases:
                inputs, rows = self.attend_inputs(sizes)
                ours = leaves(inputs, dtype, self.device)
                ours[3] = leaves([inputs[3]], torch.float32, self.device)[0]
                theirs = [t.detach().double().cpu().requires_grad_() for t in ours]
                found = self.run_attend(ours, rows, sizes)
                expected = reference_attend(theirs, rows, sizes, 0.3, self.value_size)
                assert found.dtype == dtype, f"{sizes}: result is {found.dtype} for {dtype}"
                self.assert_close(found, expected, dtype, f"{sizes}")
                upstream = torch.linspace(-1, 1, expected.numel()).view_as(expected).double()
                found.backward(upstream.to(dtype).to(self.device))
                expected.backward(upstream.to(dtype).double())
                for name, one, other in zip(("q", "k", "v", "sink"), ours, theirs, strict=True):
                    if other.grad is None:
                        continue
                    assert one.grad is not None, f"{sizes}: no gradient of {name}"
                    self.assert_close(one.grad, other.grad, dtype, f"{sizes}: gradient of {name}")

    def test_a_query_without_rows_gives_zero(self) -> None:
        """And a zero gradient, not NaN."""
        self.skip_without_device()
        dtype = self.dtypes()[0]
        for sizes in self.cases[1:]:
            inputs, rows = self.attend_inputs(sizes)
            ours = leaves(inputs, dtype, self.device)
            found = self.run_attend(ours, rows, sizes)
            assert (rows[0] == -1).all() and not found[0].any(), f"{sizes}"
            found.sum().backward()
            assert ours[0].grad is not None and not ours[0].grad[0].any(), f"{sizes}"
            assert all(t.grad is None or t.grad.isfinite().all() for t in ours), f"{sizes}"

    def test_rows_that_nobody_chose_do_not_show(self) -> None:
        self.skip_without_device()
        dtype = self.dtypes()[0]
        sizes = self.cases[-1]
        inputs, rows = self.attend_inputs(sizes)
        before = self.run_attend(leaves(inputs, dtype, self.device), rows, sizes)
        idle = sorted(set(range(sizes.keys)) - set(rows.flatten().tolist()) - {0})
        assert idle
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed[1:3]:
            tensor[idle] *= -3
        after = self.run_attend(leaves(changed, dtype, self.device), rows, sizes)
        assert before.equal(after), "rows that no query chose change the result"

    def select_inputs(self, queries: int, keys: int) -> list[Tensor]:
        """(q, k, w) in float64; weights of both signs."""
        import torch

        generator = torch.Generator().manual_seed(keys)
        shapes = (
            (queries, self.index_heads, self.index_size),
            (keys, self.index_size),
            (queries, self.index_heads),
        )
        return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def test_select_takes_the_best_visible_rows(self) -> None:
        """As sets. In half precision, a row may be exchanged for one of almost the same score."""
        import torch

        self.skip_without_device()
        first = torch.tensor([0, 0, 0, 3, 3, 3, 3, 12, 12])
        last = torch.tensor([0, 1, 3, 4, 7, 9, 12, 12, 20])
        for dtype in self.dtypes():
            for top_k in (1, 4, 50):
                made = self.select_inputs(9, 20)
                inputs = [t.to(dtype).to(self.device) for t in made]
                found = self.plugin().select(
                    *inputs, first.to(self.device), last.to(self.device), top_k
                )
                assert found.dtype == torch.int64 and tuple(found.shape) == (9, min(top_k, 20))
                q, k, w = (t.double().cpu() for t in inputs)
                scores = (w[..., None] * (q @ k.T).relu()).sum(1)
                slack = 1e-5 if dtype == torch.float32 else 0.2
                for query in range(9):
                    chosen = sorted(row for row in found[query].tolist() if row >= 0)
                    low, high = int(first[query]), int(last[query])
                    what = f"{dtype}, top {top_k}, query {query} of rows {low} to {high}"
                    count = min(top_k, high - low)
                    assert len(chosen) == len(set(chosen)) == count, f"{what}: {chosen}"
                    assert all(low <= row < high for row in chosen), f"{what}: {chosen}"
                    left = [row for row in range(low, high) if row not in chosen]
                    if chosen and left:
                        worst = scores[query, chosen].min() + slack
                        assert worst >= scores[query, left].max(), f"{what}: a better row is left"

    def test_equal_scores_do_not_depend_on_other_documents(self) -> None:
        """Many scores are exactly 0; which of these rows a document takes is its own matter."""
        import torch

        self.skip_without_device()
        dtype = self.dtypes()[0]
        given = [t.to(dtype).to(self.device) for t in self.select_inputs(120, 120)]
        keys, weights = given[1].abs(), given[2]
        queries = -torch.ones_like(given[0])  # every product is negative
        for length in (7, 33, 70):
            found = []
            for before, after in ((0, 0), (9, 0), (20, 30)):
                rows = torch.arange(before + length + after, device=self.device)
                is_own = (rows >= before) & (rows < before + length)
                first = torch.where(is_own, before, 0)
                own = (part[: len(rows)] for part in (queries, keys, weights))
                chosen = self.plugin().select(*own, first, rows + 1, 4)[is_own]
                found.append([sorted(r - before for r in one if r >= 0) for one in chosen.tolist()])
            assert found[0] == found[1] == found[2], f"{length} queries"

    def test_select_without_keys(self) -> None:
        """Documents shorter than a compression window have none."""
        import torch

        self.skip_without_device()
        inputs = [t.to(self.dtypes()[0]).to(self.device) for t in self.select_inputs(3, 0)]
        nothing = torch.zeros(3, dtype=torch.int64, device=self.device)
        found = self.plugin().select(*inputs, nothing, nothing, 4)
        assert tuple(found.shape) == (3, 0) and found.dtype == torch.int64


def reference_attend(
    tensors: list[Tensor], rows: Tensor, sizes: Sizes, scale: float, value_size: int
) -> Tensor:
    """The definition, query by query and head by head."""
    import torch

    q, k, v, sink = tensors
    values = k[..., :value_size] if sizes.shared else v
    group = sizes.heads // sizes.key_heads
    outputs = []
    for query in range(sizes.queries):
        own = rows[query][rows[query] >= 0]
        for head in range(sizes.heads):
            keys, mine = k[own, head // group], values[own, head // group]
            logits = keys @ q[query, head] * scale
            if sizes.sink:
                logits = torch.cat((logits, sink[head : head + 1]))
            if not len(own):
                outputs.append(0.0 * values.sum((0, 1)))
                continue
            outputs.append(logits.softmax(0)[: len(own)] @ mine)
    return torch.stack(outputs).view(sizes.queries, sizes.heads, -1)
