"""The bytes of a connection, to and from a non-blocking socket through TLS.

TLS runs in memory, so that one system call carries many records: with a call per record, a receiver would need 50 %
more processor time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque

from kvabr.qmux.connection import Buffer

_RECORD = 16 << 10
_SEALED_BYTES = 7 * _RECORD
"""Bytes encrypted at a time: malloc still reuses memory of this size."""
_MAX_RECORD = 5 + _RECORD + 256
"""Maximum bytes of an encrypted record with its header (RFC 8446, section 5.2)."""
_CIPHER_BYTES = 256 << 10
_RECORD_TYPES = range(20, 24)
"""Possible first bytes of a record: change_cipher_spec, alert, handshake, application_data."""
_SLICE_RECORDS, _SLICE_BYTES = 64, 4 * _RECORD
"""Maximum records and bytes given to TLS before reading from it: processing a KeyUpdate takes about 15 us. While
records yield no data, TLS gets one long record at a time."""
_CALL_RECORDS = 128
"""Records after which a call of `TlsChannel.receive` ends."""
_EMPTY_RECORDS, _EMPTY_BYTES = 100, 64 << 10
"""Maximum records and bytes without data, beyond two records and 512 bytes for each read with data. OpenSSL limits
neither KeyUpdate nor NewSessionTicket."""


class EmptyRecordsError(OSError):
    """The peer sends too many TLS records without data."""

    def __init__(self, records: int, size: int) -> None:
        super().__init__(f"{records} TLS records, {size} bytes, without data")


class TlsChannel:
    """A socket with TLS. Not thread-safe."""

    spent = False
    """True if the last `receive` stopped because it had processed `_CALL_RECORDS` records."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, host: str | None) -> None:
        """Prepare the handshake; ``host`` is the server's name, for a client."""
        self.sock = sock
        self._incoming, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._sealed, server_side=server, server_hostname=host)
        self._cipher = memoryview(bytearray(_MAX_RECORD if server else _CIPHER_BYTES))
        self._begin = self._end = 0
        self._empty_records = self._empty_bytes = 0
        self._waiting = memoryview(b"")

    def shake(self) -> bool:
        """Continue the handshake; return True if it is done. Raises `OSError`."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self.push()
                if not self._feed():
                    return False
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.push()  # send the alert
                raise
            else:
                self._empty_records = self._empty_bytes = 0
                self.push()
                return True

    def receive(self, into: list[memoryview]) -> int:
        """Fill buffers with received data; return the number of bytes, 0 at the end of the connection.

        A call processes a limited number of records, so that a peer cannot keep an event loop busy without data. Raises
        `BlockingIOError`, `OSError`, `EmptyRecordsError`.
        """
        self.spent = False
        count, records, empty = 0, 0, self._empty_bytes
        incoming, tls = self._incoming, self._tls
        for buffer in into:
            at, size = 0, len(buffer)
            while at < size:
                if not (incoming.pending or incoming.eof or tls.pending()):  # reading without data would raise
                    self.spent = records >= _CALL_RECORDS or self._empty_bytes >= empty + _RECORD // 2
                    if not self.spent and (fed := self._feed()):
                        records += fed
                        continue
                    if not count + at:
                        raise BlockingIOError
                    return count + at
                try:
                    read = tls.read(size - at, buffer[at:])  # at most a record
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
        """True if `receive` may return more without reading the socket."""
        return self._tls.pending() > 0 or self._incoming.pending > 0 or self._slice()[0] > 0

    @property
    def unsent(self) -> int:
        """Bytes accepted by `send` but not yet sent."""
        return len(self._waiting) + self._sealed.pending

    def send(self, out: deque[Buffer]) -> int:
        """Send and remove buffers from ``out``; return the number of bytes. Raises `BlockingIOError`, `OSError`."""
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
        """Send pending bytes; return True if all were sent. Raises `OSError`."""
        if self._sealed.pending:
            fresh = self._sealed.read()
            self._waiting = memoryview(b"".join((self._waiting, fresh)) if self._waiting else fresh)
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._waiting:
                self._waiting = self._waiting[self.sock.send(self._waiting) :]
        return not self._waiting

    def finish(self) -> None:
        """Send TLS's close_notify."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self.push()

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate in DER."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """The negotiated ALPN protocol."""
        return self._tls.selected_alpn_protocol()

    def _feed(self) -> int:
        """Pass the next whole records to TLS; return their number.

        The end of the connection counts as a record, and so do malformed bytes, which TLS refuses.
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
                    self._incoming.write(self._cipher[self._begin : self._end])
                    self._begin = self._end
                self._incoming.write_eof()
                return 1
        self._incoming.write(self._cipher[self._begin : end])
        self._empty_records += records
        self._empty_bytes += end - self._begin
        self._begin = end
        return records

    def _slice(self) -> tuple[int, int]:
        cipher, at, end, records = self._cipher, self._begin, self._end, 0
        most = at + (_RECORD if self._empty_bytes else _SLICE_BYTES)
        while end - at >= 5 and at < most and records < _SLICE_RECORDS:
            size = 5 + (cipher[at + 3] << 8) + cipher[at + 4]
            if cipher[at] not in _RECORD_TYPES or size > _MAX_RECORD:
                return records + 1, end
            if size > end - at:
                break
            at += size
            records += 1
        return records, at

    def _pull(self) -> int | None:
        """Read from the socket; return the number of bytes, 0 at the end, None if there are none now."""
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
    """Join short buffers: a TLS record costs the same for few bytes as for many."""
    parts, size = list[Buffer](), 0
    while out and size < _RECORD:
        part, space = out.popleft(), _RECORD - size
        if len(part) > space:
            out.appendleft(memoryview(part)[space:])
            part = part[:space]
        parts.append(part)
        size += len(part)
    out.appendleft(b"".join(parts))
