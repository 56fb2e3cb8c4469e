"""One session of an origin on moq-rs: what its peer asks for, and what of that is under way.

moq-rs takes what it is given and shares the path evenly among all groups that it has, whatever their priorities; it
does not say what it has sent, nor that a group was cancelled; and by MoQT it sends nothing of a group before it has all
of it (measured with 0.5.1 and draft 18). So groups are handed over whole, in the order of their priorities, each just
in time: what moq-rs has not sent yet is reckoned from what the connection's counters say. What it has sent it would
keep: it is taken away again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvabr.moqt.codes import RequestCode
from kvabr.quic import moq_lib as moqlib
from kvabr.server.moq_listen import FRAME_BYTES, KEEP_US, MISSING_S, Broadcasts, frame_bytes
from kvabr.server.moq_unsent import Unsent
from kvabr.server.rate_limiter import Allowance
from kvabr.store.grants import Grant
from kvabr.store.publication import Publication
from kvabr.types.errors import AssetError
from kvabr.types.naming import TrackNamespace

if TYPE_CHECKING:
    from kvabr.server.moq_server import MoqServer

MAX_TRACKS = 256
"""Tracks of one session that are kept open, and namespaces as many; those that were not used for longest go."""

_FRAME_S, _SMALL_FRAME, _FRAME = 0.01, 1 << 14, 1 << 16
"""A frame has what the connection sends in so many seconds, but at least so many bytes; and so many before that is
known. A receiver sees nothing of a frame before it has all of it."""
_KEPT_WINDOWS = 2
"""moq-rs may keep so many times what a connection may have unsent."""
_YIELD_BYTES = 1 << 20
"""After so many bytes others get their turn."""
_POLL_S, _LONGEST_POLL_S = 0.002, 0.02
_QUIET_S = 1.0
"""What was sent is forgotten when for so long next to nothing has happened."""


@dataclass(slots=True, eq=False)
class _Job:
    """A group that was asked for."""

    priority: int
    order: int
    request: Any
    track: _Track
    size: int
    requested_s: float
    doubtful: bool = False
    """Something was cancelled after it was asked for: perhaps it was, too."""


@dataclass(slots=True, eq=False)
class _Track:
    """A track that was asked for."""

    namespace: TrackNamespace
    name: str
    producer: Any
    jobs: int = 0
    task: asyncio.Task[None] | None = None


class MoqPeer:
    """One session, once its peer was let in."""

    def __init__(self, moq: Any, server: MoqServer, session: Any, routes: list[Any], grant: Grant) -> None:
        self._moq, self._server, self._session, self._routes, self._grant = moq, server, session, routes, grant
        self._unsent = Unsent(session)
        self._jobs: list[_Job] = []
        self._order = itertools.count()
        self._more = asyncio.Event()
        self._working = self._tried = False
        self._seen_unsent = 0
        self._broadcasts = Broadcasts(moq, MAX_TRACKS, self._spawn)
        self._tracks: OrderedDict[tuple[str, str], _Track] = OrderedDict()
        self._kept: deque[tuple[Any, int]] = deque()
        self._kept_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._allowance = Allowance(server.limits.requests_per_s)

    @property
    def busy(self) -> bool:
        """Whether anything is still to be sent."""
        return bool(self._jobs) or self._working or self._measure() > 0

    async def run(self) -> None:
        """Serve until the session is over."""
        for route in self._routes:
            self._spawn(self._broadcasts.listen(route, self._tracks_wanted))
        self._spawn(self._send())
        try:
            with contextlib.suppress(self._moq.Error):
                await self._session.closed()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            for job in self._jobs:
                self._over(job)
            self._jobs.clear()
            self._tracks.clear()
            self._broadcasts.clear()
            self._server.buffered(-self._seen_unsent)
            self._seen_unsent = 0
            self._forget(0)

    def close(self) -> None:
        """End the session."""
        self._session.shutdown()

    # ------------------------------------------------------------------ what the peer wants

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """What moq-rs raises here means that the peer has gone, or wants it no more."""
        with contextlib.suppress(self._moq.Error):
            await work

    async def _tracks_wanted(self, path: str, namespace: TrackNamespace, wanted: Any) -> None:
        moq, server = self._moq, self._server
        async with wanted:
            while True:
                request = await wanted.requested_track()
                self._broadcasts.used(path)
                name = request.name
                server.metrics.requests_total.labels("Track").inc()
                why = self._overload()
                if why is not None:
                    self._refuse(request, why)
                    continue
                publication = await server.holdings.find_soon(self._grant, namespace, name)
                groups = request.dynamic() if publication is not None else None
                producer = request.accept(moq.TrackInfo(max_age_us=KEEP_US))
                del request
                if publication is None:
                    server.metrics.refusals_total.labels(RequestCode.DOES_NOT_EXIST.name).inc()
                    asyncio.get_running_loop().call_later(MISSING_S, _let_go, producer)
                    continue
                producer.finish_at(publication.groups)
                track = _Track(namespace, name, producer)
                self._tracks[path, name] = track
                track.task = self._spawn(self._groups_wanted(track, groups))
                self._close_idle_tracks()

    async def _groups_wanted(self, track: _Track, wanted: Any) -> None:
        server = self._server
        async with wanted:
            while True:
                request = await wanted.requested_group()
                server.metrics.requests_total.labels("Fetch").inc()
                why = self._overload()
                size = 0
                if why is None:
                    try:
                        size = (await self._publication(track)).size(request.sequence)
                    except IndexError:
                        why = RequestCode.DOES_NOT_EXIST
                if size > moqlib.MAX_GROUP_BYTES:
                    why = RequestCode.NOT_SUPPORTED
                    hint = "moq-rs carries groups of at most 32 MiB; serve this with --quic qh3 or aioquic"
                    server.log.warning("group too large", track=track.name, bytes=size, hint=hint)
                if why is not None:
                    self._refuse(request, why)
                    continue
                track.jobs += 1
                server.requests += 1
                server.metrics.requests_in_flight.inc()
                priority = moqlib.moq_priority(request.priority)
                self._jobs.append(_Job(priority, next(self._order), request, track, size, time.monotonic()))
                del request
                self._more.set()

    async def _publication(self, track: _Track) -> Publication:
        """Looked up anew each time: the asset may have gone, or been replaced, or the token's grant changed.

        Raises:
            IndexError: it is not there any more.
        """
        publication = await self._server.holdings.find_soon(self._grant, track.namespace, track.name)
        if publication is None:
            raise IndexError(track.name)
        return publication

    def _close_idle_tracks(self) -> None:
        for key, track in list(self._tracks.items()):
            if len(self._tracks) <= MAX_TRACKS:
                break
            if not track.jobs and track.task is not None:
                track.task.cancel()
                del self._tracks[key]

    def _overload(self) -> RequestCode | None:
        """Why a request must be turned away, if it must."""
        limits, server = self._server.limits, self._server
        if server.draining:
            return RequestCode.GOING_AWAY
        if not self._allowance.take() or len(self._jobs) >= limits.requests_per_connection:
            return RequestCode.EXCESSIVE_LOAD
        return RequestCode.EXCESSIVE_LOAD if server.requests >= limits.requests else None

    def _refuse(self, request: Any, code: RequestCode) -> None:
        self._server.metrics.refusals_total.labels(code.name).inc()
        request.abort(int(code))

    # ------------------------------------------------------------------ what it gets

    async def _send(self) -> None:
        pause_s = _POLL_S
        while True:
            self._more.clear()
            if not self._jobs:
                try:
                    await asyncio.wait_for(self._more.wait(), _QUIET_S if self._kept else None)
                except TimeoutError:
                    # A group that moq-rs still has it sends again without asking: that shows only here.
                    if self._measure() == 0 and self._unsent.quiet():
                        self._forget(0)
                continue
            self._judge()
            job = min(self._jobs, key=_urgency)
            if not self._room(job.size):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_POLL_S)
                continue
            pause_s = _POLL_S
            self._jobs.remove(job)
            if self._tried:
                self._trust()
            self._tried = job.doubtful
            self._working = True
            try:
                await self._answer(job)
            finally:
                self._working = False
                self._over(job)

    async def _answer(self, job: _Job) -> None:
        server, size = self._server, job.size
        try:
            group = (await self._publication(job.track)).open(job.request.sequence)
        except (IndexError, AssetError) as error:
            missing = isinstance(error, IndexError)
            if not missing:
                server.log.warning("group cannot be read", error=str(error))
            self._refuse(job.request, RequestCode.DOES_NOT_EXIST if missing else RequestCode.INTERNAL_ERROR)
            return
        producer = job.request.accept()
        self._forget(self._allowance_bytes() - size)
        self._kept.append((producer, size))
        self._kept_bytes += size
        most = self._frame_bytes()
        begin = since = 0
        while begin < size:
            end = min(size, begin + frame_bytes(begin, most))
            producer.write_frame(bytes(group.data[begin:end]))
            since += end - begin
            begin = end
            if since >= _YIELD_BYTES:
                self._handed_over(since)
                since = 0
                await asyncio.sleep(0)
        producer.finish()
        self._handed_over(since)
        metrics = server.metrics
        metrics.first_byte_seconds.observe(time.monotonic() - job.requested_s)
        metrics.group_sent(job.track.name)
        metrics.bytes_sent_total.inc(size)
        metrics.group_bytes.observe(size)

    def _frame_bytes(self) -> int:
        rate = self._unsent.rate
        return min(FRAME_BYTES, max(_SMALL_FRAME, int(_FRAME_S * rate))) if rate else _FRAME

    def _judge(self) -> None:
        """See what has become of what was handed over."""
        self._measure()
        vanished = self._unsent.vanished()
        if vanished is not None:
            self._tried = False
            for job in self._jobs:
                job.doubtful = job.doubtful or job.requested_s < vanished.since_s

    def _trust(self) -> None:
        for job in self._jobs:
            job.doubtful = False

    def _room(self, size: int) -> bool:
        """Whether a group of that size may be handed over; one may, whatever its size, if nothing else is unsent."""
        limits, unsent, total = self._server.limits, self._seen_unsent, self._server.buffered()
        most = limits.buffered_bytes_per_connection
        ahead = self._unsent.ahead(most)
        in_time = unsent + size <= ahead or (unsent <= ahead // 2 and unsent + size <= most)
        return (not unsent or in_time) and (total == unsent or total + size <= limits.buffered_bytes)

    def _handed_over(self, count: int) -> None:
        self._unsent.add(count)
        self._seen_unsent += count
        self._server.buffered(count)

    def _measure(self) -> int:
        """Bytes that were handed over and not sent yet."""
        before, self._seen_unsent = self._seen_unsent, self._unsent.bytes()
        self._server.buffered(self._seen_unsent - before)
        return self._seen_unsent

    def _allowance_bytes(self) -> int:
        """Bytes of groups that moq-rs may keep."""
        limits, server = self._server.limits, self._server
        share = 2 * limits.buffered_bytes // max(1, len(server.peers))
        return min(_KEPT_WINDOWS * limits.buffered_bytes_per_connection, share)

    def _forget(self, most: int) -> None:
        """Take the oldest groups away until at most so many bytes are kept, but none that may still be unsent."""
        unsent = self._seen_unsent
        # Groups under way share the path: the oldest is through once those after it have had as much as it needed.
        least = 2 * unsent + self._unsent.ahead(self._server.limits.buffered_bytes_per_connection) if unsent else 0
        while self._kept and self._kept_bytes > max(0, most) and self._kept_bytes - self._kept[0][1] >= least:
            producer, size = self._kept.popleft()
            self._kept_bytes -= size
            with contextlib.suppress(self._moq.Error):
                producer.abort(int(RequestCode.EXCESSIVE_LOAD))

    def _over(self, job: _Job) -> None:
        job.track.jobs -= 1
        self._server.requests -= 1
        self._server.metrics.requests_in_flight.dec()


def _urgency(job: _Job) -> tuple[bool, int, int]:
    return job.doubtful, job.priority, job.order


def _let_go(_: Any) -> None:
    """The last reference to something of moq-rs ends here."""
