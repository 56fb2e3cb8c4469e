"""A UDP transport for asyncio that delivers packets in batches.

asyncio's own reads one packet per turn of its loop, and a QUIC connection then looks for something to send after each.
Reading all queued packets first saves a fifth of the receiver's time with aioquic.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any

MOST_AT_ONCE = 32
"""Maximum packets in a batch: enough for the savings, few enough that acknowledgements are not late."""
_MOST_QUEUED = 4096
"""Maximum packets that wait for a full socket; more are dropped, as a network would drop them."""


class BatchTransport(asyncio.DatagramTransport):
    """A transport for protocols that have ``datagrams_received(list, address)``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Any) -> None:
        """Start reading from a socket, bound and non-blocking, which is closed with the transport."""
        super().__init__()
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._queue: deque[tuple[bytes, Any]] = deque()
        self._closed = False
        protocol.connection_made(self)
        loop.add_reader(sock.fileno(), self._readable)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return ``socket`` or ``sockname``."""
        if name == "socket":
            return self._sock
        return self._sock.getsockname() if name == "sockname" else default

    def sendto(self, data: Any, addr: Any = None) -> None:
        """Send a packet, or queue it until the socket can take it."""
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
        """Return whether the transport is closed."""
        return self._closed

    def close(self) -> None:
        """Close the socket; queued packets are dropped."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._queue.clear()
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def _readable(self) -> None:
        batch: list[bytes] = []
        source: Any = None
        for _ in range(MOST_AT_ONCE):
            try:
                data, address = self._sock.recvfrom(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # an ICMP error, for instance of a closed port
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
