"""8-bit numbers: rounding and scales against plain Python, gradients, layers, served weights."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.api.backends import ExpertActivation
from prime_rl.errors import ConfigError
from prime_rl.layers.float8 import (
    Float8,
    dequantise_groups,
    float8_codes,
    power_of_two_ceil,
    quantise_groups,
    round_activations,
    round_groups,
)
from prime_rl.layers.float8_linear import Float8Experts, Float8Linear, make_linear
from prime_rl.layers.float8_weights import (
    dequantise_blocks,
    quantise_blocks,
    round_blocks,
    round_blocks_stochastically,
)
from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.testing.fixed_numbers import fixed_numbers

DATA = Path(__file__).parent / "data"
SCALES = ("exact", "power_of_two", "two_step")


def slow_grid() -> list[float]:
    """Every e4m3 number that is not negative, by the definition of the format."""
    small = [m * 2.0**-9 for m in range(8)]
    return small + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]


GRID = slow_grid()


def slow_round(x: float) -> float:
    """Nearest number of the grid; of two as near, the one with an even mantissa."""
    magnitude = abs(x)
    index = min(range(len(GRID)), key=lambda i: (abs(GRID[i] - magnitude), i % 2))
    return math.copysign(GRID[index], x)


def slow_power_ceil(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def single(x: float) -> float:
    """Rounded to float32."""
    return float(torch.tensor(x, dtype=torch.float64).float())


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_every_number_and_every_tie_rounds_as_defined() -> None:
    assert len(GRID) == 127
    assert GRID[-1] == 448.0
    middles = [(a + b) / 2 for a, b in zip(GRID, GRID[1:], strict=False)]
    near = [math.nextafter(single(m), d) for m in middles for d in (0.0, math.inf)]
    x = torch.tensor([*GRID, *middles, *near, 449.0, 464.0, 1e30, math.inf])
    x = torch.cat((x, -x))
    expected = torch.tensor(
        [slow_round(min(v, 1e4) if v > 0 else max(v, -1e4)) for v in x.tolist()]
    )
    assert float8_codes(x).float().equal(expected)


def test_power_of_two_ceil_beside_every_power() -> None:
    powers = [2.0**e for e in range(-100, 101)]
    x = torch.tensor([*powers, *(p * 1.3 for p in powers)])
    up, down = (torch.nextafter(x, torch.tensor(to)) for to in (math.inf, 0.0))
    x = torch.cat((x, up, down))
    assert power_of_two_ceil(x).tolist() == [slow_power_ceil(v) for v in x.tolist()]
    # 448 2^e is the largest magnitude that the scale 2^e holds.
    amax = torch.tensor([448.0 * 2.0**e for e in range(-20, 20)])
    held = torch.stack((amax, torch.nextafter(amax, torch.tensor(math.inf)))).unsqueeze(-1)
    scales = quantise_groups(held, 1, power_of_two=True).scales[..., 0]
    assert scales.log2().tolist()[0] == list(range(-20, 20))
    assert scales.log2().tolist()[1] == list(range(-19, 21))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("floors", [(0.0, 1e-4), (1e-4, 0.0), (1e-10, 0.0)])
def test_groups_against_plain_python(power_of_two: bool, floors: tuple[float, float]) -> None:
    """Three groups, the last one short; rows from far below the floors to far above."""
    magnitudes = torch.tensor([0.0, 1e-8, 1e-5, 1e-3, 0.1, 30.0])[:, None]
    x = normal(6, 20) * magnitudes
    amax_floor, scale_floor = floors
    found = quantise_groups(
        x, 8, power_of_two=power_of_two, amax_floor=amax_floor, scale_floor=scale_floor
    )
    assert found.codes.shape == (6, 20)
    assert found.scales.shape == (6, 3)
    for row in range(6):
        for group in range(3):
            numbers = x[row, 8 * group : 8 * group + 8].tolist()
            amax = max(*(abs(v) for v in numbers), single(amax_floor))
            scale = max(single(amax * single(1 / 448)), single(scale_floor))
            scale = slow_power_ceil(scale) if power_of_two else scale
            assert found.scales[row, group].item() == scale
            codes = [slow_round(single(v / scale)) for v in numbers]
            assert found.codes[row, 8 * group : 8 * group + 8].float().tolist() == codes
    values = dequantise_groups(found, 8)
    wide = found.scales.repeat_interleave(8, dim=1)[:, :20]
    assert values.equal(found.codes.float() * wide)


@pytest.mark.parametrize("name", ["exact", "power_of_two"])
def test_activations_against_vllm(name: str) -> None:
    """Every code and scale of vLLM 0.31's kernel on an H200 (`tests/vllm_triton.py`)."""
    recorded = load_file(DATA / "vllm_activations.safetensors")
    powers = torch.exp2(torch.tensor([0.0, -14.0, -3.0, 2.0, 5.0, -6.0]))[:, None]
    x = (fixed_numbers(6, 256, seed=11) * powers).bfloat16()
    found = quantise_groups(x, 128, power_of_two=name == "power_of_two", amax_floor=1e-10)
    assert found.codes.view(torch.uint8).equal(recorded[f"{name}.codes"].view(torch.uint8))
    assert found.scales.equal(recorded[f"{name}.scales"])
    values = dequantise_groups(found, 128)
    assert round_activations(x.float(), name == "power_of_two").equal(values)


