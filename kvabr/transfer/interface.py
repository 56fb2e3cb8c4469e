"""The interface of every transport: a `PeerConnection` carries a `GroupTransfer` for each requested group.

Rules for every transport:

- `Connection.fetch` returns at once, and never raises for the network or the peer; `GroupReader.read` raises errors.
- A transfer never holds more than ``limit`` bytes: a peer that sends more ends it with `RequestError`.
- After its last reader has left, or its connection is closed, no task and no stream of a transfer remains.
- `read` never outlasts the connection: when it is lost, every reader gets an error.
- A group is copied once, from the QUIC library's memory into the transfer's buffer.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from kvabr.store.buffers import GROUPS
from kvabr.types.catalog import Catalog
from kvabr.types.digests import has_digest
from kvabr.types.errors import Reason, RequestError
from kvabr.types.events import Limit
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

T = TypeVar("T")

_LOWEST_PRIORITY = 255
_BY_WEIGHT: tuple[Limit, ...] = ("kept", "cpu", "publisher")
"""If several of these limited a read, the first in this order is reported."""
_MIN_BUFFER = 16 << 10


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request for one group of one track. Plays with equal requests share a transfer."""

    namespace: TrackNamespace
    track: str
    group: int
    limit: int
    """Maximum bytes of the group."""
    exact: bool = False
    """True: ``limit`` is the exact size, so that the buffer is allocated once."""
    digest: str | None = None
    """The group's digest (`kvabr.types.digests`), if known."""
    live: bool = False
    """True: the group may be unpublished, and is then received by a subscription to its track. If the track ends
    without the group, or the peer does not support subscriptions, the transfer ends with `NotFoundError`."""
    groups: int = 1
    """Number of consecutive groups to request, as far as they exist; their bytes are concatenated."""

    def __str__(self) -> str:
        return f"{self.track[:80]}, group {self.group}"


