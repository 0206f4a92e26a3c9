"""The model kit accepts the toy model and rejects models that are wrong in one deliberate way."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from prime_rl.api import Decoder, DecodeRequest, Kernels, PackedBatch
from prime_rl.api.layout import WeightLayout, fuse, rename
from prime_rl.configs.base import PluginConfig
from prime_rl.errors import ConfigError
from prime_rl.layers.routing import record
from prime_rl.testing.model import ModelConformance
from prime_rl.testing.toy_model import ToyArchitecture, ToyModel
from prime_rl.testing.toy_module import ToyModule

INSTALLED_ONLY = {"test_importing_it_is_light"}
CONFIG = {"model_type": "toy", "vocab_size": 40, "hidden_size": 8, "num_layers": 3}


class Replaying(ToyModule):
    """The toy, replaying routes as the contract asks."""

    def forward(self, batch: PackedBatch) -> Tensor:
        x_TH = self.embed_tokens(batch.input_ids)
        routes = batch.routed_experts
        if routes is not None and routes.shape[1] != len(self.layers):
            raise ValueError(f"routes of {routes.shape[1]} layers, expected {len(self.layers)}")
        for number, layer in enumerate(self.layers):
            means_TH = self.means(x_TH, batch)
            change_TH = torch.tanh(layer.mix(means_TH))
            if number % 2:
                chosen_T1 = layer.router(x_TH).argmax(dim=-1, keepdim=True)
                if routes is not None:
                    chosen_T1 = self.replayed(routes[:, number], chosen_T1)
                record(number, chosen_T1)
                change_TH = change_TH * layer.gains[chosen_T1]
            x_TH = x_TH + change_TH
        return x_TH

    def means(self, x_TH: Tensor, batch: PackedBatch) -> Tensor:
        sums = torch.cat([part.cumsum(dim=0) for part in x_TH.split(batch.lengths)])
        return sums / (batch.positions + 1)[:, None]

    def replayed(self, routes_Tk: Tensor, chosen_T1: Tensor) -> Tensor:
        return torch.where(routes_Tk >= 0, routes_Tk, chosen_T1)


class Good(ToyModel):
    """Right in everything the kit asks."""

    module_class: ClassVar[type[Replaying]] = Replaying

    def architecture(self, config: dict[str, Any]) -> ToyArchitecture:
        for key in ("vocab_size", "hidden_size", "num_layers"):
            if key not in config:
                raise ConfigError(f"config.json: {key} is missing")
        return super().architecture(config)

    def build(self, architecture: ToyArchitecture, kernels: Kernels) -> nn.Module:
        return self.module_class(architecture)

    def flops(self, architecture: ToyArchitecture, seq_lens: Sequence[int]) -> float:
        width = architecture.hidden_size
        routers = architecture.num_layers // 2
        per_token = architecture.num_layers * width * width + width * architecture.vocab_size
        return 2.0 * sum(seq_lens) * (per_token + routers * width * architecture.num_experts)


def failures(model: type[ToyModel]) -> set[str]:
    class Kit(ModelConformance):
        plugin_name = "toy"
        configs = (CONFIG, {**CONFIG, "tie_word_embeddings": True})
        required_keys = ("vocab_size", "hidden_size", "num_layers")

        def plugin_class(self) -> type:
            return model

        def config_class(self) -> type[PluginConfig]:
            return PluginConfig

    kit = Kit()
    failed = set()
    for name, check in inspect.getmembers(kit, inspect.ismethod):
        if name.startswith("test_") and name not in INSTALLED_ONLY:
            try:
                check()
            except Exception:
                failed.add(name.removeprefix("test_"))
    return failed


def test_a_right_model_passes() -> None:
    assert failures(Good) == set()


class CrossesDocuments(Replaying):
    def means(self, x_TH: Tensor, batch: PackedBatch) -> Tensor:
        counts = torch.arange(1, x_TH.shape[0] + 1)[:, None]
        return x_TH.cumsum(dim=0) / counts


class SeesLaterTokens(Replaying):
    def means(self, x_TH: Tensor, batch: PackedBatch) -> Tensor:
        parts = [part.mean(0).expand_as(part) for part in x_TH.split(batch.lengths)]
        return torch.cat(parts)


class IgnoresReplay(Replaying):
    def replayed(self, routes_Tk: Tensor, chosen_T1: Tensor) -> Tensor:
        return chosen_T1


class ReplaysUnset(Replaying):
    """-1 counts from the end: the last expert, silently."""

    def replayed(self, routes_Tk: Tensor, chosen_T1: Tensor) -> Tensor:
        return routes_Tk


class ComputedBuffer(Replaying):
    def __init__(self, architecture: ToyArchitecture) -> None:
        super().__init__(architecture)
        self.register_buffer("halves", torch.full((8,), 0.5), persistent=False)

    def means(self, x_TH: Tensor, batch: PackedBatch) -> Tensor:
        return super().means(x_TH, batch) * self.halves


def with_module(module: type[Replaying]) -> type[Good]:
    class Wrong(Good):
        module_class = module
        has_decoder = False

    return Wrong


PACKED = {"packed_equals_one_document_at_a_time", "changing_one_document_leaves_the_others"}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (CrossesDocuments, PACKED),
        (SeesLaterTokens, {"later_tokens_do_not_show"}),
        (IgnoresReplay, {"routes_are_replayed"}),
        (ReplaysUnset, {"routes_are_replayed"}),
        (ComputedBuffer, {"built_on_the_meta_device_and_loaded"}),
    ],
)
def test_wrong_modules_are_rejected(module: type[Replaying], expected: set[str]) -> None:
    assert failures(with_module(module)) == expected


class WrongFlops(Good):
    """Counts the embedding as a product."""

    def flops(self, architecture: ToyArchitecture, seq_lens: Sequence[int]) -> float:
        embedding = 2 * architecture.vocab_size * architecture.hidden_size
        return super().flops(architecture, seq_lens) + sum(seq_lens) * embedding


class SkipsOneInitialisation(Good):
    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        for name, parameter in module.named_parameters():
            if name != "layers.1.gains":
                parameter.data.normal_(0.0, 0.5, generator=generator)


class GlobalRandomness(Good):
    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        for parameter in module.parameters():
            parameter.data.normal_(0.0, 0.5)


class MissesOneTensor(Good):
    def layout(self, architecture: ToyArchitecture) -> WeightLayout:
        right = super().layout(architecture)
        entries = [e for name, e in right.entries.items() if name != "layers.2.gains"]
        return WeightLayout.of(entries, right.ignored)


class SwapsNothingButNames(Good):
    """Two halves under one name each, saved in the other order than they are read."""

    def layout(self, architecture: ToyArchitecture) -> WeightLayout:
        right = super().layout(architecture)
        entries = [e for name, e in right.entries.items() if name != "layers.0.mix.weight"]
        swapped = fuse("layers.0.mix.weight", ["model.top", "model.bottom"], sizes=(5, 4))
        return WeightLayout.of(entries, swapped, right.ignored)


class RefusesNothing(Good):
    """An ignore rule so wide that any missing or misspelt tensor passes."""

    def layout(self, architecture: ToyArchitecture) -> WeightLayout:
        from prime_rl.api.layout import ignore

        right = super().layout(architecture)
        return WeightLayout.of(right.entries.values(), right.ignored, ignore("*", "whatever"))


class WrongTie(Good):
    def layout(self, architecture: ToyArchitecture) -> WeightLayout:
        right = super().layout(architecture)
        if not architecture.tie_word_embeddings:
            return right
        extra = rename("lm_head.weight", "lm_head.weight")
        return WeightLayout.of(right.entries.values(), extra)


class DropsAKey(Good):
    def export_config(self, config: dict[str, Any], architecture: Any) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key != "tie_word_embeddings"}


class AcceptsAnything(Good):
    def architecture(self, config: dict[str, Any]) -> ToyArchitecture:
        return ToyModel.architecture(self, {"vocab_size": 40, **config})


class ForeignRouter(Good):
    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(1))]


WEIGHTS = {
    "weights_survive_save_and_load",
    "shards_load",
    "wrong_checkpoints_are_refused",
    "built_on_the_meta_device_and_loaded",
}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (WrongFlops, {"flops_are_those_of_a_counted_forward"}),
        (SkipsOneInitialisation, {"initialise_fills_everything_and_repeats"}),
        (GlobalRandomness, {"initialise_fills_everything_and_repeats"}),
        (MissesOneTensor, WEIGHTS),
        (SwapsNothingButNames, WEIGHTS),
        (RefusesNothing, {"wrong_checkpoints_are_refused"}),
        (WrongTie, WEIGHTS),
        (DropsAKey, {"exported_config_describes_the_same_model"}),
        (AcceptsAnything, {"missing_key_is_named"}),
        (ForeignRouter, {"module_has_the_parts_core_uses"}),
    ],
)
def test_wrong_plugins_are_rejected(model: type[Good], expected: set[str]) -> None:
    assert failures(model) >= expected


class ShiftedDecoder(Decoder):
    """Wraps the toy's decoder and is wrong in one way."""

    def __init__(self, inner: Decoder, fault: str) -> None:
        self.inner = inner
        self.fault = fault

    def forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        if self.fault == "order":
            by_slot = sorted(requests, key=lambda request: request.slot)
            return self.inner.forward(by_slot)
        if self.fault == "last token only":
            requests = [
                r if r.start == 0 else replace(r, tokens=[r.tokens[0]] * len(r.tokens))
                for r in requests
            ]
        if self.fault == "noise":
            return self.inner.forward(requests) * 1.0005
        return self.inner.forward(requests)

    def forget(self) -> None:
        self.inner.forget()


@pytest.mark.parametrize("fault", ["order", "last token only", "noise"])
def test_wrong_decoders_are_rejected(fault: str) -> None:
    class Wrong(Good):
        def decoder(self, *arguments: Any) -> Decoder | None:
            inner = super().decoder(*arguments)
            assert inner is not None
            return ShiftedDecoder(inner, fault)

    assert "decoder_equals_the_packed_forward" in failures(Wrong)


def test_a_decoder_that_keeps_old_weights_is_rejected() -> None:
    import copy

    class Stale(Good):
        def decoder(self, module: nn.Module, *arguments: Any) -> Decoder | None:
            return super().decoder(copy.deepcopy(module), *arguments)

    assert failures(Stale) == {"decoder_forgets_old_weights"}
