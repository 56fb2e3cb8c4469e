"""The send queue of one connection: answers in the order of their priorities, handed to QUIC piece by piece.

QUIC libraries keep what they are given until it is acknowledged, and share the path evenly among streams. So they get
little at a time, always of the most urgent answer that has something to send: that is what makes priorities hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.objects import FetchWriter
from kvabr.moqt.wire import Draft, KeyValue
from kvabr.server.publication import (
    PROPERTY_GROUP_BYTES,
    PROPERTY_GROUP_DIGEST,
    ArrivingGroup,
    Publication,
)

MOST_AHEAD_BYTES, LEAST_AHEAD_BYTES = 256 << 10, 16 << 10
"""Bytes that QUIC is given ahead of what it has sent: one congestion window, within these bounds. A window is all that
it can send before it asks again; more would let less urgent data in first on a slow link."""
_PIECE = 64 << 10

Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class GroupRange:
    """One group of a FETCH, and which of its objects."""

    group: int
    first_object: int
    end_object: int | None
    """The object after the last one; None for all."""


@dataclass(eq=False)
class Sending:
    """The answer to one FETCH, written as fast as its turn comes. A group is opened when its turn comes."""

    request_id: int
    stream: int
    publication: Publication
    ranges: list[GroupRange]
    """Which objects, in order."""
    draft: Draft
    track: str = field(kw_only=True)
    """For metrics."""
    priority: int = field(kw_only=True)
    """0 (most urgent) to 255."""
    dense: bool = field(kw_only=True)
    """Number objects 0, 1, 2 in each group, for receivers that take a gap between IDs for a loss."""
    descending: bool = field(kw_only=True)
    """Whether the groups come in descending order."""
    first: ArrivingGroup | None = None
    """The first group, if it is being fetched already; closed with this answer."""
    on_more: Callable[[], None] = lambda: None
    """Called when `ready` may have become true."""
    sent: int = 0
    """Bytes that QUIC has been given."""
    finished: bool = False
    """Whether the last piece was the end."""

    def __post_init__(self) -> None:
        self.requested_s = time.monotonic()
        self._group = self.first
        self._writer = FetchWriter(self.draft, descending=self.descending)
        self._pieces = self._cut()
        self._next: Piece | None = b""
        """The next piece; empty: it has not arrived; None: there are no more."""

    @property
    def ready(self) -> bool:
        """Whether there is a piece to send now.

        Raises:
            AssetError: the group's file is gone or damaged.
            TransportError: the group cannot be fetched, or is not what its catalog says.
        """
        self._advance()
        return self._next is None or len(self._next) > 0

    def piece(self) -> Piece:
        """Return the next bytes of the stream, at most about `_PIECE`, if any have arrived; raises as `ready`."""
        self._advance()
        piece = self._next or b""
        if piece:
            self._next = next(self._pieces, None)
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

    def _advance(self) -> None:
        if self._next is not None and not len(self._next):
            self._next = next(self._pieces, None)

    def _cut(self) -> Iterator[Piece]:
        for part in self.ranges:
            if self._group is None:
                self._group = self.publication.open(part.group, self.priority, self.on_more)
            yield from self._write(part, self._group)
            self.close()

    def _write(self, part: GroupRange, group: ArrivingGroup) -> Iterator[Piece]:
        """Yield objects of a group; a piece is empty while nothing has arrived."""
        properties: tuple[KeyValue, ...] = ((PROPERTY_GROUP_BYTES, group.size), (PROPERTY_GROUP_DIGEST, group.digest))
        for index, span in enumerate(group.objects):
            number = index if self.dense else span.object_id
            if number < part.first_object or (part.end_object is not None and number >= part.end_object):
                continue
            yield self._writer.header(part.group, number, span.end - span.begin, properties if index == 0 else ())
            at = span.begin
            while at < span.end:
                end = min(span.end, at + _PIECE, group.available)
                piece: Piece = group.read(at, end) if end > at else b""
                at += len(piece)
                yield piece


def last_object(objects: tuple[ObjectSpan, ...], *, dense: bool) -> int:
    """Return the ID of a group's last object."""
    return len(objects) - 1 if dense else objects[-1].object_id


class SendQueue:
    """All answers that one connection has to send."""

    def __init__(
        self,
        send: Callable[[Sending, Piece], bool],
        unsent: Callable[[], int],
        window: Callable[[], int],
        may_send: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Create an empty queue.

        Args:
            send: gives QUIC a piece of an answer; returns False if its stream is gone.
            unsent: bytes that QUIC was given and has not sent.
            window: congestion window, bytes.
            may_send: whether the peer allows a stream already.
        """
        self._send, self._unsent, self._window, self._may_send = send, unsent, window, may_send
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
        self._jobs[job.request_id] = job
        self._order = None

    def prioritise(self, request_id: int, priority: int) -> None:
        """Change an answer's priority."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.prioritise(priority)
            self._order = None

    def remove(self, request_id: int) -> Sending | None:
        """Remove and close an answer; None if there is no such answer."""
        self._order = None
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.close()
        return job

    def feed(self) -> tuple[list[Sending], list[tuple[Sending, Exception]]]:
        """Give QUIC what it can use now: the most urgent answer first, among equals the oldest request.

        Returns and removes answers that are complete, and those that broke off, with their errors.
        """
        done: list[Sending] = []
        broken: list[tuple[Sending, Exception]] = []
        if not self._jobs:
            return done, broken
        room = min(MOST_AHEAD_BYTES, max(LEAST_AHEAD_BYTES, self._window())) - self._unsent()
        while room > 0 and (room_taken := self._send_next(done, broken)) is not None:
            room -= room_taken
        return done, broken

    def _send_next(self, done: list[Sending], broken: list[tuple[Sending, Exception]]) -> int | None:
        """Send a piece of the answer whose turn it is, and return its bytes; None if no answer can be sent."""
        if self._order is None:
            self._order = sorted(self._jobs.values(), key=lambda job: (job.priority, job.request_id))
        for job in self._order:
            try:
                if not self._may_send(job.stream) or not job.ready:
                    continue
                piece = job.piece()
                alive = self._send(job, piece)
            except Exception as error:  # noqa: BLE001  # a damaged asset must not take the connection with it
                broken.append((job, error))
                self.remove(job.request_id)
                return 0
            job.sent += len(piece)
            if job.finished or not alive:
                done.append(job)
                self.remove(job.request_id)
            return len(piece)
        return None
