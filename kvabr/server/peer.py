"""One connection of an origin: who the peer is, what it asks for, and what of that is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from itertools import chain
from typing import TYPE_CHECKING

from kvabr.moqt.codes import RequestCode, ResetCode, SessionCode, name_of
from kvabr.moqt.events import Cancelled, Closed, Event, Ready, Requested, Updated
from kvabr.moqt.messages import Fetch, JoiningFetch, Subscribe, SubscribeNamespace, TrackStatus
from kvabr.moqt.parameters import Parameters, SetupOptions
from kvabr.moqt.session import Session
from kvabr.moqt.wire import Draft, Location
from kvabr.quic.endpoint import Endpoint
from kvabr.quic.library import QuicLibrary
from kvabr.server.publication import Publication
from kvabr.server.rate_limiter import Allowance
from kvabr.server.send_queue import GroupRange, Outbox, Piece, Sending, last_object
from kvabr.store.grants import Grant, token_in_path
from kvabr.types.errors import AssetError, FormatError
from kvabr.types.naming import ROOT, TrackNamespace

if TYPE_CHECKING:
    from kvabr.server.quic_server import QuicServer

_MOQ_RS = b"moq-lite"
"""How moq-rs names itself. Version 0.5 takes a gap between object IDs for a loss, so towards it they run 0, 1, 2, and
it has other habits; see `Responder.lenient` and `Peer._subscribe`."""
_ROOT_PARTS = tuple(part.encode() for part in ROOT.split("/") if part)
_MISSING = "no such track, or none that you may read"
_BUSY_MS = 1000
"""After so many milliseconds a peer that was turned away for load may ask again."""

_OfTrack = Fetch | Subscribe | TrackStatus
"""Requests that name a track."""


class Peer(Endpoint):
    """One connection."""

    starts_at_once = False
    """SETUP is sent to those who are let in, so that the others learn of their refusal as they connect."""

    def __init__(self, library: QuicLibrary, server: QuicServer) -> None:
        super().__init__(library)
        self._server = server
        self.log = server.log
        self._grant: Grant | None = None
        self._dense = False
        self._outbox = Outbox(self._send, self._unsent, lambda: self.lib.window(self.quic), self.may_send)
        self._feeding = False
        self._underway: set[int] = set()
        """Streams that QUIC has been given all of, and the peer has not acknowledged all of."""
        self._allowance = Allowance(server.limits.requests_per_s)
        self._updates = Allowance(server.limits.requests_per_s)
        self._looking: dict[int, asyncio.Task[None]] = {}
        """Requests for which files must be read first."""
        self._aliases = 0
        self._namespaces: dict[int, tuple[bytes, ...]] = {}
        self._over = False
        loop = asyncio.get_running_loop()
        self._handshake = loop.call_later(server.limits.handshake_s, self._too_slow)
        server.metrics.connections.inc()

    @property
    def busy(self) -> bool:
        """Whether anything is being sent, or is still on its way."""
        return len(self._outbox) > 0 or bool(self._underway) or bool(self._looking)

    # ------------------------------------------------------------------ Endpoint

    def make_session(self, draft: Draft) -> Session | None:
        """See `Endpoint.make_session`."""
        if self._server.draining:
            self.shut(SessionCode.NO_ERROR, "the server is going away")
            return None
        if len(self._server.peers) > self._server.limits.connections:
            self._server.metrics.connections_total.labels("too many").inc()
            self.log.warning("connection refused", why="too many connections")
            self.shut(SessionCode.INTERNAL_ERROR, "too many connections; try another server, or later")
            return None
        return Session(draft, client=False, options=SetupOptions(implementation=b"kvabr"))

    def happened(self, event: Event) -> None:
        """See `Endpoint.happened`."""
        match event:
            case Requested():
                self._requested(event)
            case Updated():
                self._updated(event)
            case Cancelled():
                self._namespaces.pop(event.request_id, None)
                if (looking := self._looking.pop(event.request_id, None)) is not None:
                    looking.cancel()
                self._done(self._outbox.remove(event.request_id), complete=False)
            case Ready():
                self._peer_is_ready(event)
            case Closed():
                if event.code:
                    self.log.warning("connection closed", why=event.reason, code=name_of(event.code, SessionCode))

    def ended(self, reason: str, code: int) -> None:
        """See `Endpoint.ended`."""
        if self._over:
            return
        self._over = True
        self._handshake.cancel()
        self._server.metrics.connections.dec()
        for task in self._looking.values():
            task.cancel()
        self._looking.clear()
        for job in self._outbox:
            self._outbox.remove(job.request_id)
            self._done(job, complete=False)
        self._underway.clear()
        self._server.leaves(self)
        self.log.debug("connection over", why=reason, code=code)

    def feed(self) -> None:
        """See `Endpoint.feed`."""
        if self._underway:
            self._forget_delivered()
        if self._feeding or not len(self._outbox):
            return
        self._feeding = True
        try:
            done, broken = self._outbox.feed()
            session = self.session
            if session is None or not (done or broken):
                return
            for job in done:
                session.responder.fetch_sent(job.request_id)
                self._underway.add(job.stream)
                self._done(job, complete=True)
            for job, error in broken:
                self.log.warning("group cannot be sent", error=str(error))
                session.responder.break_off(job.request_id, ResetCode.INTERNAL_ERROR)
                self._done(job, complete=False)
            self.settle()
        finally:
            self._feeding = False

    # ------------------------------------------------------------------ from the server

    def say_goaway(self, grace_s: float) -> None:
        """Tell the peer to go elsewhere."""
        if self.session is not None and not self._over:
            self.session.goaway(int(grace_s * 1000))
            self.settle_and_send()

    def say_goodbye(self) -> None:
        """Close the connection."""
        if not self._over and self.driver is not None:
            self.shut(SessionCode.GOAWAY_TIMEOUT if self.busy else SessionCode.NO_ERROR, "the server closes")

    # ------------------------------------------------------------------ who it is

    def _too_slow(self) -> None:
        if not self._over and self.driver is not None:
            self.log.warning("connection closed", why="no SETUP in time")
            self.shut(SessionCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP came in time")

    def _peer_is_ready(self, event: Ready) -> None:
        self._handshake.cancel()
        options = event.options
        self._dense = (options.implementation or b"").startswith(_MOQ_RS)
        assert self.session is not None  # noqa: S101  # the event came from it
        self.session.responder.lenient = self._dense
        token = event.tokens[0] if event.tokens else token_in_path(options.path)
        self._grant = self._server.holdings.admit(token)
        if self._grant is None:
            self._server.metrics.connections_total.labels("unauthorized").inc()
            self.log.warning("connection refused", why="the token is missing or wrong")
            self.session.close(SessionCode.UNAUTHORIZED, "the token is missing or wrong")
            return
        self._server.metrics.connections_total.labels("accepted").inc()
        if self.session.draft.streams:
            self.session.start()
        implementation = (options.implementation or b"").decode("utf-8", "replace")[:64]
        self.log.info("connected", grant=self._grant.name, peer=implementation, protocol=self.session.draft.alpn)
        if self._server.draining:
            self.session.goaway()

    # ------------------------------------------------------------------ what it wants

    def _requested(self, event: Requested) -> None:
        message, number = event.message, event.request_id
        self._server.metrics.requests_total.labels(type(message).__name__).inc()
        if (why := self._overload()) is not None:
            self._refuse(number, RequestCode.EXCESSIVE_LOAD, why, retry_ms=_BUSY_MS)
            return
        grant = self._grant
        if event.tokens and grant is not None:
            grant = self._server.holdings.admit(event.tokens[0])  # takes the longer the more tokens there are
        if grant is None:
            self._refuse(number, RequestCode.UNAUTHORIZED, "the token is missing or wrong")
        elif isinstance(message, Fetch | Subscribe | TrackStatus):
            self._find(number, message, grant)
        elif isinstance(message, SubscribeNamespace):
            self._subscribe_namespace(number, message)
        elif isinstance(message, JoiningFetch):
            self._refuse(number, RequestCode.NOT_SUPPORTED, "everything is published already: fetch it")
        else:
            self._refuse(number, RequestCode.NOT_SUPPORTED, "this server only publishes")

    def _overload(self) -> str | None:
        """Why a request must be turned away, if it must."""
        limits = self._server.limits
        if not self._allowance.take():
            return f"more than {limits.requests_per_s:g} requests a second"
        if len(self._outbox) + len(self._looking) >= limits.requests_per_connection:
            return f"more than {limits.requests_per_connection} requests at a time"
        if self._server.requests >= limits.requests:
            return "the server is busy"
        return None

    def _updated(self, event: Updated) -> None:
        if not self._updates.take():
            if self._updates.overdrawn and self.session is not None:
                why = f"more than {self._updates.rate:g} updates of requests a second"
                self.session.close(SessionCode.INTERNAL_ERROR, why)
        elif event.parameters.priority is not None:
            self._outbox.prioritise(event.request_id, event.parameters.priority)

    def _find(self, number: int, message: _OfTrack, grant: Grant) -> None:
        """Look for a track, and answer."""
        try:
            namespace = TrackNamespace.from_fields(message.namespace)
            track = message.track.decode()
        except (FormatError, UnicodeDecodeError):
            self._answer(number, message, None)
            return
        holdings = self._server.holdings
        try:
            found = holdings.find(grant, namespace, track, at_once=True)
        except BlockingIOError:
            looking = self._look(number, message, asyncio.to_thread(holdings.find, grant, namespace, track))
            self._looking[number] = asyncio.get_running_loop().create_task(looking)
        else:
            self._answer(number, message, found)

    async def _look(self, number: int, message: _OfTrack, finding: Awaitable[Publication | None]) -> None:
        """The same, once files have been read."""
        try:
            found = await finding
        except Exception as error:  # noqa: BLE001  # nobody thought of it: see `safely`
            self.safely(_raise, error)
            self.driver.transmit()
            return
        del self._looking[number]
        if not self._over:
            self.safely(self._answer, number, message, found)
            self.settle_and_send()
            if not self.busy:
                self._server.settled()

    def _answer(self, number: int, message: _OfTrack, found: Publication | None) -> None:
        if found is None:
            self._refuse(number, RequestCode.DOES_NOT_EXIST, _MISSING)
        elif isinstance(message, Fetch):
            self._fetch(number, message, found)
        else:
            self._subscribe(number, message, found)

    def _fetch(self, number: int, message: Fetch, publication: Publication) -> None:
        start, end = message.start, message.end
        if start.group >= publication.groups:
            self._refuse(number, RequestCode.INVALID_RANGE, f"the track has {publication.groups} groups")
            return
        last = min(end.group, publication.groups - 1)
        try:
            objects = publication.open(last).objects
        except (AssetError, IndexError) as error:
            self.log.warning("group cannot be read", error=str(error))
            self._refuse(number, RequestCode.INTERNAL_ERROR, "the publisher cannot read that group")
            return
        whole = last < end.group or end.object == 0
        final = last_object(objects, dense=self._dense)
        stop = final + 1 if whole else min(end.object, final + 1)
        if start.group == last and start.object > final:
            self._refuse(number, RequestCode.INVALID_RANGE, f"the last object of group {last} is {final}")
            return
        ranges = [
            GroupRange(
                group,
                start.object if group == start.group else 0,
                end.object if group == end.group and end.object else None,
            )
            for group in range(start.group, last + 1)
        ]
        if message.parameters.group_order == 2:
            ranges.reverse()
        assert self.session is not None  # noqa: S101  # the request came from it
        ended = last == publication.groups - 1 and stop == final + 1
        stream = self.session.responder.accept_fetch(number, Location(last, stop), end_of_track=ended)
        priority = 128 if message.parameters.priority is None else message.parameters.priority
        descending = message.parameters.group_order == 2
        self._outbox.add(
            Sending(
                number, stream, publication, ranges, self.session.draft,
                track=message.track.decode(), priority=priority, dense=self._dense, descending=descending,
            )
        )  # fmt: skip
        self._server.requests += 1
        self._server.metrics.requests_in_flight.inc()

    def _subscribe(self, number: int, message: Subscribe | TrackStatus, publication: Publication) -> None:
        """Everything is published already, so a subscription brings nothing, and its track has ended."""
        assert self.session is not None  # noqa: S101  # the request came from it
        responder = self.session.responder
        try:
            group = publication.groups - 1
            largest = Location(group, last_object(publication.open(group).objects, dense=self._dense))
        except AssetError as error:
            self.log.warning("group cannot be read", error=str(error))
            self._refuse(number, RequestCode.INTERNAL_ERROR, "the publisher cannot read that track")
            return
        if isinstance(message, TrackStatus):
            responder.accept(number, Parameters(largest=largest))
            return
        # moq-rs subscribes before it fetches: it would take an end of the track for a track that is no more, and a
        # largest object for an invitation to fetch that too. So its subscriptions stay open, and silent.
        self._aliases += 1
        responder.accept_subscribe(number, self._aliases, None if self._dense else largest)
        if not self._dense:
            responder.publish_done(number, 0x2, 0, "everything is published; fetch it")

    def _subscribe_namespace(self, number: int, message: SubscribeNamespace) -> None:
        """Tell only where this draft's names begin: what lies beneath is nobody's business but its readers'."""
        prefix = message.prefix
        if any(_overlap(prefix, other) for other in self._namespaces.values()):
            self._refuse(number, RequestCode.PREFIX_OVERLAP, "you have subscribed to that prefix already")
            return
        assert self.session is not None  # noqa: S101  # the request came from it
        responder = self.session.responder
        responder.accept(number)
        self._namespaces[number] = prefix
        for name in ((ROOT.encode(),), _ROOT_PARTS):
            if _overlap(prefix, name):
                responder.tell_namespace(number, name[len(prefix) :])

    def _refuse(self, number: int, code: RequestCode, reason: str, *, retry_ms: int | None = None) -> None:
        assert self.session is not None  # noqa: S101  # the request came from it
        self._server.metrics.refusals_total.labels(code.name).inc()
        self.session.responder.refuse(number, code, reason, retry_ms=retry_ms)

    # ------------------------------------------------------------------ sending

    def _send(self, job: Sending, piece: Piece) -> bool:
        try:
            self.quic.send_stream_data(job.stream, piece, job.finished)
        except self.broken:
            return False
        if not job.sent:
            self._server.metrics.first_byte_seconds.observe(time.monotonic() - job.requested_s)
        self._server.metrics.bytes_sent_total.inc(len(piece))
        return True

    def _unsent(self) -> int:
        return self.lib.unsent(self.quic, chain(self._outbox.streams, self._underway))

    def _done(self, job: Sending | None, *, complete: bool) -> None:
        if job is None:
            return
        metrics = self._server.metrics
        self._server.requests -= 1
        metrics.requests_in_flight.dec()
        if complete:
            metrics.group_sent(job.track)
            metrics.group_bytes.observe(job.sent)
        else:
            metrics.cancelled_total.inc()
        if not self.busy:
            self._server.settled()

    def _forget_delivered(self) -> None:
        quic, library = self.quic, self.lib
        self._underway = {stream for stream in self._underway if not library.delivered(quic, stream)}
        if not self.busy:
            self._server.settled()


def _raise(error: Exception) -> None:
    raise error


def _overlap(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> bool:
    """Whether one is a prefix of the other."""
    size = min(len(one), len(other))
    return one[:size] == other[:size]
