"""Conformance kit of weight transports: what arrives is what was sent, and nothing else arrives.

Also what tests of several transports share: a set of awkward tensors and a comparison of bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import NamedTensor
from prime_rl.errors import WeightTransferError
from prime_rl.testing.conformance import PluginConformance

if TYPE_CHECKING:
    from torch import Tensor

    from prime_rl.api import Receiver

KNOWN_CAPABILITIES = ("lora", "final_broadcast", "pauses_engines")


class WeightTransportConformance(PluginConformance):
    """Checks of a weight transport whose two ends can live in one process."""

    kind = "weight_transport"
    carries_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    """Dtypes to send."""
    leaves_files: ClassVar[bool] = True
    """The payload lies in files of the version's directory, which the kit may damage."""
    finds_flipped_bits: ClassVar[bool] = False
    """Checksums: a changed bit is found, not only a missing end."""

    def transfer(
        self, version: int, directory: Path, tensors: Iterable[NamedTensor], ranks: int = 1
    ) -> list[dict[str, Tensor]]:
        """Send from `ranks` ranks to two engines; what each engine received, copied.

        Sender and receivers run at the same time, so that a transport that needs its peer works.
        """
        held = list(tensors)
        plugin = self.plugin()
        failures: list[BaseException] = []

        def send(rank: int) -> None:
            sender = plugin.sender(rank, ranks)
            try:
                sender.send(version, directory, iter(held))
            except BaseException as error:  # carried to the test's thread
                failures.append(error)
            finally:
                sender.close()

        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "send did not return within 60 s"
        if failures:
            raise failures[0]
        return [self.received(plugin.receiver(index, 2), version, directory) for index in range(2)]

    def received(self, receiver: Receiver, version: int, directory: Path) -> dict[str, Tensor]:
        """Everything one engine receives, copied while the iterator stands at it."""
        found: dict[str, Tensor] = {}
        for name, tensor in receiver.receive(version, directory):
            assert name not in found, f"{name} was delivered twice"
            found[name] = tensor.clone()
        receiver.close()
        return found

    def test_capabilities_are_statements(self) -> None:
        capabilities = self.plugin_class().capabilities  # type: ignore[attr-defined]
        for name in KNOWN_CAPABILITIES:
            assert isinstance(capabilities.get(name, False), bool), (
                f"capabilities[{name!r}] is {capabilities[name]!r}, expected True or False"
            )

    def test_every_engine_gets_the_same_names_shapes_dtypes_and_bits(self, tmp_path: Path) -> None:
        sent = awkward_tensors(self.carries_dtypes)
        for found in self.transfer(1, tmp_path, sent):
            assert differences(dict(sent), found) == []

    def test_later_versions_replace_earlier_ones(self, tmp_path: Path) -> None:
        for version in (1, 2, 5):
            directory = tmp_path / f"step_{version}"
            directory.mkdir()
            sent = [NamedTensor(n, t + version) for n, t in awkward_tensors(("float32",))]
            for found in self.transfer(version, directory, sent):
                assert differences(dict(sent), found) == []

    def test_every_rank_exhausts_the_iterator(self, tmp_path: Path) -> None:
        """Gathering shards is a collective: a rank that stops early leaves the others waiting."""
        plugin = self.plugin()
        sent = awkward_tensors(("float32",))
        for rank in (1, 0):
            counts = [0]
            plugin.sender(rank, 2).send(1, tmp_path, _counted(sent, counts))
            assert counts[0] == len(sent), f"rank {rank} took {counts[0]} of {len(sent)} tensors"

    def test_the_senders_tensors_are_left_alone(self, tmp_path: Path) -> None:
        sent = awkward_tensors(self.carries_dtypes)
        copies = [NamedTensor(name, tensor.clone()) for name, tensor in sent]
        self.transfer(1, tmp_path, sent)
        assert differences(dict(copies), dict(sent)) == []

    def test_a_version_that_was_not_sent_is_refused(self, tmp_path: Path) -> None:
        self.expect_refusal(self.plugin().receiver(0, 1), 1, tmp_path, "nothing was sent")

    def test_damage_is_found_before_the_first_tensor(self, tmp_path: Path) -> None:
        """Cut short, one bit flipped, or gone: no engine may serve such weights."""
        if not self.leaves_files:
            return
        self.transfer(1, tmp_path, awkward_tensors(("float32",)))
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        assert files, "no files in the version's directory; set leaves_files = False"
        for path in files:
            whole = path.read_bytes()
            if not whole:
                continue
            damaged = {"cut short": whole[:-1]}
            if self.finds_flipped_bits:
                flipped = bytearray(whole)
                flipped[len(whole) // 2] ^= 1
                damaged["a flipped bit"] = bytes(flipped)
            for what, content in damaged.items():
                path.write_bytes(content)
                self.expect_refusal(self.plugin().receiver(0, 1), 1, tmp_path, f"{path}: {what}")
            path.unlink()
            self.expect_refusal(self.plugin().receiver(0, 1), 1, tmp_path, f"{path} is missing")
            path.write_bytes(whole)

    def expect_refusal(self, receiver: Receiver, version: int, directory: Path, why: str) -> None:
        """The receiver raises WeightTransferError before it yields anything."""
        taken = []
        try:
            for item in receiver.receive(version, directory):
                taken.append(item.name)
        except WeightTransferError as error:
            assert str(error), "a WeightTransferError without text"
            assert not taken, f"{why}: found out after {len(taken)} tensors were yielded"
            return
        raise AssertionError(f"{why}: accepted, {len(taken)} tensors were yielded")


def awkward_tensors(dtypes: Iterable[str] = ("float32", "bfloat16")) -> list[NamedTensor]:
    """Names and shapes that break careless code: views, transposes, scalars, empty and odd sizes,
    negative zero, NaN with a payload, subnormal numbers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found: list[NamedTensor] = []
    for name in dtypes:
        dtype: Any = getattr(torch, name)
        base = torch.randn(6, 5, generator=generator).to(dtype)
        special = torch.tensor([0.0, -0.0, 1e-40, float("inf"), -float("inf")]).to(dtype)
        odd = torch.tensor([0x7FC1], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        found += [
            NamedTensor(f"model.layers.0.{name}.weight", base),
            NamedTensor(f"model.layers.0.{name}.rows", base[2:4]),
            NamedTensor(f"model.layers.0.{name}.columns", base[:, 1:3]),
            NamedTensor(f"model.layers.1.{name}.transposed", base.T),
            NamedTensor(f"model.layers.1.{name}.scalar", base[0, 0]),
            NamedTensor(f"model.layers.1.{name}.empty", base[:0]),
            NamedTensor(f"model.layers.10.{name}.odd", base.flatten()[:7]),
            NamedTensor(f"model.layers.2.{name}.special", special),
            NamedTensor(f"model.{name}.nan", odd if name == "bfloat16" else special / special),
            NamedTensor(f"lm_head.{name}.weight", base.flip(0)),
        ]
    return found


def differences(sent: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """How two sets of tensors differ in names, shapes, dtypes or bits."""
    import torch

    lines = [f"{name} is missing" for name in sent.keys() - found.keys()]
    lines += [f"{name} was not sent" for name in found.keys() - sent.keys()]
    for name in sent.keys() & found.keys():
        a, b = sent[name], found[name]
        if a.shape != b.shape:
            lines.append(f"{name} has shape {tuple(b.shape)}, sent {tuple(a.shape)}")
        elif a.dtype != b.dtype:
            lines.append(f"{name} has dtype {b.dtype}, sent {a.dtype}")
        elif not torch.equal(_bits(a), _bits(b)):
            lines.append(f"{name} has other bits")
    return sorted(lines)


def _bits(tensor: Tensor) -> Tensor:
    import torch

    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _counted(tensors: list[NamedTensor], counts: list[int]) -> Iterator[NamedTensor]:
    for item in tensors:
        counts[0] += 1
        yield item
