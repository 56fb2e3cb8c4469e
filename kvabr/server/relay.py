"""A relay: a node-local cache between an origin and many players, on the server of moq-rs.

moq-rs gathers those who wait for the same group, asks once, and passes objects on as they are written. What it lacks is
here and in the files called after it: what it asks for is fetched by a `Connection` of whatever kind, so the origin may
be any that kvabr speaks with; what is kept is checked, and has a bound; what may change is asked for anew; a group that
broke off goes on when the origin is back, and what the relay has is served while the origin is away.

Everyone whom the relay lets in sees what the relay's own token opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvabr.moqt.codes import RequestCode
from kvabr.quic import moq_lib as moqlib
from kvabr.quic.interface import Connection
from kvabr.server.metrics import Metrics
from kvabr.server.moq_listen import KEEP_US, MISSING_S, Broadcasts, MoqListener, claim_routes
from kvabr.server.relay_cache import GroupCache
from kvabr.server.relay_forward import Carrier, Track
from kvabr.server.relay_small import LEAST_BYTES, SmallTracks, is_small
from kvabr.server.server import ServerLimits, ServerTls
from kvabr.store.grants import EVERYTHING, Grant, Grants
from kvabr.types.errors import NotFoundError, TransportError
from kvabr.types.naming import TrackNamespace, plain_track

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MEMORY_BYTES = 1 << 30
"""Bytes of groups that are kept, if nothing else is said."""
SMALL_SHARE = 1 / 8
"""Catalogs and lookups may take so much of that beside it, and `relaysmall.LEAST_BYTES` in any case."""

_MAX_TRACKS = 4096
_POLL_S = 0.01


class Relay(MoqListener):
    """Serves what an origin has, from memory where it can."""

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
            memory_bytes: groups that are kept, and on their way from the origin. Besides, catalogs take up to
                `SMALL_SHARE` of that, and moq-rs holds up to 10 MB for each player that takes more slowly than it is
                given; ``limits.connections`` bounds those.
            token: what players must show; None: everyone may come in.

        Raises:
            TransportError: moq-rs is not installed.
        """
        origin = moqlib.load().OriginProducer(cache_capacity_bytes=None)
        super().__init__(host, port, tls, limits, log, metrics, origin=origin)
        self._grants = None
        if token is not None:
            self._grants = Grants([Grant("players", token_sha256=hashlib.sha256(token.encode()).hexdigest())])
        self._broadcasts = Broadcasts(self._moq, _MAX_TRACKS, self.spawn)
        self._tracks: OrderedDict[tuple[str, str], Track] = OrderedDict()
        self.cache = GroupCache(memory_bytes, metrics)
        """What is kept."""
        self.small = SmallTracks(upstream, self._changed, log, limit=max(LEAST_BYTES, int(SMALL_SHARE * memory_bytes)))
        """Catalogs, lookups and profiles."""
        self._carrier = Carrier(self._moq, upstream, self.cache, self.small, log, metrics)

    @property
    def fetches(self) -> int:
        """Groups that are on their way."""
        return self._carrier.fetches

    # ------------------------------------------------------------------ Server

    async def start(self) -> None:
        """See `Server.start`."""
        routes = claim_routes(self._moq, self._published)
        await super().start()
        for route in routes:
            self.spawn(self._broadcasts.listen(route, self._tracks_wanted))

    async def drain(self, grace_s: float) -> None:
        """See `Server.drain`."""
        self.draining = True
        end_s = asyncio.get_running_loop().time() + grace_s
        while self.fetches and asyncio.get_running_loop().time() < end_s:  # noqa: ASYNC110  # a poll is enough
            await asyncio.sleep(_POLL_S)
        await self.say_goodbye(grace_s)
        await self.close()

    def forget(self) -> None:
        """See `MoqListener.forget`."""
        self.small.close()
        self.cache.clear()
        self._tracks.clear()
        self._broadcasts.clear()

    def admit(self, request: Any, token: bytes | None) -> Grant | None:
        """See `MoqListener.admit`."""
        del request
        return EVERYTHING if self._grants is None else self._grants.check(token)

    async def attend(self, session: Any, guest: Grant) -> None:
        """See `MoqListener.attend`: moq-rs serves it."""
        del guest
        with contextlib.suppress(self._moq.Error):
            await session.closed()

    # ------------------------------------------------------------------ what they want

    async def _tracks_wanted(self, path: str, namespace: TrackNamespace, wanted: Any) -> None:
        async with wanted:
            while True:
                request = await wanted.requested_track()
                self._broadcasts.used(path)
                self.spawn(self._open(path, namespace, request))
                del request

    async def _open(self, path: str, namespace: TrackNamespace, request: Any) -> None:
        """Answer a request for a track, once it is known whether there is one."""
        asked, name = request.name, plain_track(request.name)
        if self.draining:
            request.abort(int(RequestCode.GOING_AWAY))
            return
        info = self._moq.TrackInfo(max_age_us=KEEP_US)
        try:
            count = await self._groups(namespace, name)
        except NotFoundError:
            self.metrics.refusals_total.labels(RequestCode.DOES_NOT_EXIST.name).inc()
            producer = request.accept(info)
            await asyncio.sleep(MISSING_S)
            del producer
            return
        except TransportError as error:
            self._carrier.refuse(request, error)
            return
        groups = request.dynamic()
        track = Track(namespace, name, request.accept(info))
        if count is not None:
            track.producer.finish_at(count)
        del request
        self._tracks[path, asked] = track
        track.task = self.spawn(self._groups_wanted(track, groups))
        for key, idle in list(self._tracks.items())[: max(0, len(self._tracks) - _MAX_TRACKS)]:
            if not idle.fetches and idle.task is not None:
                idle.task.cancel()
                del self._tracks[key]

    async def _groups(self, namespace: TrackNamespace, name: str) -> int | None:
        """How many groups a track has; None if that does not matter.

        Raises:
            NotFoundError: there is no such track.
            TransportError: the origin cannot be asked.
        """
        if is_small(name):
            await self.small.get(namespace, name)
            return None
        facts = await self.small.facts(namespace)
        facts.expected(name, 0)
        return facts.groups

    async def _groups_wanted(self, track: Track, wanted: Any) -> None:
        async with wanted:
            while True:
                request = await wanted.requested_group()
                self.metrics.requests_total.labels("Fetch").inc()
                if self.draining or self.fetches >= self.limits.requests:
                    code = RequestCode.GOING_AWAY if self.draining else RequestCode.EXCESSIVE_LOAD
                    self.metrics.refusals_total.labels(code.name).inc()
                    request.abort(int(code))
                    continue
                self.spawn(self._carrier.carry(track, request))
                del request

    def _changed(self, namespace: TrackNamespace) -> None:
        """An asset was replaced: what is kept of it is of no use to those who have its new catalog."""
        self.log.info("asset replaced", model=namespace.model, prompt=namespace.prompt[:16])
        self.cache.forget(lambda owner: owner.namespace == namespace)
