"""Reload files when they change, and on SIGHUP: tokens and certificates.

An invalid file is logged once, and its previous contents stay in use.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvabr.store.files import FileVersion
from kvabr.types.errors import KvabrError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

CHECK_S = 0.1
"""Seconds between checks; each is a `stat` per file."""


@dataclass(slots=True)
class _Watched:
    what: str
    paths: Sequence[Path]
    load: Callable[[], object]
    loaded: tuple[FileVersion | None, ...] = ()

    def changed(self) -> bool:
        before, self.loaded = self.loaded, tuple(map(FileVersion.of, self.paths))
        return self.loaded != before


class Reloads:
    """Checks files regularly, in a thread. An async context manager; enter it in the main thread to handle SIGHUP."""

    def __init__(self, log: FilteringBoundLogger, *, every_s: float = CHECK_S) -> None:
        self._log, self._every_s = log, every_s
        self._watched: list[_Watched] = []
        self._hung_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, what: str, paths: Sequence[Path], load: Callable[[], object]) -> None:
        """Watch files that have been read already; ``what`` names them in the log.

        ``load`` reads them again, in any thread; it raises `KvabrError` if they are invalid, or inconsistent because
        only some of them have been replaced yet.
        """
        watched = _Watched(what, paths, load)
        watched.changed()
        self._watched.append(watched)

    def check(self, *, anyway: bool = False) -> None:
        """Load changed files; with ``anyway``, load all."""
        for watched in self._watched:
            if not watched.changed() and not anyway:
                continue
            try:
                watched.load()
            except (KvabrError, OSError) as error:
                # A mistake in a file must neither open the server to everyone nor close it.
                hint = "the previous contents stay in use"
                self._log.error(f"{watched.what} not reloaded", error=str(error), hint=hint)
            else:
                self._log.info(f"{watched.what} reloaded")

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGHUP, self._hung_up.set)
        self._task = loop.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hung_up.wait(), self._every_s)
            anyway = self._hung_up.is_set()
            self._hung_up.clear()
            try:
                await asyncio.to_thread(self.check, anyway=anyway)
            except Exception:  # noqa: BLE001  # keep watching, so that revoked tokens are noticed
                self._log.exception("cannot look for what changed")
