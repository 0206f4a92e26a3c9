"""The transport and router kits reject implementations that are wrong in one deliberate way each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prime_rl_router_sticky import Sticky
from prime_rl_router_sticky.application import StickyApplication
from prime_rl_router_sticky.forward import EngineGone, EngineRefused, Forwarder
from prime_rl_router_sticky.placement import Placements
from prime_rl_transport_filesystem import Filesystem
from prime_rl_transport_filesystem.receive import FilesystemReceiver
from prime_rl_transport_filesystem.send import FilesystemSender

from prime_rl.api import NamedTensor, Receiver, Sender
from prime_rl.testing.conformance import PluginConformance
from prime_rl.testing.router import RouterConformance
from prime_rl.testing.weight_transport import WeightTransportConformance

INSTALLED_ONLY = {"test_importing_it_is_light"}
"""Looks at an installed wheel; the classes of this file are in none."""


def failures(kit: PluginConformance, folder: Path) -> set[str]:
    """Names of the kit's checks that do not pass."""
    failed = set()
    for name, check in inspect.getmembers(kit, inspect.ismethod):
        if not name.startswith("test_") or name in INSTALLED_ONLY:
            continue
        arguments: dict[str, Any] = {}
        if "tmp_path" in inspect.signature(check).parameters:
            (folder / name).mkdir(parents=True)
            arguments = {"tmp_path": folder / name}
        try:
            check(**arguments)
        except Exception:
            failed.add(name)
    return failed


def transport_kit(
    send: Callable[..., None] | None = None,
    receive: Callable[..., Iterator[NamedTensor]] | None = None,
    **capabilities: Any,
) -> WeightTransportConformance:
    """A kit for the filesystem transport with one end replaced."""

    class WrongSender(FilesystemSender):
        def send(self, *arguments: Any) -> None:
            (send or FilesystemSender.send)(self, *arguments)

    class WrongReceiver(FilesystemReceiver):
        def receive(self, *arguments: Any) -> Iterator[NamedTensor]:
            yield from (receive or FilesystemReceiver.receive)(self, *arguments)

    declared = {**Filesystem.capabilities, **capabilities}

    class Wrong(Filesystem):
        def sender(self, rank: int, world_size: int) -> Sender:
            return WrongSender(self.config, rank)

        def receiver(self, engine_index: int, engine_count: int) -> Receiver:
            return WrongReceiver()

    Wrong.capabilities = declared

    class Kit(WeightTransportConformance):
        plugin_name = "filesystem"
        finds_flipped_bits = True

        def plugin_class(self) -> type:
            return Wrong

    return Kit()


def changed(change: Callable[[NamedTensor], NamedTensor]) -> Callable[..., Iterator[NamedTensor]]:
    def receive(self: Any, version: int, directory: Path) -> Iterator[NamedTensor]:
        for item in FilesystemReceiver.receive(self, version, directory):
            yield change(item)

    return receive


def skip_one(self: Any, version: int, directory: Path) -> Iterator[NamedTensor]:
    yield from list(FilesystemReceiver.receive(self, version, directory))[1:]


def one_twice(self: Any, version: int, directory: Path) -> Iterator[NamedTensor]:
    items = list(FilesystemReceiver.receive(self, version, directory))
    yield from [*items, items[0]]


def silent_when_nothing_was_sent(self: Any, version: int, directory: Path) -> Iterator[NamedTensor]:
    if (directory / "manifest.json").exists():
        yield from FilesystemReceiver.receive(self, version, directory)


def unverified(self: Any, version: int, directory: Path) -> Iterator[NamedTensor]:
    from safetensors.torch import load_file

    from prime_rl.errors import WeightTransferError

    files = sorted((directory / "weights").glob("*"))
    if not files:
        raise WeightTransferError("nothing there")
    for file in files:
        yield from (NamedTensor(*item) for item in load_file(file).items())


def found_late(self: Any, version: int, directory: Path) -> Iterator[NamedTensor]:
    """Yields the first tensor before it looks whether the rest is there."""
    import torch

    yield NamedTensor("model.layers.0.float32.weight", torch.zeros(1))
    yield from FilesystemReceiver.receive(self, version, directory)


def writer_only(self: Any, version: int, directory: Path, tensors: Any) -> None:
    """Other ranks do not take part in gathering."""
    if self.is_writer:
        FilesystemSender.send(self, version, directory, tensors)


def sorts_in_place(self: Any, version: int, directory: Path, tensors: Any) -> None:
    items = list(tensors)
    FilesystemSender.send(self, version, directory, iter(items))
    for item in items:
        item.tensor.zero_()


def test_the_right_transport_passes(tmp_path: Path) -> None:
    assert failures(transport_kit(), tmp_path) == set()


SAME = "test_every_engine_gets_the_same_names_shapes_dtypes_and_bits"


