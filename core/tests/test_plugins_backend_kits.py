"""The kits of MoE and attention back ends reject implementations that are wrong in one way each."""

import inspect
from dataclasses import replace

import pytest
import torch

from prime_rl.api.backends import GATED_SILU
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.testing.attention_backend import AttentionBackendConformance
from prime_rl.testing.conformance import PluginConformance
from prime_rl.testing.moe_backend import MoEBackendConformance


def kit(conformance: type[PluginConformance], plugin: type, config: type) -> PluginConformance:
    class Kit(conformance):  # type: ignore[misc,valid-type]
        plugin_name = "torch"

        def plugin_class(self) -> type:
            return plugin

        def config_class(self) -> type:
            return config

    return Kit()


def failures(kit: PluginConformance) -> set[str]:
    failed = set()
    for name, check in inspect.getmembers(kit, inspect.ismethod):
        if name.startswith("test_") and name != "test_importing_it_is_light":
            try:
                check()
            except Exception:
                failed.add(name)
    return failed


class Narrow:
    """Only float32, to keep the tests quick; the kit's own run has all dtypes."""

    capabilities = {"devices": ("cpu",), "dtypes": ("float32",)}


class MoE(Narrow, TorchMoE):
    pass


class NoActivationNamed(MoE):
    def experts(self, *tensors, activation=None):
        return super().experts(*tensors)


class ForgetsWeights(MoE):
    def experts(self, x, indices, weights, gate_up, down, activation):
        return super().experts(x, indices, torch.ones_like(weights), gate_up, down, activation)


class SwapsGateAndUp(MoE):
    def experts(self, x, indices, weights, gate_up, down, activation):
        swapped = gate_up.roll(gate_up.shape[1] // 2, dims=1)
        return super().experts(x, indices, weights, swapped, down, activation)


class DetachesWeights(MoE):
    def experts(self, x, indices, weights, gate_up, down, activation):
        result = super().experts(x, indices, weights.detach(), gate_up, down, activation)
        return result + 0 * weights.sum()


class FailsWithoutTokens(MoE):
    def experts(self, x, *others, activation):
        assert len(x)
        return super().experts(x, *others, activation=activation)


class DropsOverflow(MoE):
    """Capacity of four tokens per expert."""

    def experts(self, x, indices, weights, gate_up, down, activation):
        seen = torch.nn.functional.one_hot(indices.flatten(), len(down)).cumsum(0)
        rank = seen.gather(1, indices.flatten()[:, None]).view_as(indices)
        return super().experts(x, indices, weights * (rank <= 4), gate_up, down, activation)


class MixesTokens(MoE):
    def experts(self, x, *others, activation):
        mean = x.mean(0) if len(x) else 0.0
        return super().experts(x - mean, *others, activation=activation)


class WritesIntoX(MoE):
    def experts(self, x, *others, activation):
        result = super().experts(x, *others, activation=activation)
        x.data.mul_(2)
        return result


class SaysNothing(MoE):
    capabilities = {}


MATCH = "test_forward_and_backward_match_the_reference"
WRONG_MOE = {
    ForgetsWeights: MATCH,
    SwapsGateAndUp: MATCH,
    DetachesWeights: MATCH,
    FailsWithoutTokens: MATCH,
    DropsOverflow: MATCH,
    MixesTokens: "test_tokens_do_not_mix",
    WritesIntoX: "test_inputs_are_left_alone",
    SaysNothing: "test_declares_where_and_in_what_it_computes",
}


def test_good_moe_backend_passes():
    assert failures(kit(MoEBackendConformance, MoE, TorchMoEConfig)) == set()


@pytest.mark.parametrize("wrong", WRONG_MOE, ids=lambda backend: backend.__name__)
def test_wrong_moe_backend_is_rejected(wrong):
    assert WRONG_MOE[wrong] in failures(kit(MoEBackendConformance, wrong, TorchMoEConfig))


def test_activation_that_is_declared_but_not_computed_is_rejected():
    class Claims(NoActivationNamed):
        capabilities = {
            **Narrow.capabilities,
            "activations": ("gated_silu",),
            "activation_limit": True,
        }

    assert failures(kit(MoEBackendConformance, Claims, TorchMoEConfig)) == {MATCH}


def test_rounding_that_is_declared_but_not_done_is_rejected():
    class Claims(MoE):
        capabilities = {**MoE.capabilities, "activation_rounding": True}

        def experts(self, *arguments, activation=GATED_SILU):
            return super().experts(*arguments, activation=replace(activation, rounding="none"))

    found = failures(kit(MoEBackendConformance, Claims, TorchMoEConfig))
    assert found == {"test_rounding_between_the_matrices"}


class Attention(Narrow, TorchAttention):
    pass


class OneDocument(Attention):
    """BL-028: the borders are ignored."""

    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        return super().attend(q, k, v, cu_seqlens, (len(q),), scale)


class NotCausal(Attention):
    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        outputs = []
        for q_, k_, v_ in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
            heads = [t.transpose(0, 1) for t in (q_, k_, v_)]
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, scale=scale, enable_gqa=True
            )
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)


class OwnScale(Attention):
    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        return super().attend(q, k, v, cu_seqlens, lengths, q.shape[-1] ** -0.5)


class HeadsInterleaved(Attention):
    """Query head h reads key head h % K instead of h // (H / K)."""

    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        repeats = q.shape[1] // k.shape[1]
        return super().attend(
            q, k.repeat(1, repeats, 1), v.repeat(1, repeats, 1), cu_seqlens, lengths, scale
        )


class DetachesKeys(Attention):
    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        result = super().attend(q, k.detach(), v, cu_seqlens, lengths, scale)
        return result + 0 * k.sum()


class LosesTheLastDocument(Attention):
    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        result = super().attend(q, k, v, cu_seqlens, lengths, scale)
        kept = torch.arange(len(q)) < sum(lengths) - (lengths[-1] if len(lengths) > 1 else 0)
        return result * kept[:, None, None]


class ReturnsDouble(Attention):
    def attend(self, q, k, v, cu_seqlens, lengths, scale):
        return super().attend(q, k, v, cu_seqlens, lengths, scale).double()


WRONG_ATTENTION = {
    OneDocument: "test_nothing_crosses_a_document_border",
    NotCausal: "test_later_tokens_do_not_show",
    OwnScale: "test_the_scale_is_the_one_given",
    HeadsInterleaved: MATCH,
    DetachesKeys: MATCH,
    LosesTheLastDocument: MATCH,
    ReturnsDouble: MATCH,
}


def test_good_attention_backend_passes():
    assert failures(kit(AttentionBackendConformance, Attention, TorchAttentionConfig)) == set()


@pytest.mark.parametrize("wrong", WRONG_ATTENTION, ids=lambda backend: backend.__name__)
def test_wrong_attention_backend_is_rejected(wrong):
    found = failures(kit(AttentionBackendConformance, wrong, TorchAttentionConfig))
    assert WRONG_ATTENTION[wrong] in found


class TestTorchMoE(MoEBackendConformance):
    plugin_name = "torch"


class TestTorchAttention(AttentionBackendConformance):
    plugin_name = "torch"
