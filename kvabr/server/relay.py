"""A relay: a cache between an origin and nearby players, which a `Server` serves.

Everyone admitted to the relay may read all that its own token opens at the origin. The relay follows the origin's
reports of removed assets (`kvabr.server.changes`) and drops those. If the origin refuses its token, it closes its
players' connections, so that relays among them notice as well.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from kvabr.server.changes import MAX_CHANGES_BYTES, ChangeLog, Changes, changes_track, mark_of, position_in
from kvabr.server.grants import Grant, Grants
from kvabr.server.metrics import Metrics
from kvabr.server.publication import ArrivingGroup, CatalogLevel, Publication, Source
from kvabr.server.relay_catalogs import MIN_BYTES, Answer, AssetFacts, Catalogs, is_small, is_unauthorized
from kvabr.server.relay_groups import RelayGroups
from kvabr.server.relay_live import LiveRelay, RelayedAsset
from kvabr.server.seen_prompts import SeenPrompts
from kvabr.store.group_cache import GroupCache, StoreTier
from kvabr.store.locations import Location
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import PeerConnection, read_all
from kvabr.transfer.transfer import GroupRequest
from kvabr.transfer.work import decoders
from kvabr.types.backoff import Backoff
from kvabr.types.errors import (
    AssetError,
    FormatError,
    NotFoundError,
    Reason,
    RequestError,
    TransportError,
    UnauthorizedError,
)
from kvabr.types.naming import (
    CATALOG_TRACK,
    CHANGES_TRACK,
    EDGE_TRACK,
    MODELS_NAMESPACE,
    TrackNamespace,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MEMORY_BYTES = 1 << 30
_CATALOGS_SHARE = 1 / 8
"""Additional bound on catalogs and lookups, as a share of that of groups."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
"""Pauses after a failed subscription to changes; doubled each time."""
_ANSWER_PAUSE_S = 0.01
"""Pause after a report, so that an origin cannot keep the relay busy."""
_REFUSED = "the origin refuses the relay's token"


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
        prompts: SeenPrompts | None = None,
    ) -> None:
        """Start with an empty cache, or open the one on disk.

        ``upstream`` should redial, as `kvabr.link.moqt.connect` does, and is not closed here. ``memory_bytes`` bounds
        the groups that are kept, not those in transfer (`kvabr.server.budgets`); catalogs and lookups take up to an
        eighth more, at least `MIN_BYTES`. ``disk`` is a folder or an object store for further groups, see `StoreTier`.
        Without ``token`` everyone is admitted. ``prompts`` receives the assets that are looked up and removed, for KV
        events.
        """
        super().__init__(None if token is None else _players(token))
        self._log, self._metrics, self._upstream = log, metrics, upstream
        self._changes = ChangeLog()
        self._following: asyncio.Task[None] | None = None
        self.prompts = prompts or SeenPrompts(0)
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
            on_known=lambda facts: self.prompts.saw(facts.namespace),
        )
        self.live = LiveRelay(upstream, self.catalogs, self.groups, log, self._live_gone)

    async def __aenter__(self) -> Self:
        self._following = asyncio.get_running_loop().create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all transfers, write pending groups to disk, and clear the memory."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self.live.close()
        self.catalogs.close()
        await self.groups.close()
        await self.store.close()

    def renewed(self, grant: Grant) -> Grant | None:
        """Return a token's current grant; None for all if the origin refuses the relay."""
        return None if self.catalogs.revoked else super().renewed(grant)

    def regrant(self, token: str) -> None:
        """Replace the players' token; connections with another one end."""
        self._grants = _players(token)
        self._notify()

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """Return a track, or raise `BlockingIOError` unless the origin has answered recently."""
        del grant, at_once
        if track.startswith(CHANGES_TRACK):
            raise BlockingIOError(f"{track}: must be waited for")
        asset = self.live.find(namespace)
        if asset is not None and (found := asset.track(track)) is not None and (track == EDGE_TRACK or not asset.over):
            return found
        answer = self.catalogs.fresh(namespace, track if is_small(track) else CATALOG_TRACK)
        if answer is None and (asset is None or is_small(track)):
            raise BlockingIOError(f"{track}: must be requested")
        found = None if answer is None else self._track(answer, track)
        return asset.track(track) if found is None and asset is not None else found

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        del grant
        if namespace == MODELS_NAMESPACE and (position := position_in(track)) is not None:
            if self.catalogs.revoked:
                raise RequestError(_REFUSED, reason=Reason.UNAUTHORIZED)
            return self._changes.follow(position)
        if track != EDGE_TRACK:
            try:
                answer = await self.catalogs.get(namespace, track if is_small(track) else CATALOG_TRACK)
                return self._track(answer, track)
            except NotFoundError:
                if is_small(track):
                    return None
        with suppress(NotFoundError):  # the news, or a level of an asset without an ordinary catalog
            return (await self.live.begin(namespace)).track(track)
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

    def _dropped(self, facts: AssetFacts) -> None:
        why = "the asset was removed or replaced; request its catalog again"
        gone = facts.all_digests() - self.catalogs.named(facts.firsts())
        self.groups.withdraw(gone, NotFoundError(why, reason=Reason.MISSING))
        self.prompts.remove([facts.mark])
        self._changes.add([facts.mark])
        self._notify()

    def _live_gone(self, asset: RelayedAsset) -> None:
        frames = {level.frame(group).digest for level in asset.levels.values() for group in range(level.groups)}
        kept = self.catalogs.named({level.frame(0).digest for level in asset.levels.values() if level.groups})
        why = NotFoundError("the asset was removed or replaced", reason=Reason.MISSING)
        self.groups.withdraw({digest for digest in frames if digest} - kept, why)
        self._changes.add([mark_of(asset.namespace)])
        self._notify()

    def _revoked(self) -> None:
        self.prompts.clear()
        self.live.remove(lambda _: True)
        self.groups.withdraw(None, UnauthorizedError(_REFUSED))
        self._changes.add(everything=True)
        self._notify()

    async def _follow(self) -> None:
        position, pauses = 0, Backoff(_MIN_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                changes = await self._next_changes(position)
            except (TransportError, FormatError) as error:
                if is_unauthorized(error):
                    self.catalogs.revoke()
                await asyncio.sleep(pauses.longer())
            else:
                self.catalogs.revoked = False
                if position:  # the first answer only has the position
                    self._remove(changes)
                position = changes.position
                pauses.reset()
                await asyncio.sleep(_ANSWER_PAUSE_S)

    async def _next_changes(self, position: int) -> Changes:
        request = GroupRequest(MODELS_NAMESPACE, changes_track(position), 0, MAX_CHANGES_BYTES, live=True)
        return Changes.loads(await read_all(self._upstream.request(request, 128)))

    def _remove(self, changes: Changes) -> None:
        if changes.everything:
            self.prompts.clear()
            self.catalogs.distrust_all()
        self.prompts.remove(changes.marks)
        self.catalogs.withdraw(changes.marks)
        for asset in self.live.remove(lambda asset: mark_of(asset.namespace) in changes.marks):
            self._live_gone(asset)
        self._changes.add(changes.marks, everything=changes.everything)
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
        self._last: GroupRequest | None = None
        """The last result of `_request`: `loads` and `open` are called for a group in turn."""

    def readable(self, grant: Grant) -> bool:
        del grant
        return not self.facts.withdrawn

    def loads(self, group: int) -> int:
        request = self._request(group)
        return 0 if request in self._relayed else request.limit

    def open(self, group: int, priority: int = 128, on_more: Callable[[], None] = lambda: None) -> ArrivingGroup:
        if self.facts.withdrawn:
            raise AssetError("the asset was removed or replaced; request its catalog again")
        return self._relayed.open(self._request(group), self.objects(group), priority, on_more)

    def _request(self, group: int) -> GroupRequest:
        if self._last is None or self._last.group != group:
            size, digest = self.size(group), self.facts.digest(self.name, group)
            self._last = GroupRequest(self.facts.namespace, self.name, group, size, exact=True, digest=digest)
        return self._last


def _players(token: str) -> Grants:
    return Grants([Grant("players", token_sha256=hashlib.sha256(token.encode()).hexdigest())])
