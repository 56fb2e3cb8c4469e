"""A MoQT `Connection` over QUIC or TCP, made by `kvabr.link.moqt.connect.dial`.

Groups are fetched, or if unpublished, received by a subscription. FETCHes beyond the limit wait in a `RequestQueue`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.link.moqt.options import DialOptions, check_pinned, untrusted
from kvabr.link.moqt.requests import MoqtRequest, RequestQueue, Subscriber, filled, place
from kvabr.moqt.codes import RequestCode, SessionCode, name_of
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
from kvabr.moqt.messages import PublishNamespace, SubscribeNamespace
from kvabr.moqt.parameters import Parameters, SetupOptions, Token
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft, Location
from kvabr.transfer.interface import ConnectionStats, LimitWatch, PeerConnection
from kvabr.transfer.transfer import GroupTransfer
from kvabr.types.errors import (
    ConnectionLostError,
    RequestError,
    TransportError,
    UnauthorizedError,
)
from kvabr.types.naming import MAX_FULL_TRACK_NAME, is_catalog

_KVABR = b"kvabr"
_TOKEN_HINT = "its operator has tokens; give yours with --token-file F, KVABR_TOKEN, or token="  # noqa: S105  # none
_GOING_AWAY = "the peer is going away; reconnect"
_CLOSING_S = 0.25
_BAD_CERTIFICATE = range(0x100 + 42, 0x100 + 49)
"""QUIC error codes of TLS alerts about certificates (RFC 8446, section 6.2)."""


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
        """The peer is kvabr's, so that a rate in its answers is its own, not passed on by a relay."""
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
                    with contextlib.suppress(TimeoutError):  # then the peer's idle timeout ends it
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
        """Return the smoothed round trip, seconds."""
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

    def room(self, stream: int, most: int) -> list[memoryview]:
        """Return the transfer's buffer, so that payload is read to its final place."""
        payload = None if self.session is None else self.session.requester.expected(stream)
        request = None if payload is None else self._requests.in_flight.get(payload.request)
        if payload is None or request is None or request.transfer.over:
            return []
        return place(payload, request.transfer, most)

    def took(self, stream: int, into: list[memoryview], count: int) -> None:
        session = self.session
        assert session is not None  # noqa: S101  # there was room
        payload = session.requester.expected(stream)
        request = None if payload is None else self._requests.in_flight.get(payload.request)
        if payload is None or request is None:  # cancelled while a thread read
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
        """Accept a relay's namespace subscriptions and publications, without acting on them."""
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
