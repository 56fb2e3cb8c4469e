"""One connection of a server: the client's requests and their answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.moqt.codes import PublishDoneCode, RequestCode, ResetCode, SessionCode, name_of
from kvabr.moqt.events import Cancelled, Closed, Event, Ready, Requested, Stopped, Updated
from kvabr.moqt.messages import Fetch, Subscribe, SubscribeNamespace, TrackStatus
from kvabr.moqt.objects import DEFAULT_PRIORITY, SubgroupHeader
from kvabr.moqt.responder import Responder
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import Draft
from kvabr.server.access import Access, Denial
from kvabr.server.announced_rates import AnnouncedRates, SiteRate
from kvabr.server.budgets import Budgets, ConnectionBudget
from kvabr.server.fetch_range import DESCENDING, FetchRange, FetchRangeError, GroupRange
from kvabr.server.grants import Grant, token_in_path
from kvabr.server.limits import BUSY_MS, MISSING, RateLimiter, ServerLimits, refusal
from kvabr.server.metrics import Metrics
from kvabr.server.publication import Publication, Source
from kvabr.server.send_queue import Piece, Sending, SendQueue, TrackRequest
from kvabr.server.subscriptions import Subscription, Subscriptions
from kvabr.types.errors import AssetError, FormatError, TransportError
from kvabr.types.naming import TrackNamespace, is_catalog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_MOQ_RS = b"moq-lite"
"""Implementation name of moq-rs. Its version 0.5 treats a gap between object IDs as a loss, so objects for it are
numbered 0, 1, 2. See also `Responder.lenient` and `Subscriptions.to_track`."""
_MAX_ENDED = 256
"""Number of reset streams to remember: both sides of a stream may be reset separately."""
_MIN_REQUESTS = 8
"""Requests that each connection may have even when the server is at its limit."""
_OfTrack = Fetch | Subscribe | TrackStatus


class Host:
    """State shared by a server's connections."""

    def __init__(self, source: Source, limits: ServerLimits, log: FilteringBoundLogger, metrics: Metrics) -> None:
        self.source, self.limits, self.log, self.metrics = source, limits, log, metrics
        self.budgets = Budgets(limits)
        self.rates: AnnouncedRates | None = None
        self.peers: set[ClientConnection] = set()
        self.requests = 0
        """Number of requests in flight on all connections."""
        self.draining = False

    def left(self, peer: ClientConnection) -> None:
        """Remove a connection that has ended."""
        self.peers.discard(peer)


