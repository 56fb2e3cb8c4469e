"""The small tracks of a relay: catalogs, lookups, profiles, models. One fetch from the origin serves all readers.

Catalogs and lookups may change, so they are fetched again once a few seconds old, also when a group is requested. While
the origin is away, the relay repeats its last answer. Names that do not exist take no memory. A removed or replaced
asset is dropped when its catalog is fetched again; its groups stay in the store until evicted.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvabr.server.publication import BytesPublication
from kvabr.store.asset_index import check_names
from kvabr.store.lru import ByteLru
from kvabr.transfer.interface import Connection
from kvabr.transfer.work import decoders
from kvabr.types.catalog import MAX_CATALOG_BYTES, MAX_PROFILE_BYTES, Catalog
from kvabr.types.digests import RAW_BYTES, from_raw, raw, require
from kvabr.types.errors import (
    ConnectionLostError,
    FormatError,
    NotFoundError,
    Reason,
    RequestError,
    TransportError,
    UnauthorizedError,
)
from kvabr.types.kv import MAX_MODELS_BYTES, KVSpec, specs_from_json
from kvabr.types.live import LiveCatalog
from kvabr.types.naming import (
    CATALOG_TRACK,
    LIVE_TRACK,
    MODELS_TRACK,
    PROFILE_TRACK,
    TrackNamespace,
    is_live,
    is_lookup,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MIN_BYTES = 64 << 20
"""Minimum memory limit of small tracks."""
_OVERHEAD_BYTES = 4096
_TOP_PRIORITY = 0
_MAX_REQUESTS = 4096
MAX_FRESH_S = 30.0
"""Maximum seconds to repeat an answer while the origin is reachable, so that its removals are noticed."""
_FRESH_PER_FETCH = 20.0
"""An answer is fresh for this many times the duration of its fetch, so that refreshing takes at most 5 % of the
path."""
_BUSY_S = 1.0
REFUSED = "the origin refuses the relay's token"
_LIMITS = {PROFILE_TRACK: MAX_PROFILE_BYTES, MODELS_TRACK: MAX_MODELS_BYTES}
"""Maximum bytes of small tracks that are not catalogs."""
_UNAVAILABLE_REASONS = (Reason.TIMEOUT, Reason.AWAY, Reason.BUSY, Reason.INTERNAL)

_Name = tuple[TrackNamespace, str]


def is_small(track: str) -> bool:
    """Return True for a track of one small group, fetched whole: a catalog, lookup, profile, or list of models."""
    return track in (CATALOG_TRACK, PROFILE_TRACK, MODELS_TRACK, LIVE_TRACK) or is_lookup(track)


@dataclass(slots=True, weakref_slot=True, eq=False)
class AssetFacts:
    """The fields of a catalog that a relay needs, in little memory."""

    namespace: TrackNamespace
    sha256: str
    spec: KVSpec
    tokens: int
    sizes: dict[str, array[int]]
    """Bytes of each group, by track."""
    digests: dict[str, bytes]
    """Concatenated digests without their kind, by track."""
    digest_kind: str
    withdrawn: bool = False
    """True if the origin has removed the asset, so that sending must stop."""

    def digest(self, track: str, group: int) -> str:

        return from_raw(self.digests[track][RAW_BYTES * group : RAW_BYTES * (group + 1)], self.digest_kind)


def check_small(namespace: TrackNamespace, track: str, data: bytes) -> AssetFacts | None:
    """Check the only group of a small track against its name; return a catalog's facts. Raises `FormatError`.

    Slow for the catalog of a long prompt.
    """
    digest = hashlib.sha256(data).hexdigest()
    if track == PROFILE_TRACK:
        if digest != namespace.prompt:
            raise FormatError("a profile whose SHA-256 is not the one in its name")
        return None
    if track == MODELS_TRACK:
        specs_from_json(data)
        return None
    catalog = Catalog.loads(data)
    _check_name(catalog, namespace, whole=track == CATALOG_TRACK)
    require(catalog.digest_kind)
    tracks = catalog.published.values()
    digests = {one.name: b"".join(map(raw, one.digests)) for one in tracks}
    sizes = {one.name: array("Q", one.bytes) for one in tracks}
    return AssetFacts(catalog.namespace, digest, catalog.spec, catalog.tokens, sizes, digests, catalog.digest_kind)


def check_live(namespace: TrackNamespace, track: str, data: bytes) -> TrackNamespace:
    """Check a live catalog against the requested name, and return its own name. Raises `FormatError`."""
    catalog = LiveCatalog.loads(data).catalog
    _check_name(catalog, namespace, whole=track == LIVE_TRACK)
    require(catalog.digest_kind)
    return catalog.namespace


def _check_name(catalog: Catalog, namespace: TrackNamespace, *, whole: bool) -> None:
    check_names(catalog)
    right = (catalog.namespace.model, catalog.chunks[0]) == (namespace.model, namespace.prompt)
    if not (catalog.namespace == namespace if whole else right and catalog.passage is None):
        raise FormatError("a catalog of another prompt")


@dataclass(slots=True)
class Answer:
    """A small track, as the origin last sent it."""

    publication: BytesPublication
    facts: AssetFacts | None
    received_s: float
    took_s: float
    distrusted: bool = False
    """True if later data from the origin contradicts it."""
    live: TrackNamespace | None = None

    @property
    def memory(self) -> int:
        """Its approximate bytes in memory."""
        facts = self.facts
        digests = () if facts is None else facts.digests.values()
        return _OVERHEAD_BYTES + self.publication.open(0).size + sum(64 + len(one) * 5 // 4 for one in digests)


class Catalogs:
    """The small tracks of an origin, in bounded memory."""

    FRESH_S = 2.0
    """Minimum seconds for which an answer is repeated without a request to the origin."""
    PATIENCE_S = 0.5
    """Seconds to wait for the origin before its last answer is repeated."""
    DISCONNECTED_S = 1.0
    """Seconds to wait for a first answer while there is no connection."""

    def __init__(
        self,
        upstream: Connection,
        log: FilteringBoundLogger,
        *,
        limit: int = MIN_BYTES,
        on_dropped: Callable[[TrackNamespace], None] = lambda _: None,
        on_revoked: Callable[[], None] = lambda: None,
    ) -> None:
        """Store at most ``limit`` bytes, and receive at most as many at a time.

        ``on_dropped`` receives the name of an asset that the origin has removed or replaced. If the origin refuses the
        token, everything is dropped, and ``on_revoked`` is called.
        """
        self._upstream, self._log, self._limit = upstream, log, limit
        self._on_dropped, self._on_revoked = on_dropped, on_revoked
        self._answers: ByteLru[_Name, Answer] = ByteLru(limit, lambda answer: answer.memory)
        self._known: WeakSet[AssetFacts] = WeakSet()
        """Facts in use, including those of evicted catalogs."""
        self._requests: dict[_Name, asyncio.Task[Answer]] = {}
        self._arriving = 0
        self._away = upstream.trouble is not None
        self.revoked = False
        """True while the origin refuses the relay's token."""
        self._revocations = 0
        """Number of revocations, to reject answers requested before the last one."""

    def fresh(self, namespace: TrackNamespace, track: str) -> Answer | None:
        """Return a small track that need not be fetched again, or None."""
        answer = self._answers.get((namespace, track))
        if answer is None or track == PROFILE_TRACK:
            return answer
        age_s = asyncio.get_running_loop().time() - answer.received_s
        fresh_s = max(self.FRESH_S, min(MAX_FRESH_S, _FRESH_PER_FETCH * answer.took_s))
        return None if answer.distrusted or age_s >= fresh_s else answer

    def last(self, namespace: TrackNamespace, track: str) -> Answer | None:
        """Return the last answer, which may be old, or None."""
        return self._answers.peek((namespace, track))

    async def get(self, namespace: TrackNamespace, track: str) -> Answer:
        """Return a small track from the origin, or the last answer while the origin is away.

        Raises:
            NotFoundError: the origin does not have it.
            RequestError: the origin refuses, or it is away (`Reason.AWAY`) and has never answered this request.
            TransportError: the origin does not answer.
        """
        if (found := self.fresh(namespace, track)) is not None:
            return found
        name, first_s = (namespace, track), 0.0 if is_live(track) and self._away else self.DISCONNECTED_S
        last = self._answers.get(name)
        if last is None and not first_s and self._upstream.trouble is not None and self._requests:
            raise self._unknown(name)  # only one live track waits while the origin is away
        task = self._requests.get(name)
        if task is None or task.done():  # done, but its callback has not run
            task = self._request(name)
        while not task.done():
            lost = self._upstream.trouble is not None
            if last is None:
                patience_s = first_s if lost else self.PATIENCE_S
            elif last.distrusted:  # do not repeat it while the origin may still answer
                patience_s = None
            else:
                patience_s = 0 if self._away else self.PATIENCE_S
            await asyncio.wait({task}, timeout=patience_s)
            if not task.done() and (last is not None or (lost and self._upstream.trouble is not None)):
                break
        error = task.exception() if task.done() and not task.cancelled() else None
        if last is not None and (not task.done() or _is_away(error)):
            self._missed(name, last)
            return last
        if not task.done() or (isinstance(error, ConnectionLostError) and not isinstance(error, UnauthorizedError)):
            raise self._unknown(name) from error
        return await asyncio.shield(task)

    def _unknown(self, name: _Name) -> RequestError:
        self._missed(name, None)
        why = f"{name[1][:80]}: the relay cannot reach its origin, and does not have this yet"
        return RequestError(why, reason=Reason.AWAY, retry_after_s=_BUSY_S)

    def distrust(self, namespace: TrackNamespace) -> None:
        """Fetch an asset's catalogs again because its groups differ from them; use the old ones until then."""
        for _, answer in self._entries():
            answer.distrusted |= answer.facts is not None and answer.facts.namespace == namespace

    def revoke(self) -> None:
        """Drop everything, since the origin refuses the token."""
        if self.revoked:
            return
        self._log.warning(f"{REFUSED}; everything fetched with it was dropped")
        self.revoked = True
        self._revocations += 1
        for facts in self._known:
            facts.withdrawn = True
        self._answers.clear()
        self._on_revoked()

    def forget_live(self, namespace: TrackNamespace) -> None:
        """Drop the live catalog of a name, so that it is fetched again."""
        for name, answer in self._entries():
            if answer.live == namespace:
                del self._answers[name]

    def close(self) -> None:
        """Cancel all requests, and drop everything."""
        for task in list(self._requests.values()):
            task.cancel()
        self._requests.clear()
        self._answers.clear()

    def _request(self, name: _Name) -> asyncio.Task[Answer]:
        if len(self._requests) >= _MAX_REQUESTS:
            why = f"{name[1][:80]}: too many lookups at a time"
            raise RequestError(why, reason=Reason.BUSY, retry_after_s=_BUSY_S)
        task = self._requests[name] = asyncio.get_running_loop().create_task(self._fetch(name))
        task.add_done_callback(lambda done: self._fetched(name, done))
        return task

    def _fetched(self, name: _Name, task: asyncio.Task[Answer]) -> None:
        if self._requests.get(name) is task:
            del self._requests[name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None or isinstance(error, NotFoundError):
            if self._away:
                self._log.info("origin is back")
            self._away = self.revoked = False
        if isinstance(error, NotFoundError):
            if name[1] == CATALOG_TRACK:
                self._drop(name[0], "asset removed")
            self._answers.pop(name, None)
        elif is_unauthorized(error):
            self.revoke()

    async def _fetch(self, name: _Name) -> Answer:
        namespace, track = name
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        revocations = self._revocations
        try:
            data = bytes(await self._received(name))
        except ConnectionLostError:  # once more: there may be a new connection
            if self._upstream.closed:
                raise
            data = bytes(await self._received(name))
        try:
            check = check_live if is_live(track) else check_small
            publication, found = await loop.run_in_executor(
                decoders(), lambda: (BytesPublication(data), check(namespace, track, data))
            )
        except FormatError as error:
            self._log.warning("origin refused", track=track[:80], model=namespace.model, why=str(error))
            raise RequestError(f"{track[:80]}: {error}", reason=Reason.WRONG) from error
        if revocations != self._revocations:
            raise RequestError(REFUSED, reason=Reason.UNAUTHORIZED)
        facts = found if isinstance(found, AssetFacts) else None
        answer = Answer(publication, facts, loop.time(), loop.time() - start_s)
        if isinstance(found, TrackNamespace):
            answer.live = found
            self._answers.replace((found, LIVE_TRACK), answer)
        if facts is not None:
            # The answer to a lookup is a catalog.
            catalog = facts.namespace, CATALOG_TRACK
            known = self._answers.peek(catalog)
            if known is not None and known.facts is not None:
                if known.facts.sha256 == facts.sha256:  # equal answers share memory
                    answer.publication, answer.facts = known.publication, known.facts
                else:
                    self._drop(facts.namespace, "asset replaced")
            if answer.facts is not None:
                self._known.add(answer.facts)
            self._answers.replace(catalog, answer)
        self._answers.replace(name, answer)
        return answer

    async def _received(self, name: _Name) -> memoryview:
        namespace, track = name
        counted, limit = 0, _LIMITS.get(track, MAX_CATALOG_BYTES)
        download = self._upstream.fetch(namespace, track, 0, priority=_TOP_PRIORITY, limit=limit)
        try:
            while part := await download.read():
                counted += len(part)
                self._arriving += len(part)
                if self._arriving > self._limit:
                    why = f"{track[:80]}: the relay has no memory for it now; increase --memory"
                    raise RequestError(why, reason=Reason.BUSY, retry_after_s=_BUSY_S)
            return download.data
        finally:
            download.cancel()
            self._arriving -= counted

    def _drop(self, namespace: TrackNamespace, event: str) -> None:
        gone = [facts for facts in self._known if not facts.withdrawn and facts.namespace == namespace]
        if not gone:
            return
        for facts in gone:
            facts.withdrawn = True
        for name, answer in self._entries():
            if answer.facts is not None and answer.facts.withdrawn:
                del self._answers[name]
        self._log.info(event, model=namespace.model, prompt=namespace.prompt[:16])
        self._on_dropped(namespace)

    def _entries(self) -> list[tuple[_Name, Answer]]:
        return [(name, answer) for name in self._answers if (answer := self._answers.peek(name)) is not None]

    def _missed(self, name: _Name, last: Answer | None) -> None:
        if not self._away:
            age_s = None if last is None else round(asyncio.get_running_loop().time() - last.received_s, 1)
            why = self._upstream.trouble or "the origin does not answer"
            hint = "the relay serves its copies to players"
            self._log.warning("origin away", why=why, track=name[1][:80], model=name[0].model, age_s=age_s, hint=hint)
        self._away = True


def is_unauthorized(error: BaseException | None) -> bool:
    """Return True if the error means that the origin refuses our token."""
    if isinstance(error, RequestError):
        return error.reason in (Reason.UNAUTHORIZED, Reason.EXPIRED_TOKEN)
    return isinstance(error, UnauthorizedError)


def _is_away(error: BaseException | None) -> bool:
    if isinstance(error, RequestError):
        return error.reason in _UNAVAILABLE_REASONS
    return isinstance(error, TransportError) and not isinstance(error, UnauthorizedError)
