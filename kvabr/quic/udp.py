"""A UDP transport for asyncio that hands packets on in batches.

asyncio's own reads one packet a turn of its loop. A QUIC connection then makes an acknowledgement for every other
packet and looks for something to send after each; taking in what has queued up first saves a fifth of the receiver's
time with aioquic.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any

MOST_AT_ONCE = 32
"""Packets in a batch at most: enough to save what can be saved, few enough that acknowledgements are not late."""
_MOST_QUEUED = 4096
"""Packets that wait for a full socket; more are dropped, as the network would."""


class BatchTransport(asyncio.DatagramTransport):
    """Reads for a protocol that has ``datagrams_received(list, address)``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Any) -> None:
        """Start reading.

        Args:
            loop: the event loop.
            sock: bound, not blocking; the transport closes it.
            protocol: gets the batches.
        """
        super().__init__()
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._queue: deque[tuple[bytes, Any]] = deque()
        self._closed = False
        protocol.connection_made(self)
        loop.add_reader(sock.fileno(), self._readable)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """``socket`` and ``sockname``."""
        if name == "socket":
            return self._sock
        return self._sock.getsockname() if name == "sockname" else default

    def sendto(self, data: Any, addr: Any = None) -> None:
        """Send a packet, or let it wait for the socket."""
        if self._closed:
            return
        if not self._queue:
            try:
                self._sock.sendto(data, addr)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._writable)
            except OSError as error:
                self._protocol.error_received(error)
                return
            else:
                return
        if len(self._queue) < _MOST_QUEUED:
            self._queue.append((bytes(data), addr))

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def close(self) -> None:
        """Close the socket; what waits is dropped."""
        self.abort()

    def abort(self) -> None:
        """The same."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._queue.clear()
            self._loop.call_soon(self._protocol.connection_lost, None)

    def _readable(self) -> None:
        batch: list[bytes] = []
        source: Any = None
        for _ in range(MOST_AT_ONCE):
            try:
                data, address = self._sock.recvfrom(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # what a packet of ours met on its way, such as a closed port
                self._protocol.error_received(error)
                break
            if address != source and batch:
                self._protocol.datagrams_received(batch, source)
                batch = []
            source = address
            batch.append(data)
        if batch and not self._closed:
            self._protocol.datagrams_received(batch, source)

    def _writable(self) -> None:
        while self._queue:
            data, address = self._queue[0]
            try:
                self._sock.sendto(data, address)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._protocol.error_received(error)
            self._queue.popleft()
        self._loop.remove_writer(self._sock.fileno())
