"""Conformance kit of losses: shapes, signs, independence of documents, finite on finite inputs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, ClassVar

from prime_rl.api import LossInputs, LossOutput
from prime_rl.testing.conformance import PluginConformance

if TYPE_CHECKING:
    from torch import Tensor


class LossConformance(PluginConformance):
    """Checks of a loss. Switch a flag off where the loss is different by design."""

    kind = "loss"
    raises_rewarded_tokens: ClassVar[bool] = True
    """On policy, a positive advantage raises a token's probability and a negative one lowers it."""
    dropped_tokens_are_silent: ClassVar[bool] = True
    """A token that `keep` leaves out has no gradient."""
    mixes_within_documents: ClassVar[bool] = False
    """A token's loss may depend on other tokens of its document (sequence-level ratios)."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Run the loss under test."""
        output = self.plugin().compute(inputs)
        assert isinstance(output, LossOutput), f"expected a LossOutput, found {type(output)}"
        return output

    def test_every_stream_is_per_token(self) -> None:
        """[N] in, [N] out: core averages, and writes every metric into the trace token by token."""
        import torch

        for lengths in ([], [1], [3, 4], [1, 1, 5]):
            count = sum(lengths)
            output = self.compute(example(lengths))
            assert tuple(output.loss.shape) == (count,), (
                f"loss {tuple(output.loss.shape)} for N={count}"
            )
            assert output.loss.dtype == torch.float32, f"loss is {output.loss.dtype}"
            for name, metric in output.metrics.items():
                assert tuple(metric.shape) == (count,), (
                    f"{name} {tuple(metric.shape)} for N={count}"
                )
                assert metric.dtype in (torch.float32, torch.bool), f"{name} is {metric.dtype}"
                assert not metric.requires_grad, f"metric {name} keeps the graph alive; detach it"
            if output.keep is not None:
                assert tuple(output.keep.shape) == (count,) and output.keep.dtype == torch.bool

    def test_no_tokens_still_run_backward(self) -> None:
        """A rank with padding only must enter backward, or the other ranks wait for ever."""
        inputs = example([])
        output = self.compute(inputs)
        output.loss.sum().backward()
        assert inputs.trainer_logprobs.grad is not None

    def test_inputs_are_left_alone(self) -> None:
        inputs = example([3, 4])
        before = [stream.detach().clone() for stream in _streams(inputs)]
        self.compute(inputs)
        for stream, copy in zip(_streams(inputs), before, strict=True):
            assert stream.detach().equal(copy), "compute changes its inputs in place"

    def test_same_inputs_give_same_bits(self) -> None:
        assert self.compute(example([3, 4])).loss.equal(self.compute(example([3, 4])).loss)

    def test_everything_is_finite_for_any_finite_inputs(self) -> None:
        """Log-probability gaps of any size, any advantage: exp(89) already overflows float32."""
        import torch

        values = (0.0, -1e-6, -1.0, -89.0, -1e3, -1e4, -1e8)
        advantages = (0.0, 1.0, -1.0, 1e4, -1e4)
        rows = [(t, i, a) for t in values for i in values for a in advantages]
        trainer, inference, advantage = (torch.tensor(column) for column in zip(*rows, strict=True))
        inputs = LossInputs(
            trainer_logprobs=trainer.requires_grad_(),
            inference_logprobs=inference,
            advantages=advantage,
            segment_ids=torch.arange(len(rows)),
            reference_logprobs=inference.clone(),
        )
        output = self.compute(inputs)
        output.loss.sum().backward()
        gradient = inputs.trainer_logprobs.grad
        assert gradient is not None
        streams = {"loss": output.loss, "gradient": gradient, **output.metrics}
        for name, stream in streams.items():
            bad = (~torch.isfinite(stream.float())).nonzero().flatten().tolist()
            cases = [rows[index] for index in bad[:3]]
            assert not bad, f"{name} is not finite for (trainer, inference, advantage) {cases}"

    def test_documents_do_not_mix(self) -> None:
        """A packed row gives what its documents give alone: losses are not averaged inside."""
        import torch

        whole = example([3, 4])
        packed = self.compute(whole).loss
        first = self.compute(_part(whole, slice(0, 3))).loss
        second = self.compute(_part(whole, slice(3, 7))).loss
        torch.testing.assert_close(packed, torch.cat([first, second]), rtol=1e-6, atol=1e-7)

    def test_tokens_do_not_mix(self) -> None:
        """Changing one token leaves the loss of every other token as it was."""
        import torch

        if self.mixes_within_documents:
            return
        inputs = example([7])
        trainer, advantages = inputs.trainer_logprobs.detach().clone(), inputs.advantages.clone()
        trainer[3] -= 0.05
        advantages[3] += 0.5
        before = self.compute(inputs).loss
        after = self.compute(replace(inputs, trainer_logprobs=trainer, advantages=advantages)).loss
        others = torch.arange(7) != 3
        torch.testing.assert_close(before[others], after[others], rtol=0, atol=0)

    def test_document_numbers_are_only_names(self) -> None:
        inputs = example([3, 4])
        renumbered = replace(inputs, segment_ids=inputs.segment_ids * 5 + 2)
        assert self.compute(inputs).loss.equal(self.compute(renumbered).loss)

    def test_rewarded_tokens_become_likelier(self) -> None:
        """The sign: minimising the loss moves probability towards what was good."""
        import torch

        if not self.raises_rewarded_tokens:
            return
        logprobs = torch.tensor([-0.1, -1.0, -3.0, -0.1, -1.0, -3.0])
        inputs = LossInputs(
            trainer_logprobs=logprobs.clone().requires_grad_(),
            inference_logprobs=logprobs,
            advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
            segment_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
            reference_logprobs=logprobs.clone(),
        )
        self.compute(inputs).loss.sum().backward()
        gradient = inputs.trainer_logprobs.grad
        assert gradient is not None
        assert (gradient[:3] < 0).all(), f"advantage 1 has gradient {gradient[:3].tolist()}"
        assert (gradient[3:] > 0).all(), f"advantage -1 has gradient {gradient[3:].tolist()}"

    def test_dropped_tokens_are_silent(self) -> None:
        """What `keep` says is dropped is dropped: no gradient."""
        import torch

        if not self.dropped_tokens_are_silent:
            return
        trainer = torch.tensor([-0.01, -8.0, -1.0, -0.01, -8.0, -1.0])
        inputs = LossInputs(
            trainer_logprobs=trainer.requires_grad_(),
            inference_logprobs=torch.tensor([-8.0, -0.01, -1.0, -8.0, -0.01, -1.0]),
            advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
            segment_ids=torch.zeros(6, dtype=torch.int64),
            reference_logprobs=torch.full((6,), -1.0),
        )
        output = self.compute(inputs)
        if output.keep is None:
            return
        output.loss.sum().backward()
        gradient = inputs.trainer_logprobs.grad
        assert gradient is not None
        loud = gradient[~output.keep].tolist()
        assert not any(loud), f"tokens that keep drops have gradients {loud}"


def example(lengths: list[int]) -> LossInputs:
    """A small, slightly off-policy row of documents of these lengths; the same at every call."""
    import torch

    count = sum(lengths)
    generator = torch.Generator().manual_seed(count)
    inference = -3 * torch.rand(count, generator=generator) - 0.05
    trainer = inference + 0.02 * torch.randn(count, generator=generator)
    return LossInputs(
        trainer_logprobs=trainer.requires_grad_(),
        inference_logprobs=inference,
        advantages=torch.randn(count, generator=generator),
        segment_ids=torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
        ),
        reference_logprobs=inference - 0.1,
    )


def _streams(inputs: LossInputs) -> list[Tensor]:
    """Every stream that is present."""
    streams = (getattr(inputs, field.name) for field in fields(inputs))
    return [stream for stream in streams if stream is not None]


def _part(inputs: LossInputs, tokens: slice) -> LossInputs:
    """Some tokens as a row of their own."""
    names = [field.name for field in fields(inputs)]
    return LossInputs(**{name: getattr(inputs, name).detach()[tokens] for name in names})
