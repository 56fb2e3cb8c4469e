"""The send queue of one connection: answers in the order of their priorities, handed to the transport piece by piece.

QUIC libraries keep what they are given until it is acknowledged, and share the path evenly among streams; TCP sends
what it is given in order. So they get little at a time, always of the most urgent answer that has something to send:
that is what makes priorities hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvabr.link.transport import MOST_AHEAD_BYTES
from kvabr.moqt.objects import FetchWriter, SubgroupHeader, SubgroupWriter
from kvabr.moqt.wire import KeyValue
from kvabr.server.budgets import Room
from kvabr.server.fetch_range import GroupRange
from kvabr.server.grants import EVERYTHING, Grant
from kvabr.server.publication import ArrivingGroup, Publication
from kvabr.types.digests import BLAKE3, SHA256, kind_of, raw
from kvabr.types.errors import TransportError
from kvabr.types.naming import PROPERTY_GROUP_BLAKE3, PROPERTY_GROUP_BYTES, PROPERTY_GROUP_DIGEST

_DIGESTS = {SHA256: PROPERTY_GROUP_DIGEST, BLAKE3: PROPERTY_GROUP_BLAKE3}

Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Payload:
    """Bytes of a group that come next on a stream."""

    group: int
    begin: int
    end: int


@dataclass(eq=False)
class Sending:
    """The answer to one FETCH, or one group of a subscription, written as fast as its turn comes, when it is opened.

    A `Holder` of `kvabr.server.budgets`: its group may be closed in between, and is opened again when it goes on.
    """

    request_id: int
    stream: int
    publication: Publication
    ranges: Sequence[GroupRange]
    """Which objects, in order."""
    track: str = field(kw_only=True)
    """For metrics."""
    priority: int = field(kw_only=True)
    """0 (most urgent) to 255."""
    dense: bool = field(kw_only=True)
    """Number objects 0, 1, 2 in each group, for receivers that take a gap between IDs for a loss."""
    descending: bool = field(kw_only=True)
    """Whether the groups come in descending order."""
    subgroup: SubgroupHeader | None = field(default=None, kw_only=True)
    """The header of the stream, which is written already, for a group of a subscription; None for a FETCH."""
    grant: Grant = field(default=EVERYTHING, kw_only=True)
    """Under which it was requested."""
    first: ArrivingGroup | None = None
    """The first group, if it is being fetched already; closed with this answer."""
    on_more: Callable[[], None] = lambda: None
    """Called when `ready` may have become true."""
    room: Room | None = None
    """Where open groups are accounted for."""
    sent: int = 0
    """Bytes that the transport has been given."""
    finished: bool = False
    """Whether the last piece was the end."""

    def __post_init__(self) -> None:
        self.requested_s = time.monotonic()
        self._group, self.first = self.first, None
        if self._group is not None and self.room is not None:
            self.room.take(self, self._group.files, self._group.memory)
        self._writer: FetchWriter | SubgroupWriter
        if self.subgroup is None:
            self._writer = FetchWriter(descending=self.descending)
        else:
            self._writer = SubgroupWriter(self.subgroup)
        self._parts = self._cut()
        self._next: bytes | _Payload | None = next(self._parts, None)
        """What comes next on the stream; None: nothing. Empty payload: a group that must be opened."""

    @property
    def key(self) -> int:
        """What tells it from all others of its connection."""
        return self.request_id if self.subgroup is None else ~self.stream

    @property
    def turn(self) -> tuple[int, int, int]:
        """Its place among others: by priority, then by request, then by group."""
        group = 0 if self.subgroup is None else self.ranges[0].group
        return self.priority, self.request_id, -group if self.descending else group

    @property
    def ready(self) -> bool:
        """Whether there is a piece to send now.

        Raises:
            AssetError: the group's file is gone or damaged.
            TransportError: the group cannot be fetched, or is not what its catalog says.
        """
        while isinstance(part := self._next, _Payload):
            if not self._open(part.group):
                return False
            if part.begin < part.end:
                return self._opened.available > part.begin
            self._next = next(self._parts, None)
        return True

    def piece(self, most: int) -> Piece:
        """Return the next bytes of the stream, at most about ``most``, once it is `ready`; raises as that."""
        part = self._next
        piece: Piece = b""
        if isinstance(part, bytes):
            piece, self._next = part, next(self._parts, None)
        elif part is not None:
            end = min(part.end, part.begin + most, self._opened.available)
            piece = self._opened.read(part.begin, end)
            if self.room is not None:
                self.room.read(self)
            self._next = replace(part, begin=end) if end < part.end else next(self._parts, None)
        self.finished = self._next is None
        return piece

    def prioritise(self, priority: int) -> None:
        """Change the priority, also of what is being fetched."""
        self.priority = priority
        if self._group is not None:
            self._group.prioritise(priority)

    def close(self) -> None:
        """Stop fetching what has not arrived. May be called twice."""
        if self._group is not None:
            self._group.close()
            self._group = None
        if self.room is not None:
            self.room.leave(self)

    @property
    def dear(self) -> bool:
        return self.publication.dear

    def may_park(self) -> bool:
        try:
            return self._group is not None and self._group.available == self._group.size
        except TransportError:
            return False

    def park(self) -> None:
        self.close()

    @property
    def _opened(self) -> ArrivingGroup:
        assert self._group is not None  # noqa: S101  # `_open` said so
        return self._group

    def _open(self, number: int) -> bool:
        """Open a group unless it is open; return False if it must wait for room."""
        if self._group is not None:
            return True
        room, loads = self.room, self.publication.loads(number)
        if loads and room is not None and not room.take(self, 0, loads, wait=True):
            return False
        self._group = self.publication.open(number, self.priority, self.on_more)
        if room is not None and not loads:
            room.take(self, self._group.files, self._group.memory)
        return True

    def _header(self, group: int, number: int, size: int, properties: tuple[KeyValue, ...]) -> bytes:
        if isinstance(self._writer, SubgroupWriter):
            return self._writer.header(number, size, properties)
        return self._writer.header(group, number, size, properties)

    def _cut(self) -> Iterator[bytes | _Payload]:
        """Yield headers and payloads. Nothing here refers to a group, which may be closed in between."""
        for part in self.ranges:
            yield _Payload(part.group, 0, 0)
            size, digest, objects = self._opened.size, self._opened.digest, self._opened.objects
            properties: tuple[KeyValue, ...] = ((PROPERTY_GROUP_BYTES, size), (_DIGESTS[kind_of(digest)], raw(digest)))
            for index, span in enumerate(objects):
                number = index if self.dense else span.object_id
                if number < part.first_object or (part.end_object is not None and number >= part.end_object):
                    continue
                yield self._header(part.group, number, span.end - span.begin, properties if index == 0 else ())
                yield _Payload(part.group, span.begin, span.end)
            self.close()


class SendQueue:
    """All answers that one connection has to send."""

    def __init__(
        self,
        send: Callable[[Sending, Sequence[Piece]], bool],
        unsent: Callable[[], int],
        ahead: Callable[[], int],
        may_send: Callable[[int], bool] = lambda _: True,
        allowance: Callable[[int], int] = lambda _: MOST_AHEAD_BYTES,
        piece: Callable[[], int] = lambda: 64 << 10,
    ) -> None:
        """Create an empty queue.

        Args:
            send: gives the transport pieces of an answer; returns False if its stream is gone.
            unsent: bytes that the transport was given and has not sent.
            ahead: bytes that it should have ahead of what it has sent.
            may_send: whether the peer allows a stream already.
            allowance: bytes that it may be given now, by the server's budgets; is told what was not sent yet.
            piece: bytes that it is given at a time, at most.
        """
        self._send, self._unsent, self._ahead, self._may_send = send, unsent, ahead, may_send
        self._allowance, self._piece = allowance, piece
        self._jobs: dict[int, Sending] = {}
        self._order: list[Sending] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Sending]:
        return iter(list(self._jobs.values()))

    @property
    def streams(self) -> Iterator[int]:
        """Streams that are being written."""
        return (job.stream for job in self._jobs.values())

    def add(self, job: Sending) -> None:
        """Add an answer."""
        self._jobs[job.key] = job
        self._order = None

    def prioritise(self, key: int, priority: int) -> None:
        """Change an answer's priority."""
        job = self._jobs.get(key)
        if job is not None:
            job.prioritise(priority)
            self._order = None

    def remove(self, key: int) -> Sending | None:
        """Remove and close an answer; None if there is no such answer."""
        self._order = None
        job = self._jobs.pop(key, None)
        if job is not None:
            job.close()
        return job

    def feed(self) -> tuple[list[Sending], list[tuple[Sending, Exception]]]:
        """Give the transport what it can use now: the most urgent answer first, among equals the oldest request.

        Returns and removes answers that are complete, and those that broke off, with their errors.
        """
        done: list[Sending] = []
        broken: list[tuple[Sending, Exception]] = []
        if not self._jobs:
            return done, broken
        unsent = self._unsent()
        room = min(self._ahead() - unsent, self._allowance(unsent))
        while room > 0 and (room_taken := self._send_next(done, broken)) is not None:
            room -= room_taken
        return done, broken

    def _send_next(self, done: list[Sending], broken: list[tuple[Sending, Exception]]) -> int | None:
        """Send some pieces of the answer whose turn it is, and return their bytes; None if no answer can be sent."""
        if self._order is None:
            self._order = sorted(self._jobs.values(), key=lambda job: job.turn)
        for job in self._order:
            try:
                if not self._may_send(job.stream) or not job.ready:
                    continue
                most = self._piece()
                pieces, size = list[Piece](), 0
                while size < most and not job.finished and (not pieces or job.ready):
                    pieces.append(job.piece(most - size))
                    size += len(pieces[-1])
                alive = self._send(job, pieces)
            except Exception as error:  # noqa: BLE001  # a damaged asset must not take the connection with it
                broken.append((job, error))
                self.remove(job.key)
                return 0
            job.sent += size
            if job.finished or not alive:
                done.append(job)
                self.remove(job.key)
            return size
        return None
