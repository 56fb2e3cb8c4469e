"""A `GroupTransfer` is one group on its way: a `Carrier` fills it, `GroupReader`s read it.

It is as urgent as its most urgent reader, and ends when the last one has left. Its bytes are copied once, from what the
carrier receives into one buffer; readers get views of that, which never change or move.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvabr.store.buffers import GROUPS
from kvabr.types.digests import has_digest
from kvabr.types.errors import Reason, RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import TrackNamespace

_LEAST_URGENT = 255
_BY_WEIGHT: tuple[Limit, ...] = ("kept", "cpu", "publisher")
"""If several of these held up what one read returns, the first is reported."""
_MIN_ROOM = 16 << 10
"""Bytes that a buffer of unknown size begins with."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group of one track. Plays whose requests are equal share a transfer."""

    namespace: TrackNamespace
    track: str
    group: int
    limit: int
    """Maximum size, bytes."""
    exact: bool = False
    """Whether ``limit`` is the size, so that the buffer is allocated once."""
    digest: str | None = None
    """The group's digest (`kvabr.types.digests`), if a catalog told it."""
    live: bool = False
    """Whether the group may not be published yet: a subscription to its track brings it as soon as it is. If the track
    ends without the group, or the peer has no subscriptions, the transfer ends with `NotFoundError`."""
    groups: int = 1
    """Consecutive groups that are wanted, as far as they exist: their bytes come one behind the other."""

    def __str__(self) -> str:
        return f"{self.track[:80]}, group {self.group}"


@dataclass(slots=True)
class TransferStats:
    """Progress of one transfer, as one reader sees it; times on the event loop's clock."""

    requested_s: float
    first_byte_s: float | None = None
    done_s: float | None = None
    received: int = 0
    """Bytes that have come, read or not."""
    limit: Limit = "network"
    """What limited those of the last read."""


class Carrier(ABC):
    """Brings transfers: fills each by `GroupTransfer.push`, ends it by `GroupTransfer.finish` or `fail`."""

    @abstractmethod
    def carry(self, transfer: GroupTransfer) -> None:
        """Begin to bring a transfer. Returns at once, and never raises for what the network or a peer does."""

    def reprioritise(self, transfer: GroupTransfer) -> None:  # noqa: B027  # some need not
        """Apply the new priority of a transfer, as MoQT's REQUEST_UPDATE does; some peers ignore it."""

    def drop(self, transfer: GroupTransfer) -> None:  # noqa: B027  # as above
        """Bring no more of a transfer, which is over; do nothing if it is not under way here."""

    def answered(self, transfer: GroupTransfer) -> None:  # noqa: B027  # most need not know
        """Note that the first bytes of a transfer have come."""

    def explain(self, transfer: GroupTransfer, error: Exception) -> Exception:
        """Return the error with which a transfer ends, given what it was reported to be."""
        del transfer
        return error

    def released(self, transfer: GroupTransfer) -> None:  # noqa: B027  # as above
        """Note that a transfer is over, for whatever reason."""


class TransferListener(ABC):
    """One who wants a transfer, and hears of it."""

    @property
    @abstractmethod
    def wire_priority(self) -> int:
        """Priority of the transfer as far as this one is concerned, 0 (most urgent) to 255."""

    @abstractmethod
    def on_more(self) -> None:
        """Note that something has come, or that nothing more will."""


class ReceiveBuffer:
    """The bytes of one group, contiguous, each written once as it comes. Views of them stay valid and never change."""

    def __init__(self, limit: int, *, exact: bool = False) -> None:
        """Allocate nothing before the first byte, then all ``limit`` bytes if they are the ``exact`` size.

        Otherwise the memory doubles when it is full, which copies what is in it: for small tracks of unknown size.
        """
        self.limit = limit
        self._exact = exact
        self._memory = memoryview(b"")
        self.size = 0
        """Bytes that have come."""

    def append(self, part: bytes | memoryview) -> None:
        """Copy a part behind those before it; the caller has checked the limit."""
        end = self.size + len(part)
        if end > len(self._memory):
            self._grow(end)
        self._memory[self.size : end] = part
        self.size = end

    def _grow(self, end: int) -> None:
        room = self.limit if self._exact else min(self.limit, max(end, 2 * len(self._memory), _MIN_ROOM))
        grown = GROUPS.take(room)
        grown[: self.size] = self._memory[: self.size]
        self._memory = grown

    def room(self, most: int) -> memoryview:
        """Return memory behind what has come, for at most ``most`` further bytes; `took` says how many came."""
        end = self.size + 1
        if end > len(self._memory):
            self._grow(end)
        return self._memory[self.size : self.size + most]

    def took(self, count: int) -> None:
        """Note that ``count`` bytes were written to what `room` returned."""
        self.size += count

    def view(self) -> memoryview:
        """Return all bytes that have come, read-only."""
        return self._memory[: self.size].toreadonly()


