"""A group on its way through a relay: brought in once, passed on as it comes, checked, and kept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvabr.moqt.codes import RequestCode
from kvabr.quic import moq_lib as moqlib
from kvabr.quic.interface import Connection
from kvabr.server.metrics import Metrics
from kvabr.server.moq_listen import frame_bytes
from kvabr.server.relay_cache import GroupCache
from kvabr.server.relay_check import RunningDigest
from kvabr.server.relay_small import SmallTracks, is_small
from kvabr.server.upstream import bring
from kvabr.types.errors import NotFoundError, RequestError, TransportError
from kvabr.types.naming import TrackNamespace, may_change

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_NAMES = {int(code): code.name for code in RequestCode}
_OUTDATED_S = 1.0
"""A group of an asset that was replaced meanwhile is kept so long, for those who are reading it."""


@dataclass(slots=True, eq=False)
class Track:
    """A track that players asked for."""

    namespace: TrackNamespace
    name: str
    producer: Any
    task: asyncio.Task[None] | None = None
    fetches: int = 0


@dataclass(slots=True)
class _Fetch:
    """A group on its way through."""

    track: Track
    request: Any
    producer: Any = None
    passed: int = 0
    """Bytes that were passed on."""
    pending: bytearray = field(default_factory=bytearray)

    def pass_on(self, data: bytes) -> None:
        """More has come."""
        if self.producer is None:
            self.producer = self.request.accept()
        self.pending += data
        while len(self.pending) >= frame_bytes(self.passed):
            self._write(frame_bytes(self.passed))

    def flush(self) -> None:
        """Nothing more comes: pass on what is left."""
        while self.pending:
            self._write(frame_bytes(self.passed))

    def _write(self, size: int) -> None:
        part = bytes(self.pending[:size])
        del self.pending[:size]
        self.producer.write_frame(part)
        self.passed += len(part)


class Carrier:
    """Brings groups from the origin to those who ask for them."""

    def __init__(
        self,
        moq: Any,
        upstream: Connection,
        cache: GroupCache,
        small: SmallTracks,
        log: FilteringBoundLogger,
        metrics: Metrics,
    ) -> None:
        """Nothing is on its way.

        Args:
            moq: the module.
            upstream: the origin.
            cache: the groups that are kept.
            small: the small tracks, and what they say of groups.
            log: takes the events.
            metrics: takes the counts.
        """
        self._moq, self._upstream, self._cache, self._small = moq, upstream, cache, small
        self._log, self._metrics = log, metrics
        self._leaders: dict[tuple[TrackNamespace, str, int], asyncio.Event] = {}
        self.fetches = 0
        """Groups that are on their way."""

    async def carry(self, track: Track, request: Any) -> None:
        """Answer a request for a group."""
        fetch, number = _Fetch(track, request), request.sequence
        priority = moqlib.moq_priority(request.priority)
        track.fetches += 1
        self.fetches += 1
        self._metrics.requests_in_flight.inc()
        try:
            if is_small(track.name):
                await self._small_group(fetch, number, priority)
            else:
                await self._group(fetch, number, priority)
            self._metrics.group_sent(track.name)
        except TransportError as error:
            self._log.debug("group not relayed", track=track.name, group=number, why=str(error))
            if fetch.producer is None:
                self.refuse(request, error)
            else:
                fetch.producer.abort(error.code if isinstance(error, RequestError) else 0)
        finally:
            track.fetches -= 1
            self.fetches -= 1
            self._metrics.requests_in_flight.dec()

    def refuse(self, request: Any, error: TransportError) -> None:
        """Turn a request away."""
        code = error.code if isinstance(error, RequestError) else int(RequestCode.INTERNAL_ERROR)
        self._metrics.refusals_total.labels(_NAMES.get(code, "other")).inc()
        request.abort(code)

    async def _small_group(self, fetch: _Fetch, number: int, priority: int) -> None:
        track = fetch.track
        if number:
            raise NotFoundError(f"{track.name} has only group 0", code=RequestCode.INVALID_RANGE)
        data = await self._small.get(track.namespace, track.name)
        await self._cache.reserve(len(data), priority)
        try:
            fetch.pass_on(data)
            fetch.flush()
            fetch.producer.finish()
        finally:
            self._cache.release(len(data))
        keep_s = SmallTracks.FRESH_S if may_change(track.name) else None
        self._cache.add(track, 0, fetch.producer, fetch.passed, keep_s)

    async def _group(self, fetch: _Fetch, number: int, priority: int) -> None:
        track = fetch.track
        facts = await self._small.facts_of_old(track.namespace)
        size, digest = facts.expected(track.name, number)
        if size > moqlib.MAX_GROUP_BYTES:
            hint = "moq-rs carries groups of at most 32 MiB: let players fetch from the origin itself"
            self._log.warning("group too large", track=track.name, bytes=size, hint=hint)
            raise RequestError(f"{track.name}: {hint}", code=RequestCode.NOT_SUPPORTED)
        await self._cache.reserve(size, priority)
        try:
            await self._obtain(fetch, number, priority, size, digest)
            fetch.flush()
            fetch.producer.finish()
        finally:
            self._cache.release(size)
        keep_s = None if self._small.is_known(facts) else _OUTDATED_S
        self._cache.add(track, number, fetch.producer, fetch.passed, keep_s)

    async def _obtain(self, fetch: _Fetch, number: int, priority: int, size: int, digest: bytes) -> None:
        """Take a group from the origin; or from here, if it came under another spelling of its name."""
        track = fetch.track
        key = track.namespace, track.name, number
        while (leader := self._leaders.get(key)) is not None:
            await leader.wait()
        kept = self._cache.find(track, number)
        if kept is not None and await self._copied(fetch, kept):
            return
        leader = self._leaders[key] = asyncio.Event()
        try:
            await self._bring(fetch, number, priority, size, digest)
        finally:
            del self._leaders[key]
            # Those who wait go on once it is kept, or has failed.
            asyncio.get_running_loop().call_soon(leader.set)

    async def _bring(self, fetch: _Fetch, number: int, priority: int, size: int, digest: bytes) -> None:
        track, running, received = fetch.track, RunningDigest(), 0

        def take(data: bytes) -> None:
            nonlocal received
            received += len(data)
            running.add(data)
            fetch.pass_on(data)

        try:
            await bring(self._upstream, track.namespace, track.name, number, take, priority=priority, limit=size)
            if received != size:
                why = f"the origin sent {received} bytes of a group of {size}"
                raise RequestError(why, code=RequestCode.MALFORMED_TRACK)  # noqa: TRY301
            await running.check(digest)
        except RequestError as error:
            if error.code == RequestCode.MALFORMED_TRACK:
                # The origin lies; or the asset was replaced, and it is our catalog that is wrong.
                self._log.warning("group refused", track=track.name, group=number, why=str(error))
                self._small.doubt(track.namespace)
            raise

    async def _copied(self, fetch: _Fetch, kept: Any) -> bool:
        """Pass on a group that is kept; False if it was dropped before anything of it was passed on."""
        try:
            async for frame in kept.consume():
                fetch.pass_on(frame.payload)
        except self._moq.Error as error:
            if fetch.producer is None:
                return False
            raise RequestError("dropped while it was read", code=RequestCode.EXCESSIVE_LOAD) from error
        return fetch.producer is not None
