"""What one connection still has to send: groups in the order of their priorities, fed to QUIC bit by bit.

QUIC libraries keep what they are given until it is acknowledged, and share the path evenly among streams. So they are
given only so much at a time, and always of the most urgent request: that is what makes priorities hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.objects import FetchWriter
from kvabr.moqt.wire import Draft, KeyValue
from kvabr.server.publication import PROPERTY_GROUP_BYTES, PROPERTY_GROUP_DIGEST, Publication, PublishedGroup

MOST_AHEAD_BYTES, LEAST_AHEAD_BYTES = 256 << 10, 16 << 10
"""Bytes that QUIC is given ahead of what it has sent: a congestion window, which is all that it can send before it asks
again, within these bounds. On a slow link more would let what is less urgent in before what is more so."""
_PIECE = 64 << 10

Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class GroupRange:
    """One group of a FETCH, and which of its objects."""

    group: int
    first_object: int
    end_object: int | None
    """The one after the last wanted; None for all."""


class Sending:
    """The answer to one FETCH, written as fast as its turn comes."""

    def __init__(
        self,
        request_id: int,
        stream: int,
        publication: Publication,
        ranges: list[GroupRange],
        draft: Draft,
        *,
        track: str,
        priority: int,
        dense: bool,
        descending: bool,
    ) -> None:
        """Nothing is opened before the first piece is wanted.

        Args:
            request_id: the FETCH.
            stream: where to write.
            publication: the track.
            ranges: what of it, in order.
            draft: how objects are written.
            track: its name, for the books.
            priority: 0 (most urgent) to 255.
            dense: number objects 0, 1, 2 in each group, for receivers that take a gap between IDs for a loss.
            descending: whether the groups come in descending order.
        """
        self.request_id, self.stream, self.track, self.priority = request_id, stream, track, priority
        self.requested_s = time.monotonic()
        self.sent = 0
        """Bytes that QUIC has been given."""
        self._publication, self._ranges, self._dense = publication, ranges, dense
        self._writer = FetchWriter(draft, descending=descending)
        self._pieces = self._cut()
        self._next: Piece | None = None
        self.finished = False

    def piece(self) -> Piece:
        """The next bytes of the stream, at most about `_PIECE`; `finished` tells if they were the last.

        Raises:
            AssetError: the group's file is gone or damaged.
        """
        piece = next(self._pieces, b"") if self._next is None else self._next
        self._next = next(self._pieces, None)
        self.finished = self._next is None
        return piece

    def _cut(self) -> Iterator[Piece]:
        for part in self._ranges:
            group = self._publication.open(part.group)
            yield from self._cut_group(part, group)

    def _cut_group(self, part: GroupRange, group: PublishedGroup) -> Iterator[Piece]:
        properties: tuple[KeyValue, ...] = (
            (PROPERTY_GROUP_BYTES, len(group.data)), (PROPERTY_GROUP_DIGEST, group.digest),
        )  # fmt: skip
        for index, span in enumerate(group.objects):
            number = index if self._dense else span.object_id
            if number < part.first_object or (part.end_object is not None and number >= part.end_object):
                continue
            size = span.end - span.begin
            yield self._writer.header(part.group, number, size, properties if index == 0 else ())
            for at in range(span.begin, span.end, _PIECE):
                yield group.data[at : min(span.end, at + _PIECE)]


def last_object(objects: tuple[ObjectSpan, ...], *, dense: bool) -> int:
    """ID of the last object of a group."""
    return len(objects) - 1 if dense else objects[-1].object_id


class Outbox:
    """Everything that one connection has to send."""

    def __init__(
        self,
        send: Callable[[Sending, Piece], bool],
        unsent: Callable[[], int],
        window: Callable[[], int],
        may_send: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Nothing to send yet.

        Args:
            send: gives QUIC a piece of an answer; returns False if its stream is no more.
            unsent: bytes that QUIC was given and has not sent.
            window: bytes that QUIC may have on their way.
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
        """The streams that are being written."""
        return (job.stream for job in self._jobs.values())

    def add(self, job: Sending) -> None:
        """One more answer."""
        self._jobs[job.request_id] = job
        self._order = None

    def prioritise(self, request_id: int, priority: int) -> None:
        """Change an answer's place."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.priority = priority
            self._order = None

    def remove(self, request_id: int) -> Sending | None:
        """An answer is wanted no more."""
        self._order = None
        return self._jobs.pop(request_id, None)

    def feed(self) -> tuple[list[Sending], list[tuple[Sending, Exception]]]:
        """Give QUIC what it can use now: the most urgent first, and of those the one that was asked for first.

        Returns:
            The answers that are complete, and those that broke off, with why.
        """
        done: list[Sending] = []
        broken: list[tuple[Sending, Exception]] = []
        if not self._jobs:
            return done, broken
        room = min(MOST_AHEAD_BYTES, max(LEAST_AHEAD_BYTES, self._window())) - self._unsent()
        while room > 0 and self._jobs:
            if not self._order:
                self._order = sorted(self._jobs.values(), key=lambda job: (job.priority, job.request_id), reverse=True)
            at = next((at for at in reversed(range(len(self._order))) if self._may_send(self._order[at].stream)), None)
            if at is None:
                break
            job = self._order[at]
            try:
                piece = job.piece()
                alive = self._send(job, piece)
            except Exception as error:  # noqa: BLE001  # a damaged asset must not take the connection with it
                broken.append((job, error))
                self.remove(job.request_id)
                continue
            job.sent += len(piece)
            room -= len(piece)
            if job.finished or not alive:
                done.append(job)
                del self._jobs[job.request_id]
                self._order.pop(at)
        return done, broken