class GroupTransfer:
    """One group on its way."""

    def __init__(self, request: GroupRequest) -> None:
        """Begin without readers; `begin` gives it to a carrier."""
        self.request = request
        self.priority = _LEAST_URGENT
        """That of its most urgent reader, 0 (most urgent) to 255."""
        self.data = memoryview(b"")
        """Everything that may be read: contiguous and read-only."""
        self.complete = False
        """Whether that is all of it."""
        self.error: Exception | None = None
        """Why no more will come; what has come can still be read."""
        self.over = False
        """Whether nothing more will come: it is complete, or has failed."""
        self.limit: Limit = "network"
        """What limited the bytes that came last."""
        self.readers: list[TransferListener] = []
        self.carrier: Carrier | None = None
        """Who was asked to bring it."""
        self.source: Carrier | None = None
        """Who does: the carrier itself, or one of those that it has in turn."""
        self._buffer = ReceiveBuffer(request.limit, exact=request.exact)
        self._heard = self._due = False
        self._limit: Limit = "network"
        """What limited the bytes of which the readers have not heard yet."""

    @property
    def subscribed(self) -> bool:
        """Whether the group may not be published yet, so that the peer's silence says nothing about the path."""
        return self.request.live and not self.received

    @property
    def received(self) -> int:
        """Bytes that have come from its present carrier."""
        return self._buffer.size

    # ------------------------------------------------------------ for readers

    def begin(self, carrier: Carrier) -> None:
        """Let a carrier bring it, from its first byte."""
        self.carrier = self.source = carrier
        carrier.carry(self)

    def join(self, reader: TransferListener) -> None:
        """Add a reader, who reads from the beginning."""
        self.readers.append(reader)
        self.reprioritise()

    def leave(self, reader: TransferListener) -> None:
        """Remove a reader, once; the last one to leave ends the transfer."""
        if reader in self.readers:
            self.readers.remove(reader)
            if self.readers:
                self.reprioritise()
            elif not self.over:
                self.unread()

    def reprioritise(self) -> bool:
        """Be as urgent as the most urgent reader; return whether that is a change."""
        priority = min((reader.wire_priority for reader in self.readers), default=_LEAST_URGENT)
        if priority == self.priority or self.over:
            return False
        self.priority = priority
        if self.source is not None:
            self.source.reprioritise(self)
        return True

    def unread(self) -> None:
        """End, as nobody reads it any more."""
        self.reject(RequestError(f"{self.request}: cancelled", reason=Reason.INTERNAL))

    def has_digest(self, digest: str) -> bool:
        """Return whether `data`, which must be complete, has this digest. Takes time: call it in a thread."""
        return has_digest(digest, self.data)

    # ---------------------------------------------------------- for its carrier

    def push(self, part: bytes | memoryview, limit: Limit = "network") -> None:
        """Take bytes that have come, and what limited them."""
        self.append(part)
        self.came(limit)

    def append(self, part: bytes | memoryview) -> None:
        """Take bytes of which readers hear with the next call of `came`."""
        if self.over:
            return
        if self._buffer.size + len(part) > self._buffer.limit:
            self.too_long()
        else:
            self._buffer.append(part)

    def came(self, limit: Limit = "network") -> None:
        """Let the readers have what was taken, once all of this turn of the event loop is; say what limited it."""
        if self.over or not self._buffer.size:
            return
        if not self._heard and self.carrier is not None:
            self._heard = True
            self.carrier.answered(self)
        if limit != "network":
            self._limit = limit
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def room(self, most: int) -> memoryview:
        """Return memory for at most ``most`` bytes that come next; they must not exceed the limit."""
        return self._buffer.room(most)

    def took(self, count: int, limit: Limit = "network") -> None:
        """Note that ``count`` bytes came into what `room` returned, and what limited them."""
        if not self.over and count:
            self._buffer.took(count)
            self.came(limit)

    def show(self, data: memoryview) -> None:
        """Take memory that holds all bytes so far, instead of bytes to be copied."""
        if not self.over and len(data) > len(self.data):
            self._more(data, "network")

    def finish(self) -> None:
        """End: all of it has come."""
        self._flush()
        if not self.over:
            self.over = self.complete = True
            self._end()

    def fail(self, error: Exception) -> None:
        """End with an error; what has come can still be read."""
        self._flush()
        if not self.over:
            self.over = True
            self.error = error if self.carrier is None else self.carrier.explain(self, error)
            self._end()

    def reject(self, error: Exception) -> None:
        """Fail, and have the carrier bring no more."""
        if not self.over:
            self.fail(error)
            if self.source is not None:
                self.source.drop(self)

    def too_long(self) -> None:
        """Fail; nothing of a group that is too long is of any use. One that is complete already stays as it is."""
        if self.over:
            return
        self.data, self._buffer = memoryview(b""), ReceiveBuffer(0)
        longer = f"{self.request}: longer than the {self.request.limit} bytes expected"
        self.reject(RequestError(longer, reason=Reason.WRONG))

    # -------------------------------------------------------------- internals

    def _flush(self) -> None:
        self._due = False
        if self.received > len(self.data) and not self.over:
            limit, self._limit = self._limit, "network"
            self._more(self._buffer.view(), limit)

    def _more(self, data: memoryview, limit: Limit) -> None:
        """Let the readers have more data; the end of a group of known size need not be waited for."""
        fresh, self.data, self.limit = data[len(self.data) :], data, limit
        self.arrived(fresh)
        if self.request.exact and len(data) == self.request.limit:
            self.over = self.complete = True
            self._end()
            if self.source is not None:  # most often the end comes with the last bytes
                asyncio.get_running_loop().call_soon(self.source.drop, self)
        else:
            self.tell()

    def _end(self) -> None:
        if self.carrier is not None:
            self.carrier.released(self)
        self.settle()
        self.tell()

    def arrived(self, part: memoryview) -> None:
        """Note bytes before the readers hear of them: for those who count or pass on what comes."""

    def settle(self) -> None:
        """Note the end before the readers hear of it: as `arrived`."""

    def tell(self) -> None:
        """Tell all readers that something has come, or that nothing more will."""
        for reader in tuple(self.readers):
            reader.on_more()


