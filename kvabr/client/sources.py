"""The sources of one play: for each of its peers, this play's view of the shared downloads.

Groups are named by content, so any source may serve them. A play starts with connected sources and adds others later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from kvabr.client.lookup import Found
from kvabr.client.peers import MIN_OTHER_SIZES_S, OTHER_SIZES_FACTOR, Answered, ClientPeer, tokens_of
from kvabr.player.sources import NOT_KNOWN, Offer
from kvabr.transfer.interface import (
    Connection,
    ConnectionStats,
    GroupReader,
    GroupRequest,
    GroupTransfer,
    PrefixFinder,
    TaskSet,
    cancel_all,
    read_view,
)
from kvabr.types.errors import NotFoundError, TransportError
from kvabr.types.kv import MAX_MODELS_BYTES
from kvabr.types.naming import MODELS_NAMESPACE, MODELS_TRACK, TrackNamespace

TrackDigests = dict[tuple[TrackNamespace, str], Sequence[str]]
"""Digests of a track's groups, by number; empty for groups never requested."""
_Lookup = asyncio.Task[Answered | Exception]
_REPORT_SHARE = 0.9
"""Fraction of a lookup's time limit after which silent sources are ignored."""
_MIN_WAIT_S = 0.02


class PlayReader(GroupReader):
    """Reads one group for one play."""

    def __init__(self, source: PlaySource, transfer: GroupTransfer, priority: int) -> None:
        self._source = source
        super().__init__(transfer, priority)

    @property
    def wire_priority(self) -> int:
        return self._source.wire_priority(self.transfer.request, self.priority)

    def cancel(self) -> None:
        super().cancel()
        self._source.forget(self)


def _of_peer(name: str) -> Any:
    return property(lambda source: getattr(source.downloads.peer, name))


class PlaySource(Connection):
    """One peer, as used by one play."""

    backend: str = _of_peer("backend")
    finder: PrefixFinder | None = _of_peer("finder")
    reached: bool = _of_peer("reached")
    trouble: str | None = _of_peer("trouble")
    unreachable: bool = _of_peer("unreachable")

    def __init__(self, downloads: ClientPeer, place: Callable[[int], int], digests: TrackDigests) -> None:
        self.downloads, self.place = downloads, place
        self._digests = digests
        self._readers: set[PlayReader] = set()
        self.left = False

    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        digests = self._digests.get((request.namespace, request.track), ())
        if 0 <= request.group < len(digests) and not request.live:
            request = replace(request, exact=True, digest=digests[request.group] or None)
        if self.left:
            reader = PlayReader(self, GroupTransfer(request), priority)
            reader.cancel()
        else:
            reader = PlayReader(self, self.downloads.get(request, self.wire_priority(request, priority)), priority)
            self._readers.add(reader)
        return reader

    def wire_priority(self, request: GroupRequest, priority: int) -> int:
        """Return a request's priority among all plays; without a digest, as of catalogs, it is unchanged."""
        return priority if request.digest is None and not request.live else self.place(priority)

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """True after the play, or if the connection has ended or is unreachable."""
        return self.left or self.downloads.peer.closed

    async def connected(self) -> None:
        await self.downloads.peer.connected()

    def stats(self) -> ConnectionStats:
        return self.downloads.peer.stats()

    def reprioritise(self) -> None:
        """Apply the play's new level to its requests."""
        for reader in list(self._readers):
            reader.prioritise(reader.priority)

    def forget(self, reader: PlayReader) -> None:
        """Remove a reader that was cancelled."""
        self._readers.discard(reader)

    async def close(self) -> None:
        """Cancel the play's remaining requests; the connection stays open."""
        self.left = True
        for reader in list(self._readers):
            reader.cancel()

    def held(self) -> Iterator[bool]:
        """Yield, for each request that is due bytes, True if the link is busy with more urgent requests."""
        due = (reader.transfer for reader in self._readers if not reader.transfer.subscribed)
        return map(self.downloads.held_by_priority, due)


