"""The bytes of a connection: to and from a socket that never blocks, as they are or through TLS.

TLS is read and written in memory, so that a system call carries many of its records: with one for each, receiving takes
half as much of the processor's time again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from itertools import islice

from kvabr.qmux.connection import Buffer

_MOST_BUFFERS = 64
"""Buffers of one system call; Linux takes 1,024."""
_RECORD = 16 << 10
"""Most bytes in a record of TLS."""
_SEALED_BYTES = 7 * _RECORD
"""Bytes that are encrypted at a time: what is allocated for them is still used again by malloc."""
_CIPHER_BYTES = 256 << 10
"""Bytes that a client reads at a time."""


class SocketChannel:
    """A socket without encryption."""

    unsent = 0
    """Bytes that were taken by `send` and wait here."""
    pending = False
    """Whether `receive` may have more although nothing comes from the socket."""
    decrypts = False
    """Whether `receive` takes the processor long, so that a thread is worth while on a fast path."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def shake(self) -> bool:
        """Go on with the handshake, and return whether it is over; raises `OSError`."""
        return True

    def receive(self, into: list[memoryview]) -> int:
        """Fill buffers with what has come; return how many bytes, 0 at the end. Raises `BlockingIOError`, `OSError`."""
        return self.sock.recvmsg_into(into)[0]

    def send(self, out: deque[Buffer]) -> int:
        """Send buffers, remove what has gone, and return how many bytes. Raises `BlockingIOError`, `OSError`."""
        count = self.sock.sendmsg(islice(out, _MOST_BUFFERS))
        _remove(out, count)
        return count

    def push(self) -> bool:
        """Send what waits here, and return whether all of it has gone; raises `OSError`."""
        return True

    def finish(self) -> None:
        """Say that nothing follows."""

    @property
    def certificate(self) -> bytes | None:
        """The certificate of the peer, DER."""
        return None

    @property
    def protocol(self) -> str | None:
        """What ALPN has agreed on."""
        return None


class TlsChannel(SocketChannel):
    """A socket with TLS. Its methods must not be called from two threads at a time."""

    decrypts = True

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, host: str | None) -> None:
        """Begin the handshake with `shake`; ``host`` is the name of the server, for a client."""
        super().__init__(sock)
        self._came, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._sealed, server_side=server, server_hostname=host)
        self._cipher = memoryview(bytearray(_RECORD if server else _CIPHER_BYTES))
        self._waiting = memoryview(b"")

    def shake(self) -> bool:
        """See `SocketChannel.shake`."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.push()
                if not self._pull():
                    return False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.push()  # the alert
                raise
            else:
                self.push()
                return True

    def receive(self, into: list[memoryview]) -> int:
        """See `SocketChannel.receive`."""
        count = 0
        for buffer in into:
            at, size = 0, len(buffer)
            while at < size:
                try:
                    read = self._tls.read(size - at, buffer[at:])  # a record at most
                except ssl.SSLWantReadError:
                    if self._pull():
                        continue
                    if not count + at:
                        raise BlockingIOError from None
                    return count + at
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    return count + at
                if not read:
                    return count + at
                at += int(read)
            count += at
        return count

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """See `SocketChannel.pending`."""
        return self._tls.pending() > 0 or self._came.pending > 0

    @property
    def unsent(self) -> int:  # type: ignore[override]
        """See `SocketChannel.unsent`."""
        return len(self._waiting)

    def send(self, out: deque[Buffer]) -> int:
        """See `SocketChannel.send`."""
        if not self.push():
            raise BlockingIOError
        taken = 0
        while out and taken < _SEALED_BYTES:
            if len(out) > 1 and len(out[0]) < _RECORD // 2:
                _join(out)
            count = self._tls.write(out[0])
            _remove(out, count)
            taken += count
        self.push()
        return taken

    def push(self) -> bool:
        """See `SocketChannel.push`."""
        if self._sealed.pending:
            fresh = self._sealed.read()
            self._waiting = memoryview(b"".join((self._waiting, fresh)) if self._waiting else fresh)
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._waiting:
                self._waiting = self._waiting[self.sock.send(self._waiting) :]
        return not self._waiting

    def finish(self) -> None:
        """See `SocketChannel.finish`."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.push()

    @property
    def certificate(self) -> bytes | None:
        """See `SocketChannel.certificate`."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """See `SocketChannel.protocol`."""
        return self._tls.selected_alpn_protocol()

    def _pull(self) -> bool:
        """Read from the socket, and return whether something came, or the end."""
        try:
            count = self.sock.recv_into(self._cipher)
        except (BlockingIOError, InterruptedError):
            return False
        if count:
            self._came.write(self._cipher[:count])
        else:
            self._came.write_eof()
        return True


def _remove(out: deque[Buffer], count: int) -> None:
    while count and count >= len(out[0]):
        count -= len(out.popleft())
    if count:
        out[0] = memoryview(out[0])[count:]


def _join(out: deque[Buffer]) -> None:
    """Join short buffers, as a record of TLS costs the same for a few bytes as for all that it can hold."""
    parts, size = list[Buffer](), 0
    while out and size < _RECORD:
        part, room = out.popleft(), _RECORD - size
        if len(part) > room:
            out.appendleft(memoryview(part)[room:])
            part = part[:room]
        parts.append(part)
        size += len(part)
    out.appendleft(b"".join(parts))
