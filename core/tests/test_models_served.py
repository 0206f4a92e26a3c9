"""Weights for FP8 engines: which are rounded, how the draw depends on the version, what stays."""

import pytest
import torch
from torch import Tensor, nn

from prime_rl.api.layout import Leaf, Scale, WeightLayout, rename, stack_experts
from prime_rl.errors import ConfigError
from prime_rl.layers.float8_weights import round_blocks
from prime_rl.models.save import iter_checkpoint
from prime_rl.models.served import check_served, iter_served, rounded_names


class Toy(nn.Module):
    """Two stacked experts, a projection, a frozen one, a gate, a bias that stays float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.02)

        self.experts = normal(2, 130, 140)
        self.project = normal(30, 40)
        self.index = normal(30, 40)
        self.gate = normal(2, 40)
        self.bias = normal(2)
        self.index.requires_grad_(False)


def leaf(name: str) -> Leaf:
    return Leaf(f"{name}.weight", scale=Scale(f"{name}.scale"))


LAYOUT = WeightLayout.of(
    stack_experts("experts", [leaf("e.{e}")], range(2)),
    rename("project", leaf("project")),
    rename("index", leaf("index")),
    rename("gate", "gate.weight"),
    rename("bias", Leaf("gate.bias", dtype="float32")),
)
ROUNDED = {"e.0.weight", "e.1.weight", "project.weight"}
NAMES = ROUNDED | {"index.weight", "gate.weight", "gate.bias"}


def served(module: nn.Module, version: int = 1, seed: int = 0) -> dict[str, Tensor]:
    return dict(iter_served(module, LAYOUT, torch.bfloat16, seed, version))


def test_trained_fp8_matrices_are_on_their_grid_and_the_rest_is_as_published_otherwise() -> None:
    module = Toy()
    assert rounded_names(module, LAYOUT) == ROUNDED
    plain = dict(iter_checkpoint(module, LAYOUT, torch.bfloat16))
    found = served(module)
    assert found.keys() == plain.keys() == NAMES
    for name, tensor in found.items():
        assert tensor.dtype == plain[name].dtype
        if name in ROUNDED:
            assert not tensor.equal(plain[name])
            # What an engine with power-of-two scales makes of it.
            assert round_blocks(tensor, "power_of_two").equal(tensor)
        else:
            assert tensor.equal(plain[name])


def test_draws_differ_by_version_seed_and_tensor_and_are_repeatable() -> None:
    module = Toy()
    module.experts.data[1] = module.experts.data[0]
    first = served(module, version=1)
    assert all(tensor.equal(served(module, version=1)[name]) for name, tensor in first.items())
    for other in (served(module, version=2), served(module, seed=1)):
        assert all(not first[name].equal(other[name]) for name in ROUNDED)
    assert not first["e.0.weight"].equal(first["e.1.weight"])


def test_versions_average_to_the_float32_weights() -> None:
    """200 versions: the mean is nearer to the master than one rounding by their square root."""
    module = Toy()
    versions = [served(module, version=v)["project.weight"].float() for v in range(200)]
    spread = (versions[0] - module.project).norm()
    mean_error = (torch.stack(versions).mean(0) - module.project).norm()
    assert mean_error < 1.3 * spread / 200**0.5


def test_a_release_on_the_grid_is_published_as_it_is() -> None:
    module = Toy()
    for parameter in (module.experts, module.project):
        parameter.data = round_blocks(parameter.data, "power_of_two")
    plain = dict(iter_checkpoint(module, LAYOUT, torch.bfloat16))
    assert all(tensor.equal(plain[name]) for name, tensor in served(module).items())


def test_a_model_without_fp8_matrices_is_refused() -> None:
    module = Toy()
    check_served(module, LAYOUT)
    module.requires_grad_(False)
    with pytest.raises(ConfigError, match="weight_rounding: found 'stochastic_fp8'"):
        check_served(module, LAYOUT)
