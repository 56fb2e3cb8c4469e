"""Accepts TCP connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_BACKLOG = 512
_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop."""
_PAUSE_S = 0.1
"""Seconds to wait when there are no descriptors left, or no memory."""


class TcpListener:
    """A listening socket; `close` ends it."""

    def __init__(self, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        """Listen on a bound socket; ``accepted`` gets each connection, non-blocking."""
        self._sock, self._accepted = sock, accepted
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._go_on()

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _go_on(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._sock.fileno())
                self._pause = self._loop.call_later(_PAUSE_S, self._go_on)
                return
            connection.setblocking(False)
            self._accepted(connection)
