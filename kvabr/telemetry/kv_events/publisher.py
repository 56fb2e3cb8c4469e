"""Tells routers what a store has: a thread with two ZeroMQ sockets, as vLLM's publisher has them.

A new subscriber is told everything there is, and from then on what changes. One that missed batches asks for them; if
they are not kept any more, the answer clears everything, and all is told again. All subscribers hear that: to those who
know the blocks already it changes nothing.

The work is done asset by asset, and the thread sleeps as long as it works, so that it holds up nobody else.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

from kvabr.telemetry.kv_events.buffer import ReplayBuffer
from kvabr.telemetry.kv_events.told import ToldAssets
from kvabr.telemetry.kv_events.wire import END, KVBlocksCleared, KVBlocksStored, KVEvent, encoded, sequence_frame
from kvabr.telemetry.prometheus import MetricSet
from kvabr.types.errors import TransportError, UsageError
from kvabr.types.home import HomeProcess
from kvabr.types.installing import WHERE, extra

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from structlog.typing import FilteringBoundLogger

_BATCH_TOKENS = 16_384
_MOST_WAITING = 1024
"""Batches that may wait for a subscriber that is slow; it misses those beyond."""
_MOST_REQUEST_BYTES = 4096
_SHARED_BYTES = 4096
"""Batches from this size on are not copied for each replay."""
_SETTLE_S = 0.2
"""Seconds in which others may subscribe before everything is told again."""
_RETURN_S = 30.0
"""Seconds from the start within which subscribers of an earlier process come back."""
_REST, _LEAST_REST_S = 4.0, 1.0
"""Rest between two times that everything is told: a multiple of what it took, and at least so many seconds."""
_REPLAY_EVERY_S = 0.05
_MOST_STEP_S = 0.1
_IDLE_S = 60.0

T = TypeVar("T")


def zeromq() -> Any:
    """Return the library; `UsageError` without it."""
    try:
        import zmq  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise UsageError(f"KV events need ZeroMQ ({error}): {extra('events')} ({WHERE})") from error
    return zmq


def check_endpoint(text: str, what: str) -> str:
    """Return an endpoint of ZeroMQ, ``tcp://HOST:PORT`` or ``ipc://PATH``; raise `UsageError` if it is none."""
    how = f"{what} {text}: give tcp://HOST:PORT, such as tcp://127.0.0.1:5557, or ipc://PATH"
    try:
        parts = urlsplit(text)
        good = parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path
        path = text.removeprefix("ipc://").encode()
    except ValueError as error:
        raise UsageError(how) from error
    if not good and not (text.startswith("ipc://") and 0 < len(path) < 100 and b"\0" not in path):
        raise UsageError(how)
    return text


def host_of(endpoint: str) -> str | None:
    """Return the host of an endpoint; None: it can be reached from this machine alone."""
    return urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None


class KVEventMetrics(MetricSet):
    """Metrics of a publisher of KV events."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create the metrics, in ``registry`` or in a registry of their own."""
        super().__init__(registry)
        self.assets = self.gauge("kvabr_kv_events_assets", "Assets that are told in KV events.")
        self.untold = self.gauge("kvabr_kv_events_untold", "Assets that are not told in KV events, by why.", "why")
        self.batches_total = self.counter("kvabr_kv_events_batches_total", "Batches of KV events sent.")
        self.replays_total = self.counter(
            "kvabr_kv_events_replays_total", "Replays of KV events: complete, or of batches that were gone.", "result"
        )


