"""RMS norm: the definition in float64, gradients, rounding in half precision."""

import pytest
import torch
from torch import Tensor

from prime_rl.layers.norms import RMSNorm, rms_norm


def definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(
    ("shape", "weight_shape"), [((7, 16), (16,)), ((3, 5, 16), (16,)), ((9, 5, 16), (5, 16))]
)
def test_values_and_gradients(
    shape: tuple[int, ...], weight_shape: tuple[int, ...], scale: float
) -> None:
    """With eps large enough to matter at the smallest scale, and rows of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * scale
    x[1] = 0
    weight, upstream = torch.randn(weight_shape, generator=generator), torch.randn(shape)
    ours = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    found, expected = rms_norm(*ours, 1e-6), definition(*exact, 1e-6)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)
    found.backward(upstream)
    expected.backward(upstream.double())
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        error = (one.grad.double() - other.grad).abs().max()
        assert error <= 1e-5 * other.grad.abs().max()


def test_slices_of_a_larger_tensor() -> None:
    """Queries and keys are normalised where they stand among queries, keys and values."""
    fused = torch.randn(6, 5, 8, requires_grad=True)
    weight = torch.rand(3, 8)
    rms_norm(fused[:, :3], weight, 1e-6).sum().backward()
    assert fused.grad is not None and (fused.grad[:, 3:] == 0).all()
    apart = fused.detach()[:, :3].clone().requires_grad_()
    definition(apart, weight, 1e-6).sum().backward()
    assert apart.grad is not None and torch.allclose(fused.grad[:, :3], apart.grad, atol=1e-5)


def test_half_precision_rounds_before_the_weight() -> None:
    """Statistics in float32, one rounding before the weight, one after."""
    norm = RMSNorm(256, 1e-6)
    x = (torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 100).bfloat16()
    norm.weight.data = torch.linspace(-2, 2, 256)
    expected = definition(x.float(), torch.ones(256), 1e-6).bfloat16() * norm.weight.bfloat16()
    assert norm(x).dtype == torch.bfloat16 and norm(x).equal(expected)