class PlaySources(Connection):
    """The sources of one play. Lookups go to all of them; other requests, except for groups, to one that answered."""

    sources: Sequence[PlaySource] = ()

    def __init__(self, peers: Sequence[ClientPeer], place: Callable[[int], int] = lambda priority: priority) -> None:
        """``place`` converts a priority within the play to one among all plays."""
        self._digests: TrackDigests = {}
        self.peers = peers
        self.sources = tuple(PlaySource(each, place, self._digests) for each in peers)
        self._first = self.sources[0]
        self._chosen = False
        self._offers: list[Offer] = [None] * len(peers)
        self.tasks = TaskSet()
        """Tasks to cancel at the end of the play."""
        self.on_left_out: Callable[[int, str], None] = lambda *_: None
        """Called with the index of a source that is excluded, and the reason."""
        self.hint = False
        """True if this fetches for an expected play."""
        self.late = False
        self.upgrading = False
        """True if the play has returned its cache and fetches upgrades."""

    @property
    def backend(self) -> str:  # type: ignore[override]
        """`Connection.backend` of the chosen source."""
        return self._first.backend

    @property
    def finder(self) -> PrefixFinder | None:  # type: ignore[override]
        """`Connection.finder` of the chosen source."""
        return self._first.finder

    @property
    def offers(self) -> Sequence[Offer] | None:
        """Tracks available at each source (None: all); None if there is only one source."""
        return self._offers if len(self.sources) > 1 else None

    @property
    def round_trips(self) -> Sequence[float | None]:
        """The round trip to each source in seconds, if known."""
        return [source.stats().rtt_s for source in self.sources]

    def offer(self, source: int, tracks: Offer) -> None:
        """Set the tracks available at a source, or `kvabr.player.sources.NOT_KNOWN`."""
        self._offers[source] = tracks

    def answered_by(self, source: int) -> None:
        """Choose the source for requests other than groups."""
        self._first, self._chosen = self.sources[source], True

    async def reach(self) -> None:
        """Send requests other than groups to the first source that connects; others deliver groups once reachable."""
        if self._chosen or len(self.sources) == 1:
            return
        self.answered_by(await first_reached(self.sources))
        for number, source in enumerate(self.sources):
            if not source.reached or (source.unreachable and source is not self._first):
                self.offer(number, NOT_KNOWN)
                self.tasks.start(self._joined(number, source))

    async def _joined(self, number: int, source: PlaySource) -> None:
        has: Offer = None
        try:
            await source.connected()
            if source.unreachable:  # any answer shows that the peer is back
                with suppress(NotFoundError):
                    await read_view(source.fetch(MODELS_NAMESPACE, MODELS_TRACK, limit=MAX_MODELS_BYTES))
        except TransportError as error:
            has = frozenset()
            self.on_left_out(number, str(error))
        if self._offers[number] is NOT_KNOWN:  # unless one source now serves everything
            self.offer(number, has)

    def alone(self) -> None:
        """Use only the chosen source, the one where a joined catalog was looked up."""
        self._offers = [None if source is self._first else frozenset() for source in self.sources]

    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        return self._first.request(request, priority)

    def identify(self, namespace: TrackNamespace, track: str, digests: Sequence[str]) -> None:
        """Set the digests of a track's groups, so that stored groups can be found; empty for groups never requested."""
        self._digests[namespace, track] = digests

    def cached_groups(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        """Return the numbers of a track's groups that are in the client's store; needs `identify`."""
        digests = self._digests.get((namespace, track), ())
        here = self._first.downloads.store.present(digests)
        return [group for group, digest in enumerate(digests) if digest in here] if here else ()

    @property
    def held_by_priority(self) -> bool:  # type: ignore[override]
        held = chain.from_iterable(source.held() for source in self.sources)
        return next(held, False) and all(held)

    def stats(self) -> ConnectionStats:
        first, *others = (source.stats() for source in self.sources)
        more = sum(one.bytes_received for one in others)
        return replace(first, bytes_received=first.bytes_received + more) if more else first

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """True after the play, or once all connections have ended."""
        return all(source.closed for source in self.sources)

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        """A connection error of any peer, or None."""
        return next((one.trouble for one in self.sources if one.trouble is not None), None)

    @property
    def unreachable(self) -> bool:  # type: ignore[override]
        """True if all peers are unreachable."""
        return all(one.unreachable for one in self.sources)

    def reprioritise(self) -> None:
        """Apply the play's new level to all its requests."""
        for source in self.sources:
            source.reprioritise()

    async def close(self) -> None:
        try:
            await cancel_all(self.tasks)
        finally:  # even if the play is cancelled meanwhile
            for source in self.sources:
                await source.close()


async def first_reached(peers: Sequence[Connection]) -> int:
    """Dial all peers, and return the first that connects and is alive; if none does, raise the first peer's error."""
    dials = [asyncio.ensure_future(peer.connected()) for peer in peers]
    pending = set(dials)

    def connected() -> list[int]:
        at = [at for at, dial in enumerate(dials) if dial.done() and dial.exception() is None]
        return sorted(at, key=lambda at: peers[at].unreachable)

    try:
        while pending and all(peers[at].unreachable for at in connected()):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if found := connected():
            return found[0]
    finally:
        await cancel_all(dials)
    await dials[0]  # raises the reason
    raise AssertionError("unreachable")


async def first_found(
    connection: PlaySources,
    peers: Sequence[ClientPeer],
    look: Callable[[ClientPeer, Connection], Coroutine[Any, Any, Answered]],
    tokens: int = 1,
    within_s: float = math.inf,
) -> Answered:
    """Look up at all sources of a play at once, and return the longest prefix.

    Once a source has all ``tokens``, wait briefly for the others, but not for those that were unreachable recently.
    ``within_s``: limit in seconds. Other sources with the same asset join the play when they answer.
    """
    pairs = list(zip(peers, connection.sources, strict=True))
    if len(pairs) == 1:
        connection.answered_by(0)
        return await look(*pairs[0])
    lookups = [connection.tasks.start(_result_of(look(*pair))) for pair in pairs]
    found: dict[int, Found] = {}
    try:
        round_trip_s = max((each or 0.0 for each in connection.round_trips), default=0.0)
        unreachable = {task for task, source in zip(lookups, connection.sources, strict=True) if source.unreachable}
        found = await _found_by(lookups, unreachable, tokens, round_trip_s, _REPORT_SHARE * within_s)
    finally:
        silent = [] if found else [task.cancel() for task in lookups if not task.done()]
    if not found:
        results = [task.result() for task in lookups if task.done() and not task.cancelled()]
        answers = [each for each in results if not isinstance(each, Exception)]
        if answers:
            return next((answer for answer in answers if answer[0] is not None), answers[0])
        errors = [each for each in results if isinstance(each, Exception)]
        # "Not found" at one source proves little while others were not reached.
        raise TimeoutError if silent else min(errors, key=lambda error: isinstance(error, NotFoundError))
    best = max(found, key=lambda source: (tokens_of(found[source]), -source))
    connection.answered_by(best)
    for source, task in enumerate(lookups):
        connection.offer(source, NOT_KNOWN)
        task.add_done_callback(partial(_offer, connection, source, played=found[best]))
    return found[best], None


async def _result_of(lookup: Coroutine[Any, Any, Answered]) -> Answered | Exception:
    try:
        return await lookup
    except Exception as error:  # noqa: BLE001  # any error excludes only this source
        return error


def _offer(connection: PlaySources, source: int, lookup: _Lookup, played: Found) -> None:
    if lookup.cancelled():
        return
    same: Collection[str] = frozenset()
    answer, found = lookup.result(), _found(lookup)
    if isinstance(answer, Exception):
        why: str | None = str(answer) or repr(answer)
    elif found is None:
        why = "it has no part of the prompt"
    else:
        same, why = _same_tracks(played, found)
    connection.offer(source, same)
    if why is not None:
        connection.on_left_out(source, why)


async def _found_by(
    lookups: Sequence[_Lookup],
    unreachable: AbstractSet[_Lookup],
    tokens: int,
    round_trip_s: float,
    within_s: float,
) -> dict[int, Found]:
    """Return the prefixes found, by index of the source.

    Wait for some time after the first prefix, but only briefly after one with all ``tokens``, and not for sources in
    ``unreachable`` after any answer. ``round_trip_s``: the longest of all sources; ``within_s``: limit in seconds.
    """
    clock = asyncio.get_running_loop().time
    begun_s, waits = clock(), False
    end_s = begun_s + within_s
    found: dict[int, Found] = {}
    pending = set(lookups)
    while clock() < end_s and (pending - unreachable or (pending and not any(map(_answered, lookups)))):
        left_s = None if end_s == math.inf else end_s - clock()
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        found |= {lookups.index(task): each for task in done if (each := _found(task)) is not None}
        took_s, whole = clock() - begun_s, max(map(tokens_of, found.values()), default=0) >= tokens
        if whole:
            end_s = min(end_s, clock() + max(_MIN_WAIT_S, took_s / 2))
        elif found and not waits:
            waits = True
            end_s = min(end_s, clock() + max(MIN_OTHER_SIZES_S, OTHER_SIZES_FACTOR * max(took_s, round_trip_s)))
    return found


def _answered(task: _Lookup) -> bool:
    return task.done() and not isinstance(task.result(), Exception)


def _found(task: _Lookup) -> Found | None:
    answer = task.result()
    return answer[0] if not isinstance(answer, Exception) and isinstance(answer[0], Found) else None


def _same_tracks(one: Found, other: Found) -> tuple[Collection[str], str | None]:
    """Return the tracks that are identical at two peers, and why others are not, or None."""
    if one is other:
        return frozenset(one.catalog.by_name), None
    if one.catalog.namespace != other.catalog.namespace:
        return frozenset(), f"it has another asset, of {other.catalog.tokens:,} tokens"
    if other.live is not None:
        return frozenset(), "it is still being prefilled there"
    theirs = other.catalog.by_name
    both = [track for track in one.catalog.tracks if track.name in theirs]
    same = frozenset(track.name for track in both if theirs[track.name].digests == track.digests)
    differ = ", ".join(track.name for track in both if track.name not in same)
    return same, f"its catalog names other groups of {differ}" if differ else None
