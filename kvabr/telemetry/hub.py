"""Takes lines from plays, and hands them to listeners without ever making a play wait."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

from kvabr.telemetry.listener import Heard, Listener
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, PlayCalled, PlayEnded, PlayEvent

_LIMIT = 8192
"""Events that may wait for a listener: some plays of a hundred groups."""
_LAST_WORDS = 1024
"""Beyond that, ends of plays that may still wait."""
_CLOSE_S = 5.0
"""Seconds that listeners have to hear what waits for them when all is closed."""


@dataclass(slots=True)
class Counts:
    """What became of the events for one listener."""

    heard: int = 0
    dropped: int = 0
    """It was too slow for these."""
    errors: int = 0
    """Of those heard, it raised at these."""


class Telemetry:
    """Any number of plays on one side, some listeners on the other; a context manager."""

    def __init__(self, *listeners: Listener, limit: int = _LIMIT) -> None:
        """Take the listeners.

        Args:
            listeners: each gets a thread of its own.
            limit: events that may wait for each; what comes beyond that is dropped and counted.

        Raises:
            UsageError: no listener, or a limit below 1.
        """
        if not listeners or limit < 1:
            raise UsageError("telemetry: give at least one listener, and a limit of at least 1 event")
        self._lanes = [_Lane(listener, limit) for listener in listeners]
        self._chunk = max(1, limit // 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> dict[str, Counts]:
        """By the name of the listener, what became of the events; a second one of a name goes by ``name-2``."""
        found: dict[str, Counts] = {}
        for lane in self._lanes:
            name, number = lane.listener.name, 2
            while name in found:
                name, number = f"{lane.listener.name}-{number}", number + 1
            found[name] = lane.counts
        return found

    @contextmanager
    def play(self, log: Log | None = None) -> Iterator[Log]:
        """Begin a play; gives the log that the play is to write to, and tells how it ended.

        Args:
            log: takes every event of the play as well, at once.
        """
        tap = _Tap(self._lanes, uuid.uuid4().hex)
        tap.tell(PlayCalled(0.0), time.time())

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
        """Tell of a play that is over, such as a simulated one, by its events; waits for listeners that are behind.

        Args:
            events: in order.
            began_s: when it began, seconds since 1970; None: now.

        Returns:
            The name that the play was given.
        """
        begun = time.time() if began_s is None else began_s
        tap = _Tap(self._lanes, uuid.uuid4().hex)
        tap.tell(PlayCalled(0.0), begun)
        last_s = 0.0
        for count, event in enumerate(events, 1):
            if count % self._chunk == 0:
                self.flush()
            last_s = event.t
            tap.tell(event, begun + last_s)
        tap.end(begun + last_s)
        return tap.sid

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Wait until every listener has heard what has been told so far; returns whether all have."""
        until = time.monotonic() + timeout_s
        marks = [lane.mark() for lane in self._lanes]
        heard = [mark(max(0.0, until - time.monotonic())) for mark in marks]
        return all(heard)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Let the listeners hear what waits for them, and end their threads; one that hangs is left behind."""
        until = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(max(0.0, until - time.monotonic()))


class _Lane:
    """One listener, its queue and its thread."""

    def __init__(self, listener: Listener, limit: int) -> None:
        self.listener, self._limit = listener, limit
        self.counts = Counts()
        self._queue: SimpleQueue[tuple[Context, Heard] | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._told = False

    def put(self, context: Context, heard: Heard) -> None:
        """Never waits: what there is no room for is dropped."""
        room = self._limit + (_LAST_WORDS if isinstance(heard.event, PlayEnded) else 0)
        with self._lock:  # held for a moment only: between the look and the put nobody may end the thread
            if self._closed or self._queue.qsize() >= room:
                self.counts.dropped += 1
                return
            self._begin()
            self._queue.put((context, heard))

    def mark(self) -> Callable[[float], bool]:
        """What waits, so many seconds at most, until all that was put before has been heard, and says whether it is."""
        with self._lock:
            thread = self._thread
            if thread is None:
                return lambda _: True
            if not self._closed:
                mark = threading.Event()
                self._queue.put(mark)
                return mark.wait

        def gone(timeout_s: float) -> bool:
            thread.join(timeout_s)
            return not thread.is_alive()

        return gone

    def end(self) -> None:
        """Nothing more will be put."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            began = self._thread is not None
        if began:
            self._queue.put(None)
        else:
            self._close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._tell(f"is stuck: {self._queue.qsize()} events are lost")

    def _begin(self) -> None:
        if self._thread is None:
            name = f"kvabr-telemetry-{self.listener.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            context, heard = item
            self.counts.heard += 1
            try:
                context.run(self.listener.hear, heard)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the next play is to be heard
                self.counts.errors += 1
                self._tell(f"raised {error!r}")
        self._close()

    def _close(self) -> None:
        try:
            self.listener.close()
        except BaseException as error:  # noqa: BLE001  # as above
            self._tell(f"raised {error!r} as it was closed")

    def _tell(self, what: str) -> None:
        """Say it once: who listens badly does so often."""
        if not self._told:
            self._told = True
            message = "telemetry: listener %s %s; plays go on, `Telemetry.counts` says how much is lost"
            logging.getLogger("kvabr.telemetry").warning(message, self.listener.name, what)


class _Tap:
    """One play's way to all listeners."""

    def __init__(self, lanes: list[_Lane], sid: str) -> None:
        self.sid = sid
        # Listeners hear in the context of the caller, each in a copy of its own: that is how a span finds its parent.
        self._lanes = [(lane, copy_context()) for lane in lanes]
        self._last_s = 0.0
        self._over = False

    def tell(self, event: PlayEvent, wall_s: float) -> None:
        if self._over:
            return  # upgrades that go on after the play: nobody would ever hear of their end
        heard = Heard(self.sid, wall_s, event)
        self._last_s = event.t
        for lane, context in self._lanes:
            lane.put(context, heard)

    def end(self, wall_s: float, error: BaseException | None = None) -> None:
        name = None if error is None else type(error).__name__
        reason = None if error is None else str(error)
        self.tell(PlayEnded(self._last_s, name, reason), wall_s)
        self._over = True
