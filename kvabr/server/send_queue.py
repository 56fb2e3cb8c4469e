"""The send queue of one connection: passes answers to the transport in pieces, by priority.

QUIC libraries buffer data until it is acknowledged, and share the path evenly among streams; TCP sends in order. So the
queue gives them little data at a time, always of the most urgent answer that is ready.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

from kvabr.moqt.objects import FetchWriter, SubgroupHeader, SubgroupWriter
from kvabr.moqt.wire import KeyValue
from kvabr.server.budgets import ConnectionBudget
from kvabr.server.fetch_range import GroupRange
from kvabr.server.grants import Grant
from kvabr.server.publication import ArrivingGroup, Publication
from kvabr.types.digests import BLAKE3, SHA256, kind_of, raw
from kvabr.types.errors import TransportError
from kvabr.types.naming import PROPERTY_GROUP_BLAKE3, PROPERTY_GROUP_BYTES, PROPERTY_GROUP_DIGEST, PROPERTY_RATE

_DIGESTS = {SHA256: PROPERTY_GROUP_DIGEST, BLAKE3: PROPERTY_GROUP_BLAKE3}

Piece = bytes | memoryview


@dataclass(eq=False)
class TrackRequest:
    """A FETCH or SUBSCRIBE of one track that is being answered."""

    number: int
    publication: Publication
    grant: Grant
    track: str
    priority: int
    descending: bool
    dense: bool
    """True: number each group's objects 0, 1, 2, for receivers that treat a gap between IDs as a loss."""
    rate: int = field(default=0, kw_only=True)
    """Rate to announce (`PROPERTY_RATE`), in kbit/s; 0: none."""


@dataclass(frozen=True, slots=True)
class _Payload:
    group: int
    begin: int
    end: int


@dataclass(eq=False)
class Sending:
    """The answer to one FETCH, or one group of a subscription. It opens a group when first in the queue.

    As a `Holder` of `kvabr.server.budgets`, it may have to close its group meanwhile.
    """

    request: TrackRequest
    ranges: Iterable[GroupRange]
    """Groups to send, in order; read one at a time."""
    budget: ConnectionBudget
    wake: Callable[[], None]
    """Called when `ready` may have become True."""
    accept: Callable[[], int] | None = None
    """Accepts the FETCH once there is something to send, and returns the stream."""
    stream: int | None = None
    """Stream of the answer; None before acceptance."""
    subgroup: SubgroupHeader | None = None
    """Header of a subscription's stream, already written; None for a FETCH."""
    sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.requested_s = time.monotonic()
        self._group: ArrivingGroup | None = None
        self._waits = False
        self._writer: FetchWriter | SubgroupWriter
        if self.subgroup is None:
            self._writer = FetchWriter(descending=self.request.descending)
        else:
            self._writer = SubgroupWriter(self.subgroup)
        self._items = self._cut()
        self._next: bytes | _Payload | None = next(self._items, None)
        """Next piece for the stream; None at its end. An empty payload means that a group must be opened."""

    @property
    def group(self) -> int:
        """Group of a subscription; 0 for a FETCH."""
        return 0 if self.subgroup is None else self.subgroup.group

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: priority, request, group."""
        request, group = self.request, self.group
        return request.priority, request.number, -group if request.descending else group

    @property
    def finished(self) -> bool:
        """True if the last piece was taken."""
        return self._next is None

    def ready(self) -> bool:
        """Return True if there is a piece to send now; otherwise start to fetch the group.

        Raises `AssetError` if the group's file is missing or damaged, `TransportError` if it cannot be fetched, is
        wrong, or is too large for the server's memory.
        """
        while not self._waits and isinstance(item := self._next, _Payload):
            if not self._open(item.group) or self._opened.available < min(item.begin + 1, self._opened.size):
                self._waits = True
            elif item.begin < item.end:
                break
            else:
                self._next = next(self._items, None)
        return not self._waits

    def piece(self, most: int) -> Piece:
        """Return the next piece, about ``most`` bytes at most. Call it if `ready`; raises as `ready`."""
        item = self._next
        piece: Piece = b""
        if isinstance(item, bytes):
            piece, self._next = item, next(self._items, None)
        elif item is not None:
            end = min(item.end, item.begin + most, self._opened.available)
            piece = self._opened.read(item.begin, end)
            self._next = replace(item, begin=end) if end < item.end else next(self._items, None)
        return piece

    def on_more(self) -> None:
        """Try again, since there may be something to send, or memory for a group."""
        self._waits = False
        if self._group is not None:
            self.budget.hold(self, self._group.memory)  # the reader that accounted for it may have left
        self.wake()

    def reprioritise(self) -> None:
        """Apply the request's new priority to the fetched group."""
        if self._group is not None:
            self._group.prioritise(self.request.priority)

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        if self._group is not None:
            self._group.close()
            self._group = None
        self.budget.leave(self)

    def rest(self) -> None:
        """Close the group's file while other answers are sent."""
        if not self.request.publication.dear:
            self.close()

    def may_park(self) -> bool:
        try:
            return self._group is not None and self._group.available == self._group.size
        except TransportError:
            return False

    @property
    def _opened(self) -> ArrivingGroup:
        assert self._group is not None  # noqa: S101  # `_open` has set it
        return self._group

    def _open(self, number: int) -> bool:
        if self._group is None:
            publication, budget = self.request.publication, self.budget
            loads = publication.loads(number)
            if loads and not budget.take(self, loads):
                return False
            self._group = publication.open(number, self.request.priority, self.on_more)
        return True

    def _header(self, group: int, number: int, size: int, properties: tuple[KeyValue, ...]) -> bytes:
        if isinstance(self._writer, SubgroupWriter):
            return self._writer.header(number, size, properties)
        return self._writer.header(group, number, size, properties)

    def _cut(self) -> Iterator[bytes | _Payload]:
        """Yield headers and payload ranges, without references to a group, which may be closed meanwhile."""
        for wanted in self.ranges:
            yield _Payload(wanted.group, 0, 0)
            size, digest, objects = self._opened.size, self._opened.digest, self._opened.objects
            properties: tuple[KeyValue, ...] = ((PROPERTY_GROUP_BYTES, size), (_DIGESTS[kind_of(digest)], raw(digest)))
            if self.request.rate:
                properties += ((PROPERTY_RATE, self.request.rate),)
            first, dense = wanted.first_object, self.request.dense
            first = first if dense else bisect_left(objects, first, key=attrgetter("object_id"))
            for index in range(first, len(objects)):
                span = objects[index]
                number = index if dense else span.object_id
                if wanted.end_object is not None and number >= wanted.end_object:
                    break
                yield self._header(wanted.group, number, span.end - span.begin, properties if index == 0 else ())
                yield _Payload(wanted.group, span.begin, span.end)
            self.close()


