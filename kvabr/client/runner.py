"""Runs plays: admits them, gives each a connection, keeps them in the order of their deadlines, and ends them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from kvabr.client.metrics import ClientMetrics
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer
from kvabr.client.play_connection import PlayConnection
from kvabr.client.preparing import Clock
from kvabr.client.resources import cancel_all
from kvabr.client.result import NothingCached, Played, PlayedPrefix
from kvabr.client.scheduling import Admission, EdfScheduler, wire_priority
from kvabr.client.upgrades import Upgrades
from kvabr.types.errors import BusyError, PlayError, told_if_exhausted

R = TypeVar("R", bound=Played | NothingCached | PlayedPrefix)

_DIAL_SHARE = 0.5
"""Share of the deadline that a play waits for a connection; then it does what it does when it loses its peer."""
_MIN_LEFT_S = 1e-3
_LAST = 255
"""Priority of upgrades of caches that are in use, while there are plays."""


class PlayRunner:
    """The plays of one client, and the upgrades that go on after them."""

    def __init__(self, limits: Limits, metrics: ClientMetrics) -> None:
        self._fair, self._metrics = limits.fair, metrics
        self._admission = Admission(limits.plays, limits.waiting, limits.wait_share, metrics)
        self._schedule: EdfScheduler[PlayConnection] = EdfScheduler()
        self._plays: set[asyncio.Task[Any]] = set()
        self._upgrades: set[asyncio.Task[None]] = set()
        """Upgrades of caches that are in use."""
        self._closing = False

    async def close(self) -> None:
        """End all plays and upgrades; plays that wait for their turn are refused."""
        self._closing = True
        self._admission.close()
        await cancel_all(self._plays | self._upgrades)

    async def run(
        self,
        peer: ClientPeer,
        deadline_s: float,
        options: PlayOptions,
        work: Callable[[PlayConnection, Clock, PlayOptions], Awaitable[R]],
    ) -> R:
        """Run a play in a task of its own, so that closing the client ends it and not its caller.

        ``work`` takes the play's connection, a clock that runs since this call, and options that report to telemetry.

        Raises:
            BusyError: there are too many plays.
            PlayError: the client was closed meanwhile.
        """
        clock = Clock(deadline_s)
        result = "failed"
        try:
            with told_if_exhausted(peer.relieve), ExitStack() as reporting:
                if options.telemetry is not None:
                    options = replace(options, log=reporting.enter_context(options.telemetry.play(options.log)))
                async with self._connected(peer, clock) as connection:
                    task = asyncio.ensure_future(work(connection, clock, options))
                    self._plays.add(task)
                    task.add_done_callback(self._plays.discard)
                    played = await task
                    if isinstance(played, Played) and played.upgrades is not None:
                        self._keep(connection, played.upgrades)
            if isinstance(played, Played):
                result = "met" if played.met else "late"
            else:
                result = "nothing" if isinstance(played, NothingCached) or not played.tokens else "met"
        except BusyError:
            result = "refused"
            raise
        except asyncio.CancelledError:
            result = "aborted"
            asking = asyncio.current_task()
            if self._closing and asking is not None and not asking.cancelling():
                raise PlayError("the client was closed before the cache was there") from None
            raise
        else:
            return played
        finally:
            self._metrics.plays_total.labels(result).inc()

    # -------------------------------------------------------------- internals

    @asynccontextmanager
    async def _connected(self, peer: ClientPeer, clock: Clock) -> AsyncIterator[PlayConnection]:
        """Wait for a turn, and yield a connection for one play; leaving cancels whatever it still fetches."""
        loop = asyncio.get_running_loop()
        async with self._admission.enter(clock.deadline_s):
            transfers = await peer.transfers_within(max(0.0, _DIAL_SHARE * clock.left()))
            connection = PlayConnection(transfers, self._place)
            # A loop that stood still may have used up the deadline: the play then gets what comes at once.
            due_s = loop.time() + max(_MIN_LEFT_S, clock.left())
            connection.due_s = due_s
            self._reprioritise(self._schedule.add(connection, due_s))
            late = loop.call_at(due_s, self._reschedule, connection, due_s + clock.deadline_s)
            try:
                yield connection
            finally:
                late.cancel()
                if not connection.kept:
                    await self._give_up(connection)

    def _keep(self, connection: PlayConnection, upgrades: Upgrades) -> None:
        """Leave a connection to the upgrades of a cache in use, behind all plays."""

        async def until_over() -> None:
            try:
                with suppress(Exception):  # the caller gets it from `Upgrades.wait`
                    await upgrades.wait()
            finally:
                upgrades.cancel()
                await self._give_up(connection)

        connection.kept = True
        self._reschedule(connection, math.inf)
        task = asyncio.create_task(until_over())
        self._upgrades.add(task)
        task.add_done_callback(self._upgrades.discard)

    async def _give_up(self, connection: PlayConnection) -> None:
        await connection.close()
        self._reprioritise(self._schedule.remove(connection))

    def _place(self, connection: PlayConnection, priority: int) -> int:
        # A play that has the link for itself uses all priorities.
        if not self._fair or len(self._schedule) < 2:
            return priority
        if connection.kept:
            return _LAST
        return wire_priority(self._schedule.level(connection), priority, late=connection.late)

    def _reschedule(self, connection: PlayConnection, due_s: float) -> None:
        """Change a play's deadline: once it is late, others go before it."""
        connection.late = True
        changed = self._schedule.remove(connection)
        self._reprioritise([*changed, *self._schedule.add(connection, due_s), connection])

    def _reprioritise(self, changed: Iterable[PlayConnection]) -> None:
        # The first and the last of several plays had, or now has, the link for itself.
        for connection in changed if len(self._schedule) > 2 else list(self._schedule):
            connection.reprioritise()
