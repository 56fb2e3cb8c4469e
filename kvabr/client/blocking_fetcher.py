"""The fetcher for engines with threads: the same calls, blocking, or as handles that can be asked and cancelled.

    with BlockingFetcher() as node:
        handle = node.submit(node.peer("moqt://origin.example/"), tokens, deadline=2.0, spec=spec)
        ...
        if handle.done():
            played = handle.result()

An event loop runs in a private thread as long as the context lasts. All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvabr.client.blocking_connection import Loop
from kvabr.client.fetcher import Fetcher, Limits
from kvabr.client.metrics import NodeMetrics
from kvabr.client.peers import Peer
from kvabr.client.result import Played
from kvabr.quic.interface import Connection
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.naming import TrackNamespace

T = TypeVar("T")


class Handle(Generic[T]):
    """A play under way."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it is over, one way or the other."""
        return self._future.done()

    def cancel(self) -> None:
        """The request was aborted: end the play and its downloads, now. Does nothing to one that is over."""
        self._future.cancel()

    def result(self, timeout_s: float | None = None) -> T:
        """What it brought, waiting for it.

        Raises:
            PlayError: it was cancelled, or has no cache; see `Fetcher.play` for this and what else it raises.
            TimeoutError: it is not over after so many seconds; it goes on.
        """
        try:
            return self._future.result(timeout_s)
        except CancelledError:
            raise PlayError("the play was cancelled") from None

    def when_done(self, call: Callable[[Handle[T]], None]) -> None:
        """Have ``call`` called once the play is over, at once if it is; on some thread, so it had better be quick."""
        self._future.add_done_callback(lambda _: call(self))


class BlockingFetcher:
    """`Fetcher` for code without asyncio; a context manager."""

    def __init__(self, limits: Limits | None = None, *, metrics: NodeMetrics | None = None) -> None:
        """Start; see `Fetcher`.

        Raises:
            UsageError, AssetError: as `Fetcher`.
        """
        self._loop = Loop()

        async def make() -> Fetcher:
            return Fetcher(limits, metrics=metrics)

        try:
            self._fetcher = self._loop.call(make())
        except BaseException:
            self._loop.close()
            raise
        self._closed = False

    @property
    def metrics(self) -> NodeMetrics:
        """What it counts."""
        return self._fetcher.metrics

    def peer(self, url: str, **options: Any) -> Peer:
        """As `Fetcher.peer`."""

        async def make() -> Peer:
            return self._fetcher.peer(url, **options)

        return self._call(make())

    def begin(self, work: Callable[[Fetcher], Coroutine[Any, Any, T]]) -> Handle[T]:
        """Begin anything that is done with a `Fetcher`, on its event loop, and come back at once.

        Raises:
            UsageError: this is closed.
        """
        if self._closed:
            raise UsageError("the fetcher is closed")
        return Handle(self._loop.begin(work(self._fetcher)))

    def submit(
        self, origin: Peer | Connection | str, tokens: Sequence[int], *, deadline: float, **options: Any
    ) -> Handle[Played]:
        """Begin a play, as `Fetcher.play`, and come back at once."""
        return self.begin(lambda fetcher: fetcher.play(origin, tokens, deadline=deadline, **options))

    def submit_asset(
        self, origin: Peer | Connection | str, namespace: TrackNamespace, *, deadline: float, **options: Any
    ) -> Handle[Played]:
        """Begin a play, as `Fetcher.play_asset`, and come back at once."""
        return self.begin(lambda fetcher: fetcher.play_asset(origin, namespace, deadline=deadline, **options))

    def play(
        self, origin: Peer | Connection | str, tokens: Sequence[int], *, deadline: float, **options: Any
    ) -> Played:
        """As `Fetcher.play`."""
        return self._call(self._fetcher.play(origin, tokens, deadline=deadline, **options))

    def play_asset(
        self, origin: Peer | Connection | str, namespace: TrackNamespace, *, deadline: float, **options: Any
    ) -> Played:
        """As `Fetcher.play_asset`."""
        return self._call(self._fetcher.play_asset(origin, namespace, deadline=deadline, **options))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise UsageError("the fetcher is closed")
        return self._loop.call(work)

    def close(self) -> None:
        """As `Fetcher.close`; may be called twice."""
        if not self._closed:
            self._closed = True
            try:
                self._loop.call(self._fetcher.close())
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
