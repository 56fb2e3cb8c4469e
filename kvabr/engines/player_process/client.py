"""`RemoteClient`: an engine's client that plays in a player process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from kvabr import __version__
from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.memory import SPEEDS_FILE, speeds_at
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.client.warming import warm_engine, warm_in_background
from kvabr.codec.block_slots import BlockLayers
from kvabr.engines.client_arguments import ClientArguments
from kvabr.engines.player_process import regions
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
from kvabr.engines.player_process.sockets import own_socket, private_folder
from kvabr.engines.settings import INSIDE, OWN
from kvabr.player.groups import SharedDecodeRate
from kvabr.store.buffers import GROUPS
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.backoff import Backoff
from kvabr.types.errors import ConnectionLostError, HomeProcess, TransportError, UsageError, exhaustion_as_error
from kvabr.types.kv import KVSpec

_log = logging.getLogger("kvabr.engines")

_IDLE_S = 60
"""Seconds without engines after which a process that engines started ends."""
_START_S, _NAP_S = 30.0, 0.05
_ANSWER_S = 10.0
"""Additional seconds to wait for an answer, in case the process hangs."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_started: list[subprocess.Popen[bytes]] = []
"""Started processes, kept here so that Python does not warn about processes that outlive this one."""


P = ParamSpec("P")
T = TypeVar("T")