@dataclass(frozen=True, slots=True)
class EventSockets:
    """Where events are told."""

    endpoint: str
    """Of the publications."""
    replay: str | None = None
    """Of the replays; None: there are none."""

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Return the endpoints in ``ENDPOINT[,REPLAY]``; `UsageError` if one is none."""
        endpoint, comma, replay = text.partition(",")
        check_endpoint(endpoint, option)
        return cls(endpoint, check_endpoint(replay, option) if comma else None)


class KVEventPublisher(Generic[T]):
    """Tells what a store has, until it is closed; a context manager."""

    def __init__(
        self,
        sockets: EventSockets,
        told: ToldAssets[T],
        assets: Callable[[], Mapping[str, T]],
        log: FilteringBoundLogger,
        metrics: KVEventMetrics | None = None,
        *,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        """Bind the sockets.

        Args:
            sockets: their endpoints; port 0 takes a free one.
            told: what was told, and how.
            assets: returns all assets by name; called in the publisher's thread.
            log: receives events.
            metrics: receives counts.
            buffer: keeps batches for replays.

        Raises:
            UsageError: an endpoint is none, or ZeroMQ is not installed.
            TransportError: an address is in use, or not one of this machine.
        """
        zmq = self._zmq = zeromq()
        self._told, self._assets, self._log = told, assets, log
        self._metrics = metrics or KVEventMetrics()
        self._buffer = buffer or ReplayBuffer(time.time_ns() // 1000)
        self._context = zmq.Context()
        self._publications = self._context.socket(zmq.XPUB)
        self._publications.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replays: Any = None if sockets.replay is None else self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = self._bound(self._publications, sockets.endpoint, _MOST_WAITING)
            self.replay: str | None = None
            if self._replays is not None and sockets.replay is not None:
                self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says when a peer's queue is full
                self._replays.copy_threshold = _SHARED_BYTES
                # Room for one answer: who asks again without reading gets nothing more.
                self.replay = self._bound(self._replays, sockets.replay, self._buffer.max_batches + _MOST_WAITING)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._home = HomeProcess("the publisher of KV events")
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._changed, self._closing = True, False
        self._thread = threading.Thread(target=self._run, name="kvabr-kv-events", daemon=True)
        self._began_s = time.monotonic()
        self._again_s: float | None = None
        """When everything is told again; None: nobody has asked for it."""
        self._rested_s = self._replay_s = 0.0
        self._topic, self._batch, self._tokens = "", list[KVEvent](), 0
        """The batch that is to be sent next."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._home.here:
            return
        self._closing = True
        self._ring()
        self._thread.join()
        self._context.destroy(linger=0)
        self._bell.close()
        self._ear.close()

    def changed(self) -> None:
        """Say that there may be other assets now; returns at once, in any thread."""
        self._home.check()
        self._changed = True
        self._ring()

    def _bound(self, sock: Any, endpoint: str, waiting: int) -> str:
        zmq = self._zmq
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, waiting)
        sock.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            sock.bind(check_endpoint(endpoint, "KV events:"))
        except zmq.ZMQError as error:
            raise TransportError(f"KV events: {endpoint} cannot be bound: {error.strerror}") from error
        found: str = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        return found

    def _ring(self) -> None:
        with suppress(OSError):  # a full buffer rings already
            self._bell.send(b"\0")

    # ------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # noqa: BLE001  # the server goes on
            self._log.exception("KV events end here")

    def _work(self) -> None:
        zmq = self._zmq
        changes: Iterator[None] | None = None
        again: Iterator[None] | None = None
        poller = zmq.Poller()
        poller.register(self._publications, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        pause_s = 0.0
        while not self._closing:
            now = time.monotonic()
            if self._replays is not None:
                # A request that comes too soon after the last one waits in its socket.
                poller.register(self._replays, zmq.POLLIN if now >= self._replay_s else 0)
            if changes is None and self._changed:
                self._changed = False
                changes = self._told_one(self._told.changes(self._assets()))
            if again is None and self._again_s is not None and now >= self._again_s:
                self._again_s = None
                again = self._tell_again(now)
            work = changes or again  # what is gone is told at once, also while everything is told again
            ready = dict(poller.poll(1e3 * (pause_s if work is not None else self._idle_s(now))))
            if self._ear.fileno() in ready:
                self._ear.recv(4096)
            if self._publications in ready and self._publications.recv()[:1] == b"\1":
                self._wanted(now)
            if self._replays is not None and self._replays in ready:
                self._answer(self._replays.recv_multipart(), now)
            began_s = time.monotonic()
            if work is not None and next(work, self) is self:
                changes, again = (None, again) if work is changes else (changes, None)
                self._flush()
                self._count()
            pause_s = min(time.monotonic() - began_s, _MOST_STEP_S)

    def _idle_s(self, now: float) -> float:
        """Return how long nothing is to be done unless something comes."""
        due = [at for at in (self._again_s, self._replay_s if self._replay_s > now else None) if at is not None]
        return max(0.0, min(due, default=now + _IDLE_S) - now)

    def _wanted(self, now: float) -> None:
        """Tell everything again soon."""
        if self._again_s is None:
            self._again_s = max(now + _SETTLE_S, self._rested_s)

    def _tell_again(self, began_s: float) -> Iterator[None]:
        if began_s - self._began_s < _RETURN_S:
            for topic in self._told.topics:
                self._add(topic, [KVBlocksCleared()])
        yield from self._told_one(self._told.again())
        now = time.monotonic()
        self._rested_s = now + max(_LEAST_REST_S, _REST * (now - began_s))

    def _told_one(self, told: Iterator[tuple[str, list[KVEvent]]]) -> Iterator[None]:
        """Send what is told, and yield after each asset."""
        for topic, events in told:
            self._add(topic, events)
            yield

    def _add(self, topic: str, events: list[KVEvent]) -> None:
        """Add events to the batch, in the order in which they are told; send it once it is large enough."""
        if events and topic != self._topic:
            self._flush()
        for event in events:
            self._topic = topic
            self._batch.append(event)
            self._tokens += len(event.token_ids) if isinstance(event, KVBlocksStored) else 0
            if self._tokens >= _BATCH_TOKENS:
                self._flush()

    def _flush(self) -> None:
        if self._batch:
            self._send(self._topic, self._batch)
        self._batch, self._tokens = [], 0

    def _send(self, topic: str, events: list[KVEvent]) -> None:
        batch = self._buffer.add(topic.encode(), encoded(events, time.time()))
        self._publications.send_multipart((batch.topic, sequence_frame(batch.number), batch.payload))
        self._metrics.batches_total.inc()

    def _answer(self, frames: list[bytes], now: float) -> None:
        """Answer a request for a replay; one that is none gets no answer."""
        self._replay_s = now + _REPLAY_EVERY_S
        if len(frames) != 3 or len(frames[2]) != len(END):
            self._log.debug("not a request for a replay", frames=len(frames))
            return
        peer, _, start = frames
        wanted, first = int.from_bytes(start, "big"), self._buffer.first
        answers = [(batch.topic, sequence_frame(batch.number), batch.payload) for batch in self._buffer.since(wanted)]
        gone = wanted < first
        if gone:
            cleared = encoded([KVBlocksCleared()], time.time())
            answers[:0] = [(topic.encode(), sequence_frame(first - 1), cleared) for topic in self._told.topics]
            self._wanted(now)
        with suppress(self._zmq.ZMQError):  # it is gone, or reads nothing
            for answer in (*answers, (b"", END, b"")):
                self._replays.send_multipart((peer, b"", *answer), self._zmq.DONTWAIT, copy=False)
        self._metrics.replays_total.labels("gone" if gone else "complete").inc()

    def _count(self) -> None:
        self._metrics.assets.set(len(self._told))
        for why, number in self._told.untold.items():
            self._metrics.untold.labels(why).set(number)