@pytest.mark.parametrize(
    ("kit", "caught_by"),
    [
        (transport_kit(receive=changed(lambda i: i._replace(name=i.name + ".x"))), SAME),
        (transport_kit(receive=changed(lambda i: i._replace(tensor=i.tensor.float()))), SAME),
        (transport_kit(receive=changed(lambda i: i._replace(tensor=i.tensor.flatten()))), SAME),
        (transport_kit(receive=changed(lambda i: i._replace(tensor=i.tensor + 0))), SAME),
        (transport_kit(receive=skip_one), SAME),
        (transport_kit(receive=one_twice), SAME),
        (
            transport_kit(receive=silent_when_nothing_was_sent),
            "test_a_version_that_was_not_sent_is_refused",
        ),
        (transport_kit(receive=unverified), "test_damage_is_found_before_the_first_tensor"),
        (transport_kit(receive=found_late), "test_damage_is_found_before_the_first_tensor"),
        (transport_kit(send=writer_only), "test_every_rank_exhausts_the_iterator"),
        (transport_kit(send=sorts_in_place), "test_the_senders_tensors_are_left_alone"),
        (transport_kit(lora="yes"), "test_capabilities_are_statements"),
    ],
)
def test_wrong_transports_are_caught(
    tmp_path: Path, kit: WeightTransportConformance, caught_by: str
) -> None:
    assert caught_by in failures(kit, tmp_path)


def router_kit(application: type[StickyApplication]) -> RouterConformance:
    """A kit for the sticky router with its application replaced."""

    class Wrong(Sticky):
        def application(self, engine_urls: Any) -> Any:
            return application(self.config, engine_urls)

    class Kit(RouterConformance):
        plugin_name = "sticky"

        def plugin_class(self) -> type:
            return Wrong

    return Kit()


class RoundRobin(StickyApplication):
    """Forgets sessions."""

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [item for item in scope["headers"] if item[0] != b"x-session-id"]
        await super()._forward({**scope, "headers": headers}, receive, send)


class OneEngine(StickyApplication):
    """Uses the first engine only."""

    def __init__(self, config: Any, engine_urls: Any) -> None:
        super().__init__(config, engine_urls[:1])


class NoQuery(StickyApplication):
    """Loses the query."""

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        await super()._forward({**scope, "query_string": b""}, receive, send)


class Buffered(StickyApplication):
    """Sends the answer when it is complete."""

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        held: list[Any] = []

        async def hold(message: Any) -> None:
            held.append(message)

        await super()._forward(scope, receive, hold)
        for message in held:
            await send(message)


class NeverMoves(StickyApplication):
    """Keeps a session on a dead engine."""

    def __init__(self, config: Any, engine_urls: Any) -> None:
        super().__init__(config, engine_urls)

        class Stubborn(Placements):
            def begin(self, name: Any, tried: Any = ()) -> Any:
                return None if tried else super().begin(name)

            def mark_down(self, engine: Any) -> None:
                """Does not believe it."""

        self.placements = Stubborn(engine_urls, 100, 100)


class AsksAgain(StickyApplication):
    """Repeats a request whose answer broke off."""

    async def start(self) -> None:
        await super().start()

        class Eager(Forwarder):
            async def forward(self, request: Any, engine_url: str) -> int:
                head: list[Any] = []

                async def hold(message: Any) -> None:
                    head.append(message)

                send, request.send = request.send, hold
                try:
                    status = await super().forward(request, engine_url)
                except EngineGone as error:
                    raise EngineRefused(str(error)) from error
                finally:
                    request.send = send
                for message in head:
                    await send(message)
                return status

        if not isinstance(self._forwarder, Eager):
            await self._forwarder.close()  # type: ignore[union-attr]
            self._forwarder = Eager(1.0)


class StrictFinish(StickyApplication):
    """Refuses to finish a session it does not know."""

    async def _finish_session(self, scope: Any, send: Any) -> None:
        from prime_rl_router_sticky.application import refuse

        name = scope["query_string"].decode().removeprefix("session_id=")
        if name not in self.placements.sessions:
            await refuse(send, 404, "unknown")
            return
        await super()._finish_session(scope, send)


class PassesOwnPaths(StickyApplication):
    """Lets an engine answer for the router's workers."""

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/workers":
            await self.start()
            await self._forward(scope, receive, send)
        else:
            await super()._http(scope, receive, send)


def test_the_right_router_passes(tmp_path: Path) -> None:
    assert failures(router_kit(StickyApplication), tmp_path) == set()


@pytest.mark.parametrize(
    ("application", "caught_by"),
    [
        (RoundRobin, "test_a_session_stays_on_one_engine"),
        (OneEngine, "test_sessions_use_every_engine"),
        (NoQuery, "test_requests_and_answers_pass_unchanged"),
        (Buffered, "test_streams_arrive_piece_by_piece"),
        (NeverMoves, "test_another_engine_answers_for_a_dead_one"),
        (AsksAgain, "test_an_answer_that_has_begun_is_never_asked_for_again"),
        (StrictFinish, "test_its_own_paths"),
        (PassesOwnPaths, "test_its_own_paths"),
    ],
)
def test_wrong_routers_are_caught(
    tmp_path: Path, application: type[StickyApplication], caught_by: str
) -> None:
    kit = router_kit(application)
    with pytest.raises(Exception):  # noqa: B017 - whatever the check raises
        getattr(kit, caught_by)()
