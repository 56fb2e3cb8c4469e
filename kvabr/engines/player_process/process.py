"""The player process: clients of origins, for engines that connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy.fft  # noqa: F401  # imported here, so that the first play does not wait for it

import kvabr.abr.planner  # as above
import kvabr.abr.time_planner  # noqa: F401
from kvabr import __version__
from kvabr.client.async_client import AsyncClient
from kvabr.client.result import PlayedPrefix
from kvabr.engines.client_arguments import ClientArguments
from kvabr.engines.player_process.channel import ChannelMessage, LackingError, ProcessChannel
from kvabr.engines.player_process.messages import (
    OPENED,
    CallAnswer,
    CallMethod,
    CancelCall,
    ForgetRegion,
    OpenClient,
    PlayedMemory,
    ReleaseRegion,
)
from kvabr.engines.player_process.regions import Regions, laid_out
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import TaskSet, cancel_all
from kvabr.transfer.work import decoders
from kvabr.types.errors import ConnectionLostError, FormatError, PlayError, UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


_CALLS = frozenset(
    {"find", "find_asset", "fetch_profile", "tail_of", "round_trip", "known_link"}
    | {"play_prefix", "play_coded", "hint_asset"}
)
"""Methods of `AsyncClient` that engines may call."""
_KEEP_S = 60.0
_ENGINES = 64
_MAX_IDLE_BYTES = 512 << 20
_PAUSE_S = 1.0


class PlayerProcess:
    """Serves the engines of a node, on one event loop."""

    def __init__(self, listener: socket.socket, log: FilteringBoundLogger, metrics: ClientMetrics) -> None:
        self._listener, self._log, self._metrics = listener, log, metrics
        self._clients: dict[ClientArguments, _Shared] = {}
        self._closing = TaskSet()
        self._engines: set[_Engine] = set()
        self._changed = asyncio.Event()

    async def serve(self, idle_s: float | None) -> None:
        """Serve until there was no engine for ``idle_s`` seconds; None: until cancelled."""
        accepting = asyncio.create_task(self._accept())
        try:
            while True:
                self._changed.clear()
                try:
                    async with asyncio.timeout(None if self._engines else idle_s):
                        await self._changed.wait()
                except TimeoutError:
                    return
        finally:
            await cancel_all([accepting])
            for engine in list(self._engines):
                engine.close()
            for shared in list(self._clients.values()):
                await shared.client.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no free descriptors
                self._log.warning("no engine can connect", why=str(error))
                await asyncio.sleep(_PAUSE_S)
                continue
            with contextlib.suppress(ConnectionLostError):  # another user's process
                self._engines.add(_Engine(self, link))
                self._changed.set()

    def take(self, arguments: ClientArguments) -> AsyncClient:
        """Return the client for these arguments, and count one more engine; errors as for `ClientArguments.open`."""
        shared = self._clients.get(arguments)
        if shared is None:
            # Each engine limits its own plays. Several ranks play the same caches.
            limits = replace(arguments.limits, plays=_ENGINES * arguments.limits.plays)
            shared = self._clients[arguments] = _Shared(replace(arguments, limits=limits).open(self._metrics))
        shared.users += 1
        if shared.ends is not None:
            shared.ends.cancel()
        return shared.client

    def left(self, engine: _Engine, arguments: ClientArguments | None, why: Exception | None) -> None:
        """Record that an engine has left."""
        self._engines.discard(engine)
        self._changed.set()
        self._log.info("engine left", engines=len(self._engines), why=None if why is None else str(why))
        if arguments is None:
            return
        shared = self._clients[arguments]
        shared.users -= 1
        if not shared.users:
            shared.ends = asyncio.get_running_loop().call_later(_KEEP_S, self._drop, arguments, shared)

    def joined(self, arguments: ClientArguments) -> None:
        """Record that an engine has joined."""
        urls = ", ".join(url.partition("?")[0] for url in arguments.urls)
        self._log.info("engine joined", engines=len(self._engines), url=urls)

    def _drop(self, arguments: ClientArguments, shared: _Shared) -> None:
        del self._clients[arguments]
        self._closing.start(shared.client.close())


class _Shared:
    def __init__(self, client: AsyncClient) -> None:
        self.client, self.users = client, 0
        self.ends: asyncio.TimerHandle | None = None


class _Engine:
    def __init__(self, process: PlayerProcess, link: socket.socket) -> None:
        self._process = process
        self._channel = ProcessChannel(link, self._received, self._over)
        self._arguments: ClientArguments | None = None
        self._client: AsyncClient | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._regions = Regions(_MAX_IDLE_BYTES, lambda region: self._channel.send(ForgetRegion(region)))

    def close(self) -> None:
        self._channel.close()
        self._over(None)

    def _over(self, why: Exception | None) -> None:
        for call in self._calls.values():
            call.cancel()
        self._regions.close()
        arguments, self._arguments = self._arguments, None  # may be called twice
        self._process.left(self, arguments, why)

    def _received(self, message: ChannelMessage) -> None:
        try:
            try:
                self._take(self._channel.read(message))
            except LackingError as lack:
                self._fail(lack.message.number, LackingError(None))
        except Exception as error:  # noqa: BLE001  # a malformed field may raise any error
            why = str(error) if isinstance(error, FormatError) else repr(error)
            self._channel.send(
                CallAnswer(OPENED, error=UsageError(f"the player process cannot read a message of this engine: {why}"))
            )
            self._channel.close()
            self._over(error)

    def _take(self, thing: object) -> None:
        if isinstance(thing, CallMethod) and self._client is not None and thing.name in _CALLS:
            if not isinstance(thing.number, int):
                raise FormatError(f"the number of a call must be an integer, got {thing.number!r}")
            number, call = thing.number, asyncio.get_running_loop().create_task(self._call(self._client, thing))
            self._calls[number] = call
            call.add_done_callback(lambda _: self._calls.pop(number, None))  # the call may end before it is registered
        elif isinstance(thing, CancelCall):
            if thing.number in self._calls:
                self._calls[thing.number].cancel()
        elif isinstance(thing, ReleaseRegion):
            self._regions.give_back(thing.region)
        elif isinstance(thing, OpenClient) and self._client is None:
            self._open(thing)
        else:
            raise FormatError(f"unexpected {type(thing).__name__}")

    def _open(self, message: OpenClient) -> None:
        if message.version != __version__:
            why = (
                f"the player process has kvabr {__version__}, but this engine has {message.version}: restart the "
                "player process"
            )
            self._fail(OPENED, UsageError(why))
            return
        try:
            self._client = self._process.take(message.arguments)
        except Exception as error:  # noqa: BLE001  # raised in the engine, which waits for the result
            self._fail(OPENED, error)
            return
        self._arguments = message.arguments
        self._process.joined(message.arguments)
        self._channel.send(CallAnswer(OPENED))

    async def _call(self, client: AsyncClient, call: CallMethod) -> None:
        try:
            value = await getattr(client, call.name)(*call.args, **call.options)
            if isinstance(value, PlayedPrefix):
                await self._hand_over(call.number, value)
            else:
                self._channel.send(CallAnswer(call.number, value))
        except Exception as error:  # noqa: BLE001  # raised in the engine
            self._fail(call.number, error)

    def _fail(self, number: int, error: Exception) -> None:
        try:
            self._channel.send(CallAnswer(number, error=error))
        except Exception:  # noqa: BLE001  # for example a plug-in's error with an argument that cannot be pickled
            self._channel.send(CallAnswer(number, error=PlayError(f"{type(error).__name__}: {error}")))

    async def _hand_over(self, number: int, played: PlayedPrefix) -> None:
        views = {id(view): view for group in played.groups for view in (group.payload, *group.below)}
        placed, nbytes = laid_out(views.values())
        if not nbytes:
            self._channel.send(CallAnswer(number, played), places=dict.fromkeys(views, (0, 0)))
            return
        try:
            region = self._regions.take(nbytes)
        except OSError as error:
            raise PlayError(f"no shared memory for {nbytes:,} bytes: {error}") from error
        try:
            await asyncio.get_running_loop().run_in_executor(decoders(), region.fill, placed)
        except BaseException:
            self._regions.drop(region.number)  # a thread of a cancelled copy may still write to it
            raise
        try:
            self._channel.send(PlayedMemory(region.number, nbytes), file=region.file)
        except OSError as error:  # no free descriptors
            self._regions.drop(region.number)
            raise PlayError(f"shared memory cannot be passed to the engine: {error}") from error
        region.close()
        places = {id(view): (at, len(view)) for at, view in placed}
        self._channel.send(CallAnswer(number, played), places=places)
