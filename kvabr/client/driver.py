"""Drive one `player.Session` over one `Connection`: clock, downloads, decoding and engine.

Only decoding and prefill leave the event loop's thread. A few threads shared by all plays decode, in parallel with the
network; many very small groups are decoded on the loop. Each engine has its own thread and computes one play at a time.
A play that ends discards their late results.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import groupby
from typing import Any

from kvabr.abr.plugins import shipped
from kvabr.client.decode_speeds import on_one_core
from kvabr.client.engine_hook import EngineHook
from kvabr.client.live_feed import LiveFeed
from kvabr.client.resources import on_engine, timed, timings_of
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
from kvabr.transfer.interface import Connection
from kvabr.transfer.transfer import GroupReader
from kvabr.transfer.work import SMALL_BYTES, cancel_all, decoders
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
    """Computes groups of a play, in the engine's threads, one call at a time."""

    def __init__(self, engine: Engine, catalog: Catalog, tokens: Sequence[int], assembler: Assembler) -> None:
        """Prepare. The first computation allocates the engine's cache."""
        self._engine, self._catalog, self._tokens, self._assembler = engine, catalog, tokens, assembler
        self._room: ResidentCache | None = None
        self._asked = False
        self._held: list[str | None] = [None] * catalog.groups
        """By group, the track that the engine holds, or ``recomputed``."""

    def compute(self, first: int, last: int) -> None:
        """Compute groups ``first`` to ``last`` - 1 from the groups before them, and put them into place."""
        catalog, assembler = self._catalog, self._assembler
        begin, end = catalog.tokens_before(first), catalog.tokens_before(last)
        tokens = self._tokens[begin:end]
        if not self._asked:
            self._asked = True
            if isinstance(self._engine, ResidentEngine) and catalog.every_token and not catalog.first_token:
                self._room = self._engine.reside(catalog.tokens)
        if self._room is None:
            before = assembler.before_classes(first) if first else None
            assembler.put_computed(first, last, *prefill_classes(self._engine, tokens, before))
            return
        if first:
            self._place(self._room, first)
        self._held[first:last] = [None] * (last - first)
        computed = self._room.prefill(tokens, begin)
        self._held[first:last] = [RECOMPUTED] * (last - first)
        assembler.put_computed(first, last, computed)

    def _place(self, room: ResidentCache, groups: int) -> None:
        coverage = self._assembler.coverage[:groups]  # read first: a group that arrives during the copy is copied again
        before, ends = self._assembler.before(groups), self._catalog.tokens_before
        changed = [group for group in range(groups) if coverage[group] != self._held[group]]
        for _, run in groupby(enumerate(changed), lambda each: each[1] - each[0]):
            some = [group for _, group in run]
            begin, end = ends(some[0]), ends(some[-1] + 1)
            room.place(begin, before[:, :, :, begin:end])
        self._held[:groups] = coverage


_PAUSE_SHARE = 1 / 50
"""Share of the deadline to wait before repeating a refused request, unless the peer names a time."""
_MAX_PAUSE_SHARE = 1 / 8
"""Longest such wait as a share of the deadline, even if the peer names more."""
_MAX_THREADED_GROUPS = 64
"""Prompts of at most this many groups are always decoded in threads."""
_MAX_DECODE_TURN_S = 0.01
"""Seconds of decoding small groups before the event loop runs again."""
_MAX_READS = 96
"""Groups read at once. A connection sends fewer requests at a time anyway."""

_UNREACHABLE_S = 1.0
"""Seconds without a reachable source before the engine computes the rest; a relay restarts faster."""

LIVE = PlayerConfig(chunked=True, stalled_after=0.2, silent_after=0.25, decode_ahead_s=0.005)
"""Player settings for real networks: bytes arrive in bursts, streams stall, peers fall silent."""


_SLOW_S = 0.1
"""Steps of a plug-in policy at least this slow are logged as a warning."""
_SLOW_EVERY_S = 60.0
_next_slow_s = 0.0

_log = logging.getLogger("kvabr.client")