def test_two_floors_differ() -> None:
    """A scale of at least 1e-4 is 2^-13; an amax of at least 1e-4 is a scale of 2^-22."""
    x = torch.full((1, 4), 1e-6)
    assert quantise_groups(x, 4, power_of_two=True, scale_floor=1e-4).scales.item() == 2.0**-13
    assert quantise_groups(x, 4, power_of_two=True, amax_floor=1e-4).scales.item() == 2.0**-22


def test_no_rows_and_no_numbers() -> None:
    assert quantise_groups(torch.empty(0, 24), 64, power_of_two=True).codes.shape == (0, 24)
    assert round_blocks(torch.empty(0, 4, 4), "exact").shape == (0, 4, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_unchanged(dtype: torch.dtype) -> None:
    x = normal(5, 200).to(dtype).requires_grad_()
    y = round_groups(x, 64, power_of_two=True)
    assert y.dtype == dtype
    assert not y.equal(x)
    upstream = normal(5, 200, seed=1).to(dtype)
    y.backward(upstream)
    assert x.grad is not None
    assert x.grad.equal(upstream)
    # bfloat16 holds the result exactly: rounding again, from float32, changes nothing.
    assert round_groups(y.float(), 64, power_of_two=True).equal(y.float())


def slow_blocks(weight: Tensor, scales: str) -> Float8:
    """Block by block in Python floats, rounded to float32 where float32 computes."""
    rows, columns = weight.shape
    codes = torch.zeros_like(weight)
    grid = torch.zeros(-(-rows // 128), -(-columns // 128))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale = single(max(part.abs().max().item(), single(1e-4)) / 448)
            scale = slow_power_ceil(scale) if scales == "power_of_two" else scale
            inverse = single(1 / scale)
            made = [[slow_round(single(v * inverse)) for v in row] for row in part.tolist()]
            codes[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = torch.tensor(made)
            grid[i, j] = scale
    return Float8(codes, grid)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", [(130, 40), (40, 130), (3, 5)])
def test_blocks_against_plain_python(scales: str, shape: tuple[int, int]) -> None:
    weight = normal(*shape, scale=0.02)
    weight[: shape[0] // 2] *= 1e-4  # its block may lie below the floor
    expected = slow_blocks(weight, scales)
    if scales == "two_step":
        tall = expected.scales.repeat_interleave(128, 0)[: shape[0]]
        first = expected.codes * tall.repeat_interleave(128, 1)[:, : shape[1]]
        expected = slow_blocks(first, "power_of_two")
    found = quantise_blocks(weight, scales)  # type: ignore[arg-type]
    assert found.codes.float().equal(expected.codes)
    assert found.scales.equal(expected.scales)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("name", "shape"), [("tall", (132, 20)), ("wide", (20, 132))])
def test_blocks_against_vllm(name: str, shape: tuple[int, int], scales: str) -> None:
    """Every code and scale of what vLLM 0.31 made of the same weights (`tests/record_vllm.py`)."""
    recorded = load_file(DATA / "vllm_block_cast.safetensors")
    weight = (fixed_numbers(*shape, seed=1) / 64).bfloat16()
    found = quantise_blocks(weight, scales)  # type: ignore[arg-type]
    codes = recorded[f"{name}.{scales}.codes"]
    assert found.codes.view(torch.uint8).equal(codes.view(torch.uint8))
    assert found.scales.equal(recorded[f"{name}.{scales}.scales"])


def test_edges_of_the_block_grid() -> None:
    """BL-085: 1000 rows have 8 scale rows and row 126 uses the first; 576 x 2048 works."""
    weight = torch.full((1000, 8), 0.01)
    weight[128:] = 1.0
    codes, scales = quantise_blocks(weight, "exact")
    assert scales.shape == (8, 1)
    assert scales[:, 0].tolist() == [single(single(0.01) / 448)] + [single(1 / 448)] * 7
    assert codes.float().unique().tolist() == [448.0]
    values = dequantise_blocks(Float8(codes, scales))
    assert values[126, 0].item() == pytest.approx(0.01)
    odd = quantise_blocks(normal(576, 2048), "power_of_two")
    assert odd.scales.shape == (5, 16)
    assert odd.codes.shape == (576, 2048)


def test_stacks_are_cast_matrix_by_matrix() -> None:
    stack = normal(3, 140, 150) * torch.tensor([1.0, 1e-2, 30.0])[:, None, None]
    for scales in SCALES:
        found = round_blocks(stack, scales)  # type: ignore[arg-type]
        alone = [round_blocks(matrix, scales) for matrix in stack]  # type: ignore[arg-type]
        assert found.equal(torch.stack(alone))


def test_weights_on_the_grid_survive_powers_of_two_only() -> None:
    """Weights of a dequantised release: exact scales move most of them, and the second step does
    not bring all back. Of new weights, a quarter of the codes differ after two steps."""
    fresh = normal(512, 512, scale=0.02).bfloat16()
    released = round_blocks(fresh, "power_of_two")
    assert round_blocks(released, "power_of_two").equal(released)
    moved = {s: round_blocks(released, s).ne(released).float().mean().item() for s in SCALES}  # type: ignore[arg-type]
    assert moved["power_of_two"] == 0
    assert 0.7 < moved["exact"] < 0.95
    assert 0.1 < moved["two_step"] < 0.25
    once, twice = (quantise_blocks(fresh, s) for s in ("power_of_two", "two_step"))
    assert once.scales.equal(twice.scales)
    differing = once.codes.float().ne(twice.codes.float()).float().mean().item()
    assert differing == pytest.approx(0.255, abs=0.03)
    errors = {
        s: (round_blocks(fresh.float(), s) - fresh.float()).square().mean().sqrt().item()  # type: ignore[arg-type]
        for s in SCALES
    }
    assert errors["two_step"] / errors["power_of_two"] == pytest.approx(1.39, abs=0.05)


@pytest.mark.parametrize("scales", SCALES)
def test_linear_multiplies_the_rounded_numbers(scales: str) -> None:
    layer = make_linear(200, 140, scales)  # type: ignore[arg-type]
    assert isinstance(layer, Float8Linear)
    layer.weight.data = normal(140, 200, scale=0.05)
    x = normal(7, 200, seed=2).requires_grad_()
    out = layer(x)
    upstream = normal(7, 140, seed=3)
    out.backward(upstream)
    rounded = round_activations(x.detach(), scales != "exact")
    weight = round_blocks(layer.weight.detach(), scales)  # type: ignore[arg-type]
    assert out.detach().equal(rounded @ weight.T)
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad, upstream @ weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, upstream.T @ rounded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scales", SCALES)
def test_linear_in_bfloat16_rounds_once_at_the_end(scales: str) -> None:
    layer = make_linear(256, 32, scales).bfloat16()  # type: ignore[arg-type]
    layer.weight.data = normal(32, 256, scale=0.05).bfloat16()
    x = normal(7, 256, seed=2).bfloat16()
    rounded = round_activations(x.float(), scales != "exact").double()
    weight = round_blocks(layer.weight.float(), scales).double()  # type: ignore[arg-type]
    exact = rounded @ weight.T
    found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=2.0**-10)


def test_an_ordinary_linear_without_scales() -> None:
    assert type(make_linear(4, 4)) is torch.nn.Linear


@pytest.mark.parametrize("scales", SCALES)
def test_experts_are_as_many_linear_layers(scales: str) -> None:
    """The stacked experts give what a GatedMLP of 8-bit layers gives, expert by expert."""
    backend = Float8Experts(TorchMoE(TorchMoEConfig()), scales)  # type: ignore[arg-type]
    gate_up, down = normal(3, 2 * 150, 140, scale=0.1), normal(3, 140, 150, seed=1, scale=0.1)
    x = normal(5, 140, seed=2)
    indices = torch.tensor([[0, 1], [1, 0], [2, 0], [1, 2], [2, 1]])
    weights = normal(5, 2, seed=3).softmax(-1)
    activation = ExpertActivation("gated_silu", limit=0.7)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    found = backend.experts(x, indices, weights, gate_up, down, activation)
    expected = torch.zeros_like(found)
    matrices = []
    for expert in range(3):
        mlp = GatedMLP(140, 150, activation, scales)  # type: ignore[arg-type]
        mlp.gate_up.weight.data, mlp.down.weight.data = gate_up[expert].data, down[expert].data
        matrices += [mlp.gate_up.weight, mlp.down.weight]
        share = (weights * (indices == expert)).sum(1, keepdim=True)
        expected = expected + share * mlp(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    plain = TorchMoE(TorchMoEConfig()).experts(x, indices, weights, gate_up, down, activation)
    assert 0.01 < (found - plain).norm() / plain.norm() < 0.1
    upstream = normal(5, 140, seed=4)
    ours = torch.autograd.grad(found, leaves, upstream)
    theirs = torch.autograd.grad(expected, [x, weights, *matrices], upstream)
    stacked = [*theirs[:2], torch.stack(theirs[2::2]), torch.stack(theirs[3::2])]
    for one, other in zip(ours, stacked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_experts_need_a_back_end_that_rounds() -> None:
    class Plain(TorchMoE):
        capabilities = {"devices": ("cpu",)}

    with pytest.raises(ConfigError, match="'torch', which cannot compute experts in FP8"):
        Float8Experts(Plain(TorchMoEConfig()), "exact")


def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    """20,000 draws: the mean is within five standard deviations of every weight."""
    weight = normal(4, 16, scale=0.02)
    weight[0, :4] = torch.tensor([1e-5, -3e-6, 0.0, 2e-7])  # subnormal codes and below
    draws = 20_000
    stack = weight.repeat(draws, 1, 1)
    served = round_blocks_stochastically(stack, torch.Generator().manual_seed(0))
    scale = slow_power_ceil(single(weight.abs().max().item() / 448))
    low, high = served.amin(0), served.amax(0)
    grid = torch.tensor(GRID) * scale
    for value, one, other in zip(
        weight.flatten().tolist(), low.flatten().tolist(), high.flatten().tolist(), strict=True
    ):
        neighbours = sorted(math.copysign(float(g), value) for g in grid)
        below = max((g for g in neighbours if g <= value), default=0.0)
        above = min((g for g in neighbours if g >= value), default=0.0)
        assert {one, other} <= {below, above}
    spread = (high - low).double()
    error = (served.double().mean(0) - weight.double()).abs()
    assert (error <= 5 * 0.5 * spread / math.sqrt(draws) + 1e-12).all()
    assert (spread > 0).sum() > 50


def test_stochastic_rounding_leaves_the_grid_alone_and_can_be_read_back() -> None:
    fresh = normal(2, 140, 150, scale=0.02)
    generator = torch.Generator().manual_seed(1)
    served = round_blocks_stochastically(fresh, generator)
    assert round_blocks_stochastically(served, generator).equal(served)
    # A server that receives bfloat16 and rounds to nearest finds the same numbers.
    assert round_blocks(served.bfloat16(), "power_of_two").float().equal(served)
    released = round_blocks(fresh.bfloat16(), "power_of_two")
    assert round_blocks_stochastically(released, generator).equal(released.float())


def test_stochastic_rounding_depends_on_its_generator_alone() -> None:
    weight = normal(64, 64, scale=0.02)
    first, second, other = (
        round_blocks_stochastically(weight, torch.Generator().manual_seed(seed))
        for seed in (5, 5, 6)
    )
    assert first.equal(second)
    assert not first.equal(other)


def test_rounding_to_nearest_hides_small_updates_and_stochastic_rounding_does_not() -> None:
    """A weight on the grid moved by a tenth of a step: served unchanged, or a step in one of ten."""
    start = torch.full((128, 128), 0.5)
    start[0, 0] = 0.875
    moved = start + 0.1 * 2.0**-4
    moved[0, 0] = 0.875
    assert round_blocks(moved, "power_of_two").equal(start)
    served = round_blocks_stochastically(moved, torch.Generator().manual_seed(0))
    share = (served - start).gt(0).float().mean().item()
    assert share == pytest.approx(0.1, abs=0.01)
