"""Passes the events of plays to listeners, and never delays a play."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Self

from kvabr.telemetry.listener import EventRecord, Listener
from kvabr.types.errors import HomeProcess, UsageError
from kvabr.types.events import Log, PlayCalled, PlayEnded, PlayEvent

_QUEUE_LIMIT = 8192
_ENDS_RESERVE = 1024
"""Additional places in a queue, reserved for `PlayEnded`."""
_CLOSE_S = 5.0


@dataclass(slots=True)
class ListenerCounts:
    """Counts of one listener's events."""

    delivered: int = 0
    dropped: int = 0
    errors: int = 0


class Telemetry:
    """Connects any number of plays to listeners; a context manager."""

    def __init__(self, *listeners: Listener, limit: int = _QUEUE_LIMIT) -> None:
        """Create queues of at most ``limit`` events per listener; further events are dropped and counted."""
        if not listeners or limit < 1:
            raise UsageError(
                f"telemetry needs at least 1 listener and a limit of at least 1, got {len(listeners)} and {limit}"
            )
        self._home = HomeProcess("telemetry")
        self._queues = [_ListenerQueue(listener, limit) for listener in listeners]
        self._chunk = max(1, limit // 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> dict[str, ListenerCounts]:
        """Counts by listener name; a second listener with the same name is ``name-2``."""
        found: dict[str, ListenerCounts] = {}
        for queue in self._queues:
            name, number = queue.listener.name, 2
            while name in found:
                name, number = f"{queue.listener.name}-{number}", number + 1
            found[name] = queue.counts
        return found

    @contextmanager
    def play(self, log: Log | None = None) -> Iterator[Log]:
        """Yield a log for a new play; events are also passed to ``log``. Leaving the context ends the play."""
        self._home.check()
        tap = _Tap(self._queues, time.time())

        def record(event: PlayEvent) -> None:
            tap.put(event, time.time())
            if log is not None:
                log(event)

        try:
            yield record
        except BaseException as error:
            tap.end(time.time(), error)
            raise
        tap.end(time.time())

    def feed(self, events: Iterable[PlayEvent], began_s: float | None = None) -> str:
        """Pass on the events of a finished play, waiting for slow listeners; return its identifier.

        ``began_s`` is the start of the play in seconds since 1970; default: now.
        """
        self._home.check()
        begun = time.time() if began_s is None else began_s
        tap = _Tap(self._queues, begun)
        for count, event in enumerate(events, 1):
            if count % self._chunk == 0:
                self.flush()
            tap.put(event, begun + event.t)
        tap.end(begun + tap.last_s)
        return tap.sid

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Wait until listeners have drained their queues; return False on timeout."""
        until = time.monotonic() + timeout_s
        return all(queue.wait(max(0.0, until - time.monotonic())) for queue in self._queues)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Drain the queues, then end the threads; abandon threads that hang."""
        if not self._home.here:
            return  # the threads and outputs belong to the parent process
        until = time.monotonic() + timeout_s
        for queue in self._queues:
            queue.end()
        for queue in self._queues:
            queue.join(max(0.0, until - time.monotonic()))


class _ListenerQueue:
    def __init__(self, listener: Listener, limit: int) -> None:
        self.listener, self._limit = listener, limit
        self.counts = ListenerCounts()
        self._changed = threading.Condition()
        self._queue: deque[tuple[Context, EventRecord]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"kvabr-telemetry-{listener.name}", daemon=True)
        self._queued = self._taken = 0
        self._closed = self._warned = False

    def put(self, context: Context, delivered: EventRecord) -> None:
        """Queue an event without waiting, or drop it."""
        limit = self._limit + (_ENDS_RESERVE if isinstance(delivered.event, PlayEnded) else 0)
        with self._changed:
            if self._closed or len(self._queue) >= limit:
                self.counts.dropped += 1
                return
            self._queue.append((context, delivered))
            self._queued += 1
            self._wake()

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            queued = self._queued
            return self._changed.wait_for(lambda: self._taken >= queued, timeout_s)

    def end(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._wake()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"is stuck; events lost: {len(self._queue)}")

    def _wake(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                context, delivered = self._queue.popleft()
            self.counts.delivered += 1
            try:
                context.run(self.listener.receive, delivered)
            except BaseException as error:  # noqa: BLE001  # the listener must still receive the next event
                self.counts.errors += 1
                self._warn(f"raised {error!r}")
            with self._changed:
                self._taken += 1
                self._changed.notify_all()
        try:
            self.listener.close()
        except BaseException as error:  # noqa: BLE001  # as above
            self._warn(f"raised {error!r} in close()")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            message = "telemetry: listener %s %s; plays continue, `Telemetry.counts` has the number of lost events"
            logging.getLogger("kvabr.telemetry").warning(message, self.listener.name, problem)


class _Tap:
    def __init__(self, queues: list[_ListenerQueue], wall_s: float) -> None:
        self.sid = uuid.uuid4().hex
        # Each listener runs in a copy of the caller's context, which contains the parent span.
        self._queues = [(queue, copy_context()) for queue in queues]
        self.last_s = 0.0
        self._over = False
        self.put(PlayCalled(0.0), wall_s)

    def put(self, event: PlayEvent, wall_s: float) -> None:
        if self._over:
            return  # upgrades may continue, but listeners have received the play's end
        delivered = EventRecord(self.sid, wall_s, event)
        self.last_s = event.t
        for queue, context in self._queues:
            queue.put(context, delivered)

    def end(self, wall_s: float, error: BaseException | None = None) -> None:
        name, reason = (None, None) if error is None else (type(error).__name__, str(error))
        self.put(PlayEnded(self.last_s, name, reason), wall_s)
        self._over = True
