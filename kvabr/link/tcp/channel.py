"""The bytes of a connection: to and from a socket that never blocks, through TLS.

TLS is read and written in memory, so that a system call carries many of its records: with one for each, receiving takes
half as much of the processor's time again.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque

from kvabr.qmux.connection import Buffer

_RECORD = 16 << 10
"""Most bytes in a record of TLS."""
_SEALED_BYTES = 7 * _RECORD
"""Bytes that are encrypted at a time: what is allocated for them is still used again by malloc."""
_MOST_RECORD = 5 + _RECORD + 256
"""Most bytes in an encrypted record, with its header (RFC 8446, section 5.2)."""
_CIPHER_BYTES = 256 << 10
"""Bytes that a client reads at a time."""
_RECORD_TYPES = range(20, 24)
"""First byte of a record: change_cipher_spec, alert, handshake, application_data."""
_SLICE_RECORDS, _SLICE_BYTES = 64, 4 * _RECORD
"""Most that TLS gets before it is read: one KeyUpdate takes it about 15 us. It gets one long record while the last ones
yielded no data."""
_CALL_RECORDS = 128
"""Records after which a call of `TlsChannel.receive` ends; the next one goes on."""
_EMPTY_RECORDS, _EMPTY_BYTES = 100, 64 << 10
"""Records, and bytes of them, that may carry no data, beyond two records and 512 bytes for each read that yields some.
OpenSSL limits neither KeyUpdate nor NewSessionTicket."""


class EmptyRecordsError(OSError):
    """The peer sends too many records of TLS that carry no data."""

    def __init__(self, records: int, size: int) -> None:
        """Take what came without data: records, and bytes of them."""
        super().__init__(f"{records} records of TLS, {size} bytes, without data")


class TlsChannel:
    """A socket with TLS. Its methods must not be called from two threads at a time."""

    spent = False
    """Whether the last `receive` has done all the work that one turn of an event loop may do."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, host: str | None) -> None:
        """Begin the handshake with `shake`; ``host`` is the name of the server, for a client."""
        self.sock = sock
        self._came, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._sealed, server_side=server, server_hostname=host)
        self._cipher = memoryview(bytearray(_MOST_RECORD if server else _CIPHER_BYTES))
        self._begin = self._end = 0
        """Which part of ``_cipher`` has come and TLS has not got."""
        self._empty_records = self._empty_bytes = 0
        """What TLS got without yielding data; see `_EMPTY_RECORDS`."""
        self._waiting = memoryview(b"")

    def shake(self) -> bool:
        """Go on with the handshake, and return whether it is over; raises `OSError`."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.push()
                if not self._feed():
                    return False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.push()  # the alert
                raise
            else:
                self._empty_records = self._empty_bytes = 0
                self.push()
                return True

    def receive(self, into: list[memoryview]) -> int:
        """Fill buffers with what has come; return how many bytes, 0 at the end.

        It ends after a bounded number of records, and after the first one that is long and carries no data, so that a
        peer cannot keep an event loop busy with records that fill no buffer. Raises `BlockingIOError`, `OSError`,
        `EmptyRecordsError`.
        """
        self.spent = False
        count, records, empty = 0, 0, self._empty_bytes
        came, tls = self._came, self._tls
        for buffer in into:
            at, size = 0, len(buffer)
            while at < size:
                if not (came.pending or came.eof or tls.pending()):  # reading in vain would cost an exception
                    self.spent = records >= _CALL_RECORDS or self._empty_bytes >= empty + _RECORD // 2
                    if not self.spent and (fed := self._feed()):
                        records += fed
                        continue
                    if not count + at:
                        raise BlockingIOError
                    return count + at
                try:
                    read = tls.read(size - at, buffer[at:])  # a record at most
                except ssl.SSLWantReadError:
                    continue
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    return count + at
                if not read:
                    return count + at
                at += int(read)
                self._empty_records = max(0, self._empty_records - 2)
                self._empty_bytes = max(0, self._empty_bytes - 2 * int(read) - 512)
            count += at
        return count

    @property
    def pending(self) -> bool:
        """Whether `receive` may have more although nothing comes from the socket."""
        return self._tls.pending() > 0 or self._came.pending > 0 or self._slice()[0] > 0

    @property
    def unsent(self) -> int:
        """Bytes that were taken by `send` and wait here."""
        return len(self._waiting) + self._sealed.pending

    def send(self, out: deque[Buffer]) -> int:
        """Send buffers, remove what has gone, and return how many bytes. Raises `BlockingIOError`, `OSError`."""
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
        """Send what waits here, and return whether all of it has gone; raises `OSError`."""
        if self._sealed.pending:
            fresh = self._sealed.read()
            self._waiting = memoryview(b"".join((self._waiting, fresh)) if self._waiting else fresh)
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._waiting:
                self._waiting = self._waiting[self.sock.send(self._waiting) :]
        return not self._waiting

    def finish(self) -> None:
        """Say that nothing follows."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.push()

    @property
    def certificate(self) -> bytes | None:
        """The certificate of the peer, DER."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """What ALPN has agreed on."""
        return self._tls.selected_alpn_protocol()

    def _feed(self) -> int:
        """Give TLS the records that follow; return how many, or 0 if none has come as a whole.

        The end of the connection counts as one, and so does anything that cannot be a record, which TLS refuses.
        """
        if self._empty_records > _EMPTY_RECORDS or self._empty_bytes > _EMPTY_BYTES:
            raise EmptyRecordsError(self._empty_records, self._empty_bytes)
        records, end = self._slice()
        while not records:
            if (count := self._pull()) is None:
                return 0
            records, end = self._slice()
            if not count:
                if self._begin < self._end:
                    self._came.write(self._cipher[self._begin : self._end])
                    self._begin = self._end
                self._came.write_eof()
                return 1
        self._came.write(self._cipher[self._begin : end])
        self._empty_records += records
        self._empty_bytes += end - self._begin
        self._begin = end
        return records

    def _slice(self) -> tuple[int, int]:
        """Return how many whole records TLS gets next, and where in ``_cipher`` they end."""
        cipher, at, end, records = self._cipher, self._begin, self._end, 0
        most = at + (_RECORD if self._empty_bytes else _SLICE_BYTES)
        while end - at >= 5 and at < most and records < _SLICE_RECORDS:
            size = 5 + (cipher[at + 3] << 8) + cipher[at + 4]
            if cipher[at] not in _RECORD_TYPES or size > _MOST_RECORD:
                return records + 1, end
            if size > end - at:
                break
            at += size
            records += 1
        return records, at

    def _pull(self) -> int | None:
        """Read from the socket; return how many bytes came, 0 at the end, None if there are none now."""
        left = self._end - self._begin
        self._cipher[:left] = self._cipher[self._begin : self._end]
        self._begin, self._end = 0, left
        try:
            count = self.sock.recv_into(self._cipher[left:])
        except (BlockingIOError, InterruptedError):
            return None
        self._end += count
        return count


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
