"""The interface of every transport: a `Connection` makes `Download`s, one for each group of a track that is asked for.

Rules that every transport keeps:

- `Connection.fetch` returns at once and never raises for what the network or the peer does; errors come out of
  `Download.read`, and each says what happened.
- No more than ``limit`` bytes of a download are ever held: a peer that sends more ends it with `RequestError`.
- After `Download.cancel`, or when its connection is closed, nothing is left of a download: no task, no stream.
- `read` never waits beyond the life of the connection: when that is lost, every reader is told.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvabr.types.events import Limit
from kvabr.types.naming import TrackNamespace


@dataclass(slots=True)
class DownloadStats:
    """What is known of one download; times are of `time.monotonic`."""

    requested_s: float
    first_byte_s: float | None = None
    done_s: float | None = None
    received: int = 0
    """Payload bytes that have arrived, read or not."""
    limit: Limit = "network"
    """Who held it up since the last read."""


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """What is known of a connection; None where the transport cannot tell."""

    rtt_s: float | None = None
    """Smoothed round trip."""
    bytes_received: int = 0
    """Payload bytes of all downloads so far."""
    lost_packets: int | None = None
    """Packets of ours that were lost."""
    rate: float | None = None
    """The transport's own estimate of what the path carries towards us, bytes per second."""


class Download(ABC):
    """One group of one track on its way."""

    stats: DownloadStats

    @property
    @abstractmethod
    def data(self) -> memoryview:
        """Everything that has come so far: contiguous and read-only. The bytes of a view never change or move."""

    @abstractmethod
    async def read(self) -> memoryview:
        """Return the bytes that have come since the last read, a part of `data`; wait for some if there are none.

        An empty view means that all of the group has come.

        Raises:
            NotFoundError: no such track, or none that this connection may read.
            RequestError: refused, reset by the peer, or longer than the limit.
            ConnectionLostError: the connection ended.
        """

    def has_digest(self, digest: str) -> bool:
        """Return whether `data`, which must be complete, has this SHA-256 (hex). Takes time: call it in a thread.

        A download that others share computes the digest once for all of them.
        """
        return hashlib.sha256(self.data).hexdigest() == digest

    @abstractmethod
    def prioritise(self, priority: int) -> None:
        """Change the priority: 0 (most urgent) to 255, as in a MoQT REQUEST_UPDATE. A hint: some peers ignore it."""

    @abstractmethod
    def cancel(self) -> None:
        """Nothing more is wanted of it. May be called at any time, also after its end."""


class Connection(ABC):
    """A way to one publisher or relay. Use it as an async context manager."""

    backend: str
    """``memory``, ``aioquic`` or ``qh3``."""
    protocol: str
    """What is spoken, as negotiated: ``moqt-18``, ``moqt-16``, or what else a transport has."""

    @abstractmethod
    def fetch(
        self,
        namespace: TrackNamespace,
        track: str,
        group: int = 0,
        *,
        priority: int = 128,
        limit: int,
        exact: bool = False,
    ) -> Download:
        """Ask for one group of one track.

        Args:
            namespace: which prompt.
            track: name of the track.
            group: which group.
            priority: 0 (most urgent) to 255.
            limit: maximum size, bytes.
            exact: the group has ``limit`` bytes, so its buffer is allocated once.
        """

    @property
    def peer(self) -> str | None:
        """Which peer this is, the same for every connection to it: its host and port; None if that cannot be told."""
        return None

    def identify(  # noqa: B027  # most need not
        self, namespace: TrackNamespace, track: str, digests: Sequence[str]
    ) -> None:
        """The groups of a track have these SHA-256, hex: a connection that keeps what came need not ask for it again.

        A hint: who asks for a group checks it all the same.
        """

    def at_hand(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        """Which groups of a track, of those that were identified, need not come over the network."""
        del namespace, track
        return ()

    @property
    def waits_its_turn(self) -> bool:
        """Whether nothing comes because what others asked for on the same path is more urgent, and does come."""
        return False

    @abstractmethod
    def stats(self) -> ConnectionStats:
        """How the connection has done so far."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the connection has ended, from either side."""

    @property
    def going_away(self) -> bool:
        """Whether the peer asks for new requests to go elsewhere (GOAWAY); what is under way may still finish."""
        return False

    @property
    def trouble(self) -> str | None:
        """What keeps it from its peer at the moment, in words; None: nothing that is known."""
        return None

    async def answers(self, within_s: float) -> bool:
        """Ask the peer for a sign of life, and tell whether one came within so many seconds.

        A peer that was killed says nothing any more, and QUIC takes its whole idle timeout to notice.
        """
        del within_s  # where nothing can be asked, a connection that is open counts as alive
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


async def read_all(download: Download) -> bytes:
    """Everything of a download, whose limit bounds it.

    Raises:
        TransportError: as `Download.read`; the download is cancelled.
    """
    try:
        while await download.read():
            pass
        return bytes(download.data)
    finally:
        download.cancel()
