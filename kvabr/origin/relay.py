"""A relay: a node-local cache between an origin and many players, on the server of moq-rs.

moq-rs gathers those who wait for the same group, asks once, and passes objects on as they are written. What it lacks is
here: what it asks for is fetched by a `Connection` of whatever kind, so the origin may be any that kvabr speaks with;
memory has a bound; what may change is asked for anew; and a group that broke off goes on when the origin is back.

Everyone whom the relay lets in sees what the relay's own token opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from kvabr.codec.spans import SLICE_BYTES
from kvabr.errors import FormatError, TransportError
from kvabr.moqt.codes import RequestCode
from kvabr.naming import TrackNamespace, may_change, plain_track
from kvabr.origin.metrics import Metrics
from kvabr.origin.moqpeer import FRAME_BYTES
from kvabr.origin.relaycache import GroupCache, SmallTracks, is_small
from kvabr.origin.server import Server, ServerLimits, ServerTls
from kvabr.origin.upstream import bring
from kvabr.transport import moqlib
from kvabr.transport.base import Connection, NotFoundError, RequestError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MEMORY_BYTES = 1 << 30
"""Bytes of groups that are kept, if nothing else is said."""

_MAX_TRACKS = 4096
_KEEP_US = 10**13
"""Groups do not grow old: when they go is decided here."""
_MISSING_S = 1.0
"""A track that does not exist is held open so long: moq-rs then answers "not found", and "dropped" otherwise."""
_POLL_S = 0.01
_GOODBYE_S = 0.2
_UNAUTHORIZED, _BUSY = 401, 503


@dataclass(slots=True, eq=False)
class _Track:
    """A track that someone asked for."""

    namespace: TrackNamespace
    name: str
    producer: Any
    task: asyncio.Task[None] | None = None
    fetches: int = 0


@dataclass(slots=True)
class _Fetch:
    """A group on its way through."""

    track: _Track
    request: Any
    producer: Any = None
    passed: int = 0
    """Bytes that were passed on."""
    pending: bytearray = field(default_factory=bytearray)


class Relay(Server):
    """Serves what an origin has, from memory where it can."""

    backend = "moq"

    def __init__(
        self,
        upstream: Connection,
        host: str,
        port: int,
        tls: ServerTls,
        limits: ServerLimits,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        memory_bytes: int = MEMORY_BYTES,
        token: str | None = None,
    ) -> None:
        """Nothing is bound before `start`.

        Args:
            upstream: where groups come from; it should dial again by itself, as that of `kvabr.connect` does. It stays
                the caller's.
            host: name or address to bind.
            port: UDP port to bind; 0 takes a free one.
            tls: certificate and key.
            limits: what peers may take; those of single connections moq-rs does not let a relay enforce.
            log: takes the events.
            metrics: takes the counts.
            memory_bytes: groups that are kept, and on their way from the origin. Besides, moq-rs holds up to 10 MB for
                each player that takes more slowly than it is given; ``limits.connections`` bounds those.
            token: what players must show; None: everyone may come in.

        Raises:
            TransportError: moq-rs is not installed.
        """
        self.host, self.port, self.tls, self.limits = host, port, tls, limits
        self.log, self.metrics = log, metrics
        self._moq = moqlib.load()
        self._upstream, self._token = upstream, token
        self._origin = self._moq.OriginProducer(cache_capacity_bytes=None)
        self._server: Any = None
        self._address = host, port
        self._sessions: set[Any] = set()
        self._broadcasts: OrderedDict[str, Any] = OrderedDict()
        self._tracks: OrderedDict[tuple[str, str], _Track] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self.cache = GroupCache(memory_bytes, metrics)
        """What is kept."""
        self._small = SmallTracks(upstream, self._changed)
        self._leaders: dict[tuple[TrackNamespace, str, int], asyncio.Event] = {}
        self.fetches = 0
        """Groups that are on their way."""

    # ------------------------------------------------------------------ Server

    async def start(self) -> None:
        """See `Server.start`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        server = self._moq.Server(
            f"{host}:{self.port}",
            tls_cert=[str(self.tls.certfile)],
            tls_key=[str(self.tls.keyfile)],
            publish=self._origin,
        )
        try:
            await server.__aenter__()
        except self._moq.Error as error:
            said = moqlib.explain(self._moq, error)
            raise TransportError(f"{host}:{self.port}: cannot be bound ({said})") from error
        self._server = server
        bound, _, port = server.local_addr.rpartition(":")
        self._address = bound.strip("[]"), int(port)
        for route in moqlib.ROUTES:
            self._spawn(self._broadcasts_wanted(route))
        self._spawn(self._accept())

    @property
    def address(self) -> tuple[str, int]:
        """See `Server.address`."""
        return self._address

    async def drain(self, grace_s: float) -> None:
        """See `Server.drain`."""
        self._draining = True
        end_s = asyncio.get_running_loop().time() + grace_s
        while self.fetches and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110  # a poll is enough
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(min(grace_s, _GOODBYE_S) if self._sessions else 0)
        await self.close()

    async def close(self) -> None:
        """See `Server.close`."""
        server, self._server = self._server, None
        if server is None:
            return
        for session in list(self._sessions):
            session.shutdown()
        await asyncio.sleep(_GOODBYE_S if self._sessions else 0)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._small.close()
        self.cache.clear()
        self._tracks.clear()
        self._broadcasts.clear()
        await moqlib.close(server)

    # ------------------------------------------------------------------ who comes

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """What moq-rs raises here means that those who asked have gone."""
        with contextlib.suppress(self._moq.Error):
            await work

    async def _accept(self) -> None:
        async for request in self._server:
            self._spawn(self._session(request))

    async def _session(self, request: Any) -> None:
        counted = self.metrics.connections_total
        async with asyncio.timeout(self.limits.handshake_s):
            if self._draining or len(self._sessions) >= self.limits.connections:
                counted.inc("too many")
                await request.reject(_BUSY)
                return
            if not self._may_enter(request.query):
                counted.inc("unauthorized")
                self.log.warning("connection refused", why="the token is missing or wrong")
                await request.reject(_UNAUTHORIZED)
                return
            session = await request.accept()
        del request
        counted.inc("accepted")
        self._sessions.add(session)
        self.metrics.connections.inc()
        try:
            await session.closed()
        finally:
            self._sessions.discard(session)
            self.metrics.connections.dec()

    def _may_enter(self, query: str | None) -> bool:
        if self._token is None:
            return True
        try:
            shown = parse_qs(query or "", max_num_fields=64).get("token", [""])[0]
        except ValueError:
            return False
        # Of digests, so that not even the length shows.
        shown_digest, wanted = (hashlib.sha256(text.encode()).digest() for text in (shown, self._token))
        return hmac.compare_digest(shown_digest, wanted)

    # ------------------------------------------------------------------ what they want

    async def _broadcasts_wanted(self, route: str) -> None:
        moq = self._moq
        async with self._origin.dynamic(route, moq.Route()) as wanted:
            while True:
                request = await wanted.requested_broadcast()
                path = request.path
                try:
                    namespace = moqlib.namespace_of(path)
                except FormatError:
                    del request  # which answers it
                    continue
                broadcast = moq.BroadcastProducer()
                self._broadcasts[path] = broadcast
                self._spawn(self._tracks_wanted(path, namespace, broadcast.dynamic()))
                request.accept(broadcast)
                del request
                if len(self._broadcasts) > _MAX_TRACKS:
                    _, oldest = self._broadcasts.popitem(last=False)
                    oldest.close()

    async def _tracks_wanted(self, path: str, namespace: TrackNamespace, wanted: Any) -> None:
        async with wanted:
            while True:
                request = await wanted.requested_track()
                if path in self._broadcasts:
                    self._broadcasts.move_to_end(path)
                self._spawn(self._open(path, namespace, request))
                del request

    async def _open(self, path: str, namespace: TrackNamespace, request: Any) -> None:
        """Answer a request for a track, once it is known whether there is one."""
        asked, name = request.name, plain_track(request.name)
        if self._draining:
            request.abort(int(RequestCode.GOING_AWAY))
            return
        info = self._moq.TrackInfo(max_age_us=_KEEP_US)
        try:
            count = await self._small.groups(namespace, name)
        except NotFoundError:
            self.metrics.refusals_total.inc(RequestCode.DOES_NOT_EXIST.name)
            producer = request.accept(info)
            await asyncio.sleep(_MISSING_S)
            del producer
            return
        except TransportError as error:
            self._refuse(request, error)
            return
        groups = request.dynamic()
        track = _Track(namespace, name, request.accept(info))
        if count is not None:
            track.producer.finish_at(count)
        del request
        self._tracks[path, asked] = track
        track.task = self._spawn(self._groups_wanted(track, groups))
        for key, idle in list(self._tracks.items())[: max(0, len(self._tracks) - _MAX_TRACKS)]:
            if not idle.fetches and idle.task is not None:
                idle.task.cancel()
                del self._tracks[key]

    async def _groups_wanted(self, track: _Track, wanted: Any) -> None:
        async with wanted:
            while True:
                request = await wanted.requested_group()
                self.metrics.requests_total.inc("Fetch")
                if self._draining or self.fetches >= self.limits.requests:
                    code = RequestCode.GOING_AWAY if self._draining else RequestCode.EXCESSIVE_LOAD
                    self.metrics.refusals_total.inc(code.name)
                    request.abort(int(code))
                    continue
                fetch = _Fetch(track, request)
                del request
                self._spawn(self._carry(fetch))

    def _refuse(self, request: Any, error: TransportError) -> None:
        code = error.code if isinstance(error, RequestError) else int(RequestCode.INTERNAL_ERROR)
        names = {int(known): known.name for known in RequestCode}
        self.metrics.refusals_total.inc(names.get(code, "other"))
        request.abort(code)

    # ------------------------------------------------------------------ what they get

    async def _carry(self, fetch: _Fetch) -> None:
        """Bring one group in, and pass it on as it comes."""
        track, number = fetch.track, fetch.request.sequence
        priority = moqlib.moq_priority(fetch.request.priority)
        track.fetches += 1
        self.fetches += 1
        self.metrics.requests_in_flight.inc()
        reserved = 0
        try:
            reserved = await self.cache.reserve(track, priority)
            if is_small(track.name):
                if number:
                    raise NotFoundError(f"{track.name} has only group 0", code=RequestCode.INVALID_RANGE)
                self._pass_on(fetch, await self._small.get(track.namespace, track.name))
            else:
                await self._obtain(fetch, number, priority)
            self._flush(fetch, rest=True)
            fetch.producer.finish()
            self.cache.release(reserved)
            reserved = 0
            keep_s = SmallTracks.FRESH_S if may_change(track.name) else None
            self.cache.add(track, number, fetch.producer, fetch.passed, keep_s)
            self.metrics.groups_sent_total.inc(track.name)
        except TransportError as error:
            self.log.debug("group not relayed", track=track.name, group=number, why=str(error))
            if fetch.producer is None:
                self._refuse(fetch.request, error)
            else:
                fetch.producer.abort(error.code if isinstance(error, RequestError) else 0)
        finally:
            self.cache.release(reserved)
            track.fetches -= 1
            self.fetches -= 1
            self.metrics.requests_in_flight.dec()

    async def _obtain(self, fetch: _Fetch, number: int, priority: int) -> None:
        """Take a group from the origin; or from here, if it came under another spelling of its name."""
        track = fetch.track
        key = track.namespace, track.name, number
        while (leader := self._leaders.get(key)) is not None:
            await leader.wait()
        kept = self.cache.find(track, number)
        if kept is not None and await self._copied(fetch, kept):
            return
        leader = self._leaders[key] = asyncio.Event()
        try:
            await bring(
                self._upstream, track.namespace, track.name, number, partial(self._pass_on, fetch),
                priority=priority, limit=moqlib.MAX_GROUP_BYTES,
            )  # fmt: skip
        finally:
            del self._leaders[key]
            # Those who wait go on once it is kept, or has failed.
            asyncio.get_running_loop().call_soon(leader.set)

    async def _copied(self, fetch: _Fetch, kept: Any) -> bool:
        """Pass on a group that is kept; False if it was dropped before anything of it was passed on."""
        try:
            async for frame in kept.consume():
                self._pass_on(fetch, frame.payload)
        except self._moq.Error as error:
            if fetch.producer is None:
                return False
            raise RequestError("dropped while it was read", code=RequestCode.EXCESSIVE_LOAD) from error
        return fetch.producer is not None

    def _pass_on(self, fetch: _Fetch, data: bytes) -> None:
        if fetch.producer is None:
            fetch.producer = fetch.request.accept()
        fetch.pending += data
        self._flush(fetch)

    def _flush(self, fetch: _Fetch, *, rest: bool = False) -> None:
        """Hand over as many whole frames as there are, or all that there is."""
        while len(fetch.pending) >= (size := FRAME_BYTES if fetch.passed else SLICE_BYTES) or (rest and fetch.pending):
            part = bytes(fetch.pending[:size])
            del fetch.pending[:size]
            fetch.producer.write_frame(part)
            fetch.passed += len(part)

    def _changed(self, namespace: TrackNamespace) -> None:
        """An asset was replaced: what is kept of it is of no use to those who have its new catalog."""
        self.log.info("asset replaced", model=namespace.model, prompt=namespace.prompt[:16])
        self.cache.forget(lambda owner: owner.namespace == namespace)
