"""Announces a store's assets to routers over two ZeroMQ sockets, as vLLM's publisher does.

A new subscriber receives all assets, then changes. A subscriber that missed batches requests a replay. If the batches
are no longer buffered, the replay clears all blocks, and everything is announced again to all subscribers. The thread
works asset by asset. After each it sleeps for as long as it worked, so as not to delay other threads.
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

from kvabr.telemetry.kv_events.announced import AnnouncedAssets
from kvabr.telemetry.kv_events.buffer import ReplayBuffer
from kvabr.telemetry.kv_events.wire import END, KVBlocksCleared, KVBlocksStored, KVEvent, encoded, sequence_frame
from kvabr.telemetry.prometheus import MetricSet
from kvabr.types.errors import HomeProcess, TransportError, UsageError
from kvabr.types.installing import WHERE, extra

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from structlog.typing import FilteringBoundLogger

_BATCH_TOKENS = 16_384
_MAX_WAITING = 1024
"""Maximum number of batches queued for a slow subscriber."""
_MAX_REQUEST_BYTES = 4096
_SHARED_BYTES = 4096
"""Batches larger than this are not copied for each replay, bytes."""
_SETTLE_S = 0.2
"""Seconds to wait before a full announcement, so that other subscribers can join."""
_RECONNECT_S = 30.0
"""Seconds within which subscribers of an earlier process reconnect."""
_PAUSE_FACTOR, _MIN_PAUSE_S = 4.0, 1.0
"""Pause after a full announcement: multiple of its duration, and minimum in seconds."""
_REPLAY_EVERY_S = 0.05
_MAX_STEP_S = 0.1
_IDLE_S = 60.0

T = TypeVar("T")


def zeromq() -> Any:
    """Return the module `zmq`; raise `UsageError` if it is not installed."""
    try:
        import zmq  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise UsageError(f"KV events need ZeroMQ ({error}): {extra('events')} ({WHERE})") from error
    return zmq


def check_endpoint(text: str, what: str) -> str:
    """Return a ZeroMQ endpoint, ``tcp://HOST:PORT`` or ``ipc://PATH``; raise `UsageError` if it is neither."""
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
    """Return the host of an endpoint; None for ``ipc``, which only this machine can reach."""
    return urlsplit(endpoint).hostname if endpoint.startswith("tcp://") else None


