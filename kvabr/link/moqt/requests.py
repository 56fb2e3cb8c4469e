"""Requests of a MoQT connection: a `MoqtRequest` for each transfer, its FETCHes, and its subscriptions.

Payload is read directly into its group, the headers between objects elsewhere. Most objects of a group have the same
size, so the next header is predictable, and one system call reads many objects without a copy. If a header differs,
the pieces are joined and parsed.

Each track with wanted unpublished groups has a subscription, which ends with its last transfer. A group arrives on its
own stream when published. Groups published before the subscription, or requested after their stream, are fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from kvabr.moqt.codes import RequestCode, ResetCode, name_of, reason_of
from kvabr.moqt.events import Answered, Ended, Received, Refused, SubscriptionDone, SubscriptionEnding
from kvabr.moqt.messages import PublishDone, SubscribeOk
from kvabr.moqt.messages import RequestErrorMessage as Refusal
from kvabr.moqt.objects import Item, ObjectHeader, RangeEnd
from kvabr.moqt.parameters import Parameters
from kvabr.moqt.requester import NextPayload
from kvabr.moqt.session import MoqtSession
from kvabr.transfer.transfer import GroupTransfer
from kvabr.types.errors import NotFoundError, Reason, RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import CATALOG_TRACK, MAX_RATE_KBPS, PROPERTY_GROUP_BYTES, PROPERTY_RATE

MAX_IN_FLIGHT = 64
"""Most FETCHes in flight; the others wait. Servers allow about 100 streams."""
_MAX_BUFFERS = 64
"""Buffers filled at a time; Linux allows 1,024."""
_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)
_REQUEST_CODES = {
    ResetCode.CANCELLED: RequestCode.INTERNAL_ERROR,
    ResetCode.DELIVERY_TIMEOUT: RequestCode.TIMEOUT,
    ResetCode.SESSION_CLOSED: RequestCode.GOING_AWAY,
    ResetCode.GOING_AWAY: RequestCode.GOING_AWAY,
    ResetCode.TOO_FAR_BEHIND: RequestCode.TIMEOUT,
    ResetCode.UNKNOWN_OBJECT_STATUS: RequestCode.INTERNAL_ERROR,
    ResetCode.EXPIRED_AUTH_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
}
"""Request codes for reset codes with another meaning."""


class MoqtRequest:
    """A transfer requested from a connection."""

    def __init__(self, transfer: GroupTransfer, fields: tuple[bytes, ...]) -> None:
        self.transfer, self.request, self.fields = transfer, transfer.request, fields
        self.number: int | None = None
        """ID of its FETCH; None before, and for a group of a subscription."""
        self.rate = 0.0
        """Rate announced in the answer, bytes per second; 0.0: none."""

    def take(self, items: list[Item], limit: Limit) -> None:
        """Handle received objects, and what limited them."""
        transfer, request = self.transfer, self.transfer.request
        for item in items:
            if isinstance(item, memoryview):
                transfer.append(item)
                continue
            transfer.progressed(limit)
            if isinstance(item, RangeEnd):
                self._wrong("the peer does not have the whole group", Reason.INTERNAL)
            elif not 0 <= item.group - request.group < request.groups:
                self._wrong(f"objects of group {item.group} were received", Reason.WRONG)
            elif max(item.size, _number(item, PROPERTY_GROUP_BYTES)) > request.limit:
                transfer.too_long()
            elif (kbps := _number(item, PROPERTY_RATE)) <= MAX_RATE_KBPS:
                self.rate = max(self.rate, kbps * 1000 / 8)
        transfer.progressed(limit)

    def finish(self, reset: int | None) -> None:
        """End with the stream, or with its reset code."""
        transfer = self.transfer
        if reset is not None:
            reason = name_of(reset, ResetCode)
            code = next((code for known, code in _REQUEST_CODES.items() if known == reset), reset)
            transfer.fail(RequestError(f"{self.request}: aborted by the peer ({reason})", reason=reason_of(code)))
        elif not transfer.received:
            transfer.fail(NotFoundError(f"{self.request}: the group is empty", reason=Reason.MISSING))
        else:
            transfer.finish()

    def refuse(self, message: Refusal) -> None:
        """Fail because of a refusal."""
        code, request = message.code, self.request
        details = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            missing = f"{request}: not found{details}"
            if request.track == CATALOG_TRACK:
                name = f"{request.namespace.model}/{request.namespace.prompt}"
                missing = f"no such asset {name}, or your token does not give access to it"
            error: RequestError = NotFoundError(missing, reason=reason_of(code))
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(f"{request}: refused, {name}{details}", reason=reason_of(code), retry_after_s=retry_s)
        self.transfer.fail(error)

    def _wrong(self, why: str, reason: Reason) -> None:
        self.transfer.reject(RequestError(f"{self.request}: {why}", reason=reason))


def _number(header: ObjectHeader, wanted: int) -> int:
    return next((value for kind, value in header.properties if kind == wanted and isinstance(value, int)), 0)


class RequestQueue:
    """The unfinished FETCHes of one connection, in flight and waiting.

    The most urgent is sent first, then the earliest, in constant or logarithmic time.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, MoqtRequest] = {}
        self._places: dict[MoqtRequest, int] = {}
        self._heap: list[tuple[int, int, MoqtRequest]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._places)

    def wait(self, request: MoqtRequest) -> None:
        """Add a waiting request, or apply its new priority."""
        self._entries += 1
        self._places[request] = self._entries
        heappush(self._heap, (request.transfer.priority, self._entries, request))

    def leave(self, request: MoqtRequest) -> None:
        """Remove a waiting request."""
        self._places.pop(request, None)

    def clear(self) -> list[MoqtRequest]:
        """Remove and return all waiting requests in order of arrival."""
        waiting = list(self._places)
        self._places.clear()
        self._heap.clear()
        return waiting

    def may_send(self) -> bool:
        """Return whether a request may be sent now."""
        return len(self.in_flight) < MAX_IN_FLIGHT

    def next(self) -> MoqtRequest | None:
        """Take the next request that may be sent, or None."""
        heap = self._heap
        while heap and self._places.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        if not heap or not self.may_send():
            return None
        request = heappop(heap)[2]
        del self._places[request]
        return request


