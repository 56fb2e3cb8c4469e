"""The connections of one play, over what all plays of a client share.

A request is answered from the local store if the group is there, joins another play's transfer of the same group, or
goes to the peer, at a priority that puts the plays in order of their deadlines. A play has a connection for each of its
sources: groups are named by content, so that any source may serve any of them.

A peer is dialled when something is asked of it, and its transfers wait for that: a play begins with the sources that
are connected, and goes on with those that are later.

The transfers of one connection are shared by all plays that want the same group. Once a group whose digest is known is
complete, it is checked and put into the local store. What was asked for before its digest was known is put there once a
reader has checked it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from kvabr.client.origins import Dialling
from kvabr.client.shared_bandwidth import link_of
from kvabr.player.sources import NOT_KNOWN, Offer
from kvabr.store.group_cache import GroupCache
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.transfer.interface import Connection, ConnectionStats, PeerConnection, PrefixFinder, read_view
from kvabr.transfer.redial import UnreachedConnection
from kvabr.transfer.transfer import GroupReader, GroupRequest, GroupTransfer, TransferListener
from kvabr.transfer.work import SMALL_BYTES, cancel_all, decoders
from kvabr.types.errors import ConnectionLostError, NotFoundError, Reason, RequestError, TransportError
from kvabr.types.kv import MAX_MODELS_BYTES
from kvabr.types.naming import MODELS_NAMESPACE, MODELS_TRACK, TrackNamespace

TURN_S = 0.25
"""Seconds without a byte of anything more urgent after which a transfer that stands still no longer waits for it."""
_HASHING = tuple(threading.Lock() for _ in range(64))
"""Locks for computing digests. A transfer has one of them, as one of its own for each would cost more than waiting."""
_CLOSED = "the client was closed"


class SharedTransfer(GroupTransfer):
    """A transfer for plays."""

    def __init__(self, request: GroupRequest, owner: SharedTransfers) -> None:
        super().__init__(request)
        self.heard_s = 0.0
        self.unwanted = False
        """Whether it was ended since nobody reads it."""
        self.checked: asyncio.Future[bool] | None = None
        """Set once a group whose digest is known is complete; done, with whether it has the digest, once checked."""
        self._owner = owner
        self._hashing = _HASHING[hash(request) % len(_HASHING)]
        self._hashed: dict[str, bool] = {}

    def has_digest(self, digest: str) -> bool:
        """See `GroupTransfer.has_digest`; it is computed once."""
        with self._hashing:
            # Plays of what was not published when they asked for it may each have been told another one.
            if digest not in self._hashed:
                self._hashed[digest] = super().has_digest(digest)
            return self._hashed[digest]

    def reprioritise(self) -> bool:
        """See `GroupTransfer.reprioritise`."""
        changed = super().reprioritise()
        if changed and self.carrier is not None:
            self._owner.metrics.priority_changes_total.inc()
        return changed

    def arrived(self, part: memoryview) -> None:
        """See `GroupTransfer.arrived`."""
        self._owner.heard(self, len(part))

    def settle(self) -> None:
        """See `GroupTransfer.settle`."""
        self._owner.settled(self)

    def unread(self) -> None:
        """See `GroupTransfer.unread`."""
        if self._owner.waits_its_turn(self):
            # A player asks again for what stands still. A transfer that only waits for its turn must not lose its place
            # by that, and the same reader may join it again at this very moment.
            asyncio.get_running_loop().call_soon(self._end_unread)
        else:
            self._end_unread()

    def _end_unread(self) -> None:
        if not self.readers and not self.over:
            self.unwanted = True
            super().unread()


class SharedTransfers:
    """All transfers from one peer, for one event loop."""

    def __init__(self, source: Dialling | PeerConnection, store: GroupCache, metrics: ClientMetrics) -> None:
        """Dial nothing yet.

        ``source`` dials, or is an open connection, which stays open when this is closed. ``store`` keeps what was
        checked.
        """
        self.store, self.metrics = store, metrics
        self.connection: PeerConnection = source if isinstance(source, PeerConnection) else UnreachedConnection()
        self._source = None if isinstance(source, PeerConnection) else source
        named = self.connection.peer if self._source is None else self._source.peers[0]
        self.link = link_of(named or self.connection)
        """The path to the peer, whatever the transport."""
        self._stack = AsyncExitStack()
        self._dialling: asyncio.Task[None] | None = None
        self._waiting: dict[SharedTransfer, None] = {}
        """Those that wait for a connection, the earliest first."""
        self._transfers: dict[GroupRequest, SharedTransfer] = {}
        self._heard_s: dict[int, float] = {}
        """When bytes of each priority came last."""
        self._tasks: set[asyncio.Task[None]] = set()
        """What checks and stores groups."""
        self._closed = False

    def find(self, request: GroupRequest) -> SharedTransfer | None:
        """Return the transfer of this request if it is under way."""
        return self._transfers.get(request)

    def join(self, request: GroupRequest, reader: TransferListener) -> tuple[SharedTransfer, bool]:
        """Read a transfer from its beginning; return it, and whether it was under way already."""
        if (transfer := self._transfers.get(request)) is not None:
            transfer.join(reader)
            return transfer, True
        transfer = self._transfers[request] = SharedTransfer(request, self)
        transfer.join(reader)
        if self.reached or self._closed:
            transfer.begin(self.connection)
        else:
            self._waiting[transfer] = None
            self._dial()
        return transfer, False

    @property
    def reached(self) -> bool:
        """Whether there is a connection; `connection` stands for one before."""
        return self._source is None or not isinstance(self.connection, UnreachedConnection)

    @property
    def source(self) -> Dialling | None:
        """What dials; None for a connection that was open before."""
        return self._source

    @property
    def names(self) -> Sequence[str]:
        """What the connection may be called in a `PeerHistory`."""
        if self._source is not None and not self.reached:
            return self._source.peers
        return () if self.connection.peer is None else (self.connection.peer,)

    async def connected(self) -> PeerConnection:
        """Return the connection, which is dialled if there is none; callers share one dial.

        Raises:
            TransportError: the peer cannot be reached, does not let us in, or this was closed. Unless it was, the next
                call dials again.
        """
        if not self.reached:
            if self._closed:
                raise ConnectionLostError(_CLOSED)
            # A play that is cancelled must not end the dial of the others.
            await asyncio.wait({dial := self._dial()})
            if dial.cancelled():  # by `close`: nobody has cancelled the caller
                raise ConnectionLostError(_CLOSED)
            dial.result()
        return self.connection

    def waits_its_turn(self, transfer: SharedTransfer) -> bool:
        """Return whether nothing comes of a transfer because something does that is at least as urgent."""
        since_s = max(transfer.heard_s, asyncio.get_running_loop().time() - TURN_S)
        return any(priority <= transfer.priority and at_s > since_s for priority, at_s in self._heard_s.items())

    def identified(self, loop: asyncio.AbstractEventLoop, data: memoryview, digest: str) -> None:
        """Keep a complete group that was asked for without a digest and has this one; called in a thread."""
        loop.call_soon_threadsafe(self._put, data, digest)

    async def close(self) -> None:
        """End all transfers, and tell their readers."""
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait({self._dialling})
        for transfer in list(self._transfers.values()):
            transfer.unwanted = True
            transfer.reject(ConnectionLostError(_CLOSED))
        await cancel_all(self._tasks)
        if self._source is not None:
            if self.reached:
                self.metrics.peers.dec()
            self.connection = UnreachedConnection(_CLOSED)
        await self._stack.aclose()

    # ------------------------------------------------------ from the transfers

    def heard(self, transfer: SharedTransfer, count: int) -> None:
        """Note that bytes of a transfer have come."""
        transfer.heard_s = self._heard_s[transfer.priority] = asyncio.get_running_loop().time()
        if transfer.limit != "kept":
            self.link.received(count)
        self.metrics.downloaded_bytes_total.inc(count)

    def settled(self, transfer: SharedTransfer) -> None:
        """Note that a transfer is over; check what has come if its digest is known."""
        if transfer.complete and transfer.request.digest is not None:
            loop = asyncio.get_running_loop()
            transfer.checked = loop.create_future()
            self._track(loop.create_task(self._check(transfer, transfer.request.digest, transfer.checked)))
            return
        self._forget(transfer)
        self._waiting.pop(transfer, None)
        result = "done" if transfer.complete else "cancelled" if transfer.unwanted else "failed"
        self.metrics.downloads_total.labels(result).inc()

    # -------------------------------------------------------------- internals

    def _dial(self) -> asyncio.Task[None]:
        if self._dialling is None:
            self.connection.closed, self.connection.trouble = False, f"{self.names[0]} is not connected yet"
            self._dialling = asyncio.get_running_loop().create_task(self._connect())
            self._dialling.add_done_callback(self._dialled)
        return self._dialling

    async def _connect(self) -> None:
        assert self._source is not None  # noqa: S101  # or there was a connection from the start
        self.connection = await self._stack.enter_async_context(self._source)
        self.metrics.peers.inc()

    def _dialled(self, task: asyncio.Task[None]) -> None:
        """Begin with what waits, or let it fail."""
        self._dialling = None
        error = ConnectionLostError(_CLOSED) if task.cancelled() else task.exception()
        if error is not None:
            self.connection.trouble, self.connection.closed = str(error), True
            self.connection.unreachable = True  # until a dial succeeds
            if not task.cancelled():
                self.metrics.dials_failed_total.inc()
                if isinstance(error, RequestError) and error.reason == Reason.WRONG:
                    self.metrics.wrong_answers_total.inc()
        waiting = list(self._waiting)
        self._waiting.clear()
        for transfer in waiting:
            if error is None:
                transfer.begin(self.connection)
            else:
                transfer.fail(error if isinstance(error, Exception) else ConnectionLostError(repr(error)))

    async def _check(self, transfer: SharedTransfer, digest: str, checked: asyncio.Future[bool]) -> None:
        good = False
        try:
            # A reader that decodes the group at the same time waits for the same computation.
            if transfer.request.limit <= SMALL_BYTES:
                good = transfer.has_digest(digest)
            else:
                good = await asyncio.get_running_loop().run_in_executor(decoders(), transfer.has_digest, digest)
            if good:
                await self.store.put(digest, transfer.data)
        finally:
            self._forget(transfer)
            checked.set_result(good)
        self.metrics.downloads_total.labels("done" if good else "damaged").inc()

    def _put(self, data: memoryview, digest: str) -> None:
        if not self._closed and digest not in self.store:
            self._track(asyncio.get_running_loop().create_task(_stored(self.store, digest, data)))

    def _forget(self, transfer: SharedTransfer) -> None:
        if self.find(transfer.request) is transfer:
            del self._transfers[transfer.request]

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def first_reached(peers: Sequence[SharedTransfers]) -> int:
    """Return which of some peers is connected first; all are dialled. Raise the first one's error if none is.

    One that was connected and is dead by now is returned only if no other is there.
    """
    dials = [asyncio.ensure_future(peer.connected()) for peer in peers]
    pending = set(dials)

    def there() -> list[int]:
        at = [at for at, dial in enumerate(dials) if dial.done() and dial.exception() is None]
        return sorted(at, key=lambda at: peers[at].connection.unreachable)

    try:
        while pending and all(peers[at].connection.unreachable for at in there()):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if found := there():
            return found[0]
    finally:
        await cancel_all(dials)
    await dials[0]  # which raises why
    raise AssertionError("unreachable")


async def _stored(store: GroupCache, digest: str, data: memoryview) -> None:
    await store.put(digest, data)


class PlayReader(GroupReader):
    """Reads one group for one play, wherever it comes from."""

    transfer: SharedTransfer | None

    def __init__(self, owner: PlayConnection, shared: SharedTransfers, request: GroupRequest, priority: int) -> None:
        super().__init__(None, priority)
        self._owner, self._shared, self._request = owner, shared, request
        self._kept: memoryview | None = None
        """The whole group, if it was here before the first read. It was checked when it came."""
        self._before = 0
        """Bytes of the transfer that had come before this joined: they say nothing about the link."""
        self._counted = False
        self._gone = owner.left
        if self._gone:
            return
        under_way = shared.find(request)
        if request.digest is not None and (request.digest in shared.store or (under_way and under_way.complete)):
            return  # `read` gets it
        self._join()

    @property
    def wire_priority(self) -> int:
        """See `GroupReader.wire_priority`. A play waits for what has no digest, like a catalog: that goes first."""
        awaited = self._request.digest is None and not self._request.live
        return self.priority if awaited else self._owner.place(self.priority)

    @property
    def data(self) -> memoryview:
        """See `GroupReader.data`."""
        return super().data if self._kept is None else self._kept

    def has_digest(self, digest: str) -> bool:
        """See `GroupReader.has_digest`."""
        if self._kept is not None:
            return True
        if self.transfer is None or not self.transfer.has_digest(digest):
            return False
        if self._request.digest is None:
            self._shared.identified(self._owner.loop, self.transfer.data, digest)
        return True

    async def read(self) -> memoryview:
        """See `GroupReader.read`."""
        while self.transfer is None and self._kept is None and not self._gone:
            await self._look()
        if self._kept is not None and not self._gone:
            self._held += ("kept",)
            return self._take(self._kept)
        if self._read < self._before:
            self._held += ("kept",)
        return await super().read()

    @property
    def subscribed(self) -> bool:
        """Whether the group may not be published yet."""
        return self._request.live and not self.stats.received

    @property
    def waits_its_turn(self) -> bool:
        """Whether nothing comes because something does that is at least as urgent."""
        return self.transfer is not None and self._shared.waits_its_turn(self.transfer)

    def reprioritise(self) -> None:
        """Apply the play's new level."""
        if self.transfer is not None:
            self.transfer.reprioritise()

    def cancel(self) -> None:
        """See `GroupReader.cancel`."""
        super().cancel()
        self._owner.forget(self)

    def on_more(self) -> None:
        """See `GroupReader.on_more`."""
        super().on_more()
        if self.transfer is not None and self.transfer.data:
            self._count("network")

    # -------------------------------------------------------------- internals

    def _join(self) -> None:
        self.transfer, joined = self._shared.join(self._request, self)
        self._before = len(self.transfer.data)
        if joined:
            self._count("joined")
        self.on_more()

    async def _look(self) -> None:
        """Get the group from where it was when it was asked for, or else from the peer."""
        digest, store = self._request.digest, self._shared.store
        under_way = self._shared.find(self._request)
        if under_way is not None and under_way.checked is not None and await asyncio.shield(under_way.checked):
            self._keep(under_way.data, "joined")
            return
        # What is in memory was checked when it was put there; what is on disk is checked by the store.
        data = None if digest is None else store.held(digest)
        kept = (data, "memory") if data is not None else None if digest is None else await store.find(digest)
        if self._gone:
            return
        if kept is not None and len(kept[0]) == self._request.limit:
            self._keep(*kept)
        else:
            self._join()

    def _keep(self, data: memoryview, source: str) -> None:
        self._kept = data
        self.stats.first_byte_s = self.stats.done_s = asyncio.get_running_loop().time()
        self.stats.received = len(data)
        self._count(source)

    def _count(self, source: str) -> None:
        """Count it, once."""
        if self._request.digest is not None and not self._counted:
            self._counted = True
            self._shared.metrics.groups_total.labels(source).inc()
            self._shared.metrics.bytes_total.labels(source).inc(self._request.limit)


