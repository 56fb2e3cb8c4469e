"""A MoQT `Connection` over QUIC or TCP, made by `kvabr.link.moqt.connect.dial`.

Each transfer is a `MoqtRequest`: a FETCH, or a subscription if the group is unpublished. FETCHes beyond the limit wait
in a `RequestQueue`.

Payload is read directly into the buffer of its group, and the headers between objects into separate memory. Most
objects of a group have the same size, so the next header can be predicted, and one system call reads many objects
without a copy. If a header differs, the pieces are joined and parsed.

Each track with unpublished groups to receive has a subscription, which ends with its last transfer. A group arrives on
its own stream when published. Groups published before the subscription, or requested after their stream, are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.link.moqt.options import DialOptions, check_pinned, untrusted
from kvabr.moqt.codes import REASONS, RESET_REASONS, RequestCode, ResetCode, SessionCode, name_of
from kvabr.moqt.events import (
    Answered,
    Closed,
    Ended,
    Event,
    GoingAway,
    Ready,
    Received,
    Refused,
    Requested,
    SubscriptionDone,
    SubscriptionEnding,
)
from kvabr.moqt.messages import PublishDone, PublishNamespace, SubscribeNamespace, SubscribeOk
from kvabr.moqt.messages import RequestErrorMessage as Refusal
from kvabr.moqt.objects import Item, ObjectHeader, RangeEnd
from kvabr.moqt.requester import NextPayload
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import Draft, Location, Parameters, Token
from kvabr.transfer.interface import ConnectionStats, GroupTransfer, LimitWatch, PeerConnection
from kvabr.types.errors import (
    ConnectionLostError,
    NotFoundError,
    Reason,
    RequestError,
    TransportError,
    UnauthorizedError,
)
from kvabr.types.events import Limit
from kvabr.types.naming import (
    CATALOG_TRACK,
    MAX_FULL_TRACK_NAME,
    MAX_RATE_KBPS,
    PROPERTY_GROUP_BYTES,
    PROPERTY_RATE,
    is_catalog,
)

_KVABR = b"kvabr"
_TOKEN_HINT = "its operator has tokens; give yours with --token-file F, KVABR_TOKEN, or token="  # noqa: S105  # none
_GOING_AWAY = "the peer is going away; reconnect"
_CLOSING_S = 0.25
_BAD_CERTIFICATE = range(0x100 + 42, 0x100 + 49)
"""QUIC error codes of TLS alerts about certificates (RFC 8446, section 6.2)."""


MAX_IN_FLIGHT = 64
"""Maximum FETCHes in flight; others wait. Servers allow about 100 streams."""
_MAX_BUFFERS = 64
"""Maximum number of buffers filled at a time; Linux allows 1,024."""
_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)


class MoqtRequest:
    """A transfer requested from a connection."""

    def __init__(self, transfer: GroupTransfer, fields: tuple[bytes, ...]) -> None:
        self.transfer, self.request, self.fields = transfer, transfer.request, fields
        self.number: int | None = None
        """ID of its FETCH; None before it is sent, and for a group of a subscription."""
        self.rate = 0.0
        """Rate announced with the answer, in bytes per second; 0.0: none."""

    def take(self, items: list[Item], limit: Limit) -> None:
        """Handle received objects; ``limit`` names what limited their rate."""
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
        """Handle the end of the stream, or its ``reset`` code."""
        transfer = self.transfer
        if reset is not None:
            reason = name_of(reset, ResetCode)
            transfer.fail(
                RequestError(
                    f"{self.request}: aborted by the peer ({reason})", reason=RESET_REASONS.get(reset, Reason.OTHER)
                )
            )
        elif not transfer.received:
            transfer.fail(NotFoundError(f"{self.request}: the group is empty", reason=Reason.MISSING))
        else:
            transfer.finish()

    def refuse(self, message: Refusal) -> None:
        """Fail with the error of a refusal."""
        code, request = message.code, self.request
        details = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            missing = f"{request}: not found{details}"
            if request.track == CATALOG_TRACK:
                name = f"{request.namespace.model}/{request.namespace.prompt}"
                missing = f"no such asset {name}, or your token does not give access to it"
            error: RequestError = NotFoundError(missing, reason=REASONS.get(code, Reason.OTHER))
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(
                f"{request}: refused, {name}{details}", reason=REASONS.get(code, Reason.OTHER), retry_after_s=retry_s
            )
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
        """Add a waiting request, or apply the new priority of one."""
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
        """Return True if a request may be sent now."""
        return len(self.in_flight) < MAX_IN_FLIGHT

    def next(self) -> MoqtRequest | None:
        """Remove and return the next request that may be sent, or None."""
        heap = self._heap
        while heap and self._places.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        if not heap or not self.may_send():
            return None
        request = heappop(heap)[2]
        del self._places[request]
        return request


def place(payload: NextPayload, transfer: GroupTransfer, most: int) -> list[memoryview]:
    """Return buffers for at most ``most`` bytes, by turns payload and header; empty if the group is complete."""
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
"""Seconds to wait for missing streams after the publisher has ended a subscription."""
_Track = tuple[tuple[bytes, ...], str]


class TrackSubscription:
    """One SUBSCRIBE and its transfers."""

    def __init__(self, track: _Track, number: int, priority: int) -> None:
        """``number``: ID of the SUBSCRIBE, which was sent with ``priority``."""
        self.track, self.number, self.asked_priority = track, number, priority
        self.waiting: dict[int, MoqtRequest] = {}
        """Transfers that have received no data, by group."""
        self.receiving: dict[int, MoqtRequest] = {}
        """Transfers that have received data, by stream."""
        self.last: int | None = None
        """Last published group; groups up to it must be fetched. None before the peer's answer."""
        self.done: PublishDone | None = None
        self.late: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[MoqtRequest]:
        return iter((*self.waiting.values(), *self.receiving.values()))

    @property
    def priority(self) -> int:
        """Priority of its most urgent transfer."""
        return min((one.transfer.priority for one in self), default=255)

    def reach(self, group: int) -> None:
        """Record that a group was published."""
        self.last = group if self.last is None else max(self.last, group)