def place(payload: NextPayload, transfer: GroupTransfer, most: int) -> list[memoryview]:
    """Return buffers for at most ``most`` bytes: payload, header, payload, and so on; empty if the group is full."""
    allowed = min(most, transfer.request.limit - transfer.received)
    if allowed <= 0:
        return []
    whole, step = transfer.buffer(allowed), len(payload.follower)
    headers = memoryview(bytearray(step * (_MAX_BUFFERS // 2)))
    buffers = [whole[: payload.left]]
    at, left = len(buffers[0]), most - len(buffers[0])
    while step and left > step and at < len(whole) and len(buffers) < _MAX_BUFFERS:
        number = len(buffers) // 2
        part = whole[at : at + min(payload.size, left - step)]
        buffers += headers[number * step : (number + 1) * step], part
        at, left = at + len(part), left - step - len(part)
    return buffers


def filled(buffers: Sequence[memoryview], count: int) -> Iterator[memoryview]:
    """Yield the first ``count`` bytes of buffers."""
    for buffer in buffers:
        if count <= 0:
            return
        yield buffer[:count]
        count -= len(buffer)


_LATE_STREAMS_S = 1.0
"""Seconds that streams may be late after the publisher's end."""
_Track = tuple[tuple[bytes, ...], str]


class TrackSubscription:
    """One SUBSCRIBE and its transfers."""

    def __init__(self, track: _Track, number: int, priority: int) -> None:
        """``number`` is the ID of the SUBSCRIBE, with this priority."""
        self.track, self.number, self.asked_priority = track, number, priority
        self.waiting: dict[int, MoqtRequest] = {}
        """Transfers without data, by group."""
        self.receiving: dict[int, MoqtRequest] = {}
        """The other transfers, by stream."""
        self.last: int | None = None
        """Last published group, which cannot be waited for; None before the peer's answer."""
        self.done: PublishDone | None = None
        self.late: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[MoqtRequest]:
        return iter((*self.waiting.values(), *self.receiving.values()))

    @property
    def priority(self) -> int:
        """Priority of its most urgent transfer."""
        return min((one.transfer.priority for one in self), default=255)

    def reach(self, group: int) -> None:
        """Note that a group was published."""
        self.last = group if self.last is None else max(self.last, group)


class Subscriber:
    """All subscriptions of a connection."""

    def __init__(
        self, session: Callable[[], MoqtSession], fetch: Callable[[MoqtRequest], None],
        over: Callable[[MoqtRequest], None], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """``over`` is called with each finished transfer, ``fetch`` fetches other groups, ``settle`` sends output."""
        self._session, self._fetch, self._over, self._settle = session, fetch, over, settle
        self._by_track: dict[_Track, TrackSubscription] = {}
        self._by_number: dict[int, TrackSubscription] = {}
        self._of: dict[MoqtRequest, TrackSubscription] = {}

    def __contains__(self, request: MoqtRequest) -> bool:
        return request in self._of

    @property
    def receiving(self) -> int:
        """Number of groups that are being received."""
        return sum(len(one.receiving) for one in self._by_number.values())

    def bring(self, request: MoqtRequest) -> None:
        """Request a group by a subscription to its track, or by a FETCH if it was published."""
        track, group = (request.fields, request.request.track), request.request.group
        subscription = self._by_track.get(track)
        if subscription is None:
            priority = request.transfer.priority
            number = self._session().subscribe(request.fields, track[1].encode(), Parameters(priority=priority))
            subscription = self._by_track[track] = self._by_number[number] = TrackSubscription(track, number, priority)
        if subscription.done is not None or (subscription.last is not None and group <= subscription.last):
            self._fetch(request)
            return
        subscription.waiting[group] = request
        self._of[request] = subscription
        self._prioritise(subscription)

    def reprioritise(self, request: MoqtRequest) -> None:
        """Apply the new priority of a transfer."""
        self._prioritise(self._of[request])

    def leave(self, request: MoqtRequest) -> None:
        """Drop a transfer."""
        subscription = self._of.pop(request)
        requester = self._session().requester
        for stream in [stream for stream, one in subscription.receiving.items() if one is request]:
            del subscription.receiving[stream]
            requester.stop(stream)
        if subscription.waiting.get(request.request.group) is request:
            del subscription.waiting[request.request.group]
        self._end_unread(subscription)

    def clear(self) -> None:
        """Forget all subscriptions at the end of the connection."""
        for subscription in self._by_number.values():
            if subscription.late is not None:
                subscription.late.cancel()
        for each in (self._by_track, self._by_number, self._of):
            each.clear()

    # ------------------------------------------------------------------ from the peer

    def happened(self, event: Answered | Ended | Refused | SubscriptionEnding | SubscriptionDone) -> None:
        """Handle a subscription's event, other than `Received`."""
        subscription = self._by_number.get(event.request_id)
        if subscription is None:
            return
        match event:
            case Answered(message=SubscribeOk(parameters=parameters)):
                subscription.reach(-1 if parameters.largest is None else parameters.largest.group)
                self._fetch_past(subscription)
            case Ended(stream=int(stream)):
                if (request := subscription.receiving.pop(stream, None)) is not None:
                    self._leave(request)
                    request.finish(event.reset)
                    self._end_unread(subscription)
            case Refused():
                self._forget(subscription)
                for request in subscription:
                    self._leave(request)
                    request.refuse(event.message)
            case SubscriptionEnding():
                subscription.done = event.message
                loop = asyncio.get_running_loop()
                subscription.late = loop.call_later(_LATE_STREAMS_S, self._end_late, subscription)
            case SubscriptionDone():
                self._end(subscription)
            case _:
                pass

    def take(self, event: Received, limit: Limit) -> None:
        """Pass objects to their group's transfer; stop an unwanted stream."""
        subscription, stream = self._by_number.get(event.request_id), event.stream
        if subscription is None or stream is None:
            return
        if (request := subscription.receiving.get(stream)) is None:
            header = event.items[0]
            group = header.group if isinstance(header, ObjectHeader) else -1
            subscription.reach(group)
            request = subscription.waiting.pop(group, None)
            if request is None:
                self._session().requester.stop(stream)
                return
            subscription.receiving[stream] = request
        request.take(event.items, limit)

    # ------------------------------------------------------------------ internals

    def _prioritise(self, subscription: TrackSubscription) -> None:
        priority = subscription.priority
        if priority != subscription.asked_priority:
            subscription.asked_priority = priority
            self._session().requester.update(subscription.number, Parameters(priority=priority))
            self._settle()

    def _fetch_past(self, subscription: TrackSubscription) -> None:
        last = subscription.last
        for group in sorted(subscription.waiting):
            if subscription.done is not None or (last is not None and group <= last):
                request = subscription.waiting.pop(group)
                del self._of[request]
                self._fetch(request)
        self._end_unread(subscription)

    def _end_unread(self, subscription: TrackSubscription) -> None:
        if not (subscription.waiting or subscription.receiving) and subscription.number in self._by_number:
            self._forget(subscription)
            self._session().requester.cancel(subscription.number)
            self._settle()

    def _end_late(self, subscription: TrackSubscription) -> None:
        """End a subscription after a wrong stream count of the publisher."""
        if subscription.number in self._by_number:
            self._session().requester.cancel(subscription.number)
            for stream in list(subscription.receiving):
                self.happened(Ended(subscription.number, 0, stream))
            self._end(subscription)
            self._settle()

    def _end(self, subscription: TrackSubscription) -> None:
        self._forget(subscription)
        self._fetch_past(subscription)

    def _leave(self, request: MoqtRequest) -> None:
        del self._of[request]
        self._over(request)

    def _forget(self, subscription: TrackSubscription) -> None:
        if subscription.late is not None:
            subscription.late.cancel()
        self._by_number.pop(subscription.number, None)
        if self._by_track.get(subscription.track) is subscription:
            del self._by_track[subscription.track]
