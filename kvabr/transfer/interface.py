"""The interface of every transport: a `PeerConnection` carries `GroupTransfer`s, one for each group requested.

Rules for every transport:

- `Connection.fetch` returns at once and never raises for what the network or the peer does. Errors come out of
  `GroupReader.read`, and each says what happened.
- A transfer never holds more than ``limit`` bytes: a peer that sends more ends it with `RequestError`.
- After its last reader has left, or when its connection is closed, nothing is left of a transfer: no task, no stream.
- `read` never waits beyond the life of the connection: when it is lost, every reader gets an error.
- A group is copied once, from what the QUIC library delivers into the transfer's buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from kvabr.transfer.transfer import Carrier, GroupReader, GroupRequest, GroupTransfer
from kvabr.types.catalog import Catalog
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

CLOSED = "this side closed the connection"


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """State of a connection; None where the transport cannot tell."""

    rtt_s: float | None = None
    """Smoothed round trip, seconds."""
    bytes_received: int = 0
    """Payload bytes of all downloads so far."""
    lost_packets: int | None = None
    """Packets sent by this side that were lost."""
    rate: float | None = None
    """The transport's own estimate of what the path carries towards us, bytes per second."""
    lanes: int = 1
    """Connections that are in use."""


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """What a `PrefixFinder` has of a prompt."""

    catalog: Catalog | None
    """Of an asset, as it would be published, that begins as the prompt does; its requests name its namespace. None: no
    snapshot of a state is in what there is."""
    limited_by: str | None = None
    """The layer class for which there is less than of the others; None if there is none."""
    sha256: str = ""
    """Stands for what the catalog says, hex."""


class PrefixFinder(Protocol):
    """Finds the longest prefix of a prompt itself, where a peer has no lookups."""

    async def find(self, spec: KVSpec, digests: Sequence[str], *, any_dtype: bool) -> FoundPrefix | None:
        """Return what begins as a prompt with these chained digests does; None: nothing does.

        Args:
            spec: of the model; the number of a state's snapshots is up to the publisher.
            digests: all chained digests of the prompt, whole.
            any_dtype: the element type need not be the spec's.

        Raises:
            TransportError: the store cannot be asked.
            FormatError: what it has does not fit together.
        """


class Connection(ABC):
    """A connection to one origin or relay; an async context manager."""

    backend: str
    """``aioquic`` or ``qh3``; the scheme of a store's URL; another name of the transport."""
    protocol: str
    """Negotiated protocol: ``moqt-22``, another draft, or another name of the transport."""
    peer: str | None = None
    """Host and port of the peer, the same for every connection to it; None if unknown."""
    closed: bool = False
    """Whether the connection has ended, from either side."""
    going_away: bool = False
    """Whether the peer wants new requests to go elsewhere (GOAWAY); requests under way may still finish."""
    trouble: str | None = None
    """What keeps the peer out of reach at the moment, in words; None if nothing is known to."""
    unreachable: bool = False
    """Whether the peer is taken to be dead: it answers neither requests nor new connections."""
    finder: PrefixFinder | None = None
    """Finds prefixes of prompts; None: the peer does, asked for a track (`kvabr.types.naming.prefix_track`)."""
    reached: bool = True
    """Whether there is a connection, or was one, though it is closed by now; the first request dials if not."""
    heals: bool = False
    """Whether requests after a failure need no new dial, and silence no probes: each is an exchange of its own."""
    waits_its_turn: bool = False
    """Whether nothing comes because more urgent requests of others on the same path are served first."""

    @property
    def names(self) -> Sequence[str]:
        """What `peer` is, or may become once it is connected; empty if it is unknown."""
        return () if self.peer is None else (self.peer,)

    @property
    def sources(self) -> Sequence[Connection]:
        """The connections that it stands for: this one alone, unless it is that of a play with several sources."""
        return (self,)

    async def connected(self) -> None:  # noqa: B027  # most are
        """Wait until there is a connection, which is dialled if there is none; callers share one dial.

        Raises:
            TransportError: the peer cannot be reached, or does not let us in; the next call dials again.
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

        Args:
            namespace: of the prompt.
            track: name of the track.
            group: number of the group.
            priority: 0 (most urgent) to 255.
            limit: maximum size, bytes.
            exact: the group has ``limit`` bytes, so its buffer is allocated once.
        """
        return self.request(GroupRequest(namespace, track, group, limit, exact), priority)

    @abstractmethod
    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        """Request one group of one track, at a priority from 0 (most urgent) to 255."""

    def relieve(self) -> None:  # noqa: B027  # most hold nothing
        """Let go of what is not in use and can be had again: the process has run out of descriptors or memory."""

    async def renew(self) -> None:  # noqa: B027  # most have no token
        """Connect again with the token that is valid now; what is under way goes on.

        Raises `TransportError` if that fails; then the connection stays as it was.
        """

    @abstractmethod
    def stats(self) -> ConnectionStats:
        """Return the state of the connection."""

    async def answers(self, within_s: float) -> bool:
        """Probe the peer, and return whether it answered within ``within_s`` seconds.

        A peer that was killed sends nothing more, and QUIC takes its whole idle timeout to notice.
        """
        del within_s  # without a probe, an open connection counts as alive
        return not self.closed

    @abstractmethod
    async def close(self) -> None:
        """End the connection and everything on it; may be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class PeerConnection(Connection, Carrier):
    """A connection of this process itself: it carries the transfers of its requests."""

    def request(self, request: GroupRequest, priority: int) -> GroupReader:
        """See `Connection.request`."""
        transfer = GroupTransfer(request)
        reader = GroupReader(transfer, priority)
        transfer.begin(self)
        return reader


async def read_all(reader: GroupReader) -> bytes:
    """Read to its end, and return all of it; errors are those of `GroupReader.read`."""
    return bytes(await read_view(reader))


async def read_view(reader: GroupReader) -> memoryview:
    """As `read_all`, without a copy."""
    try:
        while await reader.read():
            pass
        return reader.data
    finally:
        reader.cancel()
