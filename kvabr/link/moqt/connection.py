"""A `Connection` in MoQT, over QUIC or TCP. `kvabr.link.moqt.connect.dial` makes it.

Each transfer is one FETCH: its objects become the bytes of the transfer, its end becomes that of the transfer. As many
are under way as the peer's limit of streams allows; the others wait in a `RequestQueue`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.link.moqt.options import DialOptions, check_pinned, why_refused
from kvabr.link.moqt.placing import filled, place
from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode, name_of, reason_of
from kvabr.moqt.events import Closed, Ended, Event, GoingAway, Ready, Received, Refused, Requested
from kvabr.moqt.messages import PublishNamespace, SubscribeNamespace
from kvabr.moqt.messages import RequestErrorMessage as Refusal
from kvabr.moqt.objects import Item, ObjectHeader, RangeEnd
from kvabr.moqt.parameters import Parameters, SetupOptions, Token
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft, Location
from kvabr.transfer.interface import ConnectionStats, PeerConnection
from kvabr.transfer.transfer import GroupTransfer, LimitWatch
from kvabr.types.errors import (
    ConnectionLostError,
    NotFoundError,
    Reason,
    RequestError,
    TransportError,
    UnauthorizedError,
)
from kvabr.types.events import Limit
from kvabr.types.naming import CATALOG_TRACK, MAX_FULL_TRACK_NAME, PROPERTY_GROUP_BYTES

_TOKEN_HINT = "its operator has tokens; give yours with --token-file F, KVABR_TOKEN, or token="  # noqa: S105  # none
_CLOSING_S = 0.25
"""Seconds that closing may take."""
_BAD_CERTIFICATE = range(0x100 + 42, 0x100 + 49)
"""QUIC error codes of the TLS alerts about certificates (RFC 8446, section 6.2)."""
MAX_IN_FLIGHT = 64
"""Maximum requests in flight; more wait, the most urgent first. Servers allow about 100 streams."""
MAX_HELD = 28
"""Maximum further requests that the peer holds until their groups are published."""
_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)
_SAME = {
    ResetCode.CANCELLED: RequestCode.INTERNAL_ERROR,
    ResetCode.DELIVERY_TIMEOUT: RequestCode.TIMEOUT,
    ResetCode.SESSION_CLOSED: RequestCode.GOING_AWAY,
    ResetCode.GOING_AWAY: RequestCode.GOING_AWAY,
    ResetCode.TOO_FAR_BEHIND: RequestCode.TIMEOUT,
    ResetCode.UNKNOWN_OBJECT_STATUS: RequestCode.INTERNAL_ERROR,
    ResetCode.EXPIRED_AUTH_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
}
"""What resets of streams mean in the codes of requests, where the same number means something else."""


class MoqtFetch:
    """A transfer that a connection has asked for, or will ask for."""

    def __init__(self, transfer: GroupTransfer, fields: tuple[bytes, ...]) -> None:
        """Begin without bytes; ``fields`` are those of the namespace as the peer is asked for it."""
        self.transfer, self.request, self.fields = transfer, transfer.request, fields
        self.number: int | None = None
        """Request ID; None before it has been asked for."""

    def take(self, items: list[Item], limit: Limit) -> None:
        """Handle objects that have come, and what limited them."""
        transfer, request = self.transfer, self.transfer.request
        for item in items:
            if isinstance(item, memoryview):
                transfer.append(item)
                continue
            transfer.came(limit)
            if isinstance(item, RangeEnd):
                self._wrong("the peer does not have all of it", Reason.INTERNAL)
            elif not 0 <= item.group - request.group < request.groups:
                self._wrong(f"objects of group {item.group} came", Reason.WRONG)
            elif max(item.size, _declared_bytes(item)) > request.limit:
                transfer.too_long()
        transfer.came(limit)

    def finish(self, reset: int | None) -> None:
        """End with the stream, or with the code that reset it."""
        transfer = self.transfer
        if reset is not None:
            reason = name_of(reset, ResetCode)
            code = next((code for known, code in _SAME.items() if known == reset), reset)
            transfer.fail(RequestError(f"{self.request}: broken off by the peer ({reason})", reason=reason_of(code)))
        elif not transfer.received:
            transfer.fail(NotFoundError(f"{self.request}: nothing there", reason=Reason.MISSING))
        else:
            transfer.finish()

    def refuse(self, message: Refusal) -> None:
        """Fail because the peer has refused the request."""
        code, request = message.code, self.request
        said = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            missing = f"{request}: not found{said}"
            if request.track == CATALOG_TRACK:
                name = f"{request.namespace.model}/{request.namespace.prompt}"
                missing = f"no such asset {name}, or none that your token opens"
            error: RequestError = NotFoundError(missing, reason=reason_of(code))
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(f"{request}: refused, {name}{said}", reason=reason_of(code), retry_after_s=retry_s)
        self.transfer.fail(error)

    def _wrong(self, why: str, reason: Reason) -> None:
        self.transfer.reject(RequestError(f"{self.request}: {why}", reason=reason))


def _declared_bytes(header: ObjectHeader) -> int:
    """Return the bytes of the whole group, where its publisher says so; otherwise 0."""
    for kind, value in header.properties:
        if kind == PROPERTY_GROUP_BYTES and isinstance(value, int):
            return value
    return 0


class RequestQueue:
    """The requests of one connection that are not over: those under way, and those that wait.

    The most urgent goes first, then the earliest. Nothing here takes longer when more requests wait.
    """

    def __init__(self) -> None:
        self._asked: dict[int, MoqtFetch] = {}
        self._held: set[int] = set()
        """Those that the peer may be holding until their groups are published."""
        self._silent: set[int] = set()
        """Those whose silence says nothing about the path."""
        self._places: dict[MoqtFetch, int] = {}
        """Requests that wait, and the numbers of their entries in the heaps that count."""
        self._heaps: dict[bool, list[tuple[int, int, MoqtFetch]]] = {False: [], True: []}
        """Heaps of the requests that wait, by whether the peer may hold them."""
        self._entries = 0

    def __iter__(self) -> Iterator[MoqtFetch]:
        return iter((*self._asked.values(), *self.waiting))

    @property
    def waiting(self) -> list[MoqtFetch]:
        """Requests that wait, in the order in which they came."""
        return list(self._places)

    @property
    def waits(self) -> bool:
        """Whether any request waits."""
        return bool(self._places)

    @property
    def awaited(self) -> int:
        """How many requests under way should bring something soon."""
        return len(self._asked) - len(self._silent)

    def under_way(self, number: int) -> MoqtFetch | None:
        """Return a request by the number under which the peer was asked; None if it is over."""
        return self._asked.get(number)

    def wait(self, fetch: MoqtFetch) -> None:
        """Let a request wait, or take in its new priority."""
        self._entries += 1
        self._places[fetch] = self._entries
        heappush(self._heaps[fetch.transfer.held], (fetch.transfer.priority, self._entries, fetch))

    def begin(self, number: int, fetch: MoqtFetch) -> None:
        """Note under which number the peer was asked."""
        self._asked[number] = fetch
        if fetch.transfer.held:
            self._held.add(number)
        if fetch.transfer.held or fetch.request.standing:
            self._silent.add(number)

    def heard(self, number: int, fetch: MoqtFetch) -> bool:
        """Note that something came; return whether that shows that the peer has not held the request any more."""
        if number not in self._held or fetch.transfer.held:
            return False
        self._held.discard(number)
        if not fetch.request.standing:
            self._silent.discard(number)
        return True

    def end(self, number: int) -> MoqtFetch | None:
        """Remove a request under way, and return it; None if it is over."""
        self._held.discard(number)
        self._silent.discard(number)
        return self._asked.pop(number, None)

    def leave(self, fetch: MoqtFetch) -> None:
        """Remove a request that waits."""
        self._places.pop(fetch, None)

    def clear_waiting(self) -> None:
        """Remove all requests that wait."""
        self._places.clear()
        for heap in self._heaps.values():
            heap.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self.clear_waiting()
        for requests in (self._asked, self._held, self._silent):
            requests.clear()

    def has_room(self, *, held: bool) -> bool:
        """Return whether a request may be sent now. What the peer holds takes no room from what it sends."""
        asked = len(self._asked)
        if asked < min(MAX_IN_FLIGHT, MAX_HELD):
            return True
        mine, most = (len(self._held), MAX_HELD) if held else (asked - len(self._held), MAX_IN_FLIGHT)
        return mine < most and asked < MAX_IN_FLIGHT + MAX_HELD

    def next(self) -> MoqtFetch | None:
        """Take the request that waits and may be sent now; None if there is none."""
        first: tuple[int, int, MoqtFetch] | None = None
        for held, heap in self._heaps.items():
            while heap and self._places.get(heap[0][2]) != heap[0][1]:
                heappop(heap)
            if heap and self.has_room(held=held) and (first is None or heap[0] < first):
                first = heap[0]
        if first is None:
            return None
        heappop(self._heaps[first[2].transfer.held])
        del self._places[first[2]]
        return first[2]


class MoqtConnection(Endpoint, PeerConnection):
    """A connection to one publisher or relay."""

    def __init__(self, backend: str, options: DialOptions) -> None:
        super().__init__()
        self.backend = backend
        self.protocol = ""
        self._options = options
        self._over = False
        self._requests = RequestQueue()
        self._fetches: dict[GroupTransfer, MoqtFetch] = {}
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
        return ConnectionStats(rtt, self._received, self.transport.lost())

    async def answers(self, within_s: float) -> bool:
        """See `Connection.answers`."""
        self._heard.clear()
        self._probe()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), within_s)
        return self._lost is None and self._heard.is_set()

    async def close(self) -> None:
        """See `Connection.close`."""
        if self._over:
            return
        self._over = True
        if self._lost is None:
            self.ended("closed by this side", 0)
            self.shut(SessionCode.NO_ERROR, "")
            if self.session is not None:
                with contextlib.suppress(TimeoutError):  # otherwise the peer notices by its idle timeout
                    await asyncio.wait_for(self.transport.wait_closed(), _CLOSING_S)
        self.transport.drop()

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
            fetch = self._fetches[transfer] = MoqtFetch(transfer, fields)
            if self._requests.has_room(held=transfer.held):
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
        elif session is not None and session.requester.update(fetch.number, Parameters(priority=transfer.priority)):
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
        return self.transport.round_trip()

    # ------------------------------------------------------------------ Endpoint

    def make_session(self, draft: Draft) -> MoqtSession | None:
        """See `Endpoint.make_session`. A pinned certificate is checked before anything is sent."""
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
            der = self.refused = self.transport.peer_certificate()
            why = why_refused(der, self._options.host)
            # Each library words the same cause differently; `Connecting` names a cause once.
            reason = why if der is not None else f"{why} ({reason})"
        elif code in (SessionCode.UNAUTHORIZED, SessionCode.EXPIRED_AUTH_TOKEN):
            if "token" not in reason:
                reason = f"{reason}; the token is missing or wrong"
            reason = f"{reason}; {_TOKEN_HINT}"
            self._lost_kind = UnauthorizedError
        self._fail(reason)

    def room(self, stream: int, most: int) -> list[memoryview]:
        """See `Endpoint.room`: the buffer of the transfer, so that payload is read to where it stays."""
        payload = None if self.session is None else self.session.requester.expected(stream)
        fetch = None if payload is None else self._requests.under_way(payload.request)
        if payload is None or fetch is None or fetch.transfer.over:
            return []
        return place(payload, fetch.transfer, most)

    def took(self, stream: int, into: list[memoryview], count: int) -> None:
        """See `Endpoint.took`."""
        session = self.session
        assert session is not None  # noqa: S101  # there was room
        payload = session.requester.expected(stream)
        fetch = None if payload is None else self._requests.under_way(payload.request)
        if payload is None or fetch is None:  # cancelled while a thread read
            return
        placed, others = session.requester.took(stream, list(filled(into, count)))
        self._count(placed)
        fetch.transfer.took(placed, self.watch.limit)
        self._noted(payload.request, fetch)
        if others:
            session.receive(stream, b"".join(others), fin=False)
            self.settle()

    def worked(self, cpu_s: float) -> None:
        """See `Endpoint.worked`."""
        self.watch.worked(cpu_s)

    def alive(self) -> None:
        """See `Endpoint.alive`."""
        self.watch.alive()
        self._heard.set()

    # ------------------------------------------------------------------ internals

    def _ask(self, fetch: MoqtFetch) -> None:
        session = self.session
        assert session is not None  # noqa: S101  # connections are returned once SETUP has arrived
        request = fetch.request
        fill_ms = max(1, round(1000 * request.wait_s)) if request.wait_s > 0 else None
        first, last = Location(request.group, 0), Location(request.group + request.groups - 1, 0)
        parameters = Parameters(priority=fetch.transfer.priority, fill_timeout=fill_ms)
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

    def _finished(self, number: int, tell: Callable[[MoqtFetch], None]) -> None:
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
        self._count(sum(len(item) for item in event.items if isinstance(item, memoryview)))
        fetch.take(event.items, self.watch.limit)
        self._noted(event.request_id, fetch)

    def _count(self, count: int) -> None:
        self._received += count
        self.watch.received(count)

    def _noted(self, number: int, fetch: MoqtFetch) -> None:
        if self._requests.heard(number, fetch):  # what the peer held is published
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
            with contextlib.suppress(*self.transport.broken):  # the connection is ending
                self.transport.ping()
                self.transport.flush()

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
