"""A relay: a cache between an origin and nearby players, served by a `Server`.

Every client admitted to the relay may read everything that the relay's own token may read at the origin. A removed
asset is noticed and dropped when its catalog is requested again (`kvabr.server.relay_catalogs`). If the origin refuses
the relay's token, the relay closes its clients' connections, so that relays among them notice as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from kvabr.server.grants import Grant, Grants
from kvabr.server.metrics import Metrics
from kvabr.server.publication import ArrivingGroup, CatalogLevel, Publication, Source
from kvabr.server.relay_catalogs import MIN_BYTES, REFUSED, Answer, AssetFacts, Catalogs, is_small, is_unauthorized
from kvabr.server.relay_groups import RelayGroups
from kvabr.server.relay_live import REMOVED, LiveRelay
from kvabr.store.group_cache import GroupCache, StoreTier
from kvabr.store.locations import Location
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import GroupRequest, PeerConnection
from kvabr.transfer.work import decoders
from kvabr.types.errors import AssetError, NotFoundError, Reason, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import CATALOG_TRACK, EDGE_TRACK, TrackNamespace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MEMORY_BYTES = 1 << 30
_CATALOGS_SHARE = 1 / 8
"""Memory for catalogs and lookups, as a fraction of that for groups and in addition to it."""


class Relay(Source):
    """The source of a relay; an async context manager."""

    def __init__(
        self,
        upstream: PeerConnection,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        memory_bytes: int = MEMORY_BYTES,
        disk: Location | None = None,
        disk_bytes: int = 0,
        token: str | None = None,
    ) -> None:
        """Start with an empty cache, or open the one on disk.

        ``upstream`` should redial, as `kvabr.link.moqt.connect` does, and is not closed here. ``memory_bytes`` limits
        stored groups, not those in transfer (`kvabr.server.budgets`); catalogs and lookups take up to an eighth more,
        at least `MIN_BYTES`. ``disk`` is a folder or an object store for further groups, see `StoreTier`. Without
        ``token`` every client is admitted.
        """
        super().__init__(None if token is None else _players(token))
        self._log, self._metrics, self._upstream = log, metrics, upstream
        below = None if disk is None else StoreTier(disk, disk_bytes, self._store_failed)
        self.store = GroupCache(memory_bytes, below, executor=decoders(), on_change=self._show)
        self._client_metrics = ClientMetrics(metrics.registry)
        self.groups = RelayGroups(upstream, self.store, self._client_metrics, self._failed)
        self.catalogs = Catalogs(
            upstream,
            log,
            limit=max(MIN_BYTES, int(_CATALOGS_SHARE * memory_bytes)),
            on_dropped=self._dropped,
            on_revoked=self._revoked,
        )
        self.live = LiveRelay(upstream, self.catalogs, self.groups, log, self._notify)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all transfers, write pending groups to disk, and clear the memory."""
        await self.live.close()
        self.catalogs.close()
        await self.groups.close()
        await self.store.close()

    def renewed(self, grant: Grant) -> Grant | None:
        """Return a token's current grant; None for every token once the origin refuses the relay."""
        return None if self.catalogs.revoked else super().renewed(grant)

    def regrant(self, token: str) -> None:
        """Replace the clients' token; connections with another one end."""
        self._grants = _players(token)
        self._notify()

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track; raise `BlockingIOError` unless the origin has answered recently."""
        del grant, at_once
        asset = self.live.find(namespace)
        if asset is not None and not asset.over and (found := asset.track(track)) is not None:
            return found
        answer = self.catalogs.fresh(namespace, track if is_small(track) else CATALOG_TRACK)
        found = None if answer is None else self._track(answer, track)
        if answer is None or (found is None and asset is not None):
            raise BlockingIOError(f"{track}: must be requested")
        return found

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        del grant
        with suppress(NotFoundError):
            if is_small(track):
                return (await self.catalogs.get(namespace, track)).publication
            if track != EDGE_TRACK:
                found = self._track(await self.catalogs.get(namespace, CATALOG_TRACK), track)
                if found is not None or self.live.find(namespace) is None:
                    return found
        with suppress(NotFoundError):  # the news, or a level that the complete asset's catalog lacks
            return None if is_small(track) else (await self.live.begin(namespace)).track(track)
        return None

    def _track(self, answer: Answer, track: str) -> Publication | None:
        if is_small(track):
            return answer.publication
        facts = answer.facts
        return RelayedTrack(self.groups, facts, track) if facts is not None and track in facts.sizes else None

    def _failed(self, request: GroupRequest, error: TransportError) -> None:
        if is_unauthorized(error):
            self.catalogs.revoke()
        elif isinstance(error, NotFoundError) or (isinstance(error, RequestError) and error.reason == Reason.WRONG):
            self._log.warning("group refused", track=request.track, group=request.group, why=str(error))
            self.catalogs.distrust(request.namespace)

    def _dropped(self, namespace: TrackNamespace) -> None:
        self.live.remove(lambda asset: asset.over and asset.namespace == namespace)
        self._notify()

    def _revoked(self) -> None:
        self.live.remove(lambda _: True)
        self.groups.withdraw(UnauthorizedError(REFUSED))
        self._notify()

    def _store_failed(self, why: str) -> None:
        self._client_metrics.failed_writes_total.labels("groups").inc()
        self._log.warning("groups are kept in memory only for a while", error=why)

    def _show(self) -> None:
        self._metrics.buffered_bytes.set(self.store.memory.currsize)
        self._client_metrics.show_store(self.store)


class RelayedTrack(CatalogLevel):
    """One level of an asset, according to its catalog."""

    dear = True

    def __init__(self, relayed: RelayGroups, facts: AssetFacts, track: str) -> None:
        super().__init__(facts.spec, facts.tokens, track, facts.sizes[track])
        self._relayed, self.facts = relayed, facts

    def readable(self, grant: Grant) -> bool:
        del grant
        return not self.facts.withdrawn

    def loads(self, group: int) -> int:
        request = self._request(group)
        return 0 if request in self._relayed else request.limit

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        if self.facts.withdrawn:
            raise AssetError(REMOVED)
        return self._relayed.open(self._request(group), self.objects(group), priority, on_more)

    def _request(self, group: int) -> GroupRequest:
        size, digest = self.size(group), self.facts.digest(self.name, group)
        return GroupRequest(self.facts.namespace, self.name, group, size, exact=True, digest=digest)


def _players(token: str) -> Grants:
    return Grants([Grant("players", token_sha256=hashlib.sha256(token.encode()).hexdigest())])
