"""Conformance kit of model families: construction, weights, packing, cost, decode cache.

class TestMine(ModelConformance):
    plugin_name = "mine"
    configs = ({"model_type": "mine", "vocab_size": 128, ...},)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import Decoder, DecodeRequest, Kernels, PackedBatch
from prime_rl.errors import ConfigError
from prime_rl.testing import layout as laws
from prime_rl.testing.conformance import PluginConformance
from prime_rl.testing.plain_backends import CountedAttention, CountedDSA, TokenwiseMoE

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LENGTHS = (5, 1, 17, 2, 17, 9)
"""Documents of the packed rows that are tried."""


class ModelConformance(PluginConformance):
    """Checks of a model family, in float32 on the CPU."""

    kind = "model"
    configs: ClassVar[tuple[Mapping[str, Any], ...]]
    """Tiny config.json tables that together have every kind of layer. Vocabulary at least 32."""
    required_keys: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "num_hidden_layers")
    """Keys of config.json without which reading must fail, naming the key."""
    flops_tolerance: ClassVar[float] = 1e-6
    """Largest relative difference between `flops` and a counted forward."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference of packed and lone documents, relative to the largest value."""
    replays_routes: ClassVar[bool] = True
    """Layers with experts replay recorded routes."""

    def kernels(self, layers: int) -> Kernels:
        """Core's reference back ends."""
        from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
        from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
        from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig

        return Kernels(
            attention=TorchAttention(TorchAttentionConfig()),
            moe=[TorchMoE(TorchMoEConfig())] * layers,
            dsa=TorchDSA(TorchDSAConfig()),
        )

    def module(
        self, config: Mapping[str, Any], seed: int = 0, kernels: Kernels | None = None
    ) -> nn.Module:
        """Random weights; norms and biases, which often start at 1 or 0, are random as well."""
        import torch

        plugin = self.plugin()
        architecture = plugin.architecture(dict(config))
        kernels = kernels or self.kernels(architecture.num_layers)
        module: nn.Module = plugin.build(architecture, kernels)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            plugin.initialise(module, generator)
            for parameter in module.parameters():
                spread = 0.2 if parameter.dim() == 1 else 0.1
                noise = torch.empty(parameter.shape).normal_(0.0, spread, generator=generator)
                parameter.add_(noise.to(parameter.dtype))
        return module

    def documents(self, config: Mapping[str, Any], seed: int = 0) -> list[list[int]]:
        """Random token lists of the lengths LENGTHS."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.plugin().architecture(dict(config)).vocab_size
        return [
            torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS
        ]

    def test_architecture_says_what_core_needs(self) -> None:
        for config in self.configs:
            architecture = self.plugin().architecture(dict(config))
            for name in ("vocab_size", "hidden_size", "num_layers"):
                assert isinstance(getattr(architecture, name), int), name
            assert isinstance(architecture.tie_word_embeddings, bool)

    def test_missing_key_is_named(self) -> None:
        for key in self.required_keys:
            config = {name: value for name, value in self.configs[0].items() if name != key}
            try:
                self.plugin().architecture(config)
            except ConfigError as error:
                assert key in str(error), f"the message does not name {key}: {error}"
            else:
                raise AssertionError(f"a config.json without {key} is accepted")

    def test_serves_its_model_types(self) -> None:
        types = self.plugin().model_types
        assert types and all(config["model_type"] in types for config in self.configs)

    def test_exported_config_describes_the_same_model(self) -> None:
        for config in self.configs:
            plugin = self.plugin()
            architecture = plugin.architecture(dict(config))
            exported = plugin.export_config(dict(config), architecture)
            assert exported["model_type"] == config["model_type"]
            assert plugin.architecture(exported) == architecture

    def test_module_has_the_parts_core_uses(self) -> None:
        import torch

        for config in self.configs:
            module = self.module(config)
            architecture = self.plugin().architecture(dict(config))
            size = (architecture.vocab_size, architecture.hidden_size)
            assert isinstance(module.layers, torch.nn.ModuleList)
            assert len(module.layers) == architecture.num_layers
            assert isinstance(module.embed_tokens, torch.nn.Module)
            assert (module.lm_head is None) == architecture.tie_word_embeddings
            head = module.embed_tokens if module.lm_head is None else module.lm_head
            assert isinstance(head, torch.nn.Module)
            assert isinstance(head.weight, torch.Tensor) and tuple(head.weight.shape) == size
            parameters = {id(parameter) for parameter in module.parameters()}
            for parameter in self.plugin().router_parameters(module):
                assert id(parameter) in parameters, "router_parameters gives a foreign tensor"

    def test_float32_modules_are_called_with_a_tensor(self) -> None:
        """Torch's sharding fails on an accelerator when recomputation calls one with nothing."""
        import torch

        called: list[tuple[Any, ...]] = []
        for config in self.configs:
            module = self.module(config)
            for part in self.plugin().float32_modules(module):
                part.register_forward_pre_hook(
                    lambda _, inputs, named: called.append((*inputs, *named.values())),
                    with_kwargs=True,
                )
            with torch.no_grad():
                module(PackedBatch.from_documents(self.documents(config)))
        assert all(called), "a module of float32_modules takes no input"

    def test_built_on_the_meta_device_and_loaded(self) -> None:
        """No value may exist that loading does not bring: it would be garbage after `to_empty`."""
        import torch

        from prime_rl.models.load import load_weights

        for config in self.configs:
            plugin = self.plugin()
            architecture = plugin.architecture(dict(config))
            with torch.device("meta"):
                module = plugin.build(architecture, self.kernels(architecture.num_layers))
            tensors = [*module.parameters(), *module.buffers()]
            assert all(tensor.is_meta for tensor in tensors), "something was built off the device"
            layout = plugin.layout(architecture)
            real = self.module(config)
            load_weights(module, layout, laws.RecordingSource(laws.saved(real, layout)), "cpu")
            unknown = set(dict(module.named_buffers())) - module.state_dict().keys()
            assert not unknown, f"non-persistent buffers lose their values: {sorted(unknown)}"
            batch = PackedBatch.from_documents(self.documents(config))
            assert _run(module, batch).equal(_run(real, batch))

    def test_initialise_fills_everything_and_repeats(self) -> None:
        import torch

        for config in self.configs:
            plugin = self.plugin()
            architecture = plugin.architecture(dict(config))
            states = []
            for seed in (1, 1, 2):
                module = plugin.build(architecture, self.kernels(architecture.num_layers))
                with torch.no_grad():
                    for tensor in (*module.parameters(), *module.buffers()):
                        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
                plugin.initialise(module, torch.Generator().manual_seed(seed))
                states.append({name: t.clone() for name, t in module.state_dict().items()})
            for name, tensor in states[0].items():
                assert not tensor.isnan().any(), f"initialise leaves {name} as it was"
                assert tensor.equal(states[1][name]), f"{name} depends on more than the generator"
            same = [name for name, tensor in states[0].items() if tensor.equal(states[2][name])]
            assert len(same) < len(states[0]), "the generator is not used"

    def test_weights_survive_save_and_load(self) -> None:
        for config in self.configs:
            layout = self._layout(config)
            laws.assert_round_trip(self.module(config), self.module(config, seed=1), layout)

    def test_shards_load(self) -> None:
        for config in self.configs:
            laws.assert_shards_load(self.module(config), self._layout(config))

    def test_wrong_checkpoints_are_refused(self) -> None:
        for config in self.configs:
            module, other = self.module(config), self.module(config, seed=1)
            laws.assert_wrong_checkpoints_fail(module, other, self._layout(config))

    def test_packed_equals_one_document_at_a_time(self) -> None:
        for config in self.configs:
            module, documents = self.module(config), self.documents(config)
            packed = _gradients(module, [documents])
            alone = _gradients(module, [[document] for document in documents])
            self._assert_close(packed.pop("hidden"), alone.pop("hidden"), "hidden states")
            for name, gradient in alone.items():
                self._assert_close(packed[name], gradient, f"gradient of {name}")

    def test_changing_one_document_leaves_the_others(self) -> None:
        """Bit for bit (BL-028, BL-037), with experts that do not batch tokens."""
        import torch

        for config in self.configs:
            layers = self.plugin().architecture(dict(config)).num_layers
            plain = self.kernels(layers)
            kernels = Kernels(plain.attention, [TokenwiseMoE()] * layers, plain.dsa)
            module, documents = self.module(config, kernels=kernels), self.documents(config)
            before = _run(module, PackedBatch.from_documents(documents)).split(LENGTHS)
            for changed in (2, 5):
                others = [list(document) for document in documents]
                others[changed] = self.documents(config, seed=1)[changed]
                after = _run(module, PackedBatch.from_documents(others)).split(LENGTHS)
                for index in range(len(LENGTHS)):
                    is_same = torch.equal(before[index], after[index])
                    assert is_same == (index != changed), (
                        f"after a change of document {changed}, document {index} "
                        + ("is the same" if is_same else "changed, too")
                    )

    def test_later_tokens_do_not_show(self) -> None:
        for config in self.configs:
            module, document = self.module(config), self.documents(config)[2]
            before = _run(module, PackedBatch.from_documents([document]))
            other = [*document[:-1], (document[-1] + 1) % 32]
            after = _run(module, PackedBatch.from_documents([other]))
            self._assert_close(after[:-1], before[:-1], "tokens before the changed one")
            assert not after[-1].equal(before[-1])

    def test_flops_are_those_of_a_counted_forward(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        for config in self.configs:
            plugin = self.plugin()
            architecture = plugin.architecture(dict(config))
            plain = self.kernels(architecture.num_layers)
            kernels = Kernels(attention=CountedAttention(), moe=plain.moe, dsa=CountedDSA())
            module = self.module(config, kernels=kernels)
            batch = PackedBatch.from_documents(self.documents(config))
            with FlopCounterMode(display=False) as counter:
                _run(module, batch) @ _head(module).T
            counted = counter.get_total_flops()
            stated = plugin.flops(architecture, list(LENGTHS))
            assert abs(stated - counted) <= self.flops_tolerance * counted, (
                f"flops says {stated:.6g}, a forward counts {counted:.6g}"
            )
            split = plugin.flops(architecture, [5, 1]) + plugin.flops(architecture, [17])
            assert plugin.flops(architecture, [5, 1, 17]) == split, "documents are independent"

    def test_decoder_equals_the_packed_forward(self) -> None:
        """New sequences, one token each, longer appendages, other order, reuse of a slot."""
        for config in self.configs:
            module, documents = self.module(config), self.documents(config)
            architecture = self.plugin().architecture(dict(config))
            decoder = self.plugin().decoder(module, architecture, 8, 40)
            if decoder is None:
                continue
            slots = [3, 0, 1, 2, 7, 4]
            texts = dict(zip(slots, documents, strict=True))
            filled = dict.fromkeys(slots, 0)
            self._step(module, decoder, slots, texts, filled)
            for step in range(3):
                for slot in slots:
                    texts[slot] = [*texts[slot], (7 * slot + step) % 32]
                self._step(module, decoder, slots if step else sorted(slots), texts, filled)
            texts[3], texts[1] = [*texts[3], 4, 9, 1], [*texts[1], 6]
            texts[0], filled[0] = [5, 3, 8], 0
            self._step(module, decoder, [1, 3, 0], texts, filled)
            texts[7] = [*texts[7], 2]
            self._step(module, decoder, [7], texts, filled)

    def _step(
        self,
        module: nn.Module,
        decoder: Decoder,
        slots: list[int],
        texts: dict[int, list[int]],
        filled: dict[int, int],
    ) -> None:
        """Append what is new in these slots, in this order, and compare with the whole texts."""
        requests = [
            DecodeRequest(slot, filled[slot], texts[slot][filled[slot] :]) for slot in slots
        ]
        found = decoder.forward(requests)
        batch = PackedBatch.from_documents([texts[slot] for slot in slots])
        expected = _run(module, batch)[batch.cu_seqlens[1:].long() - 1]
        self._assert_same_policy(module, found, expected)
        filled.update((slot, len(texts[slot])) for slot in slots)

    def test_decoder_forgets_old_weights(self) -> None:
        import torch

        for config in self.configs:
            module = self.module(config)
            architecture = self.plugin().architecture(dict(config))
            decoder = self.plugin().decoder(module, architecture, 2, 40)
            if decoder is None:
                continue
            document = self.documents(config)[2]
            decoder.forward([DecodeRequest(0, 0, document)])
            with torch.no_grad():
                newer = self.module(config, seed=1)
                for old, new in zip(module.parameters(), newer.parameters(), strict=True):
                    old.copy_(new)
            decoder.forget()
            found = decoder.forward([DecodeRequest(0, 0, document)])
            expected = _run(module, PackedBatch.from_documents([document]))[-1:]
            self._assert_same_policy(module, found, expected)

    def test_routes_are_replayed(self) -> None:
        """Recorded experts give the same result, others another; -1 routes normally (BL-087)."""
        from dataclasses import replace

        import torch

        from prime_rl.layers.routing import recording

        for config in self.configs if self.replays_routes else ():
            module = self.module(config)
            batch = PackedBatch.from_documents(self.documents(config))
            with recording() as record:
                normal = _run(module, batch)
            routes = record.stacked(len(module.layers))  # type: ignore[arg-type]
            if routes is None:
                continue
            self._assert_close(
                _run(module, replace(batch, routed_experts=routes)), normal, "replay"
            )
            unset = torch.full_like(routes, -1)
            assert _run(module, replace(batch, routed_experts=unset)).equal(normal)
            rolled = torch.where(routes >= 0, routes.roll(1, 0), routes)
            assert not _run(module, replace(batch, routed_experts=rolled)).equal(normal)
            try:
                _run(module, replace(batch, routed_experts=routes[:, 1:]))
            except ValueError:
                continue
            raise AssertionError("routes of a model with fewer layers are accepted (BL-086)")

    def _layout(self, config: Mapping[str, Any]) -> Any:
        plugin = self.plugin()
        return plugin.layout(plugin.architecture(dict(config)))

    def _assert_close(self, found: Tensor, expected: Tensor, what: str) -> None:
        error = (found - expected).abs().max().item()
        bound = self.tolerance * max(expected.abs().max().item(), 1e-6)
        assert error <= bound, f"{what}: off by {error:.3g}, allowed {bound:.3g}"

    def _assert_same_policy(self, module: nn.Module, found: Tensor, expected: Tensor) -> None:
        """KL divergence below 1e-9, which log-probabilities within 4e-5 keep."""
        import torch

        with torch.no_grad():
            head = _head(module).T
            ours, theirs = ((x @ head).log_softmax(-1) for x in (found, expected))
            gap = ((ours - theirs) * theirs.exp()).pow(2).sum(-1).sqrt().max().item()
        assert gap <= 4e-5, f"log-probabilities differ by {gap:.3g}"


def _run(module: nn.Module, batch: PackedBatch) -> Tensor:
    import torch

    with torch.no_grad():
        hidden: torch.Tensor = module(batch)
    return hidden


def _head(module: nn.Module) -> Tensor:
    from prime_rl.models.head import head_weight

    return head_weight(module).detach()


def _gradients(module: nn.Module, rows: list[list[list[int]]]) -> dict[str, Tensor]:
    """Gradients of a fixed projection of all hidden states, and the hidden states."""
    import torch

    module.zero_grad()
    hidden_TH = torch.cat([module(PackedBatch.from_documents(row)) for row in rows])
    upstream = torch.linspace(-1, 1, hidden_TH.numel()).sin().view_as(hidden_TH)
    hidden_TH.backward(upstream)
    named = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return {**named, "hidden": hidden_TH.detach()}
