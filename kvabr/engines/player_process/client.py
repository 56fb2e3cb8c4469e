"""`RemoteClient`: the client of an engine whose plays run in a player process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvabr import __version__
from kvabr.client.decode_speeds import SPEEDS_FILE, speeds_at
from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.client.warming import warm_engine, warm_in_background
from kvabr.codec.block_slots import BlockLayers
from kvabr.engines.clients import ClientArguments
from kvabr.engines.player_process import regions
from kvabr.engines.player_process.channel import Channel, Message
from kvabr.engines.player_process.messages import OPENED, Answer, Call, Cancel, Forget, Memory, Open, Release
from kvabr.engines.player_process.sockets import own_socket, private_folder
from kvabr.engines.settings import INSIDE, OWN
from kvabr.store.memory import GROUPS
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ConnectionLostError, FormatError, TransportError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Part, Passage

_log = logging.getLogger("kvabr.engines")

_IDLE_S = 60
"""Seconds without an engine after which a process ends that engines have started."""
_START_S, _NAP_S = 30.0, 0.05
_started: list[subprocess.Popen[bytes]] = []
"""Kept, so that nothing is said of processes that outlive this one."""


class RemoteClient:
    """As `AsyncClient`, for one event loop: what an adapter needs of it (`kvabr.engines.clients.EngineClient`)."""

    def __init__(self, arguments: ClientArguments, player: str) -> None:
        """Prepare; a process is looked for, and started, when it is needed.

        Args:
            arguments: of the client in that process.
            player: the socket of a process that somebody else starts, or `OWN`.
        """
        self.metrics = ClientMetrics()
        """Count nothing: the player process does."""
        self._arguments = arguments
        self._starts = player == OWN
        self._socket = own_socket() if self._starts else Path(player).absolute()
        self._speeds = speeds_at(None if arguments.cache is None else arguments.cache / SPEEDS_FILE)
        self._link: asyncio.Task[_Link] | None = None

    # ------------------------------------------------------------------ calls

    async def find(
        self,
        tokens: Sequence[int],
        *,
        model: KVSpec | str | None = None,
        salt: bytes | None = None,
        within_s: float = 5.0,
        any_dtype: bool = False,
    ) -> Found | None:
        found: Found | None = await self._call(
            "find", tuple(tokens), model=model, salt=salt, within_s=within_s, any_dtype=any_dtype
        )
        return found

    async def find_joined(
        self, parts: Sequence[Part], model: KVSpec, **options: Any
    ) -> tuple[Found | None, Sequence[tuple[Passage, str]]]:
        found: tuple[Found | None, Sequence[tuple[Passage, str]]]
        found = await self._call("find_joined", parts, model, **options)
        return found

    async def find_asset(self, asset: TrackNamespace | str, *, within_s: float = 5.0) -> Found:
        found: Found = await self._call("find_asset", asset, within_s=within_s)
        return found

    async def fetch_profile(self, catalog: Catalog, *, within_s: float = 5.0) -> None:
        await self._call("fetch_profile", catalog, within_s=within_s)

    async def tail_of(self, catalog: Catalog, *, options: PlayOptions | None = None, **how: Any) -> int:
        tokens: int = await self._call("tail_of", catalog, options=options, **how)
        return tokens

    async def round_trip(self, *, probe_s: float | None = None) -> float | None:
        seconds: float | None = await self._call("round_trip", probe_s=probe_s)
        return seconds

    async def play_prefix(
        self,
        found: Found,
        *,
        deadline: float,
        cost: PrefillCost,
        skip: int = 0,
        behind: int = 0,
        block: int = 1,
        options: PlayOptions | None = None,
    ) -> PlayedPrefix:
        how = {"deadline": deadline, "cost": cost, "skip": skip, "behind": behind, "block": block}
        played: PlayedPrefix = await self._call("play_prefix", found, options=self._planned(found, options), **how)
        return self._warmed(played, options)

    async def play_coded(self, found: Found, *, deadline: float, options: PlayOptions | None = None) -> PlayedPrefix:
        planned = self._planned(found, options)
        played: PlayedPrefix = await self._call("play_coded", found, deadline=deadline, options=planned)
        return self._warmed(played, options)

    async def warm(
        self, spec: KVSpec, device: torch.device, dtype: torch.dtype, like: Sequence[BlockLayers] = ()
    ) -> None:
        """As `AsyncClient.warm`, here: this process has the device."""
        warm_engine(spec, device, dtype, like, self._speeds)

    async def close(self) -> None:
        """Leave the process, which ends all plays of this client."""
        link, self._link = self._link, None
        if link is not None:
            link.cancel()
            with contextlib.suppress(asyncio.CancelledError, TransportError, UsageError):
                (await link).close()

    # -------------------------------------------------------------- internals

    def _planned(self, found: Found, options: PlayOptions | None) -> PlayOptions | None:
        """Return the options for a process without a GPU: instead of this one's, how fast it expands groups."""
        if options is None or options.device is None:
            return options
        rates, catalog = None, found.catalog.to_play
        if options.device.type == "cuda" and not self._speeds.lacks(catalog, options.device):
            rates = self._speeds.rates(catalog, options.device)
        return replace(options, device=None, decode_rates=rates)

    def _warmed(self, played: PlayedPrefix, options: PlayOptions | None) -> PlayedPrefix:
        """Have the GPU's kernels tried, and measured, for a profile that is new to this process."""
        if options is not None and options.device is not None:
            for profile in {id(one.context.profile): one.context.profile for one in played.groups}.values():
                if profile is not None:
                    warm_in_background(profile, options.device, speeds=self._speeds)
        return played

    async def _call(self, name: str, *args: object, **options: object) -> Any:
        return await (await self._connected()).call(name, args, options)

    async def _connected(self) -> _Link:
        """Return the connection to the process, which is made, or made again, if there is none."""
        made = self._link
        if made is None or (made.done() and (made.cancelled() or made.exception() or made.result().over)):
            made = self._link = asyncio.get_running_loop().create_task(self._connect())
        # Whoever gives up must not end it for the others.
        return await asyncio.shield(made)

    async def _connect(self) -> _Link:
        link = _Link(await self._dialled())
        await link.open(Open(__version__, self._arguments))
        return link

    async def _dialled(self) -> socket.socket:
        loop, started = asyncio.get_running_loop(), False
        until_s = loop.time() + _START_S
        while True:
            link = socket.socket(socket.AF_UNIX)
            try:
                link.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                link.close()
                if not self._starts:
                    raise TransportError(f"{self._socket}: no player process ({error}); see `kvabr player`") from error
                if not started:
                    started = True
                    await loop.run_in_executor(None, start, self._socket)
                elif loop.time() > until_s or _started[-1].poll():
                    log = self._socket.with_suffix(".log")
                    raise TransportError(
                        f'the player process does not start, see {log}; "player": "{INSIDE}" does without'
                    ) from error
            except OSError as error:
                link.close()
                raise TransportError(f"{self._socket}: {error}") from error
            else:
                return link
            await asyncio.sleep(_NAP_S)


