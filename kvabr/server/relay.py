"""A relay: a cache between an origin and the players near by.

`Relay` is what a `Server` serves in place of an origin's library. Its tracks come from an upstream connection: catalogs
and lookups by `Catalogs`, groups by `RelayGroups`, each fetched once for everyone who waits. Everyone who may enter the
relay may read what the relay's own token opens at the origin.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvabr.client.metrics import ClientMetrics
from kvabr.client.resources import decoders
from kvabr.client.shared_downloads import GroupRequest, SharedDownloads
from kvabr.codec.container import ObjectSpan, object_spans
from kvabr.moqt.codes import RequestCode
from kvabr.quic.interface import Connection
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.metrics import Metrics
from kvabr.server.publication import ArrivingGroup, Publication, PublishedGroup
from kvabr.server.relay_catalogs import LEAST_BYTES, AssetFacts, Catalogs, is_small, is_unauthorized
from kvabr.server.relay_groups import RelayGroups
from kvabr.store.group_folder import FolderGroupStore
from kvabr.store.group_store import MemoryGroupStore, TieredGroupStore
from kvabr.types.errors import AssetError, NotFoundError, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import TrackNamespace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MEMORY_BYTES = 1 << 30
"""Default bound on the memory of groups."""
_TRANSIT_SHARE = 1 / 4
"""Share of that bound for groups that are on their way or being read; the rest is the cache."""
_CATALOGS_SHARE = 1 / 8
"""Bound on catalogs and lookups as a share of that bound, in addition to it."""


class Relay:
    """What a relay serves; a `kvabr.server.publication.Source`. Use it as an async context manager."""

    def __init__(
        self,
        upstream: Connection,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        memory_bytes: int = MEMORY_BYTES,
        disk: Path | None = None,
        disk_bytes: int = 0,
        token: str | None = None,
    ) -> None:
        """Prepare an empty cache, or open the one on disk.

        Args:
            upstream: the connection to the origin; it should redial by itself, as that of `kvabr.quic.connect` does.
                It is not closed with the relay.
            log: receives events.
            metrics: receives counts; the downloads' metrics are registered with it.
            memory_bytes: bound on groups in memory. Catalogs and lookups take up to an eighth of it in addition, at
                least `LEAST_BYTES`.
            disk: folder for groups that memory has no room for; None: there is none.
            disk_bytes: bound on that folder.
            token: token that players must show; None: everyone may enter.

        Raises:
            UsageError: another relay or client uses the folder.
            AssetError: the folder cannot be used.
        """
        self._log, self._metrics = log, metrics
        self._grants = None
        if token is not None:
            self._grants = Grants([Grant("players", token_sha256=hashlib.sha256(token.encode()).hexdigest())])
        transit_bytes = int(_TRANSIT_SHARE * memory_bytes)
        folder = None if disk is None else FolderGroupStore(disk, disk_bytes, executor=decoders())
        memory = MemoryGroupStore(memory_bytes - transit_bytes, executor=decoders())
        self.store = TieredGroupStore(memory, folder, on_change=self._show)
        """Groups that are kept."""
        self._client_metrics = ClientMetrics(metrics.registry)
        self._downloads = SharedDownloads(upstream, self.store, self._client_metrics)
        self.groups = RelayGroups(self._downloads, self.store, transit_bytes, self._failed)
        """Groups on their way."""
        self.catalogs = Catalogs(
            upstream,
            log,
            limit=max(LEAST_BYTES, int(_CATALOGS_SHARE * memory_bytes)),
            on_dropped=self._dropped,
            on_revoked=self._revoked,
        )
        """Catalogs, lookups and profiles."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all transfers, write what waits for the disk, and forget what is in memory."""
        self.catalogs.close()
        await self.groups.close()
        await self._downloads.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.store.close()

    # ------------------------------------------------------------------ Source

    def admit(self, token: bytes | None) -> Grant | None:
        """See `Source.admit`."""
        return EVERYTHING if self._grants is None else self._grants.check(token)

    def find(self, grant: Grant, namespace: TrackNamespace, track: str, *, at_once: bool = False) -> Publication | None:
        """See `Source.find`; a relay can only answer at once what it was told a moment ago."""
        del grant, at_once
        if is_small(track):
            found: Publication | None = self.catalogs.fresh(namespace, track)
            if found is None:
                raise BlockingIOError(f"{track}: must be asked for")
            return found
        facts = self.catalogs.fresh_facts(namespace)
        if facts is None:
            raise BlockingIOError("the catalog must be asked for")
        return self._track(facts, track)

    async def find_soon(self, grant: Grant, namespace: TrackNamespace, track: str) -> Publication | None:
        """See `Source.find_soon`."""
        del grant
        try:
            if is_small(track):
                return await self.catalogs.get(namespace, track)
            return self._track(await self.catalogs.facts(namespace), track)
        except NotFoundError:
            return None

    # ------------------------------------------------------------------ internals

    def _track(self, facts: AssetFacts, track: str) -> Publication | None:
        return RelayedTrack(self.groups, facts, track) if track in facts.sizes else None

    def _failed(self, request: GroupRequest, error: TransportError) -> None:
        """A group was refused or wrong: find out what the origin says of the asset now."""
        if is_unauthorized(error):
            self.catalogs.revoke()
        elif isinstance(error, NotFoundError) or (
            isinstance(error, RequestError) and error.code == RequestCode.MALFORMED_TRACK
        ):
            self._log.warning("group refused", track=request.track, group=request.group, why=str(error))
            self.catalogs.doubt(request.namespace)

    def _dropped(self, facts: AssetFacts) -> None:
        """The origin has removed or replaced an asset."""
        why = "the asset was removed or replaced; ask for its catalog again"
        self._spawn(self.groups.drop(facts.all_digests(), NotFoundError(why, code=RequestCode.DOES_NOT_EXIST)))

    def _revoked(self) -> None:
        """The origin no longer accepts our token."""
        self._spawn(self.groups.drop(None, UnauthorizedError("the origin refuses the relay's token")))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _show(self) -> None:
        self._metrics.buffered_bytes.set(self.store.memory.total_bytes)
        self._client_metrics.show_store(self.store)


