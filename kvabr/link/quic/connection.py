"""A `Connection` over QUIC in Python, by aioquic or qh3, in MoQT. `kvabr.link.quic.connect.dial` makes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvabr.link.quic.backend import QuicLibrary
from kvabr.link.quic.bottleneck import LimitWatch
from kvabr.link.quic.endpoint import Endpoint
from kvabr.link.quic.fetch import QuicFetch
from kvabr.link.quic.options import DialOptions, check_pinned, why_refused
from kvabr.link.quic.request_queue import RequestQueue
from kvabr.moqt.codes import RequestCode, SessionCode, name_of
from kvabr.moqt.events import Closed, Ended, Event, GoingAway, Ready, Received, Refused, Requested
from kvabr.moqt.messages import PublishNamespace, SubscribeNamespace
from kvabr.moqt.parameters import Parameters, SetupOptions, Token
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft, Location
from kvabr.transfer.interface import ConnectionStats, PeerConnection
from kvabr.transfer.transfer import GroupTransfer
from kvabr.types.errors import ConnectionLostError, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import MAX_FULL_TRACK_NAME

_TOKEN_HINT = "its operator has tokens; give yours with --token-file F, KVABR_TOKEN, or token="  # noqa: S105  # none
_CLOSING_S = 0.25
"""Seconds that closing may take."""
_BAD_CERTIFICATE = range(0x100 + 42, 0x100 + 49)
"""QUIC error codes of the TLS alerts about certificates (RFC 8446, section 6.2)."""


class QuicConnection(Endpoint, PeerConnection):
    """A connection to one publisher or relay."""

    def __init__(self, library: QuicLibrary, options: DialOptions) -> None:
        super().__init__(library)
        self.backend = library.name
        self.protocol = ""
        self._options = options
        self.transport: asyncio.DatagramTransport | None = None
        """Closed with the connection."""
        self._requests = RequestQueue()
        self._fetches: dict[GroupTransfer, QuicFetch] = {}
        self._asking = False
        """Whether the requests that wait are to be looked at once this turn of the event loop is over."""
        self._received = 0
        self._lost: str | None = None
        self._lost_kind = ConnectionLostError
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the peer's SETUP has arrived, or connecting has failed."""
        self.refused: bytes | None = None
        """The peer's certificate, DER, if TLS did not accept it."""
        self.shaken = False
        """Whether the handshake is done."""
        self._heard = asyncio.Event()
        self.watch = LimitWatch(self._probe, self.round_trip)
        """Finds what limits the downloads."""

    # ------------------------------------------------------------------ Connection

    def stats(self) -> ConnectionStats:
        """See `Connection.stats`."""
        rtt = self.round_trip()
        return ConnectionStats(rtt, self._received, self.lib.lost(self.quic))

    async def answers(self, within_s: float) -> bool:
        """See `Connection.answers`."""
        self._heard.clear()
        self._probe()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), within_s)
        return self._lost is None and self._heard.is_set()

    async def close(self) -> None:
        """See `Connection.close`."""
        if self.transport is None:
            return
        transport, self.transport = self.transport, None
        if self._lost is None:
            self.ended("closed by this side", 0)
            self.shut(SessionCode.NO_ERROR, "")
            if self.session is not None:
                with contextlib.suppress(TimeoutError):  # otherwise the peer notices by its idle timeout
                    await asyncio.wait_for(self.driver.wait_closed(), _CLOSING_S)
        transport.close()

    # ------------------------------------------------------------------ Carrier

    def carry(self, transfer: GroupTransfer) -> None:
        """See `Carrier.carry`."""
        namespace = transfer.request.namespace
        if (size := namespace.full_name_bytes(transfer.request.track)) > MAX_FULL_TRACK_NAME:
            why = f"the full track name has {size} bytes, {MAX_FULL_TRACK_NAME} are allowed"
            transfer.fail(RequestError(why))
        elif self._lost is not None:
            self._lose(transfer, self._lost)
        elif self.going_away:
            self._lose(transfer, "the peer is going away; connect anew")
        else:
            fields = namespace.split_fields() if self._options.names == "split" else namespace.fields()
            fetch = self._fetches[transfer] = QuicFetch(transfer, fields)
            if self._requests.has_room(held=fetch.held):
                self._ask(fetch)
                self.settle_and_send()
            else:
                self._requests.wait(fetch)

    def reprioritise(self, transfer: GroupTransfer) -> None:
        """See `Carrier.reprioritise`."""
        fetch, session = self._fetches.get(transfer), self.session
        if fetch is None:
            return
        if fetch.number is None:
            self._requests.wait(fetch)
        elif session is not None and session.requester.update(fetch.number, Parameters(priority=fetch.priority)):
            self.settle_and_send()

    def drop(self, transfer: GroupTransfer) -> None:
        """See `Carrier.drop`."""
        fetch = self._fetches.pop(transfer, None)
        if fetch is None:
            return
        if fetch.number is None:
            self._requests.leave(fetch)
        elif self._requests.end(fetch.number) is not None and self.session is not None:
            self.session.requester.cancel(fetch.number)
            self._next_soon()

    def round_trip(self) -> float | None:
        """Return the smoothed round trip, seconds, if it is known."""
        return self.lib.round_trip(self.quic) if self.driver is not None else None

    # ------------------------------------------------------------------ Endpoint

    def make_session(self, draft: Draft) -> MoqtSession | None:
        """See `Endpoint.make_session`. A pinned certificate is checked before anything is sent."""
        options = self._options
        self.shaken = True
        if options.fingerprint is not None:
            try:
                check_pinned(self.lib.peer_certificate(self.quic), options.fingerprint)
            except TransportError as error:
                self._fail(str(error))
                self.quic.close(error_code=SessionCode.NO_ERROR)
                self.driver.transmit()
                return None
        self.protocol = draft.alpn
        setup = SetupOptions(
            path=options.path.encode(),
            authority=(f"[{options.host}]" if ":" in options.host else options.host).encode() + b":%d" % options.port,
            tokens=(Token(options.token.encode()),) if options.token is not None else (),
            implementation=b"kvabr",
        )
        return MoqtSession(draft, client=True, options=setup)

    def happened(self, event: Event) -> None:
        """See `Endpoint.happened`."""
        match event:
            case Received():
                self._take(event)
            case Ended():
                self._finished(event.request_id, lambda fetch: fetch.finish(event.reset))
            case Refused():
                self._finished(event.request_id, lambda fetch: fetch.refuse(event.message))
            case Ready():
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
        """See `Endpoint.ended`."""
        if not self.shaken and code in _BAD_CERTIFICATE:
            der = self.refused = self.lib.peer_certificate(self.quic)
            why = why_refused(der, self._options.host)
            # Each library words the same cause differently; `Connecting` names a cause once.
            reason = why if der is not None else f"{why} ({reason})"
        elif code in (SessionCode.UNAUTHORIZED, SessionCode.EXPIRED_AUTH_TOKEN):
            if "token" not in reason:
                reason = f"{reason}; the token is missing or wrong"
            reason = f"{reason}; {_TOKEN_HINT}"
            self._lost_kind = UnauthorizedError
        self._fail(reason)

    def alive(self) -> None:
        """See `Endpoint.alive`."""
        self.watch.alive()
        self._heard.set()

    # ------------------------------------------------------------------ internals

    def _ask(self, fetch: QuicFetch) -> None:
        session = self.session
        assert session is not None  # noqa: S101  # connections are returned once SETUP has arrived
        request = fetch.request
        fill_ms = max(1, round(1000 * request.wait_s)) if request.wait_s > 0 else None
        first, last = Location(request.group, 0), Location(request.group + request.groups - 1, 0)
        parameters = Parameters(priority=fetch.priority, fill_timeout=fill_ms)
        number = session.fetch(fetch.fields, request.track.encode(), first, last, parameters)
        fetch.number = number
        self._requests.begin(number, fetch)
        self._tell_watch()

    def _next_soon(self) -> None:
        if not self._asking:
            self._asking = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Send the requests that wait, and whatever else the session has to send."""
        self._asking = False
        while self._lost is None and (fetch := self._requests.next()) is not None:
            self._ask(fetch)
        self._tell_watch()
        if self._lost is None:
            self.settle_and_send()

    def _peer_goes_away(self) -> None:
        self.going_away = True
        waiting = self._requests.waiting
        self._requests.clear_waiting()
        for fetch in waiting:
            self._lose(fetch.transfer, "the peer is going away; connect anew")

    def _finished(self, number: int, tell: Callable[[QuicFetch], None]) -> None:
        fetch = self._requests.end(number)
        if fetch is not None:
            self._fetches.pop(fetch.transfer, None)
            tell(fetch)
            if self._requests.waits:
                self._next_soon()
            self._tell_watch()

    def _take(self, event: Received) -> None:
        if (fetch := self._requests.under_way(event.request_id)) is None:
            return
        count = sum(len(item) for item in event.items if isinstance(item, memoryview))
        self._received += count
        self.watch.received(count)
        fetch.take(event.items, self.watch.limit)
        if self._requests.heard(event.request_id, fetch):  # what the peer held is published
            self._tell_watch()
            if self._requests.waits:
                self._next_soon()
        self._heard.set()

    def _tell_watch(self) -> None:
        self.watch.asked(self._requests.awaited)

    def _answer(self, event: Requested) -> None:
        """Answer a relay that subscribes to namespaces or publishes some: accept, and send nothing."""
        assert self.session is not None  # noqa: S101  # the event came from it
        responder = self.session.responder
        if isinstance(event.message, PublishNamespace | SubscribeNamespace):
            responder.accept(event.request_id)
        else:
            responder.refuse(event.request_id, RequestCode.NOT_SUPPORTED, "this end only fetches")

    def _probe(self) -> None:
        if self._lost is None:
            with contextlib.suppress(*self.broken):  # the connection is ending
                self.quic.send_ping(id(self) & 0xFFFF)
                self.driver.transmit()

    def _lose(self, transfer: GroupTransfer, reason: str) -> None:
        self._fetches.pop(transfer, None)
        transfer.fail(self._lost_kind(f"{transfer.request}: {reason}"))

    def _fail(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost, self.closed = reason, True
        self.watch.close()
        if not self.ready.done():
            self.ready.set_exception(self._lost_kind(reason))
            self.ready.exception()  # retrieved, also if nobody waits for it
        fetches = list(self._requests)
        self._requests.clear()
        for fetch in fetches:
            self._lose(fetch.transfer, reason)
