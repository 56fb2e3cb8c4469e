"""Hears the KV events of one publisher, an engine's or a store's, in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from kvabr.telemetry.kv_events.feed import EventFeed
from kvabr.telemetry.kv_events.publisher import EventSockets, check_endpoint, zeromq
from kvabr.telemetry.kv_events.wire import (
    END,
    MAX_MESSAGE_BYTES,
    MAX_TOPIC_BYTES,
    KVEvent,
    MessageDecoder,
    sequence_frame,
    sequence_in,
)
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.home import HomeProcess

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

REPLAY_S = 10.0
"""Seconds that a replay may take."""
_MOST_WAITING = 128
"""Batches that may wait to be read, of up to 8 MiB each; what is lost behind them is asked for again."""
_RECONNECT_MS, _MOST_RECONNECT_MS = 100, 5000
_MOST_LOGGED = 8
"""Messages that are refused and logged; more are counted only."""


class KVEventSubscriber:
    """Connects to a publisher and passes on what it says; a context manager."""

    def __init__(
        self,
        sockets: EventSockets,
        hear: Callable[[str, Sequence[KVEvent]], object],
        forget: Callable[[str], object],
        log: FilteringBoundLogger,
        *,
        replay_s: float = REPLAY_S,
    ) -> None:
        """Connect; the publisher need not be there yet.

        Args:
            sockets: the publisher's endpoints.
            hear: takes the topic and the events of each batch, in order, in the subscriber's thread.
            forget: hears there that nothing is known of the publisher any more, and why.
            log: receives events.
            replay_s: seconds that a replay may take.

        Raises:
            UsageError: an endpoint is none, or ZeroMQ is not installed.
        """
        zmq = self._zmq = zeromq()
        self._sockets, self._log, self._replay_s = sockets, log, replay_s
        self._feed = EventFeed(hear, self._forgetting(forget), replays=sockets.replay is not None)
        self._decoder = MessageDecoder()
        self.refused = 0
        """Messages that were none."""
        self._context = zmq.Context()
        try:
            self._publications = self._connected(zmq.SUB, sockets.endpoint)
            self._publications.setsockopt(zmq.SUBSCRIBE, b"")
            if sockets.replay is not None:
                self._connected(zmq.DEALER, sockets.replay).close()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._replies: Any = None
        """Socket of the replay that is under way."""
        self._until_s = 0.0
        self._home = HomeProcess("the subscriber to KV events")
        self._bell, self._ear = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvabr-kv-events-heard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._home.here:
            return
        self._closing = True
        self._bell.send(b"\0")
        self._thread.join()
        self._context.destroy(linger=0)
        self._bell.close()
        self._ear.close()

    def _connected(self, kind: int, endpoint: str) -> Any:
        zmq, sock = self._zmq, self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            sock.connect(check_endpoint(endpoint, "KV events:"))
        except zmq.ZMQError as error:
            raise UsageError(f"KV events: {endpoint}: {error.strerror}") from error
        return sock

    def _forgetting(self, forget: Callable[[str], object]) -> Callable[[str], None]:
        def hear(why: str) -> None:
            self._log.warning("a publisher of KV events is forgotten", endpoint=self._sockets.endpoint, why=why)
            forget(why)

        return hear

    # ------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:  # noqa: BLE001  # the router goes on, without this publisher
            self._log.exception("KV events are no longer heard")
            self._feed = EventFeed(lambda *_: None, lambda _: None, replays=False)

    def _turn(self) -> None:
        zmq = self._zmq
        if self._feed.wanted is not None and self._replies is None:
            self._ask(self._feed.wanted)
        poller = zmq.Poller()
        for sock in (self._publications, self._ear, self._replies):
            if sock is not None:
                poller.register(sock, zmq.POLLIN)
        left_s = None if self._replies is None else max(0.0, self._until_s - time.monotonic())
        ready = dict(poller.poll(None if left_s is None else 1e3 * left_s))
        if self._replies is not None and self._replies in ready:
            self._reply(self._replies.recv_multipart())
        if self._publications in ready:
            frames = self._publications.recv_multipart()
            if (batch := self._read(frames)) is not None:
                self._feed.receive(*batch, len(frames[-1]))
        if self._replies is not None and (self._feed.wanted is None or time.monotonic() >= self._until_s):
            self._end_replay()

    def _ask(self, first: int) -> None:
        # A socket of its own for each replay: late answers to an earlier question are nobody's.
        assert self._sockets.replay is not None  # noqa: S101  # otherwise none is wanted
        self._replies = self._connected(self._zmq.DEALER, self._sockets.replay)
        self._until_s = time.monotonic() + self._replay_s
        with suppress(self._zmq.ZMQError):
            self._replies.send_multipart((b"", sequence_frame(first)), self._zmq.DONTWAIT)

    def _reply(self, frames: list[bytes]) -> None:
        if frames and frames[0] == b"":
            frames = frames[1:]
        if len(frames) in (2, 3) and frames[-2] == END:
            self._end_replay()
        elif (batch := self._read(frames if len(frames) != 2 else [b"", *frames])) is not None:
            self._feed.replayed(*batch)

    def _end_replay(self) -> None:
        self._replies.close()
        self._replies = None
        self._feed.replay_ended()

    def _read(self, frames: list[bytes]) -> tuple[int, str, list[KVEvent]] | None:
        """Return a message's number, topic and events; None if it is refused: then its number is missing."""
        why = f"{len(frames)} frames; a message has a topic, a number and a batch"
        if len(frames) == 3 and len(frames[0]) <= MAX_TOPIC_BYTES:
            topic, number, payload = frames
            try:
                return sequence_in(number), topic.decode(errors="replace"), self._decoder.events(payload)
            except FormatError as error:
                why = str(error)
        self.refused += 1
        if self.refused <= _MOST_LOGGED:
            self._log.warning("a message is refused", endpoint=self._sockets.endpoint, why=why)
        return None
