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

from kvabr.transfer.transfer import Carrier, GroupReader, GroupRequest, GroupTransfer
from kvabr.types.catalog import Catalog
from kvabr.types.events import Limit
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

T = TypeVar("T")

CLOSED = "this side closed the connection"


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """State of a connection; None if the transport does not know it."""

    rtt_s: float | None = None
    bytes_received: int = 0
    """Payload bytes of all downloads."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A cached prefix of a prompt."""

    catalog: Catalog | None
    """Catalog of an asset that is a prefix of the prompt, with the namespace for requests; None if no prefix ends with
    a snapshot of all states."""
    limited_by: str | None = None
    """Layer class that shortens the prefix."""
    sha256: str = ""
    """Digest of the catalog's content, hex."""


class PrefixFinder(Protocol):
    """Finds the longest prefix of a prompt, for peers without lookups."""

    async def find(self, spec: KVSpec, digests: Sequence[str], *, any_dtype: bool) -> FoundPrefix | None:
        """Return the longest cached prefix of a prompt, or None.

        ``digests`` are all chained digests of the prompt, in full; ``any_dtype`` accepts another element type than the
        spec's. The number of a state's snapshots is up to the publisher.

        Raises:
            TransportError: the store cannot be reached.
            FormatError: its pages do not fit together.
        """


class Connection(ABC):
    """A connection to one origin or relay; an async context manager."""

    backend: str
    """``aioquic`` or ``qh3``, a store URL's scheme, or another transport."""
    protocol: str
    """Negotiated protocol: ``moqt-22``, another draft, or another transport."""
    peer: str | None = None
    """Host and port, equal for all connections to a peer."""
    closed: bool = False
    """Whether either side has ended the connection."""
    going_away: bool = False
    """Whether new requests must go elsewhere (GOAWAY); others may still finish."""
    trouble: str | None = None
    """Why the peer is currently out of reach, if known."""
    unreachable: bool = False
    """Whether the peer is presumed dead: it answers neither requests nor dials."""
    finder: PrefixFinder | None = None
    """Finds prefixes of prompts; None: the peer does, by a track (`kvabr.types.naming.prefix_track`)."""
    reached: bool = True
    """Whether a connection was ever established; if not, the first request dials."""
    heals: bool = False
    """Whether it needs neither redials nor probes: each request is a separate exchange."""
    announced_rate: float = 0.0
    """Rate that the peer's last catalog announced for this path, bytes per second; 0.0: none."""
    held_by_priority: bool = False
    """Whether more urgent requests on the path are served first, so that no bytes arrive."""

    @property
    def names(self) -> Sequence[str]:
        """Possible values of `peer`, also before it is connected."""
        return () if self.peer is None else (self.peer,)

    @property
    def sources(self) -> Sequence[Connection]:
        """The connections that this one combines, usually itself."""
        return (self,)

    async def connected(self) -> None:  # noqa: B027  # most are connected from the start
        """Wait for a connection, dialling if there is none; callers share one dial.

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

        ``priority`` is 0 (most urgent) to 255, ``limit`` the most bytes. ``exact``: the group has ``limit`` bytes, so
        its buffer is allocated once.
        """
        return self.request(GroupRequest(namespace, track, group, limit, exact), priority)

    @abstractmethod
    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        """Request one group of one track, at a priority from 0 (most urgent) to 255."""

    async def renew(self) -> None:  # noqa: B027  # most have no token
        """Reconnect with the current token; running transfers continue.

        Raises `TransportError` on failure; the old connection then stays.
        """

    @abstractmethod
    def stats(self) -> ConnectionStats:
        """Return the state of the connection."""

    async def answers(self, within_s: float) -> bool:
        """Probe the peer; return whether it answered within ``within_s`` seconds.

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
    """Running tasks. An event loop keeps only weak references to its tasks."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine; its task leaves the set at its end."""
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
"""Share of a window that the thread must be busy for the CPU to be the limit."""
_MIN_SILENCE_S = 0.1


class LimitWatch:
    """Finds the limit of one connection. Only samples limited by the network describe the link.

    - Own CPU: the transport's threads were busy nearly all the time while bytes arrived.
    - Publisher: a request is open and no bytes arrive, yet the peer answers a PING. The publisher also limits the bytes
      that end its silence.
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
        """No byte has arrived since the publisher was found silent."""
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
        if self._silent:  # bytes that end a publisher's silence are late because of it, and so are the next ones
            self._silent = False
            self._wall, self._cpu = now, time.thread_time()
        elif now - self._wall >= _WINDOW_S:
            cpu = time.thread_time()
            self.limit = "cpu" if cpu - self._cpu > _BUSY * (now - self._wall) else "network"
            self._wall, self._cpu = now, cpu

    def worked(self, cpu_s: float) -> None:
        """Add processor time of this connection's threads, seconds: the loop waited for it."""
        self._cpu -= cpu_s

    def alive(self) -> None:
        """Note an acknowledged PING."""
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