class _Link:
    """A connection to a player process."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a connected socket; errors as `Channel`."""
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(link, self._received, self._lost)
        self.over = False
        """Whether it has ended."""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(OPENED + 1)
        self._regions: dict[int, mmap.mmap] = {}
        self._shared: memoryview | None = None
        """Where the views of the next message lie."""

    async def open(self, message: Open) -> None:
        """Begin; raise a `UsageError` if the process does not take us."""
        try:
            await self._answer(OPENED, message)
        except BaseException:
            self.close()
            raise

    async def call(self, name: str, args: tuple[object, ...], options: dict[str, object]) -> Any:
        """Have a method called, and return what it returns; cancelling this cancels it."""
        number = next(self._numbers)
        try:
            return await self._answer(number, Call(number, name, args, options))
        except asyncio.CancelledError:
            self._channel.send(Cancel(number))
            raise

    async def _answer(self, number: int, message: object) -> Any:
        answer = self._answers[number] = self._loop.create_future()
        try:
            if self.over:
                raise ConnectionLostError("the player process has ended")
            self._channel.send(message)
            return await answer
        finally:
            del self._answers[number]

    def close(self) -> None:
        """End it, and all calls."""
        self._channel.close()
        self._lost(ConnectionLostError("this side closed the connection"))

    def _lost(self, error: Exception) -> None:
        self.over = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError(f"the player process has ended: {error}"))
        self._regions.clear()

    def _received(self, message: Message) -> None:
        shared, self._shared = self._shared, None
        try:
            thing = self._channel.read(message, memoryview(b"") if shared is None else shared)
            if isinstance(thing, Memory):
                self._shared = self._mapped(thing, message)
        except (FormatError, OSError) as error:
            self._channel.close()
            self._lost(error)
            return
        if isinstance(thing, Forget):
            self._regions.pop(thing.region, None)
        elif isinstance(thing, Answer):
            answer = self._answers.get(thing.number)
            if answer is None or answer.done():
                return
            if thing.error is None:
                answer.set_result(thing.value)
            else:
                answer.set_exception(thing.error)

    def _mapped(self, memory: Memory, message: Message) -> memoryview:
        """Return the memory of a play, and give it back when no view of it is left."""
        if message.files:
            self._regions[memory.region] = regions.mapped(message.files[0], GROUPS.pin)
        shown = np.frombuffer(self._regions[memory.region], np.uint8, count=memory.nbytes)
        weakref.finalize(shown, self._released, memory.region).atexit = False
        return shown.data.toreadonly()

    def _released(self, region: int) -> None:
        """Called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._channel.send, Release(region))


def start(path: Path) -> None:
    """Start a player process that ends some time after the last engine has left; what it says is in a file beside.

    Raises:
        TransportError: it cannot be started.
    """
    try:
        private_folder(path.parent)
        with path.with_suffix(".log").open("ab") as log:
            command = [sys.executable, "-m", "kvabr", "player", "--socket", str(path), "--idle", str(_IDLE_S)]
            started = subprocess.Popen(  # noqa: S603  # this very interpreter
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
    except (OSError, UsageError) as error:
        raise TransportError(
            f'no player process can be started ({error}); "player": "{INSIDE}" does without'
        ) from error
    _started.append(started)
    _log.info("kvabr: started a player process, %s", path)
