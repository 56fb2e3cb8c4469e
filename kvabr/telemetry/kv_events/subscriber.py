"""Receives the KV events of one publisher (an engine or a store) in its own thread."""

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
from kvabr.types.errors import FormatError, HomeProcess, UsageError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

REPLAY_S = 10.0
_MAX_WAITING = 128
"""Maximum number of queued batches, up to 8 MiB each; lost batches are requested again."""
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 5000
_MAX_LOGGED = 8


class KVEventSubscriber:
    """Connects to a publisher and passes on its events; a context manager."""

    def __init__(
        self,
        sockets: EventSockets,
        on_events: Callable[[str, Sequence[KVEvent]], object],
        forget: Callable[[str], object],
        log: FilteringBoundLogger,
        *,
        replay_s: float = REPLAY_S,
    ) -> None:
        """Connect; the publisher may start later. Raise `UsageError` for malformed sockets, or without ZeroMQ.

        In the subscriber's thread, ``on_events`` receives the topic and events of each batch, in order, and ``forget``
        with the reason why all blocks of this publisher are invalid. ``replay_s`` is the time limit of a replay.
        """
        zmq = self._zmq = zeromq()
        self._sockets, self._log, self._replay_s = sockets, log, replay_s
        self._feed = EventFeed(on_events, self._forgetting(forget), replays=sockets.replay is not None)
        self._decoder = MessageDecoder()
        self.refused = 0
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
        self._until_s = 0.0
        self._home = HomeProcess("the subscriber to KV events")
        self._bell, self._ear = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvabr-kv-events-feed", daemon=True)

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
        sock.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            sock.connect(check_endpoint(endpoint, "KV events:"))
        except zmq.ZMQError as error:
            raise UsageError(f"KV events: {endpoint}: {error.strerror}") from error
        return sock

    def _forgetting(self, forget: Callable[[str], object]) -> Callable[[str], None]:
        def reset(why: str) -> None:
            self._log.warning(
                "dropped the known blocks of a KV event publisher", endpoint=self._sockets.endpoint, why=why
            )
            forget(why)

        return reset

    # ------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        except Exception:  # noqa: BLE001  # the router must continue without this publisher
            self._log.exception("the subscriber to KV events stopped")
            self._feed = EventFeed(lambda *_: None, lambda _: None, replays=False)

    def _step(self) -> None:
        zmq = self._zmq
        if self._feed.wanted is not None and self._replies is None:
            self._request_replay(self._feed.wanted)
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

    def _request_replay(self, first: int) -> None:
        # A new socket for each replay drops late answers to earlier requests.
        assert self._sockets.replay is not None  # noqa: S101  # a replay is requested only if there is such a socket
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
        """Return the number, topic and events of a message; None if it is malformed, which leaves a gap."""
        why = f"a message must have 3 frames (topic, number, batch), got {len(frames)}"
        if len(frames) == 3 and len(frames[0]) <= MAX_TOPIC_BYTES:
            topic, number, payload = frames
            try:
                return sequence_in(number), topic.decode(errors="replace"), self._decoder.events(payload)
            except FormatError as error:
                why = str(error)
        self.refused += 1
        if self.refused <= _MAX_LOGGED:
            self._log.warning("malformed message dropped", endpoint=self._sockets.endpoint, why=why)
        return None