class SendQueue:
    """All answers of one connection."""

    def __init__(
        self, send: Callable[[Sending, Sequence[Piece]], bool], may_send: Callable[[Sending], bool] = lambda _: True
    ) -> None:
        """``send`` returns False if the stream is gone. ``may_send`` also accepts the FETCH of an answer."""
        self._send, self._may_send = send, may_send
        self._jobs: dict[int, list[Sending]] = {}
        self._order: list[Sending] | None = None
        self._size = 0
        self._last: Sending | None = None
        """The only answer with an open file, or None."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sending]:
        return chain.from_iterable(self._jobs.values())

    def of(self, number: int) -> list[Sending]:

        return list(self._jobs.get(number, ()))

    def add(self, job: Sending) -> None:

        self._jobs.setdefault(job.request.number, []).append(job)
        self._size += 1
        self._order = None

    def reprioritise(self, number: int, priority: int) -> None:
        """Change a request's priority."""
        for job in self.of(number):
            job.request.priority = priority
            job.reprioritise()
            self._order = None

    def remove(self, job: Sending) -> None:
        """Remove and close an answer."""
        jobs = self._jobs[job.request.number]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.request.number]
        self._size -= 1
        self._order = None
        job.close()

    def feed(self, left_bytes: int, most: int) -> list[tuple[Sending, Exception | None]]:
        """Give the transport about ``left_bytes`` bytes of the most urgent answers, at most ``most`` per write.

        Remove complete and failed answers, and return them with their errors.
        """
        ended: list[tuple[Sending, Exception | None]] = []
        while left_bytes > 0 and (sent_bytes := self._send_next(most, ended)) is not None:
            left_bytes -= sent_bytes
        return ended

    def _send_next(self, most: int, ended: list[tuple[Sending, Exception | None]]) -> int | None:
        if self._order is None:
            self._order = sorted(self, key=lambda job: job.order)
        for job in self._order:
            try:
                if not self._can_send(job):
                    continue
                if self._last is not None and self._last is not job:
                    self._last.rest()
                self._last = job
                pieces, size = list[Piece](), 0
                while size < most and not job.finished and (not pieces or job.ready()):
                    pieces.append(job.piece(most - size))
                    size += len(pieces[-1])
                alive = self._send(job, pieces)
            except Exception as error:  # noqa: BLE001  # a damaged asset must not end the connection
                ended.append((job, error))
                self.remove(job)
                return 0
            job.sent += size
            if job.finished or not alive:
                ended.append((job, None))
                self.remove(job)
            return size
        return None

    def _can_send(self, job: Sending) -> bool:
        """Return True if a piece can be sent now; otherwise leave the answer's file closed."""
        if job.stream is not None and not job.request.publication.dear and not self._may_send(job):
            return False
        if not job.ready():
            return False
        if self._may_send(job):
            return True
        job.rest()
        return False
