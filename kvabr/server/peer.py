"""One connection of a server: who the peer is, what it requests, and what is being sent to it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.moqt.codes import PublishDoneCode, RequestCode, ResetCode, SessionCode, name_of
from kvabr.moqt.events import Cancelled, Closed, Event, Ready, Requested, Stopped, Updated
from kvabr.moqt.messages import Fetch, Subscribe, SubscribeNamespace, TrackStatus
from kvabr.moqt.parameters import SetupOptions
from kvabr.moqt.responder import Responder
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import Draft
from kvabr.server.access import Access, Denial
from kvabr.server.budgets import Host, Room
from kvabr.server.fetch_range import FetchRange, InvalidRangeError, LeftOutError, last_object
from kvabr.server.grants import Grant, token_in_path
from kvabr.server.limits import BUSY_MS, MISSING, RateLimiter, refusal
from kvabr.server.publication import Publication
from kvabr.server.pushing import Pushing
from kvabr.server.send_queue import Piece, Sending, SendQueue
from kvabr.server.subscriptions import Subscriptions
from kvabr.server.waiting_requests import Expected, WaitingRequests
from kvabr.types.errors import AssetError, FormatError, TransportError
from kvabr.types.naming import TrackNamespace

_MOQ_RS = b"moq-lite"
"""How moq-rs names itself. Version 0.5 takes a gap between object IDs for a loss, so its objects are numbered 0, 1, 2.
It has other habits as well; see `Responder.lenient` and `Subscriptions.to_track`."""
_ENDED = 256
"""Streams that the peer has broken off which are told from others, as the two sides of one may be broken off apart."""
_OfTrack = Fetch | Subscribe | TrackStatus
"""Requests that name a track."""


class Peer(Endpoint):
    """One connection of a server."""

    starts_at_once = False
    """SETUP goes only to peers that are let in, so that others learn of their refusal while they connect."""

    def __init__(self, server: Host[Peer]) -> None:
        super().__init__()
        self._server = server
        self.log = server.log
        self._access = Access(server.source)
        self._dense = False
        self._room: Room | None = None
        """Its part in the budgets, once the handshake is done."""
        self._queue = SendQueue(
            self._send, self._unsent, self._ahead, self.may_send, self._allowance, lambda: self.transport.piece
        )
        self._feeding = False
        self._requests_left = RateLimiter(server.limits.requests_per_s)
        self._updates_left = RateLimiter(server.limits.requests_per_s)
        # Requests that are refused may have been cancelled before.
        self._ends_left = RateLimiter(2 * server.limits.requests_per_s)
        self._ended: deque[int] = deque(maxlen=_ENDED)
        """The streams that it has broken off last."""
        self._waiting = WaitingRequests(server, self._found_soon)
        self._waking = False
        self._pushing = Pushing(server, self._queue, self._wake, self._too_late)
        self._subscriptions = Subscriptions(self._refuse, self._pushing)
        self._over = False
        loop = asyncio.get_running_loop()
        self._handshake = loop.call_later(server.limits.handshake_s, self._too_slow)
        server.metrics.connections.inc()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered, or its answer is not acknowledged yet."""
        return len(self._queue) > 0 or bool(self.underway) or len(self._waiting) > 0

    @property
    def _responder(self) -> Responder:
        assert self.session is not None  # noqa: S101  # its requests are answered
        return self.session.responder

    def make_session(self, draft: Draft) -> MoqtSession | None:
        if self._server.draining:
            self.shut(SessionCode.NO_ERROR, "the server is going away")
            return None
        if self._server.crowded:
            self._server.metrics.connections_total.labels("too many").inc()
            self.log.warning("connection refused", why="too many connections")
            self.shut(SessionCode.INTERNAL_ERROR, "too many connections; try another server, or later")
            return None
        self._room = self._server.budgets.enter(self.transport.address)
        if self._room is None:
            self._server.metrics.connections_total.labels("too many of one address").inc()
            self.log.warning("connection refused", why="too many connections from one address")
            self.shut(SessionCode.INTERNAL_ERROR, "too many connections from your address; try again later")
            return None
        self._pushing.room = self._room
        return MoqtSession(draft, client=False, options=SetupOptions(implementation=b"kvabr"))

    def happened(self, event: Event) -> None:
        match event:
            case Requested():
                self._requested(event)
            case Updated():
                self._updated(event)
            case Stopped():
                self._done(self._pushing.stopped(event.request_id, event.stream), complete=False)
            case Cancelled():
                self._subscriptions.cancel(event.request_id)
                self._waiting.stop(event.request_id)
                self._forget(event.request_id)
            case Ready():
                self._peer_is_ready(event)
            case Closed():
                if event.code:
                    self.log.warning("connection closed", why=event.reason, code=name_of(event.code, SessionCode))

    def was_reset(self, stream: int, code: int) -> None:
        self._count_end(stream)
        super().was_reset(stream, code)

    def was_stopped(self, stream: int, code: int) -> None:
        self._count_end(stream)
        super().was_stopped(stream, code)

    def _count_end(self, stream: int) -> None:
        """Count a stream of the peer's that it breaks off, whether or not a request came on it.

        Who cancels a request breaks off both sides of its stream, and the stream of the answer, which is ours.
        """
        if stream & 1 or stream in self._ended:
            return
        self._ended.append(stream)
        if not self._ends_left.take() and self._ends_left.overdrawn and self.session is not None:
            self.session.close(SessionCode.INTERNAL_ERROR, f"more than {self._ends_left.rate:g} streams reset a second")

    def ended(self, reason: str, code: int) -> None:
        if self._over:
            return
        self._over = True
        self._handshake.cancel()
        self._server.metrics.connections.dec()
        self._waiting.stop_all()
        for subscription in self._pushing:
            self._forget(subscription.request_id)
        for job in self._queue:
            self._forget(job.request_id)
        self.underway.clear()
        if self._room is not None:
            self._server.budgets.left(self._room)
            self._room = None
        self._server.left(self)
        self.log.debug("connection over", why=reason, code=code)

    def feed(self) -> None:
        if self.underway:
            self._forget_delivered()
        if self._feeding or not len(self._queue):
            if self._room is not None and self._room.in_flight:
                self._allowance(self._unsent())
            return
        self._feeding = True
        try:
            self.carry_out()  # the heads of streams come before what the queue writes to them
            done, broken = self._queue.feed()
            session = self.session
            if session is None or not (done or broken):
                return
            for job in done:
                if job.subgroup is None:
                    session.responder.fetch_sent(job.request_id)
                else:
                    session.responder.pushed(job.request_id, job.stream)
                self.underway.add(job.stream)
                self._done(job, complete=True)
            for job, error in broken:
                self.log.warning("group cannot be sent", error=str(error))
                if job.subgroup is None:
                    session.responder.break_off(job.request_id, ResetCode.INTERNAL_ERROR)
                else:
                    session.responder.pushed(job.request_id, job.stream, reset=ResetCode.INTERNAL_ERROR)
                    self._pushing.fail(job)
                self._done(job, complete=False)
            self.settle()
            if any(job.subgroup is not None for job in (*done, *(job for job, _ in broken))):
                self._wake()  # for the groups that follow
        finally:
            self._feeding = False

    def _wake(self) -> None:
        """Send what has arrived, once this turn of the event loop is over."""
        if not self._waking and not self._over:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._awake)

    def _awake(self) -> None:
        self._waking = False
        if not self._over:
            self.safely(self.settle_and_send)

    def say_goaway(self, grace_s: float) -> None:
        """Send GOAWAY."""
        if self.session is not None and not self._over:
            self.session.goaway(int(grace_s * 1000))
            self._pushing.end_all(PublishDoneCode.GOING_AWAY, "the server is going away")
            self.settle_and_send()

    def reconsider(self, now_s: float) -> None:
        """Break off what may no longer be read, at a time in seconds since 1970."""
        session = self.session
        if self._over or session is None:
            return
        metrics, access = self._server.metrics, self._access
        if (denial := access.lost(now_s)) is not None:
            token = "" if access.grant is None else access.grant.id
            metrics.token_lost(token, denial.result)
            self.log.info("connection ended", token=token, why=denial.reason)
            self.shut(denial.session, denial.reason)
            return
        for going in (*self._pushing, *(job for job in self._queue if job.subgroup is None)):
            denial = access.lost_request(going.grant, going.publication, now_s)
            if denial is not None:
                metrics.token_lost(going.grant.id, denial.result)
                self.log.info("request ended", token=going.grant.id, track=going.track, why=denial.reason)
                if isinstance(going, Sending):
                    session.responder.break_off(going.request_id, denial.reset)
                else:
                    session.responder.publish_done(going.request_id, denial.done, denial.reason)
                self._forget(going.request_id)
        for number, one in self._waiting.expected.items():
            denial = access.lost_request(one.grant, one.publication, now_s)
            if denial is not None:
                metrics.token_lost(one.grant.id, denial.result)
                self._waiting.stop(number)
                self._refuse(number, denial.request, denial.reason)
        self.settle_and_send()

    @property
    def expires_s(self) -> float:
        """When the first of its tokens expires, seconds since 1970."""
        return self._access.expires_s

    def say_goodbye(self) -> None:
        """Close the connection."""
        if not self._over:
            self.shut(SessionCode.GOAWAY_TIMEOUT if self.busy else SessionCode.NO_ERROR, "the server closes")

    def _too_slow(self) -> None:
        if not self._over:
            self.log.warning("connection closed", why="no SETUP in time")
            self.shut(SessionCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP came in time")

    def _peer_is_ready(self, event: Ready) -> None:
        self._handshake.cancel()
        options = event.options
        self._dense = (options.implementation or b"").startswith(_MOQ_RS)
        assert self.session is not None  # noqa: S101  # the event came from it
        self._responder.lenient = self._dense
        token = event.tokens[0] if event.tokens else token_in_path(options.path)
        grant = self._access.enter(token)
        if isinstance(grant, Denial):
            self._server.metrics.connections_total.labels(grant.result).inc()
            self.log.warning("connection refused", why=grant.reason)
            self.session.close(grant.session, grant.reason)
            return
        self._server.metrics.connections_total.labels("accepted").inc()
        self.session.start()
        implementation = (options.implementation or b"").decode("utf-8", "replace")[:64]
        alpn = self.session.draft.alpn
        self.log.info("connected", grant=grant.name, token=grant.id, peer=implementation, protocol=alpn)
        if self._server.draining:
            self.session.goaway()

    def _requested(self, event: Requested) -> None:
        message, number = event.message, event.request_id
        self._server.metrics.requests_total.labels(type(message).__name__).inc()
        if (why := self._overload()) is not None:
            self._refuse(number, RequestCode.EXCESSIVE_LOAD, why, retry_ms=BUSY_MS)
            return
        grant = self._access.of_request(event.tokens)
        if isinstance(grant, Denial):
            self._refuse(number, grant.request, grant.reason)
            return
        self._server.metrics.token_used(grant.id)
        if isinstance(message, Fetch | Subscribe | TrackStatus):
            self._find(number, message, grant)
        elif isinstance(message, SubscribeNamespace):
            self._subscriptions.to_namespace(self._responder, number, message)
        else:
            self._refuse(number, RequestCode.NOT_SUPPORTED, "this server only publishes")

    def _overload(self) -> str | None:
        limits = self._server.limits
        if not self._requests_left.take():
            return f"more than {limits.requests_per_s:g} requests a second"
        mine = len(self._queue) + len(self._waiting) + len(self._pushing)
        if mine >= limits.requests_per_connection:
            return f"more than {limits.requests_per_connection} requests at a time"
        if self._server.requests >= limits.requests and mine >= self._server.equal_part:
            return "the server is busy"
        return None

    def _updated(self, event: Updated) -> None:
        if not self._updates_left.take():
            if self._updates_left.overdrawn and self.session is not None:
                why = f"more than {self._updates_left.rate:g} updates of requests a second"
                self.session.close(SessionCode.INTERNAL_ERROR, why)
            return
        self._pushing.update(event.request_id, event.parameters)
        if event.parameters.priority is not None:
            self._queue.prioritise(event.request_id, event.parameters.priority)
            self._waiting.prioritise(event.request_id, event.parameters.priority)

    def _find(self, number: int, message: _OfTrack, grant: Grant) -> None:
        try:
            namespace = TrackNamespace.from_fields(message.namespace)
            track = message.track.decode()
        except (FormatError, UnicodeDecodeError):
            self._refuse(number, RequestCode.DOES_NOT_EXIST, MISSING)
            return
        source = self._server.source
        try:
            found = source.find(grant, namespace, track, at_once=True)
        except BlockingIOError:
            self._waiting.look(
                number,
                partial(source.find_soon, grant, namespace, track),
                partial(self._answer, number, message, grant),
                partial(self._refuse_for, number),
            )
        except TransportError as error:
            self._refuse_for(number, error)
        else:
            self._answer(number, message, grant, found)

    def _found_soon(self, answer: Callable[[], None]) -> None:
        """Answer a request whose track had to be looked for."""
        if self._over:
            return
        self.safely(answer)
        self.settle_and_send()
        self._note_idle()

    def _answer(self, number: int, message: _OfTrack, grant: Grant, found: Publication | None) -> None:
        if found is None:
            self._refuse(number, RequestCode.DOES_NOT_EXIST, MISSING)
        elif (denial := self._access.lost_request(grant, found, time.time())) is not None:  # while it was looked for
            self._refuse(number, denial.request, denial.reason)
        elif isinstance(message, Fetch):
            self._fetch(number, message, grant, found)
        else:
            self._subscribe(number, message, grant, found)

    def _fetch(self, number: int, message: Fetch, grant: Grant, publication: Publication) -> None:
        priority = 128 if message.parameters.priority is None else message.parameters.priority
        try:
            room = self._room
            wanted = FetchRange.of(
                message,
                publication.groups,
                lambda group: last_object(publication.objects(group), dense=self._dense),
                growing=publication.growing,
                has=publication.has,
            )
            opened = None  # what waits for room is opened when its turn comes
            first = wanted.groups[0].group
            if room is not None and room.fits(publication.loads(first)):
                opened = publication.open(first, priority, partial(self.safely, self._more, number))
        except InvalidRangeError as error:
            self._refuse(number, RequestCode.INVALID_RANGE, publication.failure or str(error))
            return
        except LeftOutError as error:
            self._refuse(number, RequestCode.DOES_NOT_EXIST, str(error))
            return
        except (AssetError, IndexError) as error:
            self.log.warning("group cannot be read", error=str(error))
            self._refuse(number, RequestCode.INTERNAL_ERROR, "the publisher cannot read that group")
            return
        arriving = opened if opened is not None and opened.available < opened.size else None
        if opened is not None and arriving is None:
            opened.close()  # until its turn comes: what waits holds no files

        def accept() -> None:
            assert self.session is not None  # noqa: S101  # the request came from it
            stream = self.session.responder.accept_fetch(number, wanted.end, end_of_track=wanted.end_of_track)
            self._queue.add(
                Sending(
                    number, stream, publication, wanted.groups, grant=grant,
                    track=message.track.decode(), priority=priority, dense=self._dense, descending=wanted.descending,
                    first=arriving, on_more=self._wake, room=room,
                )
            )  # fmt: skip
            self._server.requests += 1
            self._server.metrics.requests_in_flight.inc()

        if arriving is None:
            accept()
        else:
            self._waiting.expect(number, Expected(arriving, accept, room, grant, publication))
            self._arrived(number)

    def _arrived(self, number: int) -> None:
        """Accept or refuse a request that waits for the first bytes of its group, if they have arrived."""
        try:
            self._waiting.arrived(number)
        except TransportError as error:
            self._refuse_for(number, error)

    def _more(self, number: int) -> None:
        """Send more of a group that has arrived."""
        self._arrived(number)
        self.settle()  # the head of a stream must be written before `feed` continues it
        self._wake()

    def _subscribe(self, number: int, message: Subscribe | TrackStatus, grant: Grant, publication: Publication) -> None:
        try:
            self._subscriptions.to_track(self._responder, number, message, publication, grant, silent=self._dense)
        except AssetError as error:
            self.log.warning("group cannot be read", error=str(error))
            self._refuse(number, RequestCode.INTERNAL_ERROR, "the publisher cannot read that track")

    def _refuse(self, number: int, code: RequestCode, reason: str, *, retry_ms: int | None = None) -> None:
        self._server.metrics.refusals_total.labels(code.name).inc()
        self._responder.refuse(number, code, reason, retry_ms=retry_ms)

    def _refuse_for(self, number: int, error: TransportError) -> None:
        """Pass on why a source cannot answer: the grant was withdrawn, or a relay's origin is away or refuses."""
        code, reason, retry_ms = refusal(error)
        self.log.debug("request refused", why=str(error))
        self._refuse(number, code, reason[:500], retry_ms=retry_ms)

    def _send(self, job: Sending, pieces: Sequence[Piece]) -> bool:
        try:
            for at, piece in enumerate(pieces, 1):
                self.transport.write(job.stream, piece, fin=job.finished and at == len(pieces))
        except self.transport.broken:
            return False
        if not job.sent:
            self._server.metrics.first_byte_seconds.observe(time.monotonic() - job.requested_s)
        self._server.metrics.bytes_sent_total.inc(sum(map(len, pieces)))
        return True

    def _unsent(self) -> int:
        return self.transport.unsent(chain(self._queue.streams, self.underway))

    def _ahead(self) -> int:
        return self.transport.ahead()

    def _allowance(self, unsent: int) -> int:
        """Return how many bytes the transport may be given by the budgets, and note what it has."""
        if self._room is None:
            return 0
        self._room.note(unsent + self.transport.in_flight())
        return self._room.allowance()

    def _done(self, job: Sending | None, *, complete: bool) -> None:
        if job is None:
            return
        if job.subgroup is not None:
            self._pushing.sent(job)
        metrics = self._server.metrics
        self._server.requests -= 1
        metrics.requests_in_flight.dec()
        if complete:
            metrics.group_sent(job.track)
            metrics.group_bytes.observe(job.sent)
        else:
            metrics.cancelled_total.inc()
        self._note_idle()

    def _too_late(self, job: Sending) -> None:
        """Note that a group of a subscription is not sent, as its delivery timeout has passed."""
        self._done(job, complete=False)
        self._wake()

    def _forget(self, number: int) -> None:
        """Take out of the queue what a request or subscription has there."""
        for job in (self._queue.remove(number), *self._pushing.remove(number)):
            self._done(job, complete=False)

    def _note_idle(self) -> None:
        if not self.busy:
            self._server.idle.set()

    def _forget_delivered(self) -> None:
        self.underway = {stream for stream in self.underway if not self.transport.delivered(stream)}
        self._note_idle()
