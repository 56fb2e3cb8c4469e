"""The player's process: carries out orders, many plays at a time, and reports the results."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.engine_hook import StepGate
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.result import IncompleteError, NothingCached, Played, PlayedPrefix
from kvabr.player.session_types import ENGINE_PATIENCE
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import BusyError, KvabrError
from kvabr.types.peer import PeerOptions
from kvabr_lab.live.child import Child
from tests.chaos.facts import CacheFacts, Order, Outcome, Report, facts_of
from tests.chaos.published import SPEC, G, KnownEngine, Prompt

LIBRARIES = ("aioquic", "qh3")
COST = PrefillCost(0.02, 0.001)
"""Of the engine."""
_PACE = {"good": 0.5, "slow": 1.6, "failing": 0.2}
"""How long engines take, as a share of what their cost says."""
_LATER_S = 0.25
"""Seconds until a cache is looked at again."""
_UPGRADES_S = 0.6


@dataclass(frozen=True, slots=True)
class Seat:
    url: str
    token: str
    fingerprint: str
    folder: Path
    """For its caches; it outlives the process."""
    prompts: tuple[Prompt, ...]
    hang_s: float
    """A play that takes longer than this hangs."""
    log: Path
    """Takes the stack of every thread on SIGUSR1."""


class Player(Child):
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        super().__init__("player", _main, seat)

    def begin(self, round_number: int, begin_s: float, orders: list[Order]) -> None:
        """Have orders played in a round that begins at a time of the monotonic clock."""
        self.send((round_number, begin_s, orders))

    @staticmethod
    def ready(players: Iterable[Player], within_s: float) -> list[Player]:
        """Wait for players that have a report."""
        pipes = {player._pipe: player for player in players}
        return [pipes[pipe] for pipe in wait(list(pipes), within_s)]

    @property
    def gone(self) -> bool:
        return self._pipe.closed or not self._process.is_alive()

    def told(self) -> tuple[int, Report | str]:
        """Return a report, or a failure outside of any play, with the number of its round."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            return -1, "the pipe to a player broke"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.close()


@dataclass(slots=True)
class _Course:
    outcome: Outcome = "error"
    begun_s: float = 0.0
    ended_s: float = 0.0
    kv: torch.Tensor | None = None
    cache: CacheFacts | None = None
    later: CacheFacts | None = None
    upgraded: bool = False
    missing: tuple[int, ...] = ()
    error: str = ""


def _main(pipe: Connection, seat: Seat) -> None:
    torch.set_num_threads(1)
    with seat.log.open("a") as log:
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        asyncio.run(_Plays(pipe, seat).run())


