"""The life of a server: notice what changes on disk, and end without cutting anyone off."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvabr.server.grants import Grants
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.store.files import FileVersion
from kvabr.types.errors import KvabrError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

WATCH_S = 2.0
"""Seconds between checks of the assets and the file of tokens."""

INTERRUPTED = 130
"""Exit status after a second signal."""


class Watcher:
    """Checks the assets and the tokens regularly, in a thread; an async context manager."""

    def __init__(
        self,
        library: PublishedAssets,
        tokens: Path | None,
        log: FilteringBoundLogger,
        metrics: Metrics,
        *,
        every_s: float = WATCH_S,
    ) -> None:
        """Prepare to check the assets of ``library``, and the file that its grants were read from."""
        self._library, self._tokens, self._log, self._metrics = library, tokens, log, metrics
        self._every_s = every_s
        self._stamp = None if tokens is None else FileVersion.of(tokens)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._count()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None  # noqa: S101  # entered
        self._task.cancel()
        await asyncio.wait({self._task})

    def look(self) -> None:
        """Check once."""
        self._look_at_tokens()
        try:
            self._library.refresh()
        except (OSError, KvabrError) as error:
            self._log.warning("cannot look for assets", error=str(error))
        self._count()

    def _look_at_tokens(self) -> None:
        if self._tokens is None:
            return
        stamp = FileVersion.of(self._tokens)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            grants = Grants.from_file(self._tokens)
        except KvabrError as error:
            # A typo in the file must neither open nor close everything.
            self._log.error("tokens unreadable", error=str(error), hint="those read before stay in force")
            return
        self._library.regrant(grants)
        self._log.info("tokens read again", grants=len(grants))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # noqa: BLE001  # a server that no longer notices revoked tokens would be worse
                self._log.exception("cannot look for what changed")

    def _count(self) -> None:
        self._metrics.assets.set(len(self._library.assets))
        self._metrics.assets_damaged.set(self._library.damaged)


async def run_until_signal(
    server: Server,
    grace_s: float,
    log: FilteringBoundLogger,
    metrics: Metrics,
    started: Callable[[], None] = lambda: None,
) -> int:
    """Start a server, serve until SIGTERM or SIGINT, then drain it; a second signal ends it at once.

    Args:
        server: not started yet; `TransportError` if its address cannot be bound.
        grace_s: seconds that draining may take.
        log: receives events.
        metrics: its ``draining`` is set.
        started: called once the server is up.

    Returns:
        Exit status: 0, or 130 after a second signal.
    """
    with _signals() as signals:
        await server.start()
        try:
            started()
            log.info("signal", name=await signals.get(), draining_s=grace_s, hint="another one ends it at once")
            metrics.draining.set(1)
            drained = asyncio.create_task(server.drain(grace_s))
            again = asyncio.create_task(signals.get())
            await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
            if drained.done():
                drained.result()
                log.info("stopped")
                return 0
            drained.cancel()
            with suppress(asyncio.CancelledError):
                await drained
            log.warning("stopped", hint="what was under way was cut off")
            return INTERRUPTED
        finally:
            await server.close()


@contextmanager
def _signals() -> Iterator[asyncio.Queue[str]]:
    """Yield a queue of the signals that end the process."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[str] = asyncio.Queue()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, queue.put_nowait, number.name)
    try:
        yield queue
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