class GroupReader(TransferListener):
    """Reads a transfer from its beginning."""

    def __init__(self, transfer: GroupTransfer | None, priority: int) -> None:
        """Join a transfer; None: a subclass joins one later."""
        self.stats = TransferStats(asyncio.get_running_loop().time())
        self.priority = priority
        """0 (most urgent) to 255."""
        self.transfer = transfer
        self._held: tuple[Limit, ...] = ()  # like all of this, as few objects as can be: there are many readers
        self._read = 0
        self._before = 0
        """Bytes that had come before this joined: they say nothing about the link."""
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        if transfer is not None:
            self.join(transfer)

    def join(self, transfer: GroupTransfer) -> None:
        """Read a transfer, from its beginning."""
        self.transfer = transfer
        transfer.join(self)
        if transfer.data or transfer.over:
            self._before = len(transfer.data)
            self.on_more()

    @property
    def wire_priority(self) -> int:
        """See `TransferListener.wire_priority`."""
        return self.priority

    @property
    def data(self) -> memoryview:
        """Everything that has come so far: contiguous and read-only. The bytes of a view never change or move."""
        return memoryview(b"") if self.transfer is None else self.transfer.data

    async def read(self) -> memoryview:
        """Return the bytes that have come since the last read, a part of `data`; wait for some if there are none.

        An empty view means that all of the group has come.

        Raises:
            NotFoundError: no such track, or none that this connection may read.
            RequestError: refused, reset by the peer, or longer than the limit.
            ConnectionLostError: the connection ended.
        """
        while (transfer := self.transfer) is not None:
            if len(transfer.data) > self._read and not self._gone:
                return self._take(transfer.data)
            if transfer.error is not None:
                raise transfer.error
            if transfer.complete:
                return memoryview(b"")
            if self._gone:
                break
            await self._more()
        raise RequestError("cancelled by this side")

    def has_digest(self, digest: str) -> bool:
        """Return whether `data`, which must be complete, has this digest. Takes time: call it in a thread.

        Readers who share a transfer may share the computation.
        """
        return has_digest(digest, self.data) if self.transfer is None else self.transfer.has_digest(digest)

    def prioritise(self, priority: int) -> None:
        """Change the priority, 0 (most urgent) to 255."""
        self.priority = priority
        if self.transfer is not None:
            self.transfer.reprioritise()

    def cancel(self) -> None:
        """Stop reading. May be called at any time, also after the end; `data` stays valid."""
        self._gone = True
        if self.transfer is not None:
            self.transfer.leave(self)
        self._wake()

    def on_more(self) -> None:
        """See `TransferListener.on_more`."""
        transfer, stats = self.transfer, self.stats
        if transfer is not None:
            if len(transfer.data) > stats.received:
                stats.received = len(transfer.data)
                if transfer.limit != "network" and transfer.limit not in self._held:
                    self._held += (transfer.limit,)
                if stats.first_byte_s is None:
                    stats.first_byte_s = asyncio.get_running_loop().time()
            if transfer.complete and stats.done_s is None:
                stats.done_s = asyncio.get_running_loop().time()
        self._wake()

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, data: memoryview) -> memoryview:
        part = data[self._read :]
        if self._read < self._before:
            self._held += ("kept",)
        self._read += len(part)
        self.stats.limit = next((by for by in _BY_WEIGHT if by in self._held), "network")
        self._held = ()
        return part
