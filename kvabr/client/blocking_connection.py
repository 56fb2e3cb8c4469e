"""The client for code that does not use asyncio: the same calls, blocking.

An event loop runs in a private thread as long as the context lasts::

    with kvabr.sync.connect("moqt://origin.example/") as origin:
        played = origin.play(tokens, deadline=2.0, recompute=engine)

`Origin.play` may be called from several threads at once. Ctrl-C cancels the play that the main thread waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from kvabr.client import play as _play
from kvabr.client.result import Played
from kvabr.quic import connect as _connect
from kvabr.quic.interface import Connection, ConnectionStats
from kvabr.types.errors import ConnectionLostError, UsageError
from kvabr.types.naming import TrackNamespace

T = TypeVar("T")

_CLEAR_S = 5.0
"""Seconds that a cancelled call, or the end of the loop, may take to clear up."""


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvabr-loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, run on the loop; what interrupts the wait also cancels it."""
        if not self._thread.is_alive():
            work.close()
            raise UsageError("the connection is closed")
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda ended: _pass_on(ended, done))

        try:
            self._loop.call_soon_threadsafe(begin)
            return done.result()
        except BaseException:
            if not done.done():
                # Interrupted: nothing of the call is to be left when the caller goes on.
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                with contextlib.suppress(Exception):
                    done.result(_CLEAR_S)
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop without waiting for it; cancelling the future cancels it."""
        if not self._thread.is_alive():
            work.close()
            raise UsageError("the connection is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if not self._thread.is_alive():
            return

        async def clear() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLEAR_S)
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(clear(), self._loop).result(2 * _CLEAR_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLEAR_S)
        if not self._thread.is_alive():
            self._loop.close()


def _pass_on(ended: asyncio.Task[T], done: Future[T]) -> None:
    if ended.cancelled():
        done.set_exception(ConnectionLostError("this side closed the connection"))
    elif (error := ended.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())


class Origin:
    """A connection for blocking code; see `connect`."""

    def __init__(self, loop: Loop, connection: Connection) -> None:
        self._loop, self.connection = loop, connection

    def play(self, tokens: Sequence[int], *, deadline: float, **options: Any) -> Played:
        """As `kvabr.play`."""
        return self._loop.call(_play.play(self.connection, tokens, deadline=deadline, **options))

    def play_asset(self, namespace: TrackNamespace, *, deadline: float, **options: Any) -> Played:
        """As `kvabr.play_asset`."""
        return self._loop.call(_play.play_asset(self.connection, namespace, deadline=deadline, **options))

    def stats(self) -> ConnectionStats:
        """As `Connection.stats`."""

        async def ask() -> ConnectionStats:
            return self.connection.stats()

        return self._loop.call(ask())


class connect:  # noqa: N801  # called like the function it stands for
    """As `kvabr.connect`, for a plain ``with``."""

    def __init__(self, url: str, **options: Any) -> None:
        """Take the arguments of `kvabr.connect`.

        Raises:
            UsageError: the URL or an option makes no sense.
        """
        self._connecting = _connect.connect(url, **options)
        self._loop: Loop | None = None

    def __enter__(self) -> Origin:
        self._loop = Loop()
        try:
            return Origin(self._loop, self._loop.call(self._connecting.__aenter__()))
        except BaseException:
            self._loop.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            try:
                self._loop.call(self._connecting.__aexit__(None, None, None))
            finally:
                self._loop.close()


def play(origin: Origin, tokens: Sequence[int], *, deadline: float, **options: Any) -> Played:
    """As `kvabr.play`, with an origin from this module's `connect`."""
    return origin.play(tokens, deadline=deadline, **options)


def play_asset(origin: Origin, namespace: TrackNamespace, *, deadline: float, **options: Any) -> Played:
    """As `kvabr.play_asset`, with an origin from this module's `connect`."""
    return origin.play_asset(namespace, deadline=deadline, **options)
