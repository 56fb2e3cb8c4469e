"""Accepts TCP connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_BACKLOG = 512
_PAUSE_S = 0.1
"""Seconds to pause when the system has no descriptors or memory left."""


class TcpListener:
    """A listening socket; `close` ends it."""

    def __init__(self, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        """Listen on a bound socket; ``accepted`` receives each non-blocking connection."""
        self._sock, self._accepted = sock, accepted
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Stop accepting."""
        self._accepting.cancel()
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause_s = 0.0  # lets other work of the loop run between two connections
            try:
                connection, _ = await loop.sock_accept(self._sock)
                loop.call_soon(self._accepted, connection)
            except OSError as error:
                pause_s = 0.0 if isinstance(error, ConnectionAbortedError) else _PAUSE_S
            await asyncio.sleep(pause_s)