class _RefusedError(Exception):
    """A frame cannot be decoded."""

    def __init__(self, request: int, cause: Exception) -> None:
        super().__init__(request)
        self.request, self.cause = request, cause


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

        Args:
            session: a fresh session that only the driver calls.
            connection: the connection or sources for the groups; it outlives the play.
            assembler: receives the groups and holds the cache after `run`.
            engine: computes the session's other groups; required if it has a cost model.
            tokens: ids of the catalog's tokens, for the engine.
            hook: for upgrades: writes decoded groups when the engine allows it.
            watch: called with a snapshot at every tick.
            feed: feed of an asset that is still being prefilled.
            again: recomputes tokens of passages; required if the session has a `BlendGoal` with a cost.
        """
        self.session, self.assembler = session, assembler
        self._connection, self._sources, self._catalog = connection, connection.sources, session.view.catalog
        self._engine, self._tokens = engine, tokens
        self._computed: EngineCache | None = None
        self._hook, self._watch, self._feed, self._again = hook, watch, feed, again
        self._reads: dict[int, tuple[asyncio.Task[None], GroupReader]] = {}
        self._later: list[tuple[int, int, FetchGroup]] = []
        self._unwanted: set[int] = set()
        """Cancelled requests in `_later`."""
        self._frames: dict[int, GroupReader] = {}
        """By request, downloads to decode."""
        # An engine's hook decides when a group is written.
        largest, many = self._catalog.spec.largest, self._catalog.groups > _MAX_THREADED_GROUPS
        self._small = hook is None and many and 2 * largest.rows * largest.elements_per_token <= SMALL_BYTES
        """True if this thread decodes the groups, small and numerous."""
        self._together = hook is None and assembler.together
        """True if waiting groups are decoded in one batch."""
        self._waiting: deque[Decode] = deque()
        """Groups to decode here or in the next batch."""
        self._batching = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._away_s: float | None = None
        """Time since which no source is reachable; None: one is."""
        self.engine_error: BaseException | None = None
        """Error of the engine or its hook."""

    async def run(self) -> PlayRecord:
        """Play to the end, and return the record. Cancellation cancels every download.

        Raises:
            PolicyError: from the session's policy or estimator.
        """
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._start_s = self._loop.time()
        try:
            self._tell(self.session.start)
            if self._feed is not None and not self._over.done():
                self._begin(self._feed.run(self))
            await self._over
        finally:
            # End the timer and every download and task.
            if self._timer is not None:
                self._timer.cancel()
            for task, download in self._reads.values():
                download.cancel()
                self._tasks.add(task)
            await cancel_all(self._tasks)
            self._computed = None  # free the engine's memory for the next play
        self._show()
        return self.session.record

    def now(self) -> float:
        """Seconds since the play began."""
        return self._loop.time() - self._start_s

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._track(self._loop.create_task(work))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------- events and actions

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """Pass an event to the session, and perform its actions."""
        if self._over.done():
            return
        try:
            begun_s = time.perf_counter()
            event(*arguments, now=self.now())
            actions = self.session.actions()
            self._note_slow(time.perf_counter() - begun_s)
            if self.session.over:  # `run` ends everything at once
                self._over.set_result(None)
                return
            for action in actions:
                self._obey(action)
        except Exception as error:  # noqa: BLE001  # a policy's or ours: end the play instead of hanging
            if not self._over.done():
                self._over.set_exception(error)
        else:
            self._schedule()

    def _note_slow(self, took_s: float) -> None:
        """Warn if a plug-in policy blocks the event loop; the player's own steps take milliseconds."""
        global _next_slow_s  # noqa: PLW0603  # one warning a minute in the process
        policy, now_s = self.session.guard.policy, time.monotonic()
        if took_s >= _SLOW_S and now_s >= _next_slow_s and not shipped(policy):
            _next_slow_s = now_s + _SLOW_EVERY_S
            title = policy.name or type(policy).__name__
            _log.warning("policy %s took %.2g s for one step; every play waits for it", title, took_s)

    def _obey(self, action: Action) -> None:
        match action:
            case FetchGroup():
                self._fetch(action)
            case Cancel():
                self._cancel(action.request)
            case Decode():
                self._decode(action)
            case Recompute():
                self._compute(action)
            case ChooseTokens():
                self._begin(self._choose())
            case RecomputeTokens():
                self._begin(self._compute_again(action))

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
            self._tell(partial(self.session.stop, reason="the connection is closed"))
            return
        if self._connection.unreachable:
            self._away_s = self.now() if self._away_s is None else self._away_s
            reason = f"connection lost: {self._connection.trouble or 'no source can be reached'}"
            if self.session.groups.complete:
                self._tell(partial(self.session.stop, reason=reason))
                return
            if self.now() - self._away_s >= _UNREACHABLE_S:
                self._tell(partial(self.session.cut_off, reason))
        else:
            self._away_s = None
        if self._connection.waits_its_turn:
            self.session.waited(self.now())
        # The loop's clock and the play's may differ by a rounding error.
        self._tell(lambda now: self.session.timer(max(now, due_s)))
        self._show()

    def _show(self) -> None:
        if self._watch is not None:
            self._watch(Snapshot.of(self.session, self.assembler, self._connection.stats(), self.now()))

    # ------------------------------------------------------------- live edge

    def published(self, edge: int, changes: EdgeChanges) -> None:
        """See `LiveFeed.run`."""
        self._tell(partial(self.session.published, changes=changes), edge)

    def stopped(self, reason: str) -> None:
        """See `LiveFeed.run`."""
        self._tell(self.session.producer_stopped, reason)

    # ------------------------------------------------------------- downloads

    def _fetch(self, action: FetchGroup) -> None:
        if len(self._reads) < _MAX_READS or action.pushed:
            self._fetch_now(action)
        else:
            heappush(self._later, (action.priority, action.request, action))

    def _ended(self, request: int) -> None:
        self._reads.pop(request, None)
        while self._later and len(self._reads) < _MAX_READS and not self._over.done():
            _, _, action = heappop(self._later)
            if action.request in self._unwanted:
                self._unwanted.discard(action.request)
            else:
                self._fetch_now(action)

    def _fetch_now(self, action: FetchGroup) -> None:
        ahead = self._feed.take(action.group) if self._feed is not None and action.pushed else None
        download, before = ahead or (None, 0)
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
        self._reads[action.request] = self._loop.create_task(self._read(action, download, before)), download

    def _cancel(self, request: int) -> None:
        self._frames.pop(request, None)
        found = self._reads.get(request)
        if found is None:
            if self._later:
                self._unwanted.add(request)
            return
        task, download = found
        self._track(task)
        task.cancel()
        download.cancel()
        self._ended(request)

    async def _read(self, action: FetchGroup, download: GroupReader, before: int) -> None:
        try:
            await self._receive(action, download, before)
        except PolicyError as error:
            if not self._over.done():
                self._over.set_exception(error)
        except Exception as error:  # noqa: BLE001  # any transport error fails this request
            if download.stats.first_byte_s is None:
                await self._pause(error)
            self._ended(action.request)
            busy = isinstance(error, RequestError) and error.reason in (Reason.BUSY, Reason.AWAY)
            lost = self._sources[action.source].closed
            self._tell(partial(self.session.failed, busy=busy, lost=lost), action.request, said(error))
        else:
            self._ended(action.request)
            self._frames[action.request] = download
            self._tell(partial(self.session.done, limit=download.stats.limit), action.request)
        finally:
            download.cancel()

    async def _receive(self, action: FetchGroup, download: GroupReader, before: int) -> None:
        """Read a group up to its last byte; ``before`` bytes are already read."""
        size, received = action.bytes, before
        if 0 < received <= size:
            self.session.first_byte(action.request, self.now(), "network" if received < size else "kept")
            self.session.progress(action.request, received, self.now(), "network" if received < size else "kept")
        while received != size:
            part = await download.read() if received < size else memoryview(b"")
            if not part or received + len(part) > size:
                what = f"group {action.group} of {action.track}"
                got = "more" if part or received > size else str(received)
                raise RequestError(f"{what}: {got} bytes came, the catalog says {size}")
            first = not received
            received += len(part)
            if first:
                self.session.first_byte(action.request, self.now(), download.stats.limit)
            if received < size:
                self.session.progress(action.request, received, self.now(), download.stats.limit)

    async def _pause(self, error: Exception) -> None:
        """Wait as a busy peer requests: immediate retries would use up the attempts."""
        if not isinstance(error, RequestError):
            return
        deadline_s, wanted = self.session.view.deadline_s, error.retry_after_s
        if wanted is None and error.reason == Reason.BUSY:
            wanted = _PAUSE_SHARE * deadline_s
        if wanted is not None:
            await asyncio.sleep(max(0.0, min(wanted, _MAX_PAUSE_SHARE * deadline_s)))

    # -------------------------------------------------------------- decoding

    def _decode(self, action: Decode) -> None:
        if not self._together and not self._small:
            self._begin(self._place(action))
            return
        self._waiting.append(action)
        if not self._together:
            if len(self._waiting) == 1:
                self._loop.call_soon(self._decode_small)
        elif not self._batching:
            self._batching = True
            self._begin(self._place_together())

    async def _place(self, action: Decode) -> None:
        layers = self._layers(action)
        try:
            work = partial(timed, self._loop.time, self._decoded, action, layers)
            write, seconds = await self._loop.run_in_executor(decoders(), work)
        except _RefusedError as error:
            self._refuse(action, error)
            return
        self._forget_frames(action)
        if self._hook is not None and write is not None:
            unit = self._catalog.unit(action.group)
            try:
                await self._hook.write(unit.first, unit.first + unit.tokens, write)
            except Exception as error:  # noqa: BLE001  # any engine error ends the upgrades
                self.engine_error = error
                self._tell(partial(self.session.stop, reason=said(error)))
                return
        self._tell(partial(self.session.decoded, seconds=seconds), action.request)

    async def _place_together(self) -> None:
        """Decode all waiting groups in a thread, then later arrivals."""
        while self._waiting and not self._over.done():
            await asyncio.sleep(0)  # groups that arrive in one turn of the loop share a batch
            actions = list(self._waiting)
            self._waiting.clear()
            batch = [(action.group, self._layers(action)) for action in actions]
            verdicts: Sequence[Placement | Exception]
            work = partial(timed, self._loop.time, self.assembler.put_many, batch)
            try:
                verdicts, seconds = await self._loop.run_in_executor(decoders(), work)
            except Exception as error:  # noqa: BLE001  # any device error
                verdicts, seconds = [error] * len(batch), 0.0
            shares = self._shares(actions, seconds)
            for action, (_, layers), verdict, share in zip(actions, batch, verdicts, shares, strict=True):
                if isinstance(verdict, Exception):
                    self._refuse(action, self._refused(action, layers, verdict))
                else:
                    self._forget_frames(action)
                    self._tell(partial(self.session.decoded, seconds=share), action.request)
        self._batching = False

    def _shares(self, actions: Sequence[Decode], seconds: float) -> list[float | None]:
        """Return each group's share of the batch's time without fixed latency; None: not decoded."""
        view = self.session.view
        if self.assembler.coded:
            return [None] * len(actions)
        own = [view.decode_s(action.track) for action in actions]
        spent, whole = max(0.0, seconds - view.decode_latency_s(actions[0].track)), sum(own)
        return [spent * (each / whole if whole else 1 / len(own)) for each in own]

    def _note_damage(self, group: int, track: str, why: str) -> None:
        """Record an unusable frame; log the first one of a play."""
        damaged = self.session.record.damaged
        if not damaged:
            name = self._catalog.namespace.prompt
            _log.warning(
                "kvabr: group %d of %s on %s is damaged (%s); see `kvabr store verify --deep`", group, name, track, why
            )
        damaged.append((group, track, why))

    def _decode_small(self) -> None:
        """Decode small groups here for at most `_MAX_DECODE_TURN_S`, and the others after the loop has run."""
        until_s = self._loop.time() + _MAX_DECODE_TURN_S
        while self._waiting and not self._over.done():
            action = self._waiting[0]
            try:
                _, seconds = timed(self._loop.time, self._decoded, action, self._layers(action))
            except _RefusedError as error:
                self._refuse(action, error)
            else:
                self._forget_frames(action)
                self._tell(partial(self.session.decoded, seconds=seconds), action.request)
            self._waiting.popleft()
            if self._waiting and self._loop.time() >= until_s:
                self._loop.call_soon(self._decode_small)
                return

    def _names(self, action: Decode) -> tuple[tuple[int, ...], Sequence[str]]:
        """Return the requests and tracks of a group's layers, lowest first."""
        requests = (*action.below, action.request)
        return requests, self.session.view.ladder.stacks[action.track][-len(requests) :]

    def _layers(self, action: Decode) -> list[Layer]:
        requests, names = self._names(action)
        downloads = [self._frames[request] for request in requests]
        return [Layer(name, one.data, one.has_digest) for name, one in zip(names, downloads, strict=True)]

    def _refuse(self, action: Decode, error: _RefusedError) -> None:
        requests, names = self._names(action)
        if isinstance(error.cause, FormatError):  # other errors are local
            self._note_damage(action.group, names[requests.index(error.request)], said(error.cause))
        self._frames.pop(error.request, None)
        self._tell(self.session.refused, error.request, said(error.cause))

    def _forget_frames(self, action: Decode) -> None:
        for request in (*action.below, action.request):
            self._frames.pop(request, None)

    def _decoded(self, action: Decode, layers: Sequence[Layer]) -> Callable[[], object] | None:
        """Place a group, or return the function that writes it if the cache is in use; runs in a thread.

        Raises:
            _RefusedError: a frame cannot be used; the cache is unchanged.
        """
        if self._over.done():
            return None
        if not self._small:
            on_one_core()
        group, assembler = action.group, self.assembler
        *below, (track, frame, has_digest) = layers
        put = assembler.put if self._hook is None else assembler.prepare
        try:
            written = put(group, track, frame, has_digest=has_digest, below=below)
        except Exception as error:  # any error makes a frame unusable
            raise self._refused(action, layers, error) from error
        return written if callable(written) else None

    def _refused(self, action: Decode, layers: Sequence[Layer], error: Exception) -> _RefusedError:
        """Return the error for the first unusable frame of a group."""
        for request, layer in zip(action.below, layers, strict=False):
            try:
                self.assembler.check(action.group, layer)
            except Exception as lower:  # noqa: BLE001  # any error, as for the whole group
                return _RefusedError(request, lower)
        return _RefusedError(action.request, error)

    # ---------------------------------------------------------------- engine

    def _compute(self, action: Recompute) -> None:
        engine = self._engine
        if engine is None:
            raise KvabrError("this play has a cost of recompute but no engine")
        begin, end = map(self._catalog.tokens_before, (action.first, action.last))

        if self._computed is None:
            self._computed = EngineCache(engine, self._catalog, self._tokens, self.assembler)
        work = partial(self._computed.compute, action.first, action.last)

        async def compute() -> None:
            try:
                _, seconds = await on_engine(engine, partial(timed, self._loop.time, work))
            except Exception as error:  # noqa: BLE001  # engines raise arbitrary errors
                self.engine_error = error
                self._tell(self.session.compute_failed, said(error))
            else:
                self._tell(self.session.computed, action.first, action.last)
                timings_of(engine).note(begin, end - begin, seconds)

        self._begin(compute())

    async def _choose(self) -> None:
        aim, again, assembler = self.session.aim, self._again, self.assembler
        if again is None or not isinstance(aim, BlendAim):
            raise KvabrError("this play is to choose tokens, and has nothing that does")
        try:
            await on_engine(again.engine, lambda: again.choose(assembler.before(self._catalog.groups)))
        except Exception as error:  # noqa: BLE001  # engines and selectors raise arbitrary errors
            self._tell(aim.tokens_failed, said(error))
        else:
            self._tell(aim.tokens_chosen)

    async def _compute_again(self, action: RecomputeTokens) -> None:
        aim, again, assembler = self.session.aim, self._again, self.assembler
        if again is None or not isinstance(aim, BlendAim):
            raise KvabrError("this play is to compute tokens again, and has nothing that does")
        ahead = action.passage is not None

        def work() -> None:
            if action.passage is not None:
                again.compute_ahead(assembler, action.passage, action.tokens)
            else:
                coverage = [track or "" for track in assembler.coverage]
                again.compute(assembler, coverage, action.tokens, lambda: not self._over.done())

        try:
            await on_engine(again.engine, work)
        except Exception as error:  # noqa: BLE001  # as above
            self._tell(partial(aim.tokens_failed, ahead=ahead), said(error))
        else:
            self._tell(partial(aim.tokens_recomputed, ahead=ahead))


def said(error: BaseException) -> str:
    """Return an error's message, for the log and for the user."""
    if isinstance(error, ConnectionLostError):
        return f"connection lost: {error}"
    if isinstance(error, TransportError | KvabrError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
