"""A `GroupTransfer` receives one group: a `Carrier` fills it, `GroupReader`s read it.

It has the priority of its most urgent reader, and ends with its last one. Its bytes are copied once, into one buffer;
readers get views, which never change or move.
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

_LOWEST_PRIORITY = 255
_BY_WEIGHT: tuple[Limit, ...] = ("kept", "cpu", "publisher")
"""If several of these limited a read, the first is reported."""
_MIN_BUFFER = 16 << 10


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One group of one track. Plays with equal requests share a transfer."""

    namespace: TrackNamespace
    track: str
    group: int
    limit: int
    """Most bytes of the group."""
    exact: bool = False
    """``limit`` is the exact size, so that the buffer is allocated once."""
    digest: str | None = None
    """The group's digest (`kvabr.types.digests`), if known."""
    live: bool = False
    """The group may be unpublished: then a subscription to its track delivers it. If the track ends without the group,
    or the peer has no subscriptions, the transfer ends with `NotFoundError`."""
    groups: int = 1
    """Number of consecutive groups, if they exist; their bytes are concatenated."""

    def __str__(self) -> str:
        return f"{self.track[:80]}, group {self.group}"


class Carrier(ABC):
    """Fills transfers by `GroupTransfer.push`, and ends them by `GroupTransfer.finish` or `fail`."""

    @abstractmethod
    def carry(self, transfer: GroupTransfer) -> None:
        """Begin a transfer. Returns at once, and never raises for the network or a peer."""

    def reprioritise(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Apply a transfer's new priority, as MoQT's REQUEST_UPDATE does; some peers ignore it."""

    def drop(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Stop a transfer, which is over; ignore unknown ones."""

    def answered(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Note that the first bytes of a transfer have arrived."""

    def explain(self, transfer: GroupTransfer, error: Exception) -> Exception:
        """Return the error with which a transfer ends, given the reported one."""
        del transfer
        return error

    def released(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Note that a transfer is over, for any reason."""


class TransferListener(ABC):
    """Wants a transfer, and is notified of its progress."""

    @property
    @abstractmethod
    def wire_priority(self) -> int:
        """Its priority for the transfer, 0 (most urgent) to 255."""

    @abstractmethod
    def on_more(self) -> None:
        """Note that bytes have arrived, or that the transfer is over."""


class GroupTransfer:
    """The transfer of one group."""

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.priority = _LOWEST_PRIORITY
        """Of its most urgent reader, 0 (most urgent) to 255."""
        self.data = memoryview(b"")
        """All readable bytes: contiguous and read-only."""
        self.complete = False
        self.error: Exception | None = None
        """Why the transfer ended early; received bytes can still be read."""
        self.over = False
        self.limit: Limit = "network"
        self.readers: list[TransferListener] = []
        self.carrier: Carrier | None = None
        self.source: Carrier | None = None
        """The carrier that fills it: the same, or one used by it."""
        self.received = 0
        self._memory = memoryview(b"")
        """The received bytes, each written once, and space for more."""
        self._started = self._due = False
        self._limit: Limit = "network"

    @property
    def subscribed(self) -> bool:
        """Whether the group may be unpublished, so that silence does not describe the path."""
        return self.request.live and not self.received

    # ------------------------------------------------------------ for readers

    def begin(self, carrier: Carrier) -> None:
        """Pass it to a carrier, from its first byte; readers keep bytes of an earlier one."""
        self.carrier = self.source = carrier
        self._memory, self.received, self._started = memoryview(b""), 0, False
        carrier.carry(self)

    def join(self, reader: TransferListener) -> None:
        """Add a reader, which reads from the beginning."""
        self.readers.append(reader)
        self.reprioritise()

    def leave(self, reader: TransferListener) -> None:
        """Remove a reader, once; the transfer ends with its last one."""
        if reader in self.readers:
            self.readers.remove(reader)
            if self.readers:
                self.reprioritise()
            elif not self.over:
                self.unread()

    def reprioritise(self) -> None:
        """Take the priority of the most urgent reader."""
        priority = min((reader.wire_priority for reader in self.readers), default=_LOWEST_PRIORITY)
        if priority != self.priority and not self.over:
            self.priority = priority
            if self.source is not None:
                self.source.reprioritise(self)

    def unread(self) -> None:
        """End without readers."""
        self.reject(RequestError(f"{self.request}: cancelled", reason=Reason.INTERNAL))

    def has_digest(self, digest: str) -> bool:
        """Return whether the complete `data` has this digest. Slow: call it in a thread."""
        return has_digest(digest, self.data)

    # ---------------------------------------------------------- for its carrier

    def push(self, part: bytes | memoryview, limit: Limit = "network") -> None:
        """Add received bytes, and what limited them."""
        self.append(part)
        self.progressed(limit)

    def append(self, part: bytes | memoryview) -> None:
        """Add bytes that become readable by the next call of `progressed`."""
        end = self.received + len(part)
        if self.over:
            return
        if end > self.request.limit:
            self.too_long()
            return
        self._grow(end)
        self._memory[self.received : end] = part
        self.received = end

    def progressed(self, limit: Limit = "network") -> None:
        """Make received bytes readable after this turn of the event loop; set their limit."""
        if self.over or not self.received:
            return
        if not self._started and self.carrier is not None:
            self._started = True
            self.carrier.answered(self)
        if limit != "network":
            self._limit = limit
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def buffer(self, size: int) -> memoryview:
        """Return memory for at most ``size`` next bytes, which must not exceed the limit."""
        self._grow(self.received + 1)
        return self._memory[self.received : self.received + size]

    def written(self, count: int, limit: Limit = "network") -> None:
        """Note that ``count`` bytes were written to the memory of `buffer`, and their limit."""
        if not self.over and count:
            self.received += count
            self.progressed(limit)

    def finish(self) -> None:
        """End as complete."""
        self._flush()
        if not self.over:
            self.over = self.complete = True
            self._end()

    def fail(self, error: Exception) -> None:
        """End with an error; received bytes can still be read."""
        self._flush()
        if not self.over:
            self.over = True
            self.error = error if self.carrier is None else self.carrier.explain(self, error)
            self._end()

    def reject(self, error: Exception) -> None:
        """End with an error, and stop the carrier."""
        if not self.over:
            self.fail(error)
            if self.source is not None:
                self.source.drop(self)

    def too_long(self) -> None:
        """End with an error, and drop the useless data; a complete group is unaffected."""
        if self.over:
            return
        self.data = self._memory = memoryview(b"")
        self.received = 0
        longer = f"{self.request}: longer than the {self.request.limit} bytes expected"
        self.reject(RequestError(longer, reason=Reason.WRONG))

    # -------------------------------------------------------------- internals

    def _grow(self, end: int) -> None:
        """Get memory for ``end`` bytes: at once if the size is known, else doubling it."""
        if end > len(self._memory):
            limit = self.request.limit
            size = limit if self.request.exact else min(limit, max(end, 2 * len(self._memory), _MIN_BUFFER))
            grown = GROUPS.take(size)
            grown[: self.received] = self._memory[: self.received]
            self._memory = grown

    def _flush(self) -> None:
        self._due = False
        if self.received > len(self.data) and not self.over:
            limit, self._limit = self._limit, "network"
            self._deliver(self._memory[: self.received].toreadonly(), limit)

    def _deliver(self, data: memoryview, limit: Limit) -> None:
        fresh, self.data, self.limit = data[len(self.data) :], data, limit
        self.arrived(fresh)
        if self.request.exact and len(data) == self.request.limit:
            self.over = self.complete = True
            self._end()
            if self.source is not None:  # the end usually arrives with the last bytes
                asyncio.get_running_loop().call_soon(self.source.drop, self)
        else:
            self.notify()

    def _end(self) -> None:
        if self.carrier is not None:
            self.carrier.released(self)
        self.settle()
        self.notify()

    def arrived(self, part: memoryview) -> None:
        """Process bytes before the readers are notified; for subclasses."""

    def settle(self) -> None:
        """Process the end before the readers are notified; for subclasses."""

    def notify(self) -> None:
        """Notify all readers."""
        for reader in tuple(self.readers):
            reader.on_more()


class GroupReader(TransferListener):
    """Reads a transfer from its beginning."""

    def __init__(self, transfer: GroupTransfer, priority: int) -> None:
        self.priority = priority
        """0 (most urgent) to 255."""
        self.limit: Limit = "network"
        self.transfer = transfer
        self._held: tuple[Limit, ...] = ()  # a tuple saves an object: there are many readers
        self._read = 0
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        transfer.join(self)
        self._before = len(transfer.data)
        """Bytes received before this joined: they do not describe the link."""
        self.on_more()

    @property
    def wire_priority(self) -> int:
        return self.priority

    @property
    def data(self) -> memoryview:
        """All bytes received so far: contiguous and read-only, never changed or moved."""
        return self.transfer.data

    @property
    def error(self) -> Exception | None:
        """Why the transfer ended early, or None."""
        return self.transfer.error

    async def read(self) -> memoryview:
        """Return the bytes since the last read, a part of `data`; wait for some. An empty view marks the end.

        Raises:
            NotFoundError: there is no such track, or this connection may not read it.
            RequestError: refused, reset by the peer, or longer than the limit.
            ConnectionLostError: the connection ended.
        """
        transfer = self.transfer
        while self._gone or len(transfer.data) <= self._read:
            if transfer.error is not None:
                raise transfer.error
            if transfer.complete:
                return memoryview(b"")
            if self._gone:
                raise RequestError("cancelled by this side")
            await self._wait()
        return self._consume(transfer.data)

    def has_digest(self, digest: str) -> bool:
        """Return whether the complete `data` has this digest, once per transfer. Slow: call it in a thread."""
        return self.transfer.has_digest(digest)

    def prioritise(self, priority: int) -> None:
        """Change the priority, 0 (most urgent) to 255."""
        self.priority = priority
        self.transfer.reprioritise()

    def cancel(self) -> None:
        """Stop reading, at any time; `data` stays valid."""
        self._gone = True
        self.transfer.leave(self)
        self._wake()

    def on_more(self) -> None:
        if (limit := self.transfer.limit) != "network" and limit not in self._held:
            self._held += (limit,)
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _consume(self, data: memoryview) -> memoryview:
        part = data[self._read :]
        if self._read < self._before:
            self._held += ("kept",)
        self._read += len(part)
        self.limit = next((by for by in _BY_WEIGHT if by in self._held), "network")
        self._held = ()
        return part
