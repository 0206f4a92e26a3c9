"""What the kits of compute back ends share: device, dtypes, comparison with a float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.testing.conformance import PluginConformance

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# float32: the largest difference, relative to the largest value; sums of tens of terms. The others:
# root mean squares; intermediate products and the result are rounded at 8 or 11 bits.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}


class BackendConformance(PluginConformance):
    """A pure function over tensors, always checked against plain arithmetic in float64."""

    device: ClassVar[str] = "cpu"
    """Where to run. A back end for accelerators only sets "cuda", and is skipped without one."""
    tolerances: ClassVar[dict[str, float]] = TOLERANCES
    """dtype -> accepted difference from the reference, relative to its size."""

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that the back end declares."""
        import torch

        names = self.plugin().capabilities.get("dtypes", ())
        return [getattr(torch, name) for name in names]

    def test_declares_where_and_in_what_it_computes(self) -> None:
        capabilities = self.plugin().capabilities
        for name in ("devices", "dtypes"):
            declared = capabilities.get(name)
            assert isinstance(declared, tuple | list) and declared, f"capability {name} is missing"
        assert set(capabilities["dtypes"]) <= set(self.tolerances), capabilities["dtypes"]
        assert self.device in capabilities["devices"]

    def skip_without_device(self) -> None:
        """Skip the running test when this machine lacks the device."""
        import pytest
        import torch

        if self.device != "cpu" and not torch.cuda.is_available():
            pytest.skip(f"needs {self.device}")

    def assert_close(self, found: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
        """Compare with a float64 tensor at the dtype's tolerance."""
        assert found.shape == expected.shape, f"{what}: {found.shape}, expected {expected.shape}"
        if not expected.numel():
            return
        name = str(dtype).removeprefix("torch.")
        wanted = expected.detach().cpu()
        difference = found.detach().double().cpu() - wanted
        if name == "float32":
            error, scale = difference.abs().max().item(), wanted.abs().max().item()
        else:  # the mean square: one value that rounds over a kink may be far off
            error, scale = (t.square().mean().sqrt().item() for t in (difference, wanted))
        scale = max(scale, 0.1)  # inputs are of order 1
        assert error <= self.tolerances[name] * scale, (
            f"{what} in {name}: off by {error:.3g}, scale {scale:.3g}"
        )


def leaves(tensors: Sequence[Tensor], dtype: Any, device: str) -> list[Tensor]:
    """Copies that collect gradients. Rounded to `dtype` first, so both sides see one input."""
    return [t.to(dtype).to(device).requires_grad_() for t in tensors]