class PlayConnection(Connection):
    """The connection of one play to one peer."""

    def __init__(self, shared: SharedTransfers, place: Callable[[PlayConnection, int], int]) -> None:
        """Begin without requests.

        ``place`` returns the priority of a request among those of all plays, from this connection and the priority
        among the play's own requests.
        """
        self._shared, self._place = shared, place
        self._digests: dict[tuple[TrackNamespace, str], Sequence[str]] = {}
        self._readers: set[PlayReader] = set()
        self.loop = asyncio.get_running_loop()
        self.left = False
        """Whether the play is over."""

    @property
    def shared(self) -> SharedTransfers:
        """What all plays to this peer share."""
        return self._shared

    @property
    def backend(self) -> str:  # type: ignore[override]
        """See `Connection.backend`."""
        return self._shared.connection.backend

    @property
    def finder(self) -> PrefixFinder | None:  # type: ignore[override]
        """See `Connection.finder`."""
        return self._shared.connection.finder

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        """See `Connection.trouble`."""
        return self._shared.connection.trouble

    @property
    def unreachable(self) -> bool:  # type: ignore[override]
        """See `Connection.unreachable`."""
        return self._shared.connection.unreachable

    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        """See `Connection.request`."""
        digests = self._digests.get((request.namespace, request.track), ())
        if 0 <= request.group < len(digests) and not request.live:
            request = replace(request, exact=True, digest=digests[request.group] or None)
        reader = PlayReader(self, self._shared, request, priority)
        if not self.left:
            self._readers.add(reader)
        return reader

    def identify(self, namespace: TrackNamespace, track: str, digests: Sequence[str]) -> None:
        """See `Connection.identify`."""
        self._digests[namespace, track] = digests

    def cached_groups(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        """See `Connection.cached_groups`."""
        digests = self._digests.get((namespace, track), ())
        here = self._shared.store.present(digests)
        return [group for group, digest in enumerate(digests) if digest in here] if here else ()

    @property
    def awaited(self) -> list[PlayReader]:
        """What should come soon."""
        return [reader for reader in self._readers if not reader.subscribed]

    @property
    def waits_its_turn(self) -> bool:  # type: ignore[override]
        """See `Connection.waits_its_turn`."""
        awaited = self.awaited
        return bool(awaited) and all(reader.waits_its_turn for reader in awaited)

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        return self._shared.connection.stats()

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the play is over, the shared connection has ended, or the peer could not be reached."""
        return self.left or self._shared.connection.closed

    def place(self, priority: int) -> int:
        """Return the priority among all plays' requests of one with this priority among the play's own."""
        return self._place(self, priority)

    def reprioritise(self) -> None:
        """Apply the play's new level to all its requests."""
        for reader in list(self._readers):
            reader.reprioritise()

    def forget(self, reader: PlayReader) -> None:
        """Remove a reader that has left."""
        self._readers.discard(reader)

    async def close(self) -> None:
        """Cancel what is left of the play; the shared connection stays."""
        self.left = True
        for reader in list(self._readers):
            reader.cancel()


class PlaySources(Connection):
    """The connections of one play, at least one. All are looked up in; one of them also answers other requests."""

    def __init__(self, sources: Sequence[PlayConnection]) -> None:
        """Begin without requests."""
        self._first, self._sources = sources[0], tuple(sources)
        self._chosen = False
        """Whether the first answers requests other than for groups."""
        self._offers: list[Offer] = [None] * len(sources)
        self._alone = False
        self._asking: set[asyncio.Task[None]] = set()
        self.left_out: Callable[[int, str], None] = lambda *_: None
        """Told of sources that the play does without, and why."""
        self.late = False
        """Whether the play's deadline has passed."""
        self.kept = False
        """Whether upgrades go on after the play has returned."""

    @property
    def sources(self) -> Sequence[PlayConnection]:
        """See `Connection.sources`."""
        return self._sources

    @property
    def shared(self) -> Sequence[SharedTransfers]:
        """Of each source what all plays to its peer share."""
        return [source.shared for source in self._sources]

    @property
    def backend(self) -> str:  # type: ignore[override]
        """See `Connection.backend`; of the source that answers."""
        return self._first.backend

    @property
    def finder(self) -> PrefixFinder | None:  # type: ignore[override]
        """See `Connection.finder`; of the source that answers."""
        return self._first.finder

    @property
    def offers(self) -> Sequence[Offer] | None:
        """The tracks that each source has, None for all; None if there is only one source."""
        return self._offers if len(self._sources) > 1 else None

    @property
    def round_trips(self) -> Sequence[float | None]:
        """The round trip to each source, seconds, as far as it is known."""
        return [source.stats().rtt_s for source in self._sources]

    def offer(self, source: int, tracks: Offer) -> None:
        """Note which tracks a source has, as far as that is known (`kvabr.player.sources.NOT_KNOWN`)."""
        if not self._alone:
            self._offers[source] = tracks

    def answered_by(self, source: int) -> None:
        """Have a source answer other requests than those for groups."""
        self._first, self._chosen = self._sources[source], True

    async def reached(self) -> None:
        """Have the first source that is connected answer other requests than those for groups, unless one does.

        The others are asked for groups once they are connected, also those that were and could not be reached lately.
        """
        if self._chosen or len(self._sources) == 1:
            return
        self.answered_by(await first_reached(self.shared))
        for source, shared in enumerate(self.shared):
            if not shared.reached or (shared.connection.unreachable and self._sources[source] is not self._first):
                self.offer(source, NOT_KNOWN)
                self.meanwhile(self._joined(source, shared))

    async def _joined(self, source: int, shared: SharedTransfers) -> None:
        has: Offer = None
        try:
            await shared.connected()
            if shared.connection.unreachable:  # whatever it answers, it is back
                with suppress(NotFoundError):
                    await read_view(self._sources[source].fetch(MODELS_NAMESPACE, MODELS_TRACK, limit=MAX_MODELS_BYTES))
        except TransportError as error:
            has = frozenset()
            self.left_out(source, str(error))
        if self._offers[source] is NOT_KNOWN:  # not if one source brings everything
            self.offer(source, has)

    def alone(self) -> None:
        """Have the source that answers bring everything: what was looked up is not an asset that others may have."""
        self._alone = True
        self._offers = [None if source is self._first else frozenset() for source in self._sources]

    def meanwhile(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something until the play is over."""
        task = asyncio.get_running_loop().create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        """See `Connection.request`; from the source that answers."""
        return self._first.request(request, priority)

    def identify(self, namespace: TrackNamespace, track: str, digests: Sequence[str]) -> None:
        """See `Connection.identify`."""
        for source in self._sources:
            source.identify(namespace, track, digests)

    def cached_groups(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        """See `Connection.cached_groups`; all sources have the client's store."""
        return self._first.cached_groups(namespace, track)

    @property
    def waits_its_turn(self) -> bool:  # type: ignore[override]
        """See `Connection.waits_its_turn`: on every path from which something should come."""
        asked = [source for source in self._sources if source.awaited]
        return bool(asked) and all(source.waits_its_turn for source in asked)

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`; of the first source, with the bytes of all."""
        first, *others = (source.stats() for source in self._sources)
        more = sum(one.bytes_received for one in others)
        return replace(first, bytes_received=first.bytes_received + more) if more else first

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the play is over, or every shared connection has ended."""
        return all(source.closed for source in self._sources)

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        """What is known to keep a peer out of reach."""
        return next((one.trouble for one in self._sources if one.trouble is not None), None)

    @property
    def unreachable(self) -> bool:  # type: ignore[override]
        """Whether all peers are dead."""
        return all(one.unreachable for one in self._sources)

    def reprioritise(self) -> None:
        """Apply the play's new level to all its requests."""
        for source in self._sources:
            source.reprioritise()

    async def close(self) -> None:
        """Cancel what is left of the play; the shared connections stay."""
        try:
            await cancel_all(self._asking)
        finally:  # also if the play is cancelled meanwhile
            for source in self._sources:
                await source.close()
