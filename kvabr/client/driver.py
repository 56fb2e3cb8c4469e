"""Drive one `player.Session` over one `Connection`: clock, downloads, decoding and engine.

Only decoding and prefill leave the event loop's thread. All plays share a few decoder threads; each engine has its own
thread. A play that ends discards results that arrive later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from kvabr.client.decode_speeds import on_one_core
from kvabr.client.engine_hook import EngineHook
from kvabr.client.engine_work import on_engine, timed, timings_of
from kvabr.client.live_feed import LiveFeed
from kvabr.client.snapshot import Snapshot, Watch
from kvabr.client.token_recompute import TokenRecompute
from kvabr.player.assembler import Assembler, Layer, Placement
from kvabr.player.goals.blend import BlendAim
from kvabr.player.goals.live import EdgeChanges
from kvabr.player.session import Session
from kvabr.player.session_types import (
    Action,
    Cancel,
    ChooseTokens,
    Decode,
    FetchGroup,
    PlayerConfig,
    PlayRecord,
    Recompute,
    RecomputeTokens,
)
from kvabr.transfer.interface import Connection, GroupReader, TaskSet, cancel_all
from kvabr.transfer.work import decoders
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.engine import Engine, ResidentCache, ResidentEngine, prefill_classes
from kvabr.types.errors import (
    ConnectionLostError,
    FormatError,
    KvabrError,
    PolicyError,
    Reason,
    RequestError,
    TransportError,
)


class EngineCache:
    """Computes groups with the engine, one call at a time; runs in the engine's thread."""

    def __init__(self, engine: Engine, catalog: Catalog, tokens: Sequence[int], assembler: Assembler) -> None:
        self._engine, self._catalog, self._tokens, self._assembler = engine, catalog, tokens, assembler
        self._held: list[str | None] = [None] * catalog.groups

    def compute(self, first: int, last: int) -> None:
        """Compute groups ``first`` to ``last`` - 1, and write them to the cache."""
        catalog, assembler = self._catalog, self._assembler
        begin, end = catalog.tokens_before(first), catalog.tokens_before(last)
        tokens = self._tokens[begin:end]
        if self._resident is None:
            before = assembler.before_classes(first) if first else None
            assembler.put_computed(first, last, *prefill_classes(self._engine, tokens, before))
            return
        if first:
            self._place(self._resident, first)
        self._held[first:last] = [None] * (last - first)
        computed = self._resident.prefill(tokens, begin)
        self._held[first:last] = [RECOMPUTED] * (last - first)
        assembler.put_computed(first, last, computed)

    @cached_property
    def _resident(self) -> ResidentCache | None:
        catalog, engine = self._catalog, self._engine
        if isinstance(engine, ResidentEngine) and catalog.every_token and not catalog.first_token:
            return engine.reside(catalog.tokens)
        return None

    def _place(self, resident: ResidentCache, groups: int) -> None:
        coverage = self._assembler.coverage[:groups]  # read first: a group that arrives during the copy is copied again
        before, ends = self._assembler.before(groups), self._catalog.tokens_before
        changed = [group for group in range(groups) if coverage[group] != self._held[group]]
        for _, run in groupby(enumerate(changed), lambda each: each[1] - each[0]):
            some = [group for _, group in run]
            begin, end = ends(some[0]), ends(some[-1] + 1)
            resident.place(begin, before[:, :, :, begin:end])
        self._held[:groups] = coverage


_NOT_FAULTS = (Reason.BUSY, Reason.AWAY)
"""Refusals that do not count as attempts."""
_PAUSE_SHARE = 1 / 50
"""Fraction of the deadline to wait before repeating a refused request, unless the peer names a time."""
_MAX_PAUSE_SHARE = 1 / 8
"""Maximum of such waits, even if the peer names a longer time."""

_UNREACHABLE_S = 1.0
"""Seconds without a reachable source before the engine computes the missing groups; a relay restarts faster."""

LIVE = PlayerConfig(chunked=True, stalled_after=0.2, silent_after=0.25, decode_ahead_s=0.005)
"""Settings for real networks: bytes arrive in bursts, streams stall, peers fall silent."""

_log = logging.getLogger("kvabr.client")