class _Plays:
    def __init__(self, pipe: Connection, seat: Seat) -> None:
        self._pipe, self._seat = pipe, seat
        self._clients: dict[str, AsyncClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._round = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._stray(_said(context)))
        threading.excepthook = lambda args: self._stray(f"thread: {_trace(args.exc_value)}")
        sys.unraisablehook = lambda args: self._stray(f"unraisable: {_trace(args.exc_value)}")
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        threading.Thread(target=_listen, args=(self._pipe, loop, inbox), daemon=True).start()
        async with AsyncExitStack() as stack:
            for library in LIBRARIES:
                self._clients[library] = await stack.enter_async_context(self._client(library))
            self._pipe.send(os.getpid())
            while (message := await inbox.get()) is not None:
                self._round, begin_s, orders = message
                for order in orders:
                    task = loop.create_task(self._play(self._round, begin_s, order))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                if not orders:
                    gc.collect()
            for task in self._tasks:
                task.cancel()

    def _client(self, library: str) -> AsyncClient:
        folder = self._seat.folder / library
        limits = Limits(memory_bytes=1 << 18, disk=folder / "groups", disk_bytes=1 << 20)
        return self._new_client(library, limits, cache=folder / "cache")

    def _new_client(self, library: str, limits: Limits, cache: Path | None = None) -> AsyncClient:
        seat = self._seat
        return AsyncClient(
            seat.url,
            PeerOptions(token=seat.token, fingerprint=seat.fingerprint, quic=library),
            limits=limits,
            cache=cache,
        )

    def _stray(self, text: str) -> None:
        self._send(self._round, text)

    def _send(self, number: int, what: Report | str) -> None:
        with suppress(OSError):  # the laboratory is gone
            self._pipe.send((number, what))

    async def _play(self, number: int, begin_s: float, order: Order) -> None:
        await asyncio.sleep(max(0.0, begin_s + order.at_s - time.monotonic()))
        engine, course = self._engine(order), _Course()
        task = asyncio.create_task(self._whole(order, engine, course))
        called_s = time.monotonic()
        if order.cancel_s is not None:
            asyncio.get_running_loop().call_later(order.cancel_s, task.cancel)
        await asyncio.wait({task}, timeout=self._seat.hang_s)
        if not task.done():
            self._send(number, Report(order.number, "hang", time.monotonic() - called_s, order.deadline_s))
            task.cancel()
            return
        if task.cancelled():
            course.outcome = "crash" if order.cancel_s is None else "cancelled"
        elif (error := task.exception()) is not None:
            course.outcome, course.error = "crash", _trace(error)
        self._send(number, await self._report(order, engine, course))

    async def _report(self, order: Order, engine: KnownEngine | None, course: _Course) -> Report:
        await asyncio.sleep(_LATER_S)
        if course.kv is not None and course.later is None:
            tracks = tuple(group.track for group in course.cache.groups)
            course.later = facts_of(course.kv, G, tracks, course.cache.catalog_sha256)
        bound_s = order.deadline_s * (2 if order.how == "prefix" else 1)  # for each of two calls
        if order.engine is not None:
            bound_s += ENGINE_PATIENCE * COST.seconds(0, order.tokens)
        if course.outcome == "cancelled":
            bound_s = min(bound_s, order.cancel_s)
        outcome, error = course.outcome, course.error
        if engine is not None and engine.misled:
            outcome, error = "crash", "the engine was asked for other tokens than those of the prompt"
        return Report(
            order.number,
            outcome,
            course.ended_s - course.begun_s,
            bound_s,
            cache=course.cache,
            later=course.later,
            upgraded=course.upgraded,
            missing=course.missing,
            bases=() if engine is None else tuple(map(_both, engine.bases, engine.ends)),
            error=error,
        )

    def _engine(self, order: Order) -> KnownEngine | None:
        if order.engine is None:
            return None
        prompt = self._seat.prompts[order.prompt]
        seconds = _PACE[order.engine] * COST.seconds(0, len(prompt.tokens))
        return KnownEngine(prompt, seconds, order.mode, fails=order.engine == "failing")

    async def _whole(self, order: Order, engine: KnownEngine | None, course: _Course) -> None:
        """Play with a client; those of fresh plays are made and closed here."""
        if not order.fresh:
            await self._with(self._clients[order.quic], order, engine, course)
            return
        async with self._new_client(order.quic, Limits(memory_bytes=0)) as client:
            await self._with(client, order, engine, course)

    async def _with(self, client: AsyncClient, order: Order, engine: KnownEngine | None, course: _Course) -> None:
        try:
            course.begun_s = time.monotonic()
            try:
                got = await self._called(client, order, engine)
            finally:
                course.ended_s = time.monotonic()
        except IncompleteError as error:
            course.outcome, course.missing, course.error = "incomplete", error.missing, str(error)
            if error.prefix is not None:
                self._look(error.prefix, course)
        except BusyError as error:
            course.outcome, course.error = "refused", str(error)
        except KvabrError as error:
            course.outcome, course.error = "error", f"{type(error).__name__}: {error}"
        else:
            await self._took(got, course)

    async def _called(
        self, client: AsyncClient, order: Order, engine: KnownEngine | None
    ) -> Played | PlayedPrefix | NothingCached:
        prompt = self._seat.prompts[order.prompt]
        tokens = prompt.tokens[: order.tokens]
        options = self._options(order)
        if order.how == "asset":
            return await client.play_asset(
                prompt.namespace, deadline=order.deadline_s, tokens=tokens if engine else (), options=options,
                engine=engine,
            )  # fmt: skip
        if order.how == "prefix":
            found = await client.find(tokens, model=SPEC, within_s=order.deadline_s)
            if found is None:
                return NothingCached(SPEC, 0.0)
            return await client.play_prefix(found, deadline=order.deadline_s, cost=COST, options=options)
        model = None if order.number % 3 else SPEC
        return await client.play(tokens, deadline=order.deadline_s, options=options, model=model, engine=engine)

    @staticmethod
    def _options(order: Order) -> PlayOptions:
        options = PlayOptions(prefill_cost=COST)
        if order.policy is not None:
            options = replace(options, policy=order.policy)
        if order.how == "upgrades":
            options = replace(options, after=_UPGRADES_S)
        if order.own_tensor:
            shape = SPEC.shape(order.tokens)
            options = replace(options, out=torch.full(shape, float("nan"), dtype=SPEC.torch_dtype))
        return options

    @staticmethod
    def _look(played: Played, course: _Course) -> None:
        course.kv = played.kv
        course.cache = facts_of(played.kv, G, played.coverage, played.catalog_sha256)

    async def _took(self, got: Played | PlayedPrefix | NothingCached, course: _Course) -> None:
        if isinstance(got, NothingCached):
            course.outcome = "nothing"
        elif isinstance(got, PlayedPrefix):
            course.outcome = "prefix"
            course.kv, course.cache = got.kv, facts_of(got.kv, G, got.coverage)
        else:
            course.outcome = "complete"
            self._look(got, course)
            if got.upgrades is not None:
                got.upgrades.into(StepGate())
                try:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(got.upgrades.wait(), 2 * _UPGRADES_S)
                finally:  # also if the caller loses interest
                    got.upgrades.cancel()
                    course.later = facts_of(got.kv, G, got.upgrades.coverage, got.catalog_sha256)
                    course.upgraded = True


def _both(first: torch.Tensor, last: torch.Tensor) -> tuple[CacheFacts, CacheFacts]:
    return facts_of(first, G), facts_of(last, G)


def _listen(pipe: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any]) -> None:
    """Pass on messages from the pipe, and None at its end; in a thread."""
    with suppress(RuntimeError):  # the loop is over
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, pipe.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(inbox.put_nowait, None)


def _said(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"event loop: {context.get('message')} {'' if error is None else _trace(error)}"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]
