"""Conformance kit of MoE back ends: the experts' sum, forward and backward, for any routing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from prime_rl.api.backends import ExpertActivation
from prime_rl.testing.backend import BackendConformance, leaves

if TYPE_CHECKING:
    from torch import Tensor


class Case(NamedTuple):
    """Inputs of one call, float64 but the indices."""

    name: str
    indices_Tk: Tensor
    tensors: list[Tensor]
    """x [T, H], weights [T, k], gate_up [E, 2I, H] or [E, I, H], down [E, H, I]."""
    activation: ExpertActivation


class MoEBackendConformance(BackendConformance):
    """Checks of an MoE back end, for every activation that it declares."""

    kind = "moe_backend"
    hidden: ClassVar[int] = 32
    intermediate: ClassVar[int] = 16
    """Sizes to test with; a kernel that needs multiples of something sets its own."""

    def activations(self) -> list[ExpertActivation]:
        """What the back end declares; one with a limit where it clips."""
        capabilities = self.plugin().capabilities
        kinds = capabilities.get("activations", ("gated_silu",))
        declared = [ExpertActivation(kind) for kind in kinds]
        if capabilities.get("activation_limit"):
            declared.append(ExpertActivation("gated_silu", limit=0.5))
        return declared

    def cases(self) -> list[Case]:
        """Every routing with every activation."""
        import torch

        generator = torch.Generator().manual_seed(0)
        mixed = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(23)])
        routings = {
            "mixed": mixed,
            "one choice": mixed[:, :1],
            "all to one expert": torch.full((9, 1), 4),
            "experts without tokens": torch.tensor([[0, 5], [5, 0], [0, 5]]),
            "one token": torch.tensor([[3, 1]]),
            "no tokens": torch.zeros(0, 2, dtype=torch.int64),
        }
        return [
            Case(f"{name}, {activation}", indices, self._tensors(indices, activation), activation)
            for activation in self.activations()
            for name, indices in routings.items()
        ]

    def _tensors(self, indices_Tk: Tensor, activation: ExpertActivation) -> list[Tensor]:
        import torch

        generator = torch.Generator().manual_seed(len(indices_Tk))
        tokens, choices = indices_Tk.shape
        rows = self.intermediate * (2 if activation.kind == "gated_silu" else 1)
        shapes = ((tokens, self.hidden), (tokens, choices), (6, rows, self.hidden))
        x_TH, scores_Tk, in_ERH = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
        )
        down_EHI = torch.randn(
            (6, self.hidden, self.intermediate), generator=generator, dtype=torch.float64
        )
        weights_Tk = scores_Tk.softmax(dim=-1)
        return [x_TH, weights_Tk, in_ERH * self.hidden**-0.5, down_EHI * self.intermediate**-0.5]

    def run(self, case: Case, tensors: list[Tensor]) -> Tensor:
        """The back end on one case."""
        x_TH, weights_Tk, gate_up_EGH, down_EHI = tensors
        indices_Tk = case.indices_Tk.to(self.device)
        result: Tensor = self.plugin().experts(
            x_TH, indices_Tk, weights_Tk, gate_up_EGH, down_EHI, activation=case.activation
        )
        return result

    def test_forward_and_backward_match_the_reference(self) -> None:
        import torch

        self.skip_without_device()
        for dtype in self.dtypes():
            for case in self.cases():
                ours = leaves(case.tensors, dtype, self.device)
                theirs = [t.detach().double().cpu().requires_grad_() for t in ours]
                found, expected = self.run(case, ours), reference(case, theirs)
                assert found.dtype == dtype, f"{case.name}: result is {found.dtype} for {dtype}"
                self.assert_close(found, expected, dtype, case.name)
                if case.activation.limit is not None and dtype != torch.float32:
                    continue  # rounding decides whether a value at the clip has a gradient
                upstream = torch.linspace(-1, 1, expected.numel()).view_as(expected).double()
                found.backward(upstream.to(dtype).to(self.device))
                expected.backward(upstream.to(dtype).double())
                for what, one, other in zip(GRADIENTS, ours, theirs, strict=True):
                    label = f"{case.name}: gradient of {what}"
                    assert one.grad is not None and other.grad is not None, label
                    self.assert_close(one.grad, other.grad, dtype, label)

    def test_rounding_between_the_matrices(self) -> None:
        """What enters the second matrix, read off with an identity in its place, is rounded."""
        import torch

        from prime_rl.layers.float8 import round_activations

        self.skip_without_device()
        if not self.plugin().capabilities.get("activation_rounding"):
            return
        case = next(case for case in self.cases() if case.name.startswith("one choice"))
        x_TH, _, gate_up, down = case.tensors
        identity = torch.zeros_like(down)
        identity.diagonal(dim1=1, dim2=2).fill_(1)
        ones = torch.ones(case.indices_Tk.shape, dtype=torch.float64)
        for dtype in self.dtypes():
            read = leaves([x_TH, ones, gate_up, identity], dtype, self.device)
            inner_TI = self.run(case, read)[:, : self.intermediate].detach()
            inputs = leaves([x_TH, ones, gate_up, down], dtype, self.device)
            for rounding in ("float8", "float8_power_of_two"):
                rounded_TI = round_activations(inner_TI, rounding == "float8_power_of_two")
                assert not rounded_TI.equal(inner_TI)
                matrices = inputs[3].detach().double().cpu()[case.indices_Tk[:, 0]]
                expected = (matrices @ rounded_TI.double().cpu()[..., None]).squeeze(-1)
                activation = replace(case.activation, rounding=rounding)
                found = self.run(case._replace(activation=activation), inputs)
                self.assert_close(found, expected, dtype, f"{case.name}, {rounding}")

    def test_tokens_do_not_mix(self) -> None:
        """A token's result depends on that token alone: packed rows hold strangers."""
        import torch

        self.skip_without_device()
        dtype = self.dtypes()[0]
        case = self.cases()[0]
        changed = [tensor.clone() for tensor in case.tensors]
        changed[0][5] += 1
        before = self.run(case, leaves(case.tensors, dtype, self.device)).detach()
        after = self.run(case, leaves(changed, dtype, self.device)).detach()
        others = torch.arange(len(before)) != 5
        self.assert_close(after[others], before[others].double(), dtype, "other tokens")
        assert not before[5].equal(after[5])

    def test_inputs_are_left_alone(self) -> None:
        self.skip_without_device()
        case = self.cases()[0]
        tensors = leaves(case.tensors, self.dtypes()[0], self.device)
        before = [tensor.detach().clone() for tensor in tensors]
        self.run(case, tensors)
        for tensor, copy in zip(tensors, before, strict=True):
            assert tensor.detach().equal(copy), "experts changes its inputs in place"


GRADIENTS = ("x", "weights", "gate_up", "down")


def reference(case: Case, tensors: list[Tensor]) -> Tensor:
    """The definition, token by token."""
    import torch

    x_TH, weights_Tk, gate_up_EGH, down_EHI = tensors
    # Zero, but connected: gradients are zeros, not None, when there are no tokens.
    rows = [0 * (x_TH.sum() + weights_Tk.sum() + gate_up_EGH.sum() + down_EHI.sum()) + x_TH[:0]]
    for token in range(len(x_TH)):
        total = torch.zeros_like(x_TH[token])
        for choice, expert in enumerate(case.indices_Tk[token].tolist()):
            inner = _activate(gate_up_EGH[expert] @ x_TH[token], case.activation)
            total = total + weights_Tk[token, choice] * (down_EHI[expert] @ inner)
        rows.append(total[None])
    return torch.cat(rows)


def _activate(inner: Tensor, activation: ExpertActivation) -> Tensor:
    import torch

    if activation.kind == "squared_relu":
        return torch.relu(inner) ** 2
    gate, up = inner.chunk(2)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(gate) * up