class Carrier(ABC):
    """Fills transfers by `GroupTransfer.push`, and ends them by `GroupTransfer.finish` or `GroupTransfer.fail`."""

    @abstractmethod
    def carry(self, transfer: GroupTransfer) -> None:
        """Begin a transfer. Returns at once, and never raises for the network or a peer."""

    def reprioritise(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Apply a transfer's new priority, as MoQT's REQUEST_UPDATE does; some peers ignore it."""

    def drop(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Stop receiving a transfer that has ended; ignore unknown ones."""

    def answered(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Handle the arrival of a transfer's first bytes."""

    def explain(self, transfer: GroupTransfer, error: Exception) -> Exception:
        """Return the error with which a transfer ends, given the reported ``error``."""
        del transfer
        return error

    def released(self, transfer: GroupTransfer) -> None:  # noqa: B027  # optional
        """Handle the end of a transfer, for any reason."""


class TransferListener(ABC):
    """A reader of a transfer, notified of its progress."""

    @property
    @abstractmethod
    def wire_priority(self) -> int:
        """Its priority for the transfer, 0 (most urgent) to 255."""

    @abstractmethod
    def on_more(self) -> None:
        """Handle the arrival of bytes, or the end of the transfer."""


class GroupTransfer:
    """The transfer of one group.

    It has the priority of its most urgent reader, and ends with its last one. Its bytes are copied once, into one
    buffer; readers get views, which never change or move.
    """

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.priority = _LOWEST_PRIORITY
        """Priority of its most urgent reader, 0 (most urgent) to 255."""
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
        """The carrier that fills it: `carrier`, or another that `carrier` uses."""
        self.received = 0
        self._memory = memoryview(b"")
        """Buffer with the received bytes, each written once, and space for more."""
        self._started = self._due = False
        self._limit: Limit = "network"

    @property
    def subscribed(self) -> bool:
        """True while it waits for a group that may be unpublished, so that silence does not describe the path."""
        return self.request.live and not self.received

    # ------------------------------------------------------------ for readers

    def begin(self, carrier: Carrier) -> None:
        """Start or restart on a carrier, from the first byte; readers keep bytes that they have."""
        self.carrier = self.source = carrier
        self._memory, self.received, self._started = memoryview(b""), 0, False
        carrier.carry(self)

    def join(self, reader: TransferListener) -> None:
        """Add a reader, which reads from the beginning."""
        self.readers.append(reader)
        self.reprioritise()

    def leave(self, reader: TransferListener) -> None:
        """Remove a reader; without readers, the transfer ends. Idempotent."""
        if reader in self.readers:
            self.readers.remove(reader)
            if self.readers:
                self.reprioritise()
            elif not self.over:
                self.unread()

    def reprioritise(self) -> None:
        """Set the priority to that of the most urgent reader."""
        priority = min((reader.wire_priority for reader in self.readers), default=_LOWEST_PRIORITY)
        if priority != self.priority and not self.over:
            self.priority = priority
            if self.source is not None:
                self.source.reprioritise(self)

    def unread(self) -> None:
        """End, since there are no readers."""
        self.reject(RequestError(f"{self.request}: cancelled", reason=Reason.INTERNAL))

    def has_digest(self, digest: str) -> bool:
        """Return True if the complete `data` has this digest. Slow: call it in a thread."""
        return has_digest(digest, self.data)

    # ---------------------------------------------------------- for its carrier

    def push(self, part: bytes | memoryview, limit: Limit = "network") -> None:
        """Add received bytes; ``limit`` names what limited their rate."""
        self.append(part)
        self.progressed(limit)

    def append(self, part: bytes | memoryview) -> None:
        """Add received bytes; they become readable after `progressed`."""
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
        """Make received bytes readable in the next iteration of the event loop; ``limit`` as for `push`."""
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
        """Return memory for the next bytes, at most ``size``, which must not exceed the request's limit."""
        self._grow(self.received + 1)
        return self._memory[self.received : self.received + size]

    def written(self, count: int, limit: Limit = "network") -> None:
        """Add ``count`` bytes that were written to the memory of `buffer`; ``limit`` as for `push`."""
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
        """End with an error, and drop the received bytes; no effect on a complete group."""
        if self.over:
            return
        self.data = self._memory = memoryview(b"")
        self.received = 0
        longer = f"{self.request}: longer than the {self.request.limit} bytes expected"
        self.reject(RequestError(longer, reason=Reason.WRONG))

    # -------------------------------------------------------------- internals

    def _grow(self, end: int) -> None:
        """Allocate memory for ``end`` bytes: all of it if the size is known, else twice as much as before."""
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
            if self.source is not None:  # the end of the stream usually arrives with the last bytes
                asyncio.get_running_loop().call_soon(self.source.drop, self)
        else:
            self.notify()

    def _end(self) -> None:
        if self.carrier is not None:
            self.carrier.released(self)
        self.settle()
        self.notify()

    def arrived(self, part: memoryview) -> None:
        """Process bytes before readers are notified; for subclasses."""

    def settle(self) -> None:
        """Process the end before readers are notified; for subclasses."""

    def notify(self) -> None:
        """Notify all readers."""
        for reader in tuple(self.readers):
            reader.on_more()


class GroupReader(TransferListener):
    """Reads a transfer from its beginning."""

    def __init__(self, transfer: GroupTransfer, priority: int) -> None:
        self.priority = priority
        """Priority, 0 (most urgent) to 255."""
        self.limit: Limit = "network"
        self.transfer = transfer
        self._held: tuple[Limit, ...] = ()  # a tuple saves an object: there are many readers
        self._read = 0
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        transfer.join(self)
        self._before = len(transfer.data)
        """Bytes received before this reader joined, which do not describe the link."""
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
        """Wait for bytes, and return those since the last read, a slice of `data`. An empty view marks the end.

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
        """As `GroupTransfer.has_digest`. Slow: call it in a thread."""
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


CLOSED = "this side closed the connection"


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """State of a connection; None for values that the transport does not have."""

    rtt_s: float | None = None
    bytes_received: int = 0
    """Payload bytes of all downloads."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A cached prefix of a prompt."""

    catalog: Catalog | None
    """Catalog of the prefix, with the namespace for requests. None if no common prefix ends with a snapshot of all
    states."""
    limited_by: str | None = None
    """Layer class that shortened the prefix, or None."""
    sha256: str = ""
    """Digest of the catalog's content, in hex."""


class PrefixFinder(Protocol):
    """Finds the longest cached prefix of a prompt, for peers that cannot look it up themselves."""

    async def find(self, spec: KVSpec, digests: Sequence[str], *, any_dtype: bool) -> FoundPrefix | None:
        """Return the longest cached prefix of a prompt, or None.

        ``digests`` are all chained digests of the prompt, in full. ``any_dtype`` accepts another element type than the
        spec's. The cache may have any number of state snapshots.

        Raises:
            TransportError: the store cannot be reached.
            FormatError: its pages are inconsistent.
        """


class Connection(ABC):
    """A connection to one origin or relay; an async context manager."""

    backend: str
    """``aioquic`` or ``qh3``, the scheme of a store's URL, or another transport."""
    protocol: str
    """Negotiated protocol: ``moqt-22``, another draft, or another transport."""
    peer: str | None = None
    """Host and port, the same for all connections to a peer."""
    closed: bool = False
    """True if either side has ended the connection."""
    going_away: bool = False
    """True after GOAWAY: new requests must go elsewhere; requests in flight may still finish."""
    trouble: str | None = None
    """Why the peer cannot be reached now, if known."""
    unreachable: bool = False
    """True if the peer is presumed dead: it answers neither requests nor dials."""
    finder: PrefixFinder | None = None
    """Finds prefixes of prompts; None: the peer looks them up (`kvabr.types.naming.prefix_track`)."""
    reached: bool = True
    """True once a connection was established; before, the first request dials."""
    heals: bool = False
    """True if it needs neither redials nor probes, since each request is a separate exchange."""
    announced_rate: float = 0.0
    """Rate for this path that the peer announced with its last catalog, in bytes per second; 0.0: none."""
    held_by_priority: bool = False
    """True if no bytes arrive because more urgent requests on the path are served first."""

    @property
    def names(self) -> Sequence[str]:
        """Possible values of `peer`, known before it is connected."""
        return () if self.peer is None else (self.peer,)

    @property
    def sources(self) -> Sequence[Connection]:
        """The connections that this one combines, usually itself."""
        return (self,)

    async def connected(self) -> None:  # noqa: B027  # most are connected from the start
        """Wait for a connection, dialling if there is none; concurrent callers share one dial.

        Raises:
            TransportError: the peer cannot be reached, or refuses us; the next call dials again.
            ConnectionLostError: this was closed.
        """

    def fetch(
        self,
        namespace: TrackNamespace,
        track: str,
        group: int = 0,
        *,
        priority: int = 128,
        limit: int,
        exact: bool = False,
    ) -> GroupReader:
        """Request one group of one track.

        ``priority`` is 0 (most urgent) to 255, ``limit`` the maximum bytes. ``exact``: the group has exactly ``limit``
        bytes, so that its buffer is allocated once.
        """
        return self.request(GroupRequest(namespace, track, group, limit, exact), priority)

    @abstractmethod
    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        """Request one group of one track, at a priority from 0 (most urgent) to 255."""

    async def renew(self) -> None:  # noqa: B027  # most have no token
        """Reconnect with the current token; transfers in progress continue.

        Raises `TransportError` on failure; the old connection then stays in use.
        """

    @abstractmethod
    def stats(self) -> ConnectionStats:
        """Return the state of the connection."""

    async def answers(self, within_s: float) -> bool:
        """Probe the peer; return True if it answers within ``within_s`` seconds.

        A killed peer sends no more packets, and QUIC's idle timeout is long.
        """
        del within_s  # without a probe, an open connection counts as alive
        return not self.closed

    @abstractmethod
    async def close(self) -> None:
        """End the connection and its transfers. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class PeerConnection(Connection, Carrier):
    """A connection that carries the transfers of its own requests."""

    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        transfer = GroupTransfer(request)
        reader = GroupReader(transfer, priority)
        transfer.begin(self)
        return reader


async def read_all(reader: GroupReader) -> bytes:
    """Read a group to its end; errors as `GroupReader.read`."""
    return bytes(await read_view(reader))


async def read_view(reader: GroupReader) -> memoryview:
    """Read a group to its end without a copy; errors as `GroupReader.read`."""
    try:
        while await reader.read():
            pass
        return reader.data
    finally:
        reader.cancel()


class TaskSet(set[asyncio.Task[Any]]):
    """Running tasks, kept alive: an event loop has only weak references to its tasks."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task, which leaves the set when it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, wait for their end, and retrieve their errors, so that asyncio does not log them."""
    tasks = list(tasks)  # the caller's set may shrink as tasks end
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


_WINDOW_S = 0.05
_BUSY = 0.9
"""Fraction of a window that the thread must be busy for the CPU to be the limit."""
_MIN_SILENCE_S = 0.1


class LimitWatch:
    """Finds out what limits the rate of one connection. Only samples limited by the network describe the link.

    - Own CPU: the transport's threads were busy nearly all the time while bytes arrived.
    - Publisher: a request is open and no bytes arrive, yet the peer answers a PING. The first bytes after this silence
      also count as limited by the publisher.
    - Network: everything else.
    """

    def __init__(self, probe: Callable[[], None], round_trip: Callable[[], float | None]) -> None:
        self.limit: Limit = "network"
        self._probe, self._round_trip = probe, round_trip
        self._loop = asyncio.get_running_loop()
        self._wall, self._cpu = time.monotonic(), time.thread_time()
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._bytes = self._bytes_at_probe = 0
        self._probing = False
        self._silent = False
        """True if no byte has arrived since the publisher was found silent."""
        self._closed = False

    def set_in_flight(self, in_flight: int) -> None:
        """Set the number of downloads in flight."""
        self._in_flight = in_flight
        if in_flight and self._timer is None and not self._closed:
            self._arm()
        if not in_flight and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def received(self, count: int) -> None:
        """Count payload bytes that have arrived."""
        self._bytes += count
        now = time.monotonic()
        if self._silent:  # these bytes, and the next ones, are late because of the publisher's silence
            self._silent = False
            self._wall, self._cpu = now, time.thread_time()
        elif now - self._wall >= _WINDOW_S:
            cpu = time.thread_time()
            self.limit = "cpu" if cpu - self._cpu > _BUSY * (now - self._wall) else "network"
            self._wall, self._cpu = now, cpu

    def worked(self, cpu_s: float) -> None:
        """Add seconds of processor time of the connection's threads, for which the loop waited."""
        self._cpu -= cpu_s

    def alive(self) -> None:
        """Handle an acknowledged PING."""
        if self._probing and self._bytes == self._bytes_at_probe and self._in_flight:
            self.limit, self._silent = "publisher", True
        self._probing = False

    def close(self) -> None:
        """Stop watching."""
        self._closed = True
        self.set_in_flight(0)

    def _arm(self) -> None:
        silence = max(_MIN_SILENCE_S, 2 * (self._round_trip() or 0.0))
        self._timer = self._loop.call_later(silence, self._look, self._bytes)

    def _look(self, before: int) -> None:
        self._timer = None
        if self._closed or not self._in_flight:
            return
        if self._bytes == before and not self._probing:
            self._probing, self._bytes_at_probe = True, self._bytes
            self._probe()
        self._arm()