class KVEventMetrics(MetricSet):
    """Metrics of a publisher of KV events."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self.assets = self.gauge("kvabr_kv_events_assets", "Assets announced in KV events.")
        self.not_announced = self.gauge(
            "kvabr_kv_events_unannounced", "Assets not announced in KV events, by reason.", "why"
        )
        self.batches_total = self.counter("kvabr_kv_events_batches_total", "Batches of KV events sent.")
        self.replays_total = self.counter(
            "kvabr_kv_events_replays_total", "Replays of KV events: complete, or gone (no longer buffered).", "result"
        )


@dataclass(frozen=True, slots=True)
class EventSockets:
    """Endpoints of a publisher's sockets."""

    endpoint: str
    replay: str | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Parse ``ENDPOINT[,REPLAY]``; raise `UsageError` for a malformed endpoint."""
        endpoint, comma, replay = text.partition(",")
        check_endpoint(endpoint, option)
        return cls(endpoint, check_endpoint(replay, option) if comma else None)


class KVEventPublisher(Generic[T]):
    """Announces a store's assets until it is closed; a context manager."""

    def __init__(
        self,
        sockets: EventSockets,
        announced: AnnouncedAssets[T],
        assets: Callable[[], Mapping[str, T]],
        log: FilteringBoundLogger,
        metrics: KVEventMetrics | None = None,
        *,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        """Bind the sockets; port 0 selects a free port.

        ``assets`` returns all assets by name; it is called in the publisher's thread. Raise `UsageError` for a
        malformed endpoint or without ZeroMQ, `TransportError` if an address is in use or belongs to another machine.
        """
        zmq = self._zmq = zeromq()
        self._announced, self._assets, self._log = announced, assets, log
        self._metrics = metrics or KVEventMetrics()
        self._buffer = buffer or ReplayBuffer(time.time_ns() // 1000)
        self._context = zmq.Context()
        self._publications = self._context.socket(zmq.XPUB)
        self._publications.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replays: Any = None if sockets.replay is None else self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = self._bound(self._publications, sockets.endpoint, _MAX_WAITING)
            self.replay: str | None = None
            if self._replays is not None and sockets.replay is not None:
                self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise an error if a peer's queue is full
                self._replays.copy_threshold = _SHARED_BYTES
                # Enough for one replay; a peer that sends further requests without reading gets no more messages.
                self.replay = self._bound(self._replays, sockets.replay, self._buffer.max_batches + _MAX_WAITING)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._home = HomeProcess("the publisher of KV events")
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._changed, self._closing = True, False
        self._thread = threading.Thread(target=self._run, name="kvabr-kv-events", daemon=True)
        self._began_s = time.monotonic()
        self._announce_all_s: float | None = None
        self._earliest_all_s = self._replay_s = 0.0
        self._topic, self._batch, self._tokens = "", list[KVEvent](), 0

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
        """Announce changes of the store. Thread-safe, returns immediately."""
        self._home.check()
        self._changed = True
        self._ring()

    def _bound(self, sock: Any, endpoint: str, waiting: int) -> str:
        zmq = self._zmq
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, waiting)
        sock.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            sock.bind(check_endpoint(endpoint, "KV events:"))
        except zmq.ZMQError as error:
            raise TransportError(f"KV events: {endpoint} cannot be bound: {error.strerror}") from error
        found: str = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        return found

    def _ring(self) -> None:
        with suppress(OSError):  # if the buffer is full, the thread wakes up anyway
            self._bell.send(b"\0")

    # ------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # noqa: BLE001  # the server must continue
            self._log.exception("the publisher of KV events stopped")

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
                # Do not poll for requests too soon after the last one; they wait in the socket.
                poller.register(self._replays, zmq.POLLIN if now >= self._replay_s else 0)
            if changes is None and self._changed:
                self._changed = False
                changes = self._send_each(self._announced.changes(self._assets()))
            if again is None and self._announce_all_s is not None and now >= self._announce_all_s:
                self._announce_all_s = None
                again = self._announce_all(now)
            work = changes or again  # send removals immediately, also during a full announcement
            ready = dict(poller.poll(1e3 * (pause_s if work is not None else self._idle_s(now))))
            if self._ear.fileno() in ready:
                self._ear.recv(4096)
            if self._publications in ready and self._publications.recv()[:1] == b"\1":
                self._schedule_all(now)
            if self._replays is not None and self._replays in ready:
                self._answer(self._replays.recv_multipart(), now)
            began_s = time.monotonic()
            if work is not None and next(work, self) is self:
                changes, again = (None, again) if work is changes else (changes, None)
                self._flush()
                self._count()
            pause_s = min(time.monotonic() - began_s, _MAX_STEP_S)

    def _idle_s(self, now: float) -> float:
        due = [at for at in (self._announce_all_s, self._replay_s if self._replay_s > now else None) if at is not None]
        return max(0.0, min(due, default=now + _IDLE_S) - now)

    def _schedule_all(self, now: float) -> None:
        if self._announce_all_s is None:
            self._announce_all_s = max(now + _SETTLE_S, self._earliest_all_s)

    def _announce_all(self, began_s: float) -> Iterator[None]:
        if began_s - self._began_s < _RECONNECT_S:
            for topic in self._announced.topics:
                self._add(topic, [KVBlocksCleared()])
        yield from self._send_each(self._announced.all_events())
        now = time.monotonic()
        self._earliest_all_s = now + max(_MIN_PAUSE_S, _PAUSE_FACTOR * (now - began_s))

    def _send_each(self, events_by_topic: Iterator[tuple[str, list[KVEvent]]]) -> Iterator[None]:
        for topic, events in events_by_topic:
            self._add(topic, events)
            yield

    def _add(self, topic: str, events: list[KVEvent]) -> None:
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
            answers[:0] = [(topic.encode(), sequence_frame(first - 1), cleared) for topic in self._announced.topics]
            self._schedule_all(now)
        with suppress(self._zmq.ZMQError):  # the peer has left or does not read
            for answer in (*answers, (b"", END, b"")):
                self._replays.send_multipart((peer, b"", *answer), self._zmq.DONTWAIT, copy=False)
        self._metrics.replays_total.labels("gone" if gone else "complete").inc()

    def _count(self) -> None:
        self._metrics.assets.set(len(self._announced))
        for why, number in self._announced.skipped.items():
            self._metrics.not_announced.labels(why).set(number)