class Driver:
    """One play, from `Session.start` to its end."""

    def __init__(
        self,
        session: Session,
        connection: Connection,
        assembler: Assembler,
        *,
        engine: Engine | None = None,
        tokens: Sequence[int] = (),
        hook: EngineHook | None = None,
        watch: Watch | None = None,
        feed: LiveFeed | None = None,
        again: TokenRecompute | None = None,
    ) -> None:
        """Prepare; `run` starts the play.

        Only the driver may call the fresh ``session``. The connection outlives the play; the assembler holds the cache
        after `run`. The engine is required if the session has a cost model, ``again`` if it has a `BlendGoal` with a
        cost. ``hook`` writes decoded upgrades; ``watch`` receives a snapshot at every tick; ``feed`` follows an asset
        still being prefilled.
        """
        self.session, self.assembler = session, assembler
        self._connection, self._sources, self._catalog = connection, connection.sources, session.view.catalog
        self._engine, self._tokens = engine, tokens
        self._computed: EngineCache | None = None
        self._hook, self._watch, self._feed, self._again = hook, watch, feed, again
        self._reads: dict[int, GroupReader] = {}
        self._frames: dict[int, GroupReader] = {}
        # An engine's hook decides when a group is written.
        self._together = hook is None and assembler.together
        self._waiting: list[Decode] = []
        self._batching = False
        self._tasks = TaskSet()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._unreachable_s: float | None = None
        self.engine_error: BaseException | None = None

    async def run(self) -> PlayRecord:
        """Play to the end, and return the record; raise `PolicyError`. Cancellation cancels every download."""
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._start_s = self._loop.time()
        try:
            self._report(self.session.start)
            if self._feed is not None and not self._over.done():
                stopped = partial(self._report, self.session.producer_stopped)
                self._tasks.start(self._feed.run(self._published, stopped))
            await self._over
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for download in self._reads.values():
                download.cancel()
            await cancel_all(self._tasks)
            self._computed = None  # free the engine's memory for the next play
        self._show()
        return self.session.record

    def now(self) -> float:
        """Seconds since the play began."""
        return self._loop.time() - self._start_s

    # ---------------------------------------------------- events and actions

    def _report(self, event: Callable[..., None], *arguments: Any) -> None:
        if self._over.done():
            return
        try:
            event(*arguments, now=self.now())
            actions = self.session.actions()
            if self.session.over:  # `run` ends everything at once
                self._over.set_result(None)
                return
            for action in actions:
                self._execute(action)
        except Exception as error:  # noqa: BLE001  # raised by a policy or by kvabr: end the play instead of hanging
            if not self._over.done():
                self._over.set_exception(error)
        else:
            self._schedule()

    def _execute(self, action: Action) -> None:
        match action:
            case FetchGroup():
                self._fetch(action)
            case Cancel():
                self._cancel(action.request)
            case Decode():
                self._decode(action)
            case Recompute():
                self._compute(action)
            case ChooseTokens() | RecomputeTokens():
                self._tasks.start(self._recompute_tokens(action))

    def _schedule(self) -> None:
        when = self.session.next_timer()
        if when == self._timer_s or self._over.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when
        self._timer = None if when is None else self._loop.call_at(self._start_s + when, self._tick)

    def _tick(self) -> None:
        due_s = self._timer_s or 0.0
        self._timer = self._timer_s = None
        if self._hook is not None and self._connection.closed:
            self._report(partial(self.session.stop, reason="the connection is closed"))
            return
        if self._connection.unreachable:
            self._unreachable_s = self.now() if self._unreachable_s is None else self._unreachable_s
            reason = f"connection lost: {self._connection.trouble or 'no source can be reached'}"
            self._report(partial(self.session.unreachable, reason))
            if self.now() - self._unreachable_s >= _UNREACHABLE_S:
                self._report(partial(self.session.cut_off, reason))
        else:
            self._unreachable_s = None
        if self._connection.held_by_priority:
            self.session.waited(self.now())
        # The loop's clock and the play's may differ by a rounding error.
        self._report(lambda now: self.session.timer(max(now, due_s)))
        self._show()

    def _show(self) -> None:
        if self._watch is not None:
            self._watch(Snapshot.of(self.session, self.assembler, self._connection.stats(), self.now()))

    def _published(self, edge: int, changes: EdgeChanges) -> None:
        self._report(partial(self.session.published, changes=changes), edge)

    # ------------------------------------------------------------- downloads

    def _fetch(self, action: FetchGroup) -> None:
        download = self._feed.take(action.group) if self._feed is not None and action.pushed else None
        if download is None:
            track, group = self._catalog.address(action.group, action.track)
            download = self._sources[action.source].fetch(
                self._catalog.namespace_of(action.group),
                track,
                group,
                priority=action.priority,
                limit=action.bytes,
                exact=True,
            )
        self._reads[action.request] = download
        self._tasks.start(self._read(action, download))

    def _cancel(self, request: int) -> None:
        self._frames.pop(request, None)
        if (download := self._reads.pop(request, None)) is not None:
            download.cancel()  # its read ends with an error, which the session ignores

    async def _read(self, action: FetchGroup, download: GroupReader) -> None:
        received_before = len(download.data) == action.bytes  # a pushed group may arrive before its announcement
        try:
            await self._receive(action, download)
        except PolicyError as error:
            if not self._over.done():
                self._over.set_exception(error)
        except Exception as error:  # noqa: BLE001  # any transport error fails this request
            if not download.data:
                await self._pause(error)
            self._reads.pop(action.request, None)
            busy = isinstance(error, RequestError) and error.reason in _NOT_FAULTS
            lost = self._sources[action.source].closed
            self._report(partial(self.session.failed, busy=busy, lost=lost), action.request, message_of(error))
        else:
            self._reads.pop(action.request, None)
            self._frames[action.request] = download
            self._report(
                partial(self.session.done, limit="kept" if received_before else download.limit), action.request
            )
        finally:
            download.cancel()

    async def _receive(self, action: FetchGroup, download: GroupReader) -> None:
        size, received = action.bytes, 0
        while received < size:
            part = await download.read()
            if not part or received + len(part) > size:
                got = "more" if part else str(received)
                raise RequestError(f"group {action.group} of {action.track} must have {size} bytes, got {got}")
            received += len(part)
            if received < size:
                self.session.progress(action.request, received, self.now(), download.limit)

    async def _pause(self, error: Exception) -> None:
        """Wait as long as a busy peer requests; immediate retries would load it more."""
        if not isinstance(error, RequestError):
            return
        deadline_s, wanted = self.session.view.deadline_s, error.retry_after_s
        if wanted is None and error.reason in _NOT_FAULTS:
            wanted = _PAUSE_SHARE * deadline_s
        if wanted is not None:
            await asyncio.sleep(max(0.0, min(wanted, _MAX_PAUSE_SHARE * deadline_s)))

    # -------------------------------------------------------------- decoding

    def _decode(self, action: Decode) -> None:
        if not self._together:
            self._tasks.start(self._place([action]))
            return
        self._waiting.append(action)
        if not self._batching:
            self._batching = True
            self._tasks.start(self._place_waiting())

    async def _place_waiting(self) -> None:
        while self._waiting and not self._over.done():
            await asyncio.sleep(0)  # groups that arrive in one loop iteration share a batch
            actions, self._waiting = self._waiting, []
            await self._place(actions)
        self._batching = False

    async def _place(self, actions: Sequence[Decode]) -> None:
        batch = [(action.group, self._layers(action)) for action in actions]
        placed: Sequence[Placement | Callable[[], Placement] | Exception]
        try:
            work = partial(timed, self._loop.time, self._decoded, batch)
            placed, seconds = await self._loop.run_in_executor(decoders(), work)
        except Exception as error:  # noqa: BLE001  # any device error
            placed, seconds = [error] * len(batch), 0.0
        seconds_each = self._seconds_each(actions, seconds)
        for action, (_, layers), result, own_s in zip(actions, batch, placed, seconds_each, strict=True):
            if isinstance(result, Exception):
                self._refuse(action, layers, result)
                continue
            for request in (*action.below, action.request):
                self._frames.pop(request, None)
            if self._hook is None or isinstance(result, Placement) or await self._written(self._hook, action, result):
                self._report(partial(self.session.decoded, seconds=own_s), action.request)

    def _decoded(self, batch: Sequence[tuple[int, Sequence[Layer]]]) -> Sequence[Any]:
        if self._over.done():
            return [Placement.LATE] * len(batch)
        on_one_core()
        if self._hook is None:
            return self.assembler.put_many(batch)
        ((group, (*below, top)),) = batch
        return [self.assembler.prepare(group, top.track, top.frame, has_digest=top.has_digest, below=below)]

    async def _written(self, hook: EngineHook, action: Decode, write: Callable[[], object]) -> bool:
        unit = self._catalog.unit(action.group)
        try:
            await hook.write(unit.first, unit.first + unit.tokens, write)
        except Exception as error:  # noqa: BLE001  # any engine error ends the upgrades
            self.engine_error = error
            self._report(partial(self.session.stop, reason=message_of(error)))
        return self.engine_error is None

    def _seconds_each(self, actions: Sequence[Decode], seconds: float) -> list[float | None]:
        view = self.session.view
        if self.assembler.coded:
            return [None] * len(actions)
        own = [view.decode_s(action.track) for action in actions]
        spent, whole = max(0.0, seconds - view.decode_latency_s(actions[0].track)), sum(own)
        return [spent * (each / whole if whole else 1 / len(own)) for each in own]

    def _layers(self, action: Decode) -> list[Layer]:
        downloads = [self._frames[request] for request in (*action.below, action.request)]
        names = self.session.view.ladder.stacks[action.track][-len(downloads) :]
        return [Layer(name, one.data, one.has_digest) for name, one in zip(names, downloads, strict=True)]

    def _refuse(self, action: Decode, layers: Sequence[Layer], error: Exception) -> None:
        """Report the first unusable layer of a group; log only the first damaged group of a play."""
        request, track = action.request, action.track
        for below, layer in zip(action.below, layers, strict=False):
            try:
                self.assembler.check(action.group, layer)
            except Exception as lower:  # noqa: BLE001  # as for the whole group
                request, track, error = below, layer.track, lower
                break
        if isinstance(error, FormatError):  # others are errors of this machine, not damage
            damaged, name = self.session.record.damaged, self._catalog.namespace.prompt
            if not damaged:
                what = f"group {action.group} of {name} on {track}"
                _log.warning("kvabr: %s is damaged (%s); see `kvabr store verify --deep`", what, message_of(error))
            damaged.append((action.group, track, message_of(error)))
        self._frames.pop(request, None)
        self._report(self.session.refused, request, message_of(error))

    # ---------------------------------------------------------------- engine

    def _compute(self, action: Recompute) -> None:
        engine = self._engine
        if engine is None:
            raise KvabrError("this play has a recompute cost but no engine")
        begin, end = map(self._catalog.tokens_before, (action.first, action.last))

        if self._computed is None:
            self._computed = EngineCache(engine, self._catalog, self._tokens, self.assembler)
        work = partial(self._computed.compute, action.first, action.last)

        async def compute() -> None:
            try:
                _, seconds = await on_engine(engine, partial(timed, self._loop.time, work))
            except Exception as error:  # noqa: BLE001  # engines raise arbitrary errors
                self.engine_error = error
                self._report(self.session.compute_failed, message_of(error))
            else:
                self._report(self.session.computed, action.first, action.last)
                timings_of(engine).note(begin, end - begin, seconds)

        self._tasks.start(compute())

    async def _recompute_tokens(self, action: ChooseTokens | RecomputeTokens) -> None:
        aim, again, assembler = self.session.aim, self._again, self.assembler
        if again is None or not isinstance(aim, BlendAim):
            raise KvabrError("this play recomputes tokens, but has no TokenRecompute")
        done: Callable[..., None] = aim.tokens_chosen
        failed: Callable[..., None] = aim.tokens_failed
        if isinstance(action, RecomputeTokens):
            ahead = action.passage is not None
            done, failed = partial(aim.tokens_recomputed, ahead=ahead), partial(failed, ahead=ahead)

        def work() -> None:
            if isinstance(action, ChooseTokens):
                again.choose(assembler.before(self._catalog.groups))
            elif action.passage is not None:
                again.compute_ahead(assembler, action.passage, action.tokens)
            else:
                coverage = [track or "" for track in assembler.coverage]
                again.compute(assembler, coverage, action.tokens, lambda: not self._over.done())

        try:
            await on_engine(again.engine, work)
        except Exception as error:  # noqa: BLE001  # engines and selectors raise arbitrary errors
            self._report(failed, message_of(error))
        else:
            self._report(done)


def message_of(error: BaseException) -> str:
    """Return an error's message for users."""
    if isinstance(error, ConnectionLostError):
        return f"connection lost: {error}"
    if isinstance(error, TransportError | KvabrError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