def _remote(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RemoteClient, P], Coroutine[Any, Any, T]]:
    async def call(self: RemoteClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        value: T = await self.call(method.__name__, args, kwargs)
        return value

    update_wrapper(call, method)
    return call


class RemoteClient:
    """The methods of `AsyncClient` that adapters need, for one event loop."""

    def __init__(self, arguments: ClientArguments, player: str) -> None:
        """Prepare; ``player`` is the socket of a running process, or `OWN` to start one on demand."""
        self.metrics = ClientMetrics()
        """Stays empty: the player process counts."""
        self._arguments = arguments
        self._starts = player == OWN
        self._socket = own_socket() if self._starts else Path(player).absolute()
        self._speeds = speeds_at(None if arguments.cache is None else arguments.cache / SPEEDS_FILE)
        self._link: asyncio.Task[_Link] | None = None
        self._home = HomeProcess("the client of the player process")
        self._pauses, self._again_s = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S), 0.0
        self._playing = 0

    find = _remote(AsyncClient.find)
    find_asset = _remote(AsyncClient.find_asset)
    fetch_profile = _remote(AsyncClient.fetch_profile)
    tail_of = _remote(AsyncClient.tail_of)
    round_trip = _remote(AsyncClient.round_trip)
    known_link = _remote(AsyncClient.known_link)
    play_prefix = _remote(AsyncClient.play_prefix)
    play_coded = _remote(AsyncClient.play_coded)
    hint_asset = _remote(AsyncClient.hint_asset)

    async def warm(
        self, spec: KVSpec, device: torch.device, dtype: torch.dtype, like: Sequence[BlockLayers] = ()
    ) -> None:
        """Like `AsyncClient.warm`, but in this process, which has the device."""
        warm_engine(spec, device, dtype, like, self._speeds)

    async def close(self) -> None:
        """Disconnect, which ends all plays of this client."""
        link, self._link = self._link, None
        if link is not None and self._home.here:
            link.cancel()
            with contextlib.suppress(asyncio.CancelledError, TransportError, UsageError):
                (await link).close()

    # -------------------------------------------------------------- internals

    async def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the client in the process; raise its errors, or `TransportError` if there is no process."""
        how, device, plays = options.get("options"), None, name.startswith("play")
        self._playing += plays
        link, within_s, begun_s = None, _longest_s(options), asyncio.get_running_loop().time()
        try:
            if isinstance(how, PlayOptions):
                device, options["options"] = how.device, self._planned(how, args)
            async with asyncio.timeout(within_s or _ANSWER_S) as bound:
                link = await self._connected()
                _shorten(options, asyncio.get_running_loop().time() - begun_s)
                bound.reschedule(begun_s + within_s + _ANSWER_S)
                value = await link.call(name, args, options)
        except TimeoutError as error:
            if not bound.expired():
                raise
            log = self._socket.with_suffix(".log")
            raise TransportError(
                f"the player process has not started within {within_s or _ANSWER_S:.3g} s: see {log}; a later request "
                "may succeed"
                if link is None
                else f"the player process does not answer: see {log}, and stop it; the next request uses another"
            ) from error
        finally:
            self._playing -= plays
        if isinstance(value, PlayedPrefix) and device is not None:
            # The profiles' kernels must be prepared here: the process that played has no GPU.
            for profile in {id(one.context.profile): one.context.profile for one in value.groups}.values():
                if profile is not None:
                    warm_in_background(profile, device, speeds=self._speeds)
        return value

    def _planned(self, how: PlayOptions, args: tuple[Any, ...]) -> PlayOptions:
        """Replace the device in the options by its decoding speed, since the player process has no GPU."""
        share = None
        if how.device is not None and how.device.type == "cuda" and isinstance(args[0], Found):
            catalog = args[0].catalog.to_play
            if not self._speeds.lacks(catalog, how.device):
                share = SharedDecodeRate(self._speeds.rates(catalog, how.device), partial(int, self._playing))
        own = _from_here(how.policy), None if how.estimator is None else _from_here(how.estimator)
        return replace(how, device=None, decode_share=share, policy=own[0], estimator=own[1])

    async def _connected(self) -> _Link:
        self._home.check()  # a forked child must not write to the parent's socket
        made = self._link
        if made is None or (made.done() and (made.cancelled() or made.exception() or made.result().over)):
            made = self._link = asyncio.get_running_loop().create_task(self._connect())
        # Cancelling one caller must not cancel the connection for others.
        return await asyncio.shield(made)

    async def _connect(self) -> _Link:
        if self._starts:
            with contextlib.suppress(ConnectionLostError):  # the process was unused and about to end
                return await self._opened()
        return await self._opened()

    async def _opened(self) -> _Link:
        link = _Link(await self._dialled())
        await link.open(OpenClient(__version__, self._arguments))
        return link

    async def _dialled(self) -> socket.socket:
        loop, started = asyncio.get_running_loop(), False
        until_s = loop.time() + _START_S
        while True:
            with exhaustion_as_error():
                link = socket.socket(socket.AF_UNIX)
            try:
                link.setblocking(False)  # a full backlog would block
                link.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                link.close()
                if not self._starts:
                    raise TransportError(f"{self._socket}: no player process ({error}); see `kvabr player`") from error
                if started and (loop.time() > until_s or _started[-1].poll()):
                    self._again_s = loop.time() + self._pauses.longer()
                if loop.time() < self._again_s:
                    log = self._socket.with_suffix(".log")
                    raise TransportError(
                        f'the player process does not start, see {log}; "player": "{INSIDE}" needs no process'
                    ) from error
                if not started:
                    started = True
                    await loop.run_in_executor(None, start, self._socket)
            except OSError as error:
                link.close()
                if not isinstance(error, BlockingIOError) or loop.time() > until_s:  # otherwise: full backlog
                    raise TransportError(f"{self._socket}: {error}") from error
            else:
                self._pauses.reset()
                return link
            await asyncio.sleep(_NAP_S)


_LIMITS = ("deadline", "within_s", "probe_s")


_MIN_S = 1e-6
"""Minimum time limit of a call in seconds, as 0 is not allowed."""


def _longest_s(options: Mapping[str, Any]) -> float:
    how = options.get("options")
    patience = how.patience if isinstance(how, PlayOptions) else 1.0
    return max(1.0, patience) * max(options.get(name) or 0.0 for name in _LIMITS)


def _shorten(options: dict[str, Any], waited_s: float) -> None:
    for name in _LIMITS:
        if options.get(name):
            options[name] = max(min(options[name], _MIN_S), options[name] - waited_s)


def _from_here(plugin: str) -> str:
    file, colon, rest = plugin.partition(":")
    return f"{Path(file).absolute()}{colon}{rest}" if file.endswith(".py") else plugin


class _Link:
    def __init__(self, link: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = ProcessChannel(link, self._received, self._lost)
        self.over = False
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(OPENED + 1)
        self._regions: dict[int, mmap.mmap | memoryview] = {}
        self._shared: memoryview | None = None

    async def open(self, message: OpenClient) -> None:
        try:
            await self._answer(OPENED, message)
        except BaseException:
            self.close()
            raise

    async def call(self, name: str, args: tuple[object, ...], options: dict[str, object]) -> Any:
        """Call a method and return its result; cancelling this coroutine cancels the call."""
        number = next(self._numbers)
        call = CallMethod(number, name, args, options)
        try:
            try:
                return await self._answer(number, call, theirs=True)
            except LackingError:
                return await self._answer(number, call)
        except asyncio.CancelledError:
            self._channel.send(CancelCall(number))
            raise

    async def _answer(self, number: int, message: object, *, theirs: bool = False) -> Any:
        answer = self._answers[number] = self._loop.create_future()
        try:
            if self.over:
                raise ConnectionLostError("the player process has ended")
            self._channel.send(message, theirs=theirs)
            return await answer
        finally:
            del self._answers[number]

    def close(self) -> None:
        self._channel.close()
        self._lost(ConnectionLostError("this side closed the connection"))

    def _lost(self, error: Exception) -> None:
        self.over = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError(f"the player process has ended: {error}"))
        self._regions.clear()

    def _received(self, message: ChannelMessage) -> None:
        shared, self._shared = self._shared, None
        try:
            thing = self._channel.read(message, memoryview(b"") if shared is None else shared)
            if isinstance(thing, PlayedMemory):
                self._shared = self._mapped(thing, message)
            self._take(thing)
        except Exception as error:  # noqa: BLE001  # a malformed field may raise any error
            self._channel.close()
            self._lost(error)

    def _take(self, thing: object) -> None:
        if isinstance(thing, ForgetRegion):
            self._regions.pop(thing.region, None)
        elif isinstance(thing, CallAnswer):
            answer = self._answers.get(thing.number)
            if answer is None or answer.done():
                return
            if thing.error is None:
                answer.set_result(thing.value)
            else:
                answer.set_exception(thing.error)

    def _mapped(self, memory: PlayedMemory, message: ChannelMessage) -> memoryview:
        """Return the memory of a play; it is released with the last view of it."""
        if message.files:
            self._regions[memory.region] = regions.mapped(message.files[0], GROUPS.pin)
        shown = np.frombuffer(self._regions[memory.region], np.uint8, count=memory.nbytes)
        weakref.finalize(shown, self._released, memory.region).atexit = False
        return shown.data.toreadonly()

    def _released(self, region: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._channel.send, ReleaseRegion(region))


def start(path: Path) -> None:
    """Start a player process, with its output next to the socket; raise `TransportError` if it cannot be started."""
    try:
        private_folder(path.parent)
        with path.with_suffix(".log").open("ab") as log:
            command = [sys.executable, "-P", "-m", "kvabr", "player", "--socket", str(path), "--idle", str(_IDLE_S)]
            # Modules must not come from the working directory, which may be untrusted.
            places = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
            started = subprocess.Popen(  # noqa: S603  # runs this interpreter
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": places},
            )
    except (OSError, UsageError) as error:
        raise TransportError(
            f'no player process can be started ({error}); "player": "{INSIDE}" needs no process'
        ) from error
    _started[:] = [*(one for one in _started if one.poll() is None), started]  # polling reaps processes that have ended
    _log.info("kvabr: started a player process, %s", path)
