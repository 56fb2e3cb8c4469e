"""Hands the events of plays to listeners; a play never waits for one."""

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

from kvabr.telemetry.listener import Heard, Listener
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, PlayCalled, PlayEnded, PlayEvent
from kvabr.types.home import HomeProcess

_QUEUE_LIMIT = 8192
"""Events: those of several plays of a hundred groups."""
_ENDS_RESERVE = 1024
"""Places beyond that for `PlayEnded`."""
_CLOSE_S = 5.0
"""Seconds that `close` waits for the listeners to take queued events."""


@dataclass(slots=True)
class ListenerCounts:
    """Events of one listener."""

    heard: int = 0
    dropped: int = 0
    """The queue was full."""
    errors: int = 0
    """Heard, but the listener raised an exception."""


class Telemetry:
    """Connects any number of plays to listeners; a context manager."""

    def __init__(self, *listeners: Listener, limit: int = _QUEUE_LIMIT) -> None:
        """Start without threads; each listener gets its thread with its first event.

        At most ``limit`` events wait for each; more are dropped and counted.
        """
        if not listeners or limit < 1:
            raise UsageError("telemetry: give at least one listener, and a limit of at least 1 event")
        self._home = HomeProcess("telemetry")
        self._queues = [_ListenerQueue(listener, limit) for listener in listeners]
        self._chunk = max(1, limit // 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> dict[str, ListenerCounts]:
        """Counts by name of the listener; a second listener of the same name is ``name-2``."""
        found: dict[str, ListenerCounts] = {}
        for queue in self._queues:
            name, number = queue.listener.name, 2
            while name in found:
                name, number = f"{queue.listener.name}-{number}", number + 1
            found[name] = queue.counts
        return found

    @contextmanager
    def play(self, log: Log | None = None) -> Iterator[Log]:
        """Yield the log of a new play, which also calls ``log`` with every event; leaving the context ends the play."""
        self._home.check()
        tap = _Tap(self._queues, time.time())

        def hear(event: PlayEvent) -> None:
            tap.tell(event, time.time())
            if log is not None:
                log(event)

        try:
            yield hear
        except BaseException as error:
            tap.end(time.time(), error)
            raise
        tap.end(time.time())

    def feed(self, events: Iterable[PlayEvent], began_s: float | None = None) -> str:
        """Pass on the events of a finished play, for instance a simulated one; wait for listeners that fall behind.

        It began at ``began_s``, seconds since 1970; None: now. Return the identifier that the play was given.
        """
        self._home.check()
        begun = time.time() if began_s is None else began_s
        tap = _Tap(self._queues, begun)
        for count, event in enumerate(events, 1):
            if count % self._chunk == 0:
                self.flush()
            tap.tell(event, begun + event.t)
        tap.end(begun + tap.last_s)
        return tap.sid

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Wait until every listener has taken all events so far; return whether all have."""
        until = time.monotonic() + timeout_s
        return all(queue.wait(max(0.0, until - time.monotonic())) for queue in self._queues)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Let the listeners take queued events, then end their threads; a thread that hangs is abandoned."""
        if not self._home.here:
            return  # the threads, and what they write to, are the parent's
        until = time.monotonic() + timeout_s
        for queue in self._queues:
            queue.end()
        for queue in self._queues:
            queue.join(max(0.0, until - time.monotonic()))


class _ListenerQueue:
    """One listener, its queue and its thread, which starts with the first event."""

    def __init__(self, listener: Listener, limit: int) -> None:
        self.listener, self._limit = listener, limit
        self.counts = ListenerCounts()
        self._changed = threading.Condition()
        self._queue: deque[tuple[Context, Heard]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"kvabr-telemetry-{listener.name}", daemon=True)
        self._queued = self._taken = 0
        self._closed = self._told = False

    def put(self, context: Context, heard: Heard) -> None:
        """Queue an event, or drop it if the queue is full; never wait."""
        room = self._limit + (_ENDS_RESERVE if isinstance(heard.event, PlayEnded) else 0)
        with self._changed:
            if self._closed or len(self._queue) >= room:
                self.counts.dropped += 1
                return
            self._queue.append((context, heard))
            self._queued += 1
            self._wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the listener has taken the events queued so far; return whether it has."""
        with self._changed:
            queued = self._queued
            return self._changed.wait_for(lambda: self._taken >= queued, timeout_s)

    def end(self) -> None:
        """Take no more events; the thread closes the listener once it has taken those that are queued, and ends."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, after `end`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._tell(f"is stuck: {len(self._queue)} events are lost")

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
                context, heard = self._queue.popleft()
            self.counts.heard += 1
            try:
                context.run(self.listener.hear, heard)
            except BaseException as error:  # noqa: BLE001  # the listener must hear the next event
                self.counts.errors += 1
                self._tell(f"raised {error!r}")
            with self._changed:
                self._taken += 1
                self._changed.notify_all()
        try:
            self.listener.close()
        except BaseException as error:  # noqa: BLE001  # as above
            self._tell(f"raised {error!r} as it was closed")

    def _tell(self, what: str) -> None:
        """Warn, once per listener."""
        if not self._told:
            self._told = True
            message = "telemetry: listener %s %s; plays go on, `Telemetry.counts` says how much is lost"
            logging.getLogger("kvabr.telemetry").warning(message, self.listener.name, what)


class _Tap:
    """Passes the events of one play to all listeners."""

    def __init__(self, queues: list[_ListenerQueue], wall_s: float) -> None:
        self.sid = uuid.uuid4().hex
        # Each listener runs in a copy of the caller's context, in which a span finds its parent.
        self._queues = [(queue, copy_context()) for queue in queues]
        self.last_s = 0.0
        self._over = False
        self.tell(PlayCalled(0.0), wall_s)

    def tell(self, event: PlayEvent, wall_s: float) -> None:
        if self._over:
            return  # upgrades may continue after the play, but it has ended for the listeners
        heard = Heard(self.sid, wall_s, event)
        self.last_s = event.t
        for queue, context in self._queues:
            queue.put(context, heard)

    def end(self, wall_s: float, error: BaseException | None = None) -> None:
        name, reason = (None, None) if error is None else (type(error).__name__, str(error))
        self.tell(PlayEnded(self.last_s, name, reason), wall_s)
        self._over = True