class ClientConnection(Endpoint):
    """The server's end of one client's connection."""

    starts_at_once = False
    """False: SETUP is sent only to admitted clients, so that others see their refusal while connecting."""

    def __init__(self, server: Host) -> None:
        super().__init__()
        self._server = server
        self.log = server.log
        self.access = Access(server.source)
        self._dense = False
        self._budget: ConnectionBudget | None = None
        self._site: SiteRate | None = None
        self._given = self._delivered = 0
        """Bytes given to the transport, and acknowledged."""
        self._queue = SendQueue(self._send, self._may_send)
        self._underway: set[int] = set()
        """Streams given to the transport but not yet delivered in full."""
        self._deadlines: dict[Sending, asyncio.TimerHandle] = {}
        """Timers of pushed groups with a delivery timeout; they hold the connection in memory."""
        self._feeding = False
        rate = server.limits.requests_per_s
        self._requests_left, self._updates_left = RateLimiter(rate), RateLimiter(rate)
        self._ends_left = RateLimiter(2 * rate)  # refused requests may have been cancelled before
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self._lookups: dict[int, asyncio.Task[Publication | None]] = {}
        self._subscriptions = Subscriptions(lambda: self._responder, self._push, self._wake)
        self._counted = 0
        self._waking = self._over = False
        self._handshake = asyncio.get_running_loop().call_later(server.limits.handshake_s, self._too_slow)
        server.metrics.connections.inc()

    @property
    def busy(self) -> bool:
        """True if an answer is unfinished or unacknowledged."""
        return len(self._queue) > 0 or bool(self._underway) or bool(self._lookups)

    @property
    def _responder(self) -> Responder:
        assert self.session is not None  # noqa: S101  # its requests are answered
        return self.session.responder

    def make_session(self, draft: Draft) -> MoqtSession | None:
        server = self._server
        if server.draining:
            self.shut(SessionCode.NO_ERROR, "the server is going away")
            return None
        if len(server.peers) > server.limits.connections:
            self._reject("too many", "", "; try another server, or later")
            return None
        self._budget = server.budgets.enter(self.transport.address)
        if self._budget is None:
            self._reject("too many of one address", " from one address", " from your address; try again later")
            return None
        if server.rates is not None:
            self._site = server.rates.site(self.transport.address)
        return MoqtSession(draft, client=False, options=SetupOptions(implementation=b"kvabr"))

    def _reject(self, result: str, why: str, advice: str) -> None:
        self._server.metrics.connections_total.labels(result).inc()
        self.log.warning("connection refused", why=f"too many connections{why}")
        self.shut(SessionCode.INTERNAL_ERROR, f"too many connections{advice}")

    def happened(self, event: Event) -> None:
        match event:
            case Requested():
                self._requested(event)
            case Updated():
                self._updated(event)
            case Stopped():
                for job in self._queue.of(event.request_id):
                    if job.stream == event.stream:
                        self._give_up(job)
            case Cancelled():
                self._forget(event.request_id)
            case Ready():
                self._peer_is_ready(event)
            case Closed():
                if event.code:
                    self.log.warning("connection closed", why=event.reason, code=name_of(event.code, SessionCode))

    def settle(self) -> None:
        super().settle()
        self._count()

    def was_reset(self, stream: int, code: int) -> None:
        self._count_end(stream)
        super().was_reset(stream, code)

    def was_stopped(self, stream: int, code: int) -> None:
        self._count_end(stream)
        super().was_stopped(stream, code)

    def _count_end(self, stream: int) -> None:
        """Count a stream that the peer has reset, whether or not it carried a request.

        If the peer cancels a request, it resets both directions of the request's stream, and our stream with the
        answer.
        """
        if stream & 1 or stream in self._ended:
            return
        self._ended.append(stream)
        self._within(self._ends_left, "streams reset")

    def _within(self, limiter: RateLimiter, what: str) -> bool:
        within = limiter.take()
        if not within and limiter.overdrawn and self.session is not None:
            self.session.close(SessionCode.INTERNAL_ERROR, f"more than {limiter.rate:g} {what} a second")
        return within

    def ended(self, reason: str, code: int) -> None:
        if self._over:
            return
        self._over = True
        self._handshake.cancel()
        self._server.metrics.connections.dec()
        for number in {*self._lookups, *(request.number for request in self._answered())}:
            self._forget(number)
        self._underway.clear()
        self._count()
        if self._budget is not None:
            self._server.budgets.left(self._budget)
            self._budget = None
        self._measure(self._delivered, limited=False)
        self._server.left(self)
        self.log.debug("connection over", why=reason, code=code)

    def feed(self) -> None:
        if self._underway:
            self._underway = {stream for stream in self._underway if not self.transport.delivered(stream)}
        budget = self._budget
        if self._feeding or self.session is None or budget is None or not (len(self._queue) or budget.in_flight):
            return
        self._feeding = True
        try:
            self.carry_out()  # stream headers precede the data that the queue writes
            streams = (job.stream for job in self._queue if job.stream is not None)
            unsent = self.transport.unsent(chain(streams, self._underway))
            budget.note(unsent + self.transport.in_flight())
            left, given = min(self.transport.ahead() - unsent, budget.allowance()), self._given
            ended = self._queue.feed(left, self.transport.piece)
            self._measure(given - budget.in_flight, limited=len(self._queue) > 0 and self._given - given >= left)
            for job, error in ended:
                self._end(job, error)
            if ended:
                self.settle()
            if any(job.subgroup is not None for job, _ in ended):
                self._wake()  # for the groups that follow
        finally:
            self._feeding = False

    def _measure(self, delivered: int, *, limited: bool) -> None:
        if self._site is None or self._server.rates is None:
            return
        more = max(0, delivered - self._delivered)
        self._delivered += more
        self._site.note(self, more, self.transport.round_trip() or 0.0, self._server.rates.clock(), limited=limited)

    def _end(self, job: Sending, error: Exception | None) -> None:
        """Finish an answer that was sent, or failed with ``error``."""
        number, stream, responder = job.request.number, job.stream, self._responder
        if stream is None:
            assert error is not None  # noqa: S101  # only a failed answer has no stream
            self._refuse_for(number, error)
        elif job.subgroup is not None:
            responder.pushed(number, stream, reset=None if error is None else ResetCode.INTERNAL_ERROR)
        elif error is None:
            responder.fetch_sent(number)
        else:
            responder.break_off(number, ResetCode.INTERNAL_ERROR)
        if stream is not None and error is None:
            self._underway.add(stream)
            self._server.metrics.group_sent(job.request.track)
        elif stream is not None:
            self.log.warning("group cannot be sent", error=str(error))
        self._left_queue(job, failed=error is not None)

    def _give_up(self, job: Sending) -> None:
        self._queue.remove(job)
        self._left_queue(job)

    def _left_queue(self, job: Sending, *, failed: bool = False) -> None:
        if (deadline := self._deadlines.pop(job, None)) is not None:
            deadline.cancel()
        self._subscriptions.sent(job, failed=failed)

    def _wake(self) -> None:
        if not self._waking and not self._over:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._awake)

    def _awake(self) -> None:
        self._waking = False
        if not self._over:
            self.safely(self.settle_and_send)

    def say_goaway(self, grace_s: float) -> None:
        """Send GOAWAY and end the subscriptions."""
        if self.session is not None and not self._over:
            self.session.goaway(int(grace_s * 1000))
            self._subscriptions.end_all(PublishDoneCode.GOING_AWAY, "the server is going away")
            self.settle_and_send()

    def reconsider(self, now_s: float) -> None:
        """End requests, or the connection, that are no longer allowed at ``now_s`` (seconds since 1970)."""
        session = self.session
        if self._over or session is None:
            return
        access = self.access
        if (denial := access.recheck(now_s)) is not None:
            token = "" if access.grant is None else access.grant.id
            self.log.info("connection ended", token=token, why=denial.reason)
            self.shut(denial.session, denial.reason)
            return
        for request in self._answered():
            denial = access.recheck_request(request.grant, request.publication, now_s)
            if denial is not None:
                self.log.info("request ended", token=request.grant.id, track=request.track, why=denial.reason)
                if request in self._subscriptions:
                    session.responder.publish_done(request.number, denial.done, denial.reason)
                elif any(job.stream is None for job in self._queue.of(request.number)):
                    self._refuse(request.number, denial.request, denial.reason)
                else:
                    session.responder.break_off(request.number, denial.reset)
                self._forget(request.number)
        self.settle_and_send()

    def say_goodbye(self) -> None:
        """Close the connection because the server closes."""
        if not self._over:
            self.shut(SessionCode.GOAWAY_TIMEOUT if self.busy else SessionCode.NO_ERROR, "the server closes")

    def _too_slow(self) -> None:
        if not self._over:
            self.log.warning("connection closed", why="no SETUP in time")
            self.shut(SessionCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP arrived in time")

    def _peer_is_ready(self, event: Ready) -> None:
        self._handshake.cancel()
        options = event.options
        self._dense = (options.implementation or b"").startswith(_MOQ_RS)
        assert self.session is not None  # noqa: S101  # the event is from it
        self._responder.lenient = self._dense
        token = event.tokens[0] if event.tokens else token_in_path(options.path)
        grant = self.access.enter(token)
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
        if (why := self._overload()) is not None:
            self._refuse(number, RequestCode.EXCESSIVE_LOAD, why, retry_ms=BUSY_MS)
            return
        grant = self.access.for_request(event.tokens)
        if isinstance(grant, Denial):
            self._refuse(number, grant.request, grant.reason)
            return
        self._server.metrics.token_used(grant.id)
        if isinstance(message, Fetch | Subscribe | TrackStatus):
            self._find(number, message, grant)
        elif isinstance(message, SubscribeNamespace):
            if not self._subscriptions.to_namespace(number, message):
                self._refuse(
                    number, RequestCode.PREFIX_OVERLAP, "this connection already has a subscription to that prefix"
                )
        else:
            self._refuse(number, RequestCode.NOT_SUPPORTED, "this server only publishes")

    def _overload(self) -> str | None:
        limits = self._server.limits
        if not self._requests_left.take():
            return f"more than {limits.requests_per_s:g} requests a second"
        self._count()
        mine = self._counted
        if mine >= limits.requests_per_connection:
            return f"more than {limits.requests_per_connection} requests at a time"
        fair = max(_MIN_REQUESTS, limits.requests // max(1, len(self._server.peers)))
        if self._server.requests >= limits.requests and mine >= fair:
            return "the server is busy"
        return None

    def _updated(self, event: Updated) -> None:
        if self._within(self._updates_left, "updates of requests"):
            if event.parameters.priority is not None:
                self._queue.reprioritise(event.request_id, event.parameters.priority)
            self._subscriptions.update(event.request_id, event.parameters)

    def _find(self, number: int, message: _OfTrack, grant: Grant) -> None:
        try:
            namespace = TrackNamespace.from_fields(message.namespace)
            track = message.track.decode()
        except (FormatError, UnicodeDecodeError):
            self._refuse(number, RequestCode.DOES_NOT_EXIST, MISSING)
            return
        source = self._server.source
        try:
            self._answer(number, message, grant, lambda: source.find(grant, namespace, track, at_once=True))
        except BlockingIOError:
            task = asyncio.get_running_loop().create_task(source.find_soon(grant, namespace, track))
            self._lookups[number] = task
            task.add_done_callback(partial(self.safely, self._found, number, message, grant))

    def _found(self, number: int, message: _OfTrack, grant: Grant, task: asyncio.Task[Publication | None]) -> None:
        if self._lookups.pop(number, None) is not None:  # else it was cancelled
            self._answer(number, message, grant, task.result)
            self.settle_and_send()

    def _answer(self, number: int, message: _OfTrack, grant: Grant, find: Callable[[], Publication | None]) -> None:
        """Answer a request with the track that ``find`` returns, or refuse it; pass on its `BlockingIOError`."""
        try:
            found = find()
            if found is None:
                self._refuse(number, RequestCode.DOES_NOT_EXIST, MISSING)
            else:
                self._serve(number, message, grant, found)
        except FetchRangeError as error:
            self._refuse(number, error.code, str(error))
        except (AssetError, TransportError) as error:
            self._refuse_for(number, error)

    def _serve(self, number: int, message: _OfTrack, grant: Grant, found: Publication) -> None:
        if (denial := self.access.recheck_request(grant, found, time.time())) is not None:  # since the request
            self._refuse(number, denial.request, denial.reason)
            return
        parameters = message.parameters
        priority = DEFAULT_PRIORITY if parameters.priority is None else parameters.priority
        descending = parameters.group_order == DESCENDING
        request = TrackRequest(number, found, grant, message.track.decode(), priority, descending, self._dense)
        if self._server.rates is not None and is_catalog(request.track):
            request.rate = self._server.rates.of(self.transport.address)
        if isinstance(message, Fetch):
            self._fetch(request, message)
        else:
            self._subscriptions.to_track(request, message)

    def _fetch(self, request: TrackRequest, message: Fetch) -> None:
        wanted = FetchRange.of(message, request.publication, dense=self._dense)
        accept = partial(self._responder.accept_fetch, request.number, wanted.end, end_of_track=wanted.end_of_track)
        job = self._job(request, wanted.groups(request.publication), accept=accept)
        if request.publication.dear:
            job.ready()  # begin to fetch the group if there is memory for it
        self._queue.add(job)

    def _push(self, subscription: Subscription, group_range: GroupRange, header: SubgroupHeader, stream: int) -> None:
        self._queue.add(job := self._job(subscription.request, [group_range], stream=stream, subgroup=header))
        if (timeout_s := subscription.timeout_s) is not None:
            self._deadlines[job] = asyncio.get_running_loop().call_later(timeout_s, self._too_late, job, stream)

    def _too_late(self, job: Sending, stream: int) -> None:
        self._responder.pushed(job.request.number, stream, reset=ResetCode.DELIVERY_TIMEOUT)
        self._give_up(job)
        self._wake()

    def _job(self, request: TrackRequest, ranges: Iterable[GroupRange], **more: Any) -> Sending:
        assert self._budget is not None  # noqa: S101  # the handshake is done
        return Sending(request, ranges, self._budget, self._wake, **more)

    def _refuse(self, number: int, code: RequestCode, reason: str, *, retry_ms: int | None = None) -> None:
        self._server.metrics.refusals_total.labels(code.name).inc()
        self._responder.refuse(number, code, reason, retry_ms=retry_ms)

    def _refuse_for(self, number: int, error: Exception) -> None:
        code, reason, retry_ms = refusal(error)
        report = self.log.debug if isinstance(error, TransportError) else self.log.warning
        report("request refused", why=str(error))
        self._refuse(number, code, reason[:500], retry_ms=retry_ms)

    def _may_send(self, job: Sending) -> bool:
        if job.stream is None:
            if job.accept is None or job.request.number not in self._responder:
                return False  # the session is about to report its cancellation
            job.stream = job.accept()
            self.carry_out()
        return self.may_send(job.stream)

    def _send(self, job: Sending, pieces: Sequence[Piece]) -> bool:
        assert job.stream is not None  # noqa: S101  # `_may_send` has set it
        try:
            for at, piece in enumerate(pieces, 1):
                self.transport.write(job.stream, piece, fin=job.finished and at == len(pieces))
        except self.transport.broken:
            return False
        if not job.sent:
            self._server.metrics.first_byte_seconds.observe(time.monotonic() - job.requested_s)
        size = sum(map(len, pieces))
        self._given += size
        self._server.metrics.bytes_sent_total.inc(size)
        return True

    def _answered(self) -> set[TrackRequest]:

        return {*self._subscriptions, *(job.request for job in self._queue)}

    def _forget(self, number: int) -> None:

        if (task := self._lookups.pop(number, None)) is not None:
            task.cancel()
        self._subscriptions.remove(number)
        for job in self._queue.of(number):
            self._give_up(job)

    def _count(self) -> None:
        mine = len(self._queue) + len(self._lookups) + len(self._subscriptions)
        if mine != self._counted:
            self._server.requests += mine - self._counted
            self._server.metrics.requests_in_flight.inc(mine - self._counted)
            self._counted = mine
