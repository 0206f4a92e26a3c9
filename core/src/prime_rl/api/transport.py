"""The weight-transport contract. Handshake, order and time-outs belong to core."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prime_rl.api.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


class NamedTensor(NamedTuple):
    """A tensor under its checkpoint name."""

    name: str
    tensor: Tensor


class Sender:
    """Lives in every trainer rank."""

    @abstractmethod
    def send(self, version: int, directory: Path, tensors: Iterable[NamedTensor]) -> None:
        """Deliver the full set of tensors of `version`.

        Called on every rank with an iterator that all ranks must exhaust (gathering shards is a
        collective); only rank 0 sees tensors that hold data worth sending, the other ranks see the
        same names. `directory` is the version's own, shared with the receiver, already empty.
        Returns when the payload is complete; core then publishes it.
        """

    def close(self) -> None:
        """Release what the sender holds."""


class Receiver:
    """Lives in every engine process."""

    @abstractmethod
    def receive(self, version: int, directory: Path) -> Iterator[NamedTensor]:
        """Yield every tensor of `version` once. Raises WeightTransferError when the payload is
        incomplete or damaged, before yielding the first tensor where that can be known."""

    def close(self) -> None:
        """Release what the receiver holds."""


class WeightTransport(Plugin):
    """Carries weights from trainer to engines.

    Capabilities it declares: lora, final_broadcast (the last version is written even when nobody
    consumes it), pauses_engines (False when requests may go on during the transfer).
    """

    @abstractmethod
    def sender(self, rank: int, world_size: int) -> Sender:
        """The sending end of one trainer rank."""

    @abstractmethod
    def receiver(self, engine_index: int, engine_count: int) -> Receiver:
        """The receiving end of one engine."""
