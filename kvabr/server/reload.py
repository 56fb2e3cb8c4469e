"""Files that a server reads again when they change, and on SIGHUP: tokens and certificates.

A file that cannot be used is logged once, and what was read before stays in use.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvabr.store.files import FileVersion
from kvabr.types.errors import KvabrError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LOOK_S = 0.1
"""Seconds between looks at the files; one look is a `stat` of each."""

_Versions = tuple[FileVersion | None, ...]


@dataclass(slots=True)
class _Watched:
    what: str
    paths: Sequence[Path]
    load: Callable[[], object]
    settles: bool
    loaded: _Versions
    """Those that were loaded last, or refused."""
    seen: _Versions

    def versions(self) -> _Versions:
        return tuple(map(FileVersion.of, self.paths))


class Reloads:
    """Looks at files regularly, in a thread; an async context manager, to be entered in the main thread for SIGHUP."""

    def __init__(self, log: FilteringBoundLogger, *, every_s: float = LOOK_S) -> None:
        """Begin without files."""
        self._log, self._every_s = log, every_s
        self._watched: list[_Watched] = []
        self._hung_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._before: Any = signal.SIG_DFL

    def add(self, what: str, paths: Sequence[Path], load: Callable[[], object]) -> None:
        """Watch files, which have been read already.

        Args:
            what: what they are, for the log.
            paths: the files. Of several, none is read before all have stayed the same for one look, so that a
                certificate is not read with the key of the one before it.
            load: reads them and puts them into use, in any thread; a `KvabrError` says why it cannot.
        """
        watched = _Watched(what, paths, load, len(paths) > 1, (), ())
        watched.loaded = watched.seen = watched.versions()
        self._watched.append(watched)

    def look(self, *, anyway: bool = False) -> None:
        """Look once, and load what has changed, or everything ``anyway``."""
        for watched in self._watched:
            versions = watched.versions()
            settled = versions == watched.seen or not watched.settles
            watched.seen = versions
            if anyway or (versions != watched.loaded and settled):
                self._load(watched, versions)

    def _load(self, watched: _Watched, versions: _Versions) -> None:
        watched.loaded = versions
        try:
            watched.load()
        except (KvabrError, OSError) as error:
            # A slip of the editor must neither open nor close everything.
            hint = "what was read before stays in use"
            self._log.error(f"{watched.what} not read again", error=str(error), hint=hint)
        else:
            self._log.info(f"{watched.what} read again")

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGHUP)
            loop.add_signal_handler(signal.SIGHUP, self._hung_up.set)
        self._task = loop.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP):
            signal.signal(signal.SIGHUP, self._before)
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
                await asyncio.to_thread(self.look, anyway=anyway)
            except Exception:  # noqa: BLE001  # a server that no longer notices revoked tokens would be worse
                self._log.exception("cannot look for what changed")
