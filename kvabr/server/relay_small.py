"""What a relay knows of small tracks: catalogs, lookups, profiles. One fetch from the origin serves all who ask.

They are asked for anew after a moment, since they may change. When the origin does not answer, what it said last is
given out instead: players then get what the relay still has of an asset, which is better than nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvabr.moqt.codes import RequestCode
from kvabr.quic import moq_lib as moqlib
from kvabr.quic.interface import Connection
from kvabr.server.relay_check import Facts, check_small, checkers
from kvabr.server.upstream import bring
from kvabr.types.errors import ConnectionLostError, FormatError, NotFoundError, RequestError, TransportError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace, may_change

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LEAST_BYTES = 64 << 20
"""Memory for small tracks, at least: room for the largest that can pass, once on its way and once kept."""
_URGENT = 0
_MAX_ASKING = 4096
_BUSY_S = 1.0
_ABSENT = (RequestCode.TIMEOUT, RequestCode.GOING_AWAY, RequestCode.EXCESSIVE_LOAD, RequestCode.INTERNAL_ERROR)
"""Codes of an origin that cannot answer now, which says nothing about what it has."""

_Name = tuple[TrackNamespace, str]


def is_small(track: str) -> bool:
    """Whether a track has one group, which is fetched as a whole before it is passed on."""
    return may_change(track) or track == PROFILE_TRACK


@dataclass(slots=True)
class _Kept:
    data: bytes
    facts: Facts | None
    asked_s: float
    """When it was last known to be true."""
    doubted: bool = False
    """Whether something that came since does not agree with it."""

    @property
    def size(self) -> int:
        return len(self.data) + (0 if self.facts is None else self.facts.memory)


class SmallTracks:
    """The small tracks of an origin, up to some bytes."""

    FRESH_S = 2.0
    """So long an answer is given again without asking the origin."""
    PATIENCE_S = 0.5
    """So long an origin may take to answer anew; then what it said last is given again."""

    def __init__(
        self,
        upstream: Connection,
        changed: Callable[[TrackNamespace], None],
        log: FilteringBoundLogger,
        *,
        limit: int = LEAST_BYTES,
    ) -> None:
        """Nothing is known.

        Args:
            upstream: the origin.
            changed: told when the catalog of an asset is not the one that it was.
            log: takes the events.
            limit: bytes that are kept at most, and as many may be on their way.
        """
        self._upstream, self._changed, self._log, self._limit = upstream, changed, log, limit
        self._kept: OrderedDict[_Name, _Kept] = OrderedDict()
        self._facts: dict[TrackNamespace, _Kept] = {}
        """By asset, the entry that says most lately what it has."""
        self._asking: dict[_Name, asyncio.Task[bytes]] = {}
        self._coming = 0
        self._away = False
        self.bytes = 0
        """What is kept."""

    async def get(self, namespace: TrackNamespace, track: str) -> bytes:
        """The only group of a track.

        Raises:
            TransportError: as `kvabr.quic.interface.Download.read`.
        """
        key = namespace, track
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            if track == PROFILE_TRACK or self._is_fresh(kept):
                return kept.data
        task = self._asking.get(key)
        if task is None:
            task = self._ask(key)
        if kept is not None:
            gone = self._away or self._upstream.trouble is not None
            # What is doubted is better waited for: the groups that it speaks of are no more.
            patience_s = None if kept.doubted else self.PATIENCE_S
            await asyncio.wait({task}, timeout=0 if gone else patience_s)
            if not task.done() or _is_absent(task.exception()):
                self._missed(kept, namespace, track)
                return kept.data
        return await asyncio.shield(task)

    async def facts(self, namespace: TrackNamespace) -> Facts:
        """What an asset has, as the origin said a moment ago.

        Raises:
            NotFoundError: there is no such asset.
            TransportError: as `get`.
        """
        known = self._latest(namespace)
        if known is None or not self._is_fresh(known):
            await self.get(namespace, CATALOG_TRACK)
        return self._known(namespace)

    async def facts_of_old(self, namespace: TrackNamespace) -> Facts:
        """What an asset has, as the origin said last, however long ago that is, unless there is reason to doubt it.

        Raises:
            TransportError: as `facts`.
        """
        known = self._latest(namespace)
        return await self.facts(namespace) if known is None or known.doubted else self._known(namespace)

    def is_known(self, facts: Facts) -> bool:
        """Whether that is what is known of its asset now."""
        known = self._latest(facts.namespace)
        return known is not None and known.facts is facts

    def doubt(self, namespace: TrackNamespace) -> None:
        """What is known of an asset does not agree with its groups: have it asked for anew before it is used again.

        It is not dropped: if the origin goes away now, it is still the best that there is.
        """
        for kept in self._kept.values():
            if kept.facts is not None and kept.facts.namespace == namespace:
                kept.doubted = True

    def close(self) -> None:
        """Give up what is being asked for."""
        for task in list(self._asking.values()):
            task.cancel()
        self._asking.clear()
        self._kept.clear()
        self._facts.clear()
        self.bytes = 0

    # ------------------------------------------------------------------ internals

    def _is_fresh(self, kept: _Kept) -> bool:
        return not kept.doubted and time.monotonic() - kept.asked_s < self.FRESH_S

    def _latest(self, namespace: TrackNamespace) -> _Kept | None:
        """What says most lately what an asset has; its catalog, where that was a lookup which had to go."""
        return self._facts.get(namespace) or self._kept.get((namespace, CATALOG_TRACK))

    def _known(self, namespace: TrackNamespace) -> Facts:
        known = self._latest(namespace)
        if known is None or known.facts is None:
            why = "the relay has no room for the catalog; give it more --memory"
            raise RequestError(why, code=RequestCode.EXCESSIVE_LOAD, retry_after_s=_BUSY_S)
        return known.facts

    def _ask(self, key: _Name) -> asyncio.Task[bytes]:
        if len(self._asking) >= _MAX_ASKING:
            why = f"{key[1][:80]}: too many lookups at a time"
            raise RequestError(why, code=RequestCode.EXCESSIVE_LOAD, retry_after_s=_BUSY_S)
        task = self._asking[key] = asyncio.get_running_loop().create_task(self._fetch(*key))
        task.add_done_callback(lambda done: self._done(key, done))
        return task

    def _done(self, key: _Name, task: asyncio.Task[bytes]) -> None:
        if self._asking.get(key) is task:
            del self._asking[key]
        if task.cancelled():
            return
        error = task.exception()
        if error is None or isinstance(error, NotFoundError):
            self._back()
        if isinstance(error, NotFoundError):
            self._drop(key)

    async def _fetch(self, namespace: TrackNamespace, track: str) -> bytes:
        parts: list[bytes] = []
        came = 0

        def take(data: bytes) -> None:
            nonlocal came
            came += len(data)
            self._coming += len(data)
            if self._coming > self._limit:
                why = f"{track[:80]}: the relay has no room for it now; give it more --memory"
                raise RequestError(why, code=RequestCode.EXCESSIVE_LOAD, retry_after_s=_BUSY_S)
            parts.append(data)

        try:
            limit = moqlib.MAX_GROUP_BYTES
            await bring(self._upstream, namespace, track, 0, take, priority=_URGENT, limit=limit)
            data = b"".join(parts)
            check = asyncio.get_running_loop().run_in_executor(checkers(), check_small, namespace, track, data)
            try:
                facts = await check
            except FormatError as error:
                self._log.warning("origin refused", track=track[:80], model=namespace.model, why=str(error))
                raise RequestError(f"{track[:80]}: {error}", code=RequestCode.MALFORMED_TRACK) from error
        finally:
            self._coming -= came
        self._keep((namespace, track), data, facts)
        return data

    def _keep(self, key: _Name, data: bytes, facts: Facts | None) -> None:
        kept = _Kept(data, facts, time.monotonic())
        if facts is not None:
            before = self._facts.get(facts.namespace)
            if before is not None and before.facts is not None:
                if before.facts.sha256 == facts.sha256:
                    kept.facts = before.facts  # who holds them holds what is true
                else:
                    self._drop_asset(facts.namespace)
                    self._changed(facts.namespace)
            self._facts[facts.namespace] = kept
        self._drop(key)
        self._kept[key] = kept
        self.bytes += kept.size
        while self.bytes > self._limit:
            self._drop(next(iter(self._kept)))

    def _drop_asset(self, namespace: TrackNamespace) -> None:
        for key, kept in list(self._kept.items()):
            if kept.facts is not None and kept.facts.namespace == namespace:
                self._drop(key)

    def _drop(self, key: _Name) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        self.bytes -= kept.size
        if kept.facts is not None and self._facts.get(kept.facts.namespace) is kept:
            del self._facts[kept.facts.namespace]

    def _missed(self, kept: _Kept, namespace: TrackNamespace, track: str) -> None:
        if not self._away:
            age_s = round(time.monotonic() - kept.asked_s, 1)
            why = self._upstream.trouble or "it does not answer"
            hint = "players get what the relay has kept"
            self._log.warning("origin away", why=why, track=track[:80], model=namespace.model, age_s=age_s, hint=hint)
        self._away = True

    def _back(self) -> None:
        if self._away:
            self._log.info("origin is back")
        self._away = False


def _is_absent(error: BaseException | None) -> bool:
    """Whether an error says nothing but that the origin cannot answer now."""
    if isinstance(error, RequestError):
        return error.code in _ABSENT
    return isinstance(error, ConnectionLostError | TransportError)
