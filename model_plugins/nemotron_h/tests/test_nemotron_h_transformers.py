"""Nemotron-H against transformers: logits, all gradients, chosen experts."""

from pathlib import Path

import nemotron_h_cases as cases
import pytest
import torch

from prime_rl.api import PackedBatch
from prime_rl.layers.routing import recording


@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_logits_and_gradients(variant: str, tmp_path: Path) -> None:
    """A checkpoint that transformers wrote; packed here, one document at a time there. Correction:
    transformers' lower clamp of the time step is off, as servers have none."""
    model = cases.theirs(variant)
    model.save_pretrained(tmp_path)
    setup, module = cases.ours(tmp_path)
    texts = cases.documents()
    found, expected = cases.logits_of_ours(module, texts), cases.logits_of_theirs(model, texts)
    cases.assert_close(found, expected, "logits")
    upstream = torch.linspace(-1, 1, expected.numel()).sin().view_as(expected)
    found.backward(upstream)
    expected.backward(upstream)
    gradients = ((key, p.grad) for key, p in module.named_parameters() if p.grad is not None)
    by_name = {
        key.replace("backbone.", "model.", 1): gradient
        for key, gradient in setup.layout.stream(gradients)
    }
    for key, parameter in model.named_parameters():
        gradient = by_name.pop(key, None)
        if gradient is None:  # transformers stacks experts at run time
            stem, _, name = key.rpartition(".")
            gradient = torch.stack([by_name.pop(f"{stem}.{e}.{name}.weight") for e in range(8)])
        cases.assert_close(gradient, parameter.grad, f"gradient of {key}")
    assert not by_name, f"gradients transformers does not have: {sorted(by_name)}"


@pytest.mark.parametrize("variant", ["latent", "grouped"])
def test_the_same_experts_are_chosen(variant: str, tmp_path: Path) -> None:
    model = cases.theirs(variant)
    model.save_pretrained(tmp_path)
    _, module = cases.ours(tmp_path)
    text = cases.documents(37)[0]
    chosen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        if layer.block_type == "moe":
            layer.mixer.gate.register_forward_hook(
                lambda gate, inputs, output, n=number: chosen.update({n: output[2]})
            )
    with torch.no_grad(), recording() as record:
        module(PackedBatch.from_documents([text]))
        model(torch.tensor([text]))
    routes = record.stacked(len(module.layers))
    assert routes is not None and sorted(chosen) == [1, 5]
    for number in range(6):
        found = routes[:, number].sort(-1).values
        if number in chosen:
            assert found.equal(chosen[number].sort(-1).values), f"layer {number}"
        else:
            assert (found == -1).all(), f"layer {number} has no experts"


def test_the_clamp_of_transformers_is_not_followed(tmp_path: Path) -> None:
    """The trainer follows vLLM, which does not clamp time steps from below. With steps near and
    below transformers' 0.001 the two differ, and only the correction makes them equal."""
    model = cases.theirs(time_step_min=0.001)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.sub_(4.0)
            elif name.endswith(".D"):
                parameter.zero_()
    model.save_pretrained(tmp_path)
    _, module = cases.ours(tmp_path)
    texts = cases.documents()
    found, clamped = cases.logits_of_ours(module, texts), cases.logits_of_theirs(model, texts)
    assert (found - clamped).abs().max() > 1e-3 * clamped.abs().max()
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = (0.0, float("inf"))
    cases.assert_close(found, cases.logits_of_theirs(model, texts), "logits without the clamp")


def test_a_limit_in_the_config_is_followed(tmp_path: Path) -> None:
    """vLLM passes `time_step_limit` to the scan; transformers takes the same bounds by hand."""
    model = cases.theirs(time_step_limit=(0.004, 0.05))
    model.save_pretrained(tmp_path)
    setup, module = cases.ours(tmp_path)
    assert setup.architecture.mamba.step_limit == (0.004, 0.05)
    texts = cases.documents()
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = (0.004, 0.05)
    expected = cases.logits_of_theirs(model, texts)
    cases.assert_close(cases.logits_of_ours(module, texts), expected, "logits")
