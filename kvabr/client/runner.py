"""Runs plays: admits them, gives each a connection, keeps them in the order of their deadlines, and ends them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer
from kvabr.client.play_connection import PlayConnection, PlaySources
from kvabr.client.result import NothingCached, Played, PlayedPrefix
from kvabr.client.scheduling import Admission, EdfScheduler, wire_priority
from kvabr.client.upgrades import Upgrades
from kvabr.player.session_types import SourceOf, first_source
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.work import cancel_all
from kvabr.types.errors import BusyError, PlayError, told_if_exhausted

R = TypeVar("R", bound=Played | NothingCached | PlayedPrefix)

_DIAL_SHARE = 0.5
"""Share of the deadline that a play waits for a connection; then it does what it does when it loses its peer."""
_MIN_LEFT_S = 1e-3
_LAST = 255
"""Priority of upgrades of caches that are in use, while there are plays."""


class Clock:
    """Seconds since a play was called for, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        """Start, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._start_s, self.deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Return the seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Return the seconds to the deadline; negative once it has passed."""
        return self._start_s + self.deadline_s - self._loop.time()


@dataclass(slots=True)
class Turn:
    """The turn of one play."""

    connection: PlaySources
    clock: Clock
    """Runs since the call."""
    options: PlayOptions
    """Those that were asked for, reporting to telemetry."""
    source_of: SourceOf
    """Which source is asked for a group."""
    played: Played | NothingCached | PlayedPrefix | None = None

    def over(self, played: R) -> R:
        """Note what came of the play, and return it."""
        self.played = played
        return played


class PlayRunner:
    """The plays of one client, and the upgrades that go on after them."""

    def __init__(self, limits: Limits, metrics: ClientMetrics) -> None:
        self._fair, self._metrics = limits.fair, metrics
        self._admission = Admission(limits.plays, limits.waiting, limits.wait_share, metrics)
        self._schedule: EdfScheduler[PlaySources] = EdfScheduler()
        self._plays: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        """Tasks that play, and what is done once they no longer do."""
        self._upgrades: set[asyncio.Task[None]] = set()
        """Upgrades of caches that are in use."""
        self._closing = False

    async def close(self) -> None:
        """End all plays and upgrades; plays that wait for their turn are refused."""
        first, self._closing = not self._closing, True
        self._admission.close()
        for task in self._plays if first else ():  # each is cancelled once
            task.cancel()
        if self._plays:
            await asyncio.wait(self._plays.values())
        await cancel_all(self._upgrades)

    @asynccontextmanager
    async def play(
        self,
        peers: Sequence[ClientPeer],
        deadline_s: float,
        options: PlayOptions,
        source_of: SourceOf = first_source,
        dials: bool = True,
    ) -> AsyncIterator[Turn]:
        """Yield a play's turn once it has come; the body plays, and says what came of it by `Turn.over`.

        Its sources are ``peers``; the first answers its lookups. Those without a connection are dialled, unless the
        play does without them (``dials``). Closing the client ends the body, not the task that it runs in.

        Raises:
            BusyError: there are too many plays.
            PlayError: the client was closed meanwhile.
        """
        clock, result = Clock(deadline_s), "failed"
        try:
            with ExitStack() as reporting:
                for peer in peers:
                    reporting.enter_context(told_if_exhausted(peer.relieve))
                if options.telemetry is not None:
                    options = replace(options, log=reporting.enter_context(options.telemetry.play(options.log)))
                async with self._connected(peers, clock, dials) as connection:
                    turn = Turn(connection, clock, options, source_of)
                    with self._until_closed():
                        yield turn
                    played = turn.played
                    if isinstance(played, Played) and played.upgrades is not None:
                        self._keep(connection, played.upgrades)
            if isinstance(played, Played):
                result = "met" if played.met else "late"
            else:
                result = "nothing" if isinstance(played, NothingCached | None) or not played.tokens else "met"
        except BusyError:
            result = "refused"
            raise
        except asyncio.CancelledError:
            result = "aborted"
            asking = asyncio.current_task()
            if self._closing and asking is not None and not asking.cancelling():
                raise PlayError("the client was closed before the cache was there") from None
            raise
        finally:
            self._metrics.plays_total.labels(result).inc()

    # -------------------------------------------------------------- internals

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Let `close` end what is done meanwhile, as a timeout would."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # a coroutine runs in one
        over = self._plays[task] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            if self._closing:
                task.uncancel()
            del self._plays[task]
            over.set_result(None)

    @asynccontextmanager
    async def _connected(self, peers: Sequence[ClientPeer], clock: Clock, dials: bool) -> AsyncIterator[PlaySources]:
        """Wait for a turn, and yield the connections of one play; leaving cancels whatever it still fetches."""
        loop = asyncio.get_running_loop()
        async with self._admission.enter(clock.deadline_s):
            within_s = max(0.0, _DIAL_SHARE * clock.left()) if dials else None
            dialled = [asyncio.ensure_future(peer.transfers_within(within_s)) for peer in peers[1:]]
            try:
                shared = [await peers[0].transfers_within(within_s), *[await one for one in dialled]]
            finally:
                for one in dialled:
                    one.cancel()
            if self._closing:  # its turn came in the moment of closing, when nobody knew of its task
                raise asyncio.CancelledError
            connection = PlaySources(
                [PlayConnection(one, lambda _, own: self._place(connection, own)) for one in shared]
            )
            # A loop that stood still may have used up the deadline: the play then gets what comes at once.
            due_s = loop.time() + max(_MIN_LEFT_S, clock.left())
            connection.due(due_s)
            self._reprioritise(self._schedule.add(connection, due_s))
            late = loop.call_at(due_s, self._reschedule, connection, due_s + clock.deadline_s)
            try:
                yield connection
            finally:
                late.cancel()
                if not connection.kept:
                    await self._give_up(connection)

    def _keep(self, connection: PlaySources, upgrades: Upgrades) -> None:
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

    async def _give_up(self, connection: PlaySources) -> None:
        await connection.close()
        self._reprioritise(self._schedule.remove(connection))

    def _place(self, connection: PlaySources, priority: int) -> int:
        # A play that has the link for itself uses all priorities.
        if not self._fair or len(self._schedule) < 2:
            return priority
        if connection.kept:
            return _LAST
        return wire_priority(self._schedule.level(connection), priority, late=connection.late)

    def _reschedule(self, connection: PlaySources, due_s: float) -> None:
        """Change a play's deadline: once it is late, others go before it."""
        connection.late = True
        changed = self._schedule.remove(connection)
        self._reprioritise([*changed, *self._schedule.add(connection, due_s), connection])

    def _reprioritise(self, changed: Iterable[PlaySources]) -> None:
        # The first and the last of several plays had, or now has, the link for itself.
        for connection in changed if len(self._schedule) > 2 else list(self._schedule):
            connection.reprioritise()
