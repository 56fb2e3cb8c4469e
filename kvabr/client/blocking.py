"""`Client`: `AsyncClient` for code without asyncio. Its calls block, or return handles.

    with Client("moqt://origin.example/", engine=engine) as client:
        played = client.play(tokens, deadline=2.0)

One event loop runs in a private thread as long as the client lasts. All methods may be called from any thread. Ctrl-C
cancels the play that the main thread waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.metrics import ClientMetrics
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.peers import ClientPeer
from kvabr.client.result import NothingCached, Played
from kvabr.quic.backend import Quic
from kvabr.quic.interface import Connection, ConnectionStats
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine
from kvabr.types.errors import ConnectionLostError, PlayError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

T = TypeVar("T")

_CLEAR_S = 5.0
"""Seconds that a cancelled call, or the end of the loop, may take to clear up."""


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvabr-loop", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result; what interrupts the wait also cancels it."""
        if not self._thread.is_alive():
            work.close()
            raise UsageError("the client is closed")
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
                # Interrupted: nothing of the call must be left when the caller goes on.
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                with contextlib.suppress(Exception):
                    done.result(_CLEAR_S)
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop without waiting for it; cancelling the future cancels it."""
        if not self._thread.is_alive():
            work.close()
            raise UsageError("the client is closed")
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


class Handle(Generic[T]):
    """A play or a lookup under way."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        """Return whether it is over, one way or the other."""
        return self._future.done()

    def cancel(self) -> None:
        """End it and its downloads, now. Does nothing if it is over."""
        self._future.cancel()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, and return it.

        Raises:
            PlayError: it was cancelled. Otherwise as the call that began it.
            TimeoutError: it is not over after ``timeout_s`` seconds; it goes on.
        """
        try:
            return self._future.result(timeout_s)
        except CancelledError:
            raise PlayError("the play was cancelled") from None

    def when_done(self, call: Callable[[Handle[T]], None]) -> None:
        """Call ``call`` once it is over, at once if it is, on any thread; it should return quickly."""
        self._future.add_done_callback(lambda _: call(self))


class Client:
    """`AsyncClient` for code without asyncio; a context manager."""

    def __init__(
        self,
        origin: str | None = None,
        *,
        token: str | None = None,
        ca: Path | None = None,
        fingerprint: str | None = None,
        insecure: bool = False,
        quic: Quic = "auto",
        timeout_s: float = 5.0,
        model: KVSpec | str | None = None,
        engine: Engine | None = None,
        options: PlayOptions | None = None,
        limits: Limits | None = None,
        cache: str | os.PathLike[str] | None = None,
        metrics: ClientMetrics | None = None,
    ) -> None:
        """Start the event loop; the arguments are those of `AsyncClient`.

        Raises:
            UsageError, AssetError: as `AsyncClient`.
        """
        self._client = AsyncClient(
            origin,
            token=token,
            ca=ca,
            fingerprint=fingerprint,
            insecure=insecure,
            quic=quic,
            timeout_s=timeout_s,
            model=model,
            engine=engine,
            options=options,
            limits=limits,
            cache=cache,
            metrics=metrics,
        )
        self._loop = LoopThread()
        self._closed = False

    @property
    def options(self) -> PlayOptions:
        """How to play, for plays that do not say otherwise."""
        return self._client.options

    @property
    def metrics(self) -> ClientMetrics:
        """Counts what happens."""
        return self._client.metrics

    def peer(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: Path | None = None,
        fingerprint: str | None = None,
        insecure: bool = False,
        quic: Quic = "auto",
        timeout_s: float = 5.0,
    ) -> ClientPeer:
        """See `AsyncClient.peer`."""

        async def make() -> ClientPeer:
            return self._client.peer(
                url,
                token=token,
                ca=ca,
                fingerprint=fingerprint,
                insecure=insecure,
                quic=quic,
                timeout_s=timeout_s,
            )

        return self._call(make())

    def connect(self, peer: ClientPeer | Connection | str | None = None) -> None:
        """See `AsyncClient.connect`."""
        self._call(self._client.connect(peer))

    def stats(self, peer: ClientPeer | Connection | str | None = None) -> ConnectionStats:
        """Return what is known of the connection to a peer, which is made if there is none."""

        async def ask() -> ConnectionStats:
            return (await self._client.connect(peer)).stats()

        return self._call(ask())

    def measure_prefill(self, engine: Engine | None = None, tokens: Sequence[int] = ()) -> PrefillCost:
        """See `AsyncClient.measure_prefill`."""
        return self._call(self._client.measure_prefill(engine, tokens))

    def play(
        self,
        tokens: Sequence[int],
        *,
        deadline: float,
        options: PlayOptions | None = None,
        model: KVSpec | str | None = None,
        engine: Engine | None = None,
        peer: ClientPeer | Connection | str | None = None,
    ) -> Played | NothingCached:
        """See `AsyncClient.play`."""
        return self._call(
            self._client.play(tokens, deadline=deadline, options=options, model=model, engine=engine, peer=peer)
        )

    def submit(
        self,
        tokens: Sequence[int],
        *,
        deadline: float,
        options: PlayOptions | None = None,
        model: KVSpec | str | None = None,
        engine: Engine | None = None,
        peer: ClientPeer | Connection | str | None = None,
    ) -> Handle[Played | NothingCached]:
        """Begin a play, and return at once; see `AsyncClient.play`."""
        return self.begin(
            lambda client: client.play(
                tokens, deadline=deadline, options=options, model=model, engine=engine, peer=peer
            )
        )

    def play_asset(
        self,
        asset: TrackNamespace | Found | str,
        *,
        deadline: float,
        tokens: Sequence[int] = (),
        options: PlayOptions | None = None,
        engine: Engine | None = None,
        peer: ClientPeer | Connection | str | None = None,
    ) -> Played:
        """See `AsyncClient.play_asset`."""
        return self._call(
            self._client.play_asset(asset, deadline=deadline, tokens=tokens, options=options, engine=engine, peer=peer)
        )

    def find(
        self,
        tokens: Sequence[int],
        *,
        model: KVSpec | str | None = None,
        salt: bytes | None = None,
        within_s: float = 5.0,
        any_dtype: bool = False,
        peer: ClientPeer | Connection | str | None = None,
    ) -> Found | None:
        """See `AsyncClient.find`."""
        return self._call(
            self._client.find(tokens, model=model, salt=salt, within_s=within_s, any_dtype=any_dtype, peer=peer)
        )

    def find_asset(
        self,
        asset: TrackNamespace | str,
        *,
        within_s: float = 5.0,
        peer: ClientPeer | Connection | str | None = None,
    ) -> Found:
        """See `AsyncClient.find_asset`."""
        return self._call(self._client.find_asset(asset, within_s=within_s, peer=peer))

    def models(self, *, within_s: float = 5.0, peer: ClientPeer | Connection | str | None = None) -> Sequence[KVSpec]:
        """See `AsyncClient.models`."""
        return self._call(self._client.models(within_s=within_s, peer=peer))

    def begin(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> Handle[T]:
        """Begin anything that an `AsyncClient` does, on its event loop, and return at once.

        Raises:
            UsageError: this client is closed.
        """
        if self._closed:
            raise UsageError("the client is closed")
        return Handle(self._loop.begin(work(self._client)))

    def close(self) -> None:
        """See `AsyncClient.close`; may be called twice."""
        if not self._closed:
            self._closed = True
            try:
                self._loop.call(self._client.close())
            finally:
                self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise UsageError("the client is closed")
        return self._loop.call(work)

    def __enter__(self) -> Self:
        try:
            self._call(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