class RelayedTrack(Publication):
    """One level of an asset, as its catalog describes it."""

    def __init__(self, relayed: RelayGroups, facts: AssetFacts, track: str) -> None:
        self._relayed, self._facts, self._name = relayed, facts, track

    @property
    def groups(self) -> int:
        """As many as the catalog says."""
        return self._facts.groups

    def size(self, group: int) -> int:
        """See `Publication.size`."""
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} is outside an asset of {self.groups} groups")
        return self._facts.sizes[self._name][group]

    def objects(self, group: int) -> tuple[ObjectSpan, ...]:
        """See `Publication.objects`; the same as at the origin."""
        size, spec = self.size(group), self._facts.spec
        first, last = spec.group_range(group, self._facts.tokens)
        return object_spans(spec, self._name, first, last - first, size)

    def open(self, group: int) -> PublishedGroup:
        """See `Publication.open`; only of groups that are in memory, as `follow` tells."""
        objects, digest = self.objects(group), self._facts.digest(self._name, group)
        data = self._relayed.held(digest.hex())
        if data is None:
            raise AssetError(f"group {group} of {self._name}: no longer in memory")
        return PublishedGroup(data, objects, digest)

    def follow(self, group: int, priority: int, on_more: Callable[[], None]) -> ArrivingGroup | None:
        """See `Publication.follow`."""
        size, digest = self.size(group), self._facts.digest(self._name, group).hex()
        if self._relayed.held(digest) is not None:
            return None
        request = GroupRequest(self._facts.namespace, self._name, group, size, exact=True, digest=digest)
        return self._relayed.follow(request, self.objects(group), priority, on_more)
