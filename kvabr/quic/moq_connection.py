"""A `Connection` over moq-rs, a QUIC stack in Rust: the gigabit path for a player. `kvabr.quic.moq_dial` makes it.

What moq-rs does by itself, and a player should know:

- A whole group is taken into memory as fast as it comes, read or not: `Download.read` does not hold its sender back.
  What bounds memory is that only so many bytes are asked for at a time, and that no group is larger than 32 MiB.
- A priority counts when a group is asked for, and cannot be changed any more.
- The first group of a track costs a round trip more than the others: moq-rs asks about the track first. Between two of
  moq-rs `MoqConnection.expect` does that ahead.
- Of a pinned certificate only the fingerprint is checked, not its dates.
- Which protocol the two sides agreed on it does not tell, only its family: moq-lite, which two of moq-rs speak with
  each other, or MoQT. It offers drafts 14 to 22 and cannot be told to offer fewer.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from kvabr.moqt.codes import RequestCode, ResetCode
from kvabr.quic import moq_lib as moqlib
from kvabr.quic.bottleneck import LimitWatch
from kvabr.quic.buffered import BufferedDownload
from kvabr.quic.interface import ConnectionStats, Download
from kvabr.quic.moq_catalogwatch import CatalogWatch, asset_of
from kvabr.quic.moq_download import MoqDownload, MoqOwner
from kvabr.quic.moq_warm import WarmTracks
from kvabr.quic.options import DialOptions, Names
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError, TransportError
from kvabr.types.naming import PROFILE_TRACK, TrackNamespace, fresh_track, may_change

MAX_IN_FLIGHT = 64
"""Downloads under way at a time; more wait, the most urgent first."""
IN_FLIGHT_BYTES = 96 << 20
"""Bytes that they may have together by their limits, or one download alone."""
CACHE_BYTES = 2 * IN_FLIGHT_BYTES
"""What moq-rs keeps of groups. It throws out the oldest, read or not, so it needs room for more than is asked for."""

MOQT, MOQ_LITE = "moqt", "moq-lite"

_FRESH_S = 2.0
"""Catalogs and lookups are asked for by a new name after so long."""
_ANSWER_S = 30.0
"""After so long without an answer, and without anything else coming, a request has failed."""
_LONG_CATALOG = 1 << 16
"""Bytes of a catalog that is not read on the event loop."""
_ROUTE_S = 1.0
"""Seconds that a peer has to announce what was asked for, if it has announced something else."""
_ENDING_S = 0.01
_LOOK_S = 0.01
_PROBE_TRACK = "kvabr.probe"
"""Asked for to see whether a silent peer is still there: it acknowledges the packet, whatever it answers."""


class MoqConnection(MoqOwner):
    """A connection to one publisher or relay."""

    backend = "moq"

    def __init__(self, moq: Any, client: Any, options: DialOptions, protocol: str) -> None:
        self.protocol = protocol
        self._moq, self._client, self._options = moq, client, options
        self._session: Any = client.session
        self._names: Names = "split" if protocol == MOQ_LITE else options.names
        self._in_flight: set[MoqDownload] = set()
        self._asked_bytes = 0
        self._waiting: list[tuple[int, int, MoqDownload]] = []
        self._order = itertools.count()
        self._catalogs = CatalogWatch()
        self._replaced: dict[TrackNamespace, int] = {}
        self._warm = WarmTracks(moq, client, subscribe=protocol == MOQ_LITE)
        self._received = 0
        self._heard_s = self._payload_s = time.monotonic()
        self._packets = 0
        self._asked = _PROBE_TRACK
        self._last_stats = ConnectionStats()
        self._lost: str | None = None
        self._going_away = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.watch = LimitWatch(lambda: None, lambda: self.stats().rtt_s)
        """Who holds the downloads up."""
        self._spawn(self._until_closed())
        self._spawn(self._listen())

    def fetch(
        self,
        namespace: TrackNamespace,
        track: str,
        group: int = 0,
        *,
        priority: int = 128,
        limit: int,
        exact: bool = False,
    ) -> Download:
        """See `Connection.fetch`."""
        download = MoqDownload(self, namespace, track, group, priority, limit, exact=exact)
        if self._lost is not None:
            download.fail(ConnectionLostError(f"{download.what}: {self._lost}"))
        else:
            bisect.insort(self._waiting, (priority, next(self._order), download))
            self._next()
        return download

    def expect(self, namespace: TrackNamespace, tracks: Iterable[str]) -> None:
        """See `Connection.expect`."""
        if self._lost is None:
            path = self._path(namespace)
            for track in tracks:
                self._warm.prepare(path, self._current(namespace, track))

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        if self._lost is None:
            with contextlib.suppress(self._moq.Error):
                seen = self._session.stats()
                if (packets := seen.packets_received or 0) != self._packets:
                    self._packets, self._heard_s = packets, time.monotonic()
                self._last_stats = ConnectionStats(
                    None if seen.rtt_us is None else seen.rtt_us / 1e6,
                    self._received,
                    seen.packets_lost,
                    None if seen.estimated_recv_rate_bps is None else seen.estimated_recv_rate_bps / 8,
                )
        return ConnectionStats(
            self._last_stats.rtt_s, self._received, self._last_stats.lost_packets, self._last_stats.rate
        )

    @property
    def closed(self) -> bool:
        """See `Connection.closed`."""
        return self._lost is not None

    @property
    def going_away(self) -> bool:
        """See `Connection.going_away`."""
        return self._going_away

    async def answers(self, within_s: float) -> bool:
        """See `Connection.answers`."""
        if self._lost is not None:
            return False
        self.stats()
        packets, end_s = self._packets, time.monotonic() + within_s
        probe = self._spawn(self._probe(self._asked))
        try:
            while self._packets == packets and self._lost is None and time.monotonic() < end_s:
                await asyncio.sleep(min(_LOOK_S, within_s / 4))
                self.stats()
        finally:
            probe.cancel()
        return self._packets != packets and self._lost is None

    async def close(self) -> None:
        """See `Connection.close`."""
        self._end("closed by this side")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._client.__aexit__(None, None, None)

    # ------------------------------------------------------------------ for downloads

    def prioritise(self, download: MoqDownload, priority: int) -> None:
        """Change the place of a download that waits."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not download]
        download.priority = priority
        bisect.insort(self._waiting, (priority, next(self._order), download))

    def drop(self, download: BufferedDownload) -> None:
        """A download is wanted no more."""
        assert isinstance(download, MoqDownload)  # noqa: S101  # it has no others
        if download.task is None:
            self._waiting = [entry for entry in self._waiting if entry[2] is not download]
        else:
            download.task.cancel()

    # ------------------------------------------------------------------ internals

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _next(self) -> None:
        """Ask for what waits, as far as there is room."""
        while self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
            download = self._waiting[0][2]
            cost = _cost(download)
            if self._in_flight and self._asked_bytes + cost > IN_FLIGHT_BYTES:
                break
            del self._waiting[0]
            if not self._in_flight:
                self._heard_s = time.monotonic()
            self._in_flight.add(download)
            self._warm.busy = True
            self._asked_bytes += cost
            download.task = self._spawn(self._run(download))
            download.task.add_done_callback(partial(self._done, download))
        self.watch.asked(len(self._in_flight))

    def _done(self, download: MoqDownload, _: asyncio.Task[None]) -> None:
        download.fail(RequestError(f"{download.what}: cancelled", code=ResetCode.CANCELLED))
        self._in_flight.discard(download)
        self._asked_bytes -= _cost(download)
        if self._lost is None:
            self._next()
            self._warm.busy = bool(self._in_flight)

    async def _run(self, download: MoqDownload) -> None:
        group: Any = None
        try:
            self._expect_more(download)
            group = await self._answered(self._open(download), download.what)
            parts: list[bytes] | None = [] if may_change(download.track) else None
            while (frame := await group.read_frame()) is not None:
                self._came(frame.payload)
                if parts is not None:
                    parts.append(frame.payload)
                if not download.push(frame.payload):
                    group.cancel()
                    return
            if parts is not None:
                await self._look_at(b"".join(parts))
            elif _has_more(download):
                self._warm.keep(self._path(download.namespace), self._track(download), group)
            download.complete()
        except self._moq.Error as error:
            await self._failed(download, error)
        except TransportError as error:
            download.fail(error)
        except asyncio.CancelledError:
            if group is not None:
                group.cancel()
            raise

    def _expect_more(self, download: MoqDownload) -> None:
        if _has_more(download):
            self.expect(download.namespace, (download.track,))

    def _came(self, payload: bytes) -> None:
        self._received += len(payload)
        self.watch.received(len(payload))
        self._payload_s = time.monotonic()

    async def _failed(self, download: MoqDownload, error: Exception) -> None:
        ours = moqlib.as_ours(self._moq, error, download.what)
        if not isinstance(ours, NotFoundError) and self._lost is None:
            await asyncio.sleep(_ENDING_S)  # it may be the first sign of the connection's end
        if isinstance(ours, RequestError) and ours.code == RequestCode.GOING_AWAY:
            self._going_away = True
            ours = ConnectionLostError(str(ours))
        download.fail(ours if self._lost is None else ConnectionLostError(f"{download.what}: {self._lost}"))

    async def _open(self, download: MoqDownload) -> Any:
        moq = self._moq
        path = self._asked = self._path(download.namespace)
        options = moq.FetchGroupOptions(priority=moqlib.moq_priority(download.priority))
        try:
            broadcast = await self._client.request_broadcast(path)
        except moq.Error as error:
            if not isinstance(moqlib.as_ours(moq, error, ""), NotFoundError):
                raise
            # The peer has not announced it, or not yet.
            announced = self._client.announced_broadcast(path)
            try:
                broadcast = await asyncio.wait_for(announced.available(), _ROUTE_S)
            except TimeoutError:
                raise error from None
            finally:
                announced.cancel()
        return await broadcast.fetch_group(self._track(download), download.group, options)

    def _path(self, namespace: TrackNamespace) -> str:
        return moqlib.path_of(namespace, self._names)

    def _track(self, download: MoqDownload) -> str:
        """The name to ask by: of a name that it knows moq-rs shows its own copy."""
        track = download.track
        if may_change(track):
            return fresh_track(track, int(time.monotonic() / _FRESH_S))
        return self._current(download.namespace, track)

    def _current(self, namespace: TrackNamespace, track: str) -> str:
        replaced = self._replaced.get(namespace, 0)
        return fresh_track(track, replaced) if replaced else track

    async def _answered(self, asking: Any, what: str) -> Any:
        """What a request brings, or an error if it and everything else stays without an answer."""
        task = asyncio.ensure_future(asking)
        begun_s = time.monotonic()
        try:
            while not task.done():
                left = max(begun_s, self._payload_s) + _ANSWER_S - time.monotonic()
                if left <= 0:
                    raise RequestError(f"{what}: no answer within {_ANSWER_S:.3g} s", code=RequestCode.TIMEOUT)
                await asyncio.wait({task}, timeout=left)
            return task.result()
        finally:
            task.cancel()

    async def _look_at(self, data: bytes) -> None:
        """Notice from its catalog that an asset was replaced. That of a long prompt takes long to read."""
        seen = await asyncio.to_thread(asset_of, data) if len(data) > _LONG_CATALOG else asset_of(data)
        if seen is not None and self._catalogs.replaced(*seen):
            self._replaced[seen[0]] = self._replaced.get(seen[0], 0) + 1

    async def _until_closed(self) -> None:
        try:
            await self._session.closed()
            self._end("closed by the peer")
        except self._moq.Error as error:
            said = moqlib.explain(self._moq, error)
            self._end("the token is missing or wrong" if self._moq.is_auth(error) else f"it ended ({said})")

    async def _listen(self) -> None:
        """Notice a peer that is gone without a word, sooner than the library does."""
        patience_s = self._options.timeout_s
        while self._lost is None:
            await asyncio.sleep(patience_s / 8)
            self.stats()
            if self._in_flight and time.monotonic() - self._heard_s > patience_s / 2:
                before_s = self._heard_s
                if not await self.answers(patience_s / 2) and self._heard_s == before_s:
                    self._end(f"nothing came from the peer for {patience_s:.3g} s")

    async def _probe(self, path: str) -> None:
        """Send what the peer must acknowledge."""
        with contextlib.suppress(self._moq.Error):
            await (await self._client.request_broadcast(path)).fetch_group(_PROBE_TRACK, 0)

    def _end(self, reason: str) -> None:
        if self._lost is not None:
            return
        self.stats()
        self._lost = f"the connection is over: {reason}"
        self.watch.close()
        self._warm.clear()
        for download in [*self._in_flight, *(entry[2] for entry in self._waiting)]:
            download.fail(ConnectionLostError(f"{download.what}: {self._lost}"))
            if download.task is not None:
                download.task.cancel()
        self._waiting.clear()
        self._session.shutdown()
        for task in self._tasks:
            task.cancel()


def _cost(download: MoqDownload) -> int:
    return min(download.limit, moqlib.MAX_GROUP_BYTES)


def _has_more(download: MoqDownload) -> bool:
    """Whether its track has other groups."""
    return not may_change(download.track) and download.track != PROFILE_TRACK