class Subscriber:
    """All subscriptions of a connection."""

    def __init__(
        self, session: Callable[[], MoqtSession], fetch: Callable[[MoqtRequest], None],
        over: Callable[[MoqtRequest], None], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """``over`` is called with each finished transfer, ``fetch`` to fetch a group, ``settle`` to send output."""
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
        """Request a group by a subscription to its track, or by a FETCH if it is already published."""
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
        """Remove a transfer, and stop its stream."""
        subscription = self._of.pop(request)
        requester = self._session().requester
        for stream in [stream for stream, one in subscription.receiving.items() if one is request]:
            del subscription.receiving[stream]
            requester.stop(stream)
        if subscription.waiting.get(request.request.group) is request:
            del subscription.waiting[request.request.group]
        self._end_unread(subscription)

    def clear(self) -> None:
        """Remove all subscriptions, at the end of the connection."""
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
        """Pass objects to their group's transfer; if it has none, stop the stream."""
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
        """End a subscription although streams are missing: the publisher announced a wrong number."""
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


class MoqtConnection(Endpoint, PeerConnection):
    """A connection to one publisher or relay."""

    def __init__(self, backend: str, options: DialOptions) -> None:
        super().__init__()
        self.backend = backend
        self.protocol = ""
        self._options = options
        self._over = False
        self._requests = RequestQueue()
        self._made: dict[GroupTransfer, MoqtRequest] = {}
        self._subscriber = Subscriber(self._open_session, self._fetch, self._forget, self._next_soon)
        self._next_due = False
        self._received = 0
        self._lost: str | None = None
        self._lost_kind = ConnectionLostError
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the peer's SETUP has arrived, or connecting has failed."""
        self.shaken = False
        self._received_any = asyncio.Event()
        self._announces = False
        """True if the peer is kvabr, so that a rate in its answers is for this path, not passed on by a relay."""
        self.watch = LimitWatch(self._probe, self.round_trip)

    # ------------------------------------------------------------------ Connection

    def stats(self) -> ConnectionStats:
        return ConnectionStats(self.round_trip(), self._received)

    async def answers(self, within_s: float) -> bool:
        self._received_any.clear()
        self._probe()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._received_any.wait(), within_s)
        return self._lost is None and self._received_any.is_set()

    async def close(self) -> None:
        if self._over:
            return
        self._over = True
        try:
            if self._lost is None:
                self.ended("closed by this side", 0)
                self.shut(SessionCode.NO_ERROR, "")
                if self.session is not None:
                    with contextlib.suppress(TimeoutError):  # else the peer's idle timeout ends it
                        await asyncio.wait_for(self.transport.wait_closed(), _CLOSING_S)
        finally:  # also when cancelled
            self.transport.drop()

    # ------------------------------------------------------------------ Carrier

    def carry(self, transfer: GroupTransfer) -> None:
        namespace = transfer.request.namespace
        if (size := namespace.full_name_bytes(transfer.request.track)) > MAX_FULL_TRACK_NAME:
            why = f"full track name of {size} bytes, more than the {MAX_FULL_TRACK_NAME} allowed"
            transfer.fail(RequestError(why))
        elif self._lost is not None:
            self._lose(transfer, self._lost)
        elif self.going_away:
            self._lose(transfer, _GOING_AWAY)
        else:
            fields = namespace.split_fields() if self._options.names == "split" else namespace.fields()
            request = self._made[transfer] = MoqtRequest(transfer, fields)
            if transfer.request.live:
                self._subscriber.bring(request)
            else:
                self._fetch(request)
            if transfer.request.live or request.number is not None:  # not for waiting requests
                self.settle_and_send()

    def reprioritise(self, transfer: GroupTransfer) -> None:
        request, session = self._made.get(transfer), self.session
        if request is None or session is None:
            return
        if request in self._subscriber:
            self._subscriber.reprioritise(request)
        elif request.number is None:
            self._requests.wait(request)
        elif session.requester.update(request.number, Parameters(priority=transfer.priority)):
            self.settle_and_send()

    def drop(self, transfer: GroupTransfer) -> None:
        request = self._made.pop(transfer, None)
        if request is None:
            return
        if request in self._subscriber:
            self._subscriber.leave(request)
            self._next_soon()
        elif request.number is None:
            self._requests.leave(request)
        elif self._requests.in_flight.pop(request.number, None) is not None and self.session is not None:
            self.session.requester.cancel(request.number)
            self._next_soon()

    def round_trip(self) -> float | None:
        """Return the smoothed round trip in seconds."""
        return self.transport.round_trip()

    # ------------------------------------------------------------------ Endpoint

    def make_session(self, draft: Draft) -> MoqtSession | None:
        """Check a pinned certificate before any data is sent; see `Endpoint.make_session`."""
        options = self._options
        self.shaken = True
        if options.how.fingerprint is not None:
            try:
                check_pinned(self.transport.peer_certificate(), options.how.fingerprint)
            except TransportError as error:
                self._fail(str(error))
                self.transport.close(SessionCode.NO_ERROR, "")
                self.transport.flush()
                return None
        self.protocol = draft.alpn
        setup = SetupOptions(
            path=options.path.encode(),
            authority=(f"[{options.host}]" if ":" in options.host else options.host).encode() + b":%d" % options.port,
            tokens=(Token(options.token.encode()),) if options.token is not None else (),
            implementation=_KVABR,
        )
        return MoqtSession(draft, client=True, options=setup)

    def happened(self, event: Event) -> None:
        match event:
            case Received():
                self._accept(event)
            case Ended(stream=None):
                self._finished(event.request_id, lambda request: request.finish(event.reset))
            case Refused() if event.request_id in self._requests.in_flight:
                self._finished(event.request_id, lambda request: request.refuse(event.message))
            case Answered() | Ended() | Refused() | SubscriptionEnding() | SubscriptionDone():
                self._subscriber.happened(event)
                self._update_watch()
            case Ready():
                self._announces = event.options.implementation == _KVABR
                if not self.ready.done():
                    self.ready.set_result(None)
            case GoingAway():
                self._peer_goes_away()
            case Requested():
                self._answer(event)
            case Closed():
                why = f"the peer broke the protocol, {name_of(event.code, SessionCode)}: {event.reason}"
                self._fail(why if event.code else "closed by this side")

    def ended(self, reason: str, code: int) -> None:
        if not self.shaken and code in _BAD_CERTIFICATE:
            reason = untrusted(reason, self.transport.peer_certificate())
        elif code in (SessionCode.UNAUTHORIZED, SessionCode.EXPIRED_AUTH_TOKEN):
            if "token" not in reason:
                reason = f"{reason}; the token is missing or wrong"
            reason = f"{reason}; {_TOKEN_HINT}"
            self._lost_kind = UnauthorizedError
        self._fail(reason)

    def receive_buffers(self, stream: int, most: int) -> list[memoryview]:
        """Return the transfer's buffer, so that payload is read directly into it."""
        payload = None if self.session is None else self.session.requester.expected(stream)
        request = None if payload is None else self._requests.in_flight.get(payload.request)
        if payload is None or request is None or request.transfer.over:
            return []
        return place(payload, request.transfer, most)

    def took(self, stream: int, into: list[memoryview], count: int) -> None:
        session = self.session
        assert session is not None  # noqa: S101  # receive_buffers has returned memory
        payload = session.requester.expected(stream)
        request = None if payload is None else self._requests.in_flight.get(payload.request)
        if payload is None or request is None:  # cancelled while a thread was reading
            return
        placed, others = session.requester.took(stream, list(filled(into, count)))
        self._count(placed)
        request.transfer.written(placed, self.watch.limit)
        self._received_any.set()
        if others:
            session.receive(stream, b"".join(others), fin=False)
            self.settle()

    def worked(self, cpu_s: float) -> None:
        self.watch.worked(cpu_s)

    def alive(self) -> None:
        self.watch.alive()
        self._received_any.set()

    # ------------------------------------------------------------------ internals

    def _open_session(self) -> MoqtSession:
        assert self.session is not None  # noqa: S101  # connections are returned after SETUP
        return self.session

    def _fetch(self, request: MoqtRequest) -> None:
        if self.going_away:
            self._lose(request.transfer, _GOING_AWAY)
        elif self._requests.may_send():
            self._send(request)
        else:
            self._requests.wait(request)

    def _send(self, request: MoqtRequest) -> None:
        wanted = request.request
        first, last = Location(wanted.group, 0), Location(wanted.group + wanted.groups - 1, 0)
        parameters = Parameters(priority=request.transfer.priority)
        number = self._open_session().fetch(request.fields, wanted.track.encode(), first, last, parameters)
        request.number = number
        self._requests.in_flight[number] = request
        self._update_watch()

    def _next_soon(self) -> None:
        if not self._next_due:
            self._next_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._next_due = False
        while self._lost is None and (request := self._requests.next()) is not None:
            self._send(request)
        self._update_watch()
        if self._lost is None:
            self.settle_and_send()

    def _peer_goes_away(self) -> None:
        self.going_away = True
        for request in self._requests.clear():
            self._lose(request.transfer, _GOING_AWAY)

    def _finished(self, number: int, end: Callable[[MoqtRequest], None]) -> None:
        request = self._requests.in_flight.pop(number, None)
        if request is not None:
            self._forget(request)
            end(request)
            if len(self._requests):
                self._next_soon()
            self._update_watch()

    def _forget(self, request: MoqtRequest) -> None:
        self._made.pop(request.transfer, None)

    def _accept(self, event: Received) -> None:
        self._count(sum(len(item) for item in event.items if isinstance(item, memoryview)))
        if event.stream is not None:
            self._subscriber.take(event, self.watch.limit)
            self._update_watch()
        elif (request := self._requests.in_flight.get(event.request_id)) is not None:
            request.take(event.items, self.watch.limit)
            if self._announces and is_catalog(request.request.track):
                self.announced_rate = request.rate
        self._received_any.set()

    def _count(self, count: int) -> None:
        self._received += count
        self.watch.received(count)

    def _update_watch(self) -> None:
        self.watch.set_in_flight(len(self._requests.in_flight) + self._subscriber.receiving)

    def _answer(self, event: Requested) -> None:
        """Accept a relay's namespace subscriptions and publications, but ignore them."""
        assert self.session is not None  # noqa: S101  # the event came from it
        responder = self.session.responder
        if isinstance(event.message, PublishNamespace | SubscribeNamespace):
            responder.accept(event.request_id)
        else:
            responder.refuse(event.request_id, RequestCode.NOT_SUPPORTED, "this end only fetches")

    def _probe(self) -> None:
        if self._lost is None:
            with contextlib.suppress(*self.transport.broken):  # the connection is ending
                self.transport.ping()
                self.transport.flush()

    def _lose(self, transfer: GroupTransfer, reason: str) -> None:
        self._made.pop(transfer, None)
        transfer.fail(self._lost_kind(f"{transfer.request}: {reason}"))

    def _fail(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost, self.closed = reason, True
        self.watch.close()
        if not self.ready.done():
            self.ready.set_exception(self._lost_kind(reason))
            self.ready.exception()  # avoids a warning if it is never awaited
        self._requests = RequestQueue()
        self._subscriber.clear()
        for transfer in list(self._made):
            self._lose(transfer, reason)
