"""`Client`: `AsyncClient` for code without asyncio. Its calls block, or return handles.

    with Client("moqt://origin.example/", engine=engine) as client:
        played = client.play(tokens, deadline=2.0)

All methods are thread-safe. Ctrl-C in the main thread cancels the call that it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.peers import ClientPeer, PeerLike
from kvabr.client.result import NothingCached, Played
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.errors import ConnectionLostError, HomeProcess, PlayError, UsageError, exhaustion_as_error

P = ParamSpec("P")
T = TypeVar("T")

_CLEANUP_S = 5.0


class LoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.home = HomeProcess("the client")
        with exhaustion_as_error():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="kvabr-loop", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._loop.close()
                raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result; an interrupt cancels it."""
        over = threading.Event()
        task: asyncio.Task[Any] | None = None

        async def run() -> T:
            nonlocal task
            task = asyncio.current_task()
            try:
                return await work
            finally:
                over.set()

        def stop() -> None:
            if task is None:
                over.set()
            else:
                task.cancel()

        self._check(work)
        try:
            # An interrupt may arrive before the future exists: cancel the task.
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except CancelledError:
            raise ConnectionLostError("this side closed the connection") from None
        except BaseException:
            if not over.is_set():
                # Interrupted: end the call before returning. After one loop iteration, a starting task has started.
                self._loop.call_soon_threadsafe(self._loop.call_soon, stop)
                over.wait(_CLEANUP_S)
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, and return its future; cancelling the future cancels the coroutine."""
        self._check(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _check(self, work: Coroutine[Any, Any, T]) -> None:
        if not self.home.here:
            work.close()
            self.home.check()
        if not self.open:
            work.close()
            raise UsageError("the client is closed")

    @property
    def open(self) -> bool:
        """True until `close`."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Cancel all tasks, and end the thread."""
        if not self.open:
            return

        async def clear() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLEANUP_S)
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(clear(), self._loop).result(2 * _CLEANUP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLEANUP_S)
        if not self._thread.is_alive():
            self._loop.close()


class Handle(Generic[T]):
    """A play or lookup under way."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return True once it has ended."""
        return self._future.done()

    def cancel(self) -> None:
        """Cancel it and its downloads, unless it has ended."""
        self._future.cancel()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, and return it.

        Raises `PlayError` if it was cancelled, `TimeoutError` after ``timeout_s`` seconds, or an error of the call that
        started it.
        """
        try:
            return self._future.result(timeout_s)
        except CancelledError:
            raise PlayError("the play was cancelled") from None

    def when_done(self, call: Callable[[Handle[T]], None]) -> None:
        """Call ``call`` with this handle when it ends, on any thread; ``call`` should return fast."""
        # If the callback held this handle, the future would keep the result until garbage collection.
        self._future.add_done_callback(lambda future: call(Handle(future)))


def _like(
    method: Callable[Concatenate[AsyncClient, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Client, P], T]]:
    return lambda function: update_wrapper(function, method, assigned=())


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.call(method(self._client, *args, **kwargs))

    update_wrapper(call, method)
    return call


class Closable(Protocol):
    """An object to close on its event loop."""

    async def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Closable)


class Background(Generic[C]):
    """An asynchronous client on an event loop in its own thread."""

    def __init__(self, client: C) -> None:
        self._client = client
        self._loop = LoopThread()

    def begin(self, work: Callable[[C], Coroutine[Any, Any, T]]) -> Handle[T]:
        """Start a coroutine on the client's event loop; raise `UsageError` if closed."""
        return Handle(self._loop.begin(work(self._client)))

    def close(self) -> None:
        """Close the client, and end the thread. Idempotent; no effect in a forked child."""
        if self._loop.open and self._loop.home.here:
            try:
                self._loop.call(self._client.close())
            finally:
                self._loop.close()


class Client(Background[AsyncClient]):
    """`AsyncClient` with blocking calls; a context manager."""

    @_like(AsyncClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncClient(*args, **kwargs))

    measure_prefill = _blocking(AsyncClient.measure_prefill)
    play = _blocking(AsyncClient.play)
    play_asset = _blocking(AsyncClient.play_asset)
    find = _blocking(AsyncClient.find)
    find_asset = _blocking(AsyncClient.find_asset)
    hint_asset = _blocking(AsyncClient.hint_asset)
    models = _blocking(AsyncClient.models)

    @property
    def options(self) -> PlayOptions:
        """Default options of plays."""
        return self._client.options

    @property
    def metrics(self) -> ClientMetrics:
        """Counts and timings of the client."""
        return self._client.metrics

    @_like(AsyncClient.peer)
    def peer(self, *args: Any, **kwargs: Any) -> ClientPeer:
        """See `AsyncClient.peer`."""
        return self._client.peer(*args, **kwargs)

    def connect(self, peer: PeerLike = None) -> None:
        """See `AsyncClient.connect`."""
        self._loop.call(self._client.connect(peer))

    @_like(AsyncClient.play)
    def submit(self, *args: Any, **kwargs: Any) -> Handle[Played | NothingCached]:
        """Start a play; see `AsyncClient.play`."""
        return self.begin(lambda client: client.play(*args, **kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
