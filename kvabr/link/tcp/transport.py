"""QMux on a TCP socket with TLS, as a `StreamTransport`.

It runs in the event loop, a bounded number of bytes at a time. Reading and encrypting release the interpreter's lock,
and payload is read directly into the buffer of its transfer (`Endpoint.receive_buffers`). On a fast path, a thread per
connection reads and decrypts TLS, so that each connection has a core. Meanwhile the loop does not use the socket, and
output waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import ssl
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from kvabr.link.moqt.endpoint import MIN_AHEAD_BYTES, Endpoint, StreamTransport
from kvabr.link.moqt.options import untrusted
from kvabr.link.tcp.channel import EmptyRecordsError, TlsChannel
from kvabr.link.tcp.tls import PREFIX
from kvabr.moqt.codes import SessionCode, name_of
from kvabr.qmux.connection import (
    Buffer,
    Event,
    ParametersReceived,
    Ponged,
    QmuxConnection,
    StopReceived,
    StreamData,
    StreamReset,
    Terminated,
)
from kvabr.qmux.frames import QuicCode, TransportParameters

MAX_AHEAD_BYTES = 1 << 20
RECORD_BYTES = MAX_AHEAD_BYTES + 64
"""Maximum size of an accepted record. Records are not buffered."""
AHEAD_S = 0.004
"""Unsent bytes to hold, in seconds of the path's rate; the kernel holds as much. Urgent data waits for them."""
STREAM_WINDOW, CONNECTION_WINDOW = 16 << 20, 64 << 20
"""Flow control windows of a client, bytes. They need no memory, since data is consumed at once."""
STREAMS = 128
"""Maximum streams of each kind that a peer may have open."""
_BUDGET_BYTES = 1 << 20
_DIRECT_BYTES = 16 << 10
"""Minimum payload to read directly into its buffer: less is not worth a system call."""
_MIN_THREADED_BYTES, _MAX_THREAD_WAIT_S = 256 << 10, 0.004
"""Payload that a thread reads at least before it returns, and its longest wait for it, in bytes and seconds. Threads
read if payload arrives at this rate."""
_READERS = 16
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_SCRATCH_BYTES = 64 << 10
_REQUESTS_BYTES = 2 << 10
"""Scratch bytes of a server, which receives only requests: at worst, parsing 5 bytes takes 40 us."""
_PARSE_COST = 16
"""Cost of parsing a byte, relative to reading a byte of payload directly into its buffer."""
_INFO_S = 0.01
_RATE_DECAY = 0.9
"""Factor of the previous rate at each reading, so that a moment without the processor does not lower it much."""
_LINGER_S = 1.0
"""Seconds to wait for the other end after a close."""


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, thread_name_prefix="kvabr-tls")


if hasattr(os, "register_at_fork"):  # a child does not inherit threads
    os.register_at_fork(after_in_child=_readers.cache_clear)


def address_of(sock: socket.socket) -> str:
    """Return the peer's address without port, or "" if the connection is gone."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


class _TcpInfo:
    """Linux's data about a connection (``struct tcp_info``)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._until_s = sock, 0.0
        self.round_trip: float | None = None
        self.rate = 0

    def read(self, now_s: float) -> None:
        """Read the data again, unless it is recent."""
        if now_s < self._until_s:
            return
        self._until_s = now_s + _INFO_S
        with contextlib.suppress(OSError, AttributeError):
            data = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            if len(data) >= 72:
                (rtt_us,) = struct.unpack_from("=I", data, 68)
                self.round_trip = rtt_us / 1e6 or None
            if len(data) >= 168:
                (mss,), (window,) = struct.unpack_from("=I", data, 16), struct.unpack_from("=I", data, 80)
                (delivered,) = struct.unpack_from("=Q", data, 160)  # too high for bunched acknowledgements
                fresh = min(delivered, int(mss * window / max(rtt_us, 1) * 1e6))
                self.rate = max(fresh, int(_RATE_DECAY * self.rate))


class QmuxTransport(StreamTransport):
    """One connection."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: Endpoint,
        context: ssl.SSLContext,
        *,
        client: bool,
        idle_s: float,
        host: str | None = None,
        windows: tuple[int, int] = (STREAM_WINDOW, CONNECTION_WINDOW),
    ) -> None:
        """Take a connected, non-blocking socket; `start` begins.

        ``windows``: of a stream and of the connection, in bytes; ``host``: the server's name, for a client.
        """
        self._loop = asyncio.get_running_loop()
        self._sock, self._endpoint, self._client = sock, endpoint, client
        endpoint.transport = self
        self._address = address_of(sock)
        self._info = _TcpInfo(sock)
        stream, connection = windows
        self._parameters = TransportParameters(
            max_idle_timeout=int(idle_s * 1000),
            max_data=connection,
            max_stream_data_bidi_local=stream,
            max_stream_data_bidi_remote=stream,
            max_stream_data_uni=stream,
            max_streams_bidi=STREAMS,
            max_streams_uni=STREAMS,
            max_record_size=RECORD_BYTES,
        )
        self._idle_s = idle_s
        self._conn: QmuxConnection | None = None
        """The QMux connection; None before TLS is established."""
        self._channel = TlsChannel(sock, context, server=not client, host=host)
        self._read_budget = _BUDGET_BYTES if client else _REQUESTS_BYTES
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES if client else _REQUESTS_BYTES))
        self._out: deque[Buffer] = deque()
        self._writes = False
        self._fast = self._reading = False
        """True if data arrives fast enough for a thread; True while a thread uses the channel."""
        self._since, self._received_bytes = self._loop.time(), 0
        self._busy = self._again = False
        """True while `flush` is running; True if it was called again meanwhile."""
        self._ahead = MIN_AHEAD_BYTES
        self._low_water = 0
        self._active_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = self._shut = self._lingers = False
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Start TLS."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._sock.fileno(), self._ready)
        self._timer = self._loop.call_later(self._idle_s, self._look_idle)
        if self._client:
            self._ready()

    # ------------------------------------------------------------------ StreamTransport

    def write(self, stream: int, data: bytes | memoryview, *, fin: bool = False) -> None:
        self._qmux.send(stream, data, fin=fin)

    def reset(self, stream: int, code: int) -> None:
        self._qmux.reset(stream, code)

    def stop(self, stream: int, code: int) -> None:
        self._qmux.stop(stream, code)

    def close(self, code: int, reason: str) -> None:
        if self._conn is None:
            self.abandon(f"closed before TLS was established: {reason}" if reason else "closed by this side")
        else:
            self._conn.close(code, reason)

    def ping(self) -> None:
        self._qmux.ping()

    def flush(self) -> None:
        if self._conn is None or self._closed or self._reading:
            return
        if self._busy:
            self._again = True
            return
        self._busy, self._again = True, False
        try:
            self._flush(self._conn)
        finally:
            self._busy = False
            if self._again:
                self._loop.call_soon(self._endpoint.safely, self.flush)

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)

    def drop(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stop in (self._loop.remove_reader, self._loop.remove_writer):
            stop(self._sock.fileno())
        if self._timer is not None:
            self._timer.cancel()
        if not self._reading:  # otherwise another file could get its number before the thread has read
            self._sock.close()
        if not self._gone.done():
            self._gone.set_result(None)

    def abandon(self, reason: str, code: int = 0) -> None:
        """End at once, without notifying the peer."""
        self._endpoint.ended(reason, code)
        self.drop()

    def may_open(self, stream: int) -> bool:
        return self._conn is not None and self._conn.may_open(stream)

    def backlog(self, stream: int) -> int:
        return 0 if self._conn is None else self._conn.backlog(stream)

    def unsent(self, streams: Iterable[int]) -> int:
        del streams
        mine = sum(map(len, self._out)) + self._channel.unsent
        return mine if self._conn is None else mine + self._conn.unsent

    def ahead(self) -> int:
        """Return the bytes that the path carries in `AHEAD_S` seconds, within bounds."""
        return self._ahead

    @property
    def piece(self) -> int:
        return self._ahead

    def in_flight(self) -> int:
        """Return the unacknowledged bytes that this kernel has sent or holds."""
        if self._closed:
            return 0
        try:
            return int(struct.unpack("i", fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except OSError:
            return 0

    def delivered(self, stream: int) -> bool:
        """Return True if the kernel has all of a stream, which then counts as delivered in QMux (section 4)."""
        return self._closed or self._conn is None or not (self._conn.sending(stream) or self._waits)

    def round_trip(self) -> float | None:
        if not self._closed:
            self._info.read(self._loop.time())
        return self._info.round_trip

    @property
    def address(self) -> str:
        return self._address

    def peer_certificate(self) -> bytes | None:
        return self._channel.certificate

    @property
    def begins(self) -> bool:
        """True if the connection is open, but MoQT has not begun."""
        return not self._closed and self._endpoint.session is None

    @property
    def _qmux(self) -> QmuxConnection:
        if self._conn is None or self._closed:
            raise ValueError("there is no connection")
        return self._conn

    # ------------------------------------------------------------------ TLS

    def _ready(self) -> None:
        self._endpoint.safely(self._step)

    def _step(self) -> None:
        if self._closed or self._reading or (self._conn is None and not self._shake()):
            return
        assert self._conn is not None  # noqa: S101  # after `_shake`
        self._read(self._conn)

    def _shake(self) -> bool:
        try:
            done = self._channel.shake()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.abandon(_why(error), SessionCode.INTERNAL_ERROR)
            return False
        self._watch_writable(bool(self._channel.unsent))
        if done:
            self._conn = QmuxConnection(client=self._client, parameters=self._parameters)
            self.flush()
        return done

    # ------------------------------------------------------------------ reading

    def _read(self, conn: QmuxConnection) -> None:
        left, count = self._read_budget, None
        if conn.waits:
            conn.go_on()
            self._handle(conn)
        while left > 0 and not (self._closed or conn.waits):
            into = self._buffers(conn)
            if self._fast and into:
                self._end_read(conn, None)
                self._read_beside(conn)
                return
            count = self._take(conn, into, self._receive(self._with_scratch(into)))
            if not count or self._channel.spent:
                break
            left -= count + (_PARSE_COST - 1) * max(0, count - sum(map(len, into)))
        self._end_read(conn, count)

    def _with_scratch(self, into: list[memoryview]) -> list[memoryview]:
        return [*into, self._scratch[: _DIRECT_BYTES if into or self._fast else None]]

    def _receive(self, buffers: list[memoryview]) -> int | OSError:
        try:
            return self._channel.receive(buffers)
        except OSError as error:
            return error

    def _take(self, conn: QmuxConnection, into: list[memoryview], received: int | Exception) -> int | None:
        """Process the result of a read; return its bytes, 0 at the end, None if there are none now."""
        if isinstance(received, BlockingIOError | InterruptedError):
            return None
        if isinstance(received, EmptyRecordsError):
            self._loop.remove_reader(self._sock.fileno())  # more of them would follow
            conn.fail(QuicCode.PROTOCOL_VIOLATION, str(received))
            return None
        if isinstance(received, OSError):
            conn.lost(_why(received))
            return 0
        if isinstance(received, Exception):
            raise received
        if not received:
            conn.lost("the peer has closed the connection")
            return 0
        if conn.terminated is not None:
            return received
        direct = min(received, sum(map(len, into)))
        if direct:
            assert conn.expected is not None  # noqa: S101  # since `_buffers` returned memory
            stream = conn.expected[0]
            conn.took(direct)
            self._endpoint.took(stream, into, direct)
        if received > direct:
            conn.receive(self._scratch[: received - direct])
            self._handle(conn)
        self._received_bytes += received
        if self._received_bytes >= _MIN_THREADED_BYTES:
            now = self._loop.time()
            enough = now - self._since < _MAX_THREAD_WAIT_S * self._received_bytes / _MIN_THREADED_BYTES
            self._fast = enough and self._client and _CORES > 1
            self._since, self._received_bytes = now, 0
        return received

    def _end_read(self, conn: QmuxConnection, count: int | None) -> None:
        if self._closed:
            return
        self._active_s = self._loop.time()
        self._handle(conn)
        self._endpoint.settle()
        self.flush()
        if count == 0:
            self.abandon("")
        elif conn.waits or ((count or self._channel.spent) and self._channel.pending):
            self._loop.call_soon(self._ready)  # the socket would not wake it

    def _read_beside(self, conn: QmuxConnection) -> None:
        """Read in a thread, or later in the loop if no thread is available (Python is ending, or a system limit)."""
        if self._closed:
            return
        into, claim = self._buffers(conn), threading.Lock()
        try:
            _readers().submit(self._beside, into, claim)
        except RuntimeError:
            if claim.acquire(blocking=False):  # it may have been queued for another thread
                self._fast = False
                self._loop.call_soon(self._ready)
                return
        self._reading = True
        self._loop.remove_reader(self._sock.fileno())
        self._watch_writable(wanted=False)

    def _beside(self, into: list[memoryview], claim: threading.Lock) -> None:
        if not claim.acquire(blocking=False):
            return
        begin = time.thread_time()
        received: int | Exception
        try:
            received = self._fill(self._with_scratch(into), sum(map(len, into)))
        except Exception as error:  # noqa: BLE001  # raised in the loop
            received = error
        try:
            self._loop.call_soon_threadsafe(self._back, into, received, time.thread_time() - begin)
        except RuntimeError:  # the loop is closed
            self._sock.close()

    def _fill(self, buffers: list[memoryview], wanted: int) -> int | OSError:
        """Read until ``wanted`` bytes have arrived or time is up; return as `_receive`."""
        until_s, received = time.monotonic() + _MAX_THREAD_WAIT_S, 0
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            more = self._receive(buffers)
            if isinstance(more, int) and more:
                received += more
                buffers = list(_rest(buffers, more))
            elif not isinstance(more, BlockingIOError | InterruptedError):
                return received or more
            left_s = until_s - time.monotonic()
            if received >= wanted or left_s <= 0 or self._channel.spent or not poll.poll(max(1, int(1000 * left_s))):
                return received or BlockingIOError()

    def _back(self, into: list[memoryview], received: int | Exception, cpu_s: float) -> None:
        self._reading = False
        if self._closed:
            self._sock.close()
            return
        self._loop.add_reader(self._sock.fileno(), self._ready)
        self._endpoint.safely(self._finish_beside, into, received, cpu_s)

    def _finish_beside(self, into: list[memoryview], received: int | Exception, cpu_s: float) -> None:
        conn = self._qmux
        self._endpoint.worked(cpu_s)
        self._end_read(conn, self._take(conn, into, received))

    def _buffers(self, conn: QmuxConnection) -> list[memoryview]:
        if (expected := conn.expected) is None or expected[1] < _DIRECT_BYTES:
            return []
        return self._endpoint.receive_buffers(*expected)

    def _handle(self, conn: QmuxConnection) -> None:
        """Pass events on; their views are consumed before the next read."""
        events = conn.take_events()
        for event in events:
            self._dispatch(event)
        if events:
            self._endpoint.settle()

    def _dispatch(self, event: Event) -> None:
        endpoint = self._endpoint
        match event:
            case StreamData():
                endpoint.received(event.stream, event.data, fin=event.fin)
            case StreamReset():
                endpoint.was_reset(event.stream, event.code)
            case StopReceived():
                endpoint.was_stopped(event.stream, event.code)
            case ParametersReceived(parameters):
                self._idle_s = min(self._idle_s, parameters.max_idle_timeout / 1000 or self._idle_s)
                endpoint.handshake_done((self._channel.protocol or "").removeprefix(PREFIX))
            case Ponged():
                endpoint.alive()
            case Terminated():
                endpoint.settle()  # earlier data counts, and may have to be ended
                self._terminated(event)

    def _terminated(self, event: Terminated) -> None:
        details = f": {event.reason}" if event.reason else ""
        code = event.code if event.application else SessionCode.INTERNAL_ERROR
        if event.application:
            why = f"closed with {name_of(code, SessionCode)}{details}" if code else f"the connection ended{details}"
        else:
            why = f"QMux error 0x{event.code:x}{details}" if event.code else event.reason
        self._endpoint.ended(why, code)

    # ------------------------------------------------------------------ writing

    @property
    def _waits(self) -> bool:
        return bool(self._out) or self._channel.unsent > 0

    def _flush(self, conn: QmuxConnection) -> None:
        left = _BUDGET_BYTES
        try:
            while not self._closed and self._channel.push():
                if not self._out:
                    self._endpoint.feed()
                    self._out.extend(conn.data_to_send(self._ahead))
                if not self._out:
                    break
                if left <= 0:
                    self._loop.call_soon(self._endpoint.safely, self.flush)
                    break
                left -= self._channel.send(self._out)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            conn.lost(_why(error))
            self._handle(conn)
            self.abandon("")
            return
        if self._closed:
            return
        self._active_s = self._loop.time()
        self._watch_writable(self._waits)
        self._handle(conn)
        if conn.terminated is not None:
            self._shut_down()
        self._adapt()

    def _adapt(self) -> None:
        self._info.read(self._loop.time())
        ahead = min(MAX_AHEAD_BYTES, max(MIN_AHEAD_BYTES, int(self._info.rate * AHEAD_S)))
        if not self._low_water or not 0.5 < ahead / self._ahead < 2:
            self._ahead = ahead
            with contextlib.suppress(OSError, AttributeError):
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, ahead)
                self._low_water = ahead

    def _watch_writable(self, wanted: bool) -> None:
        if wanted and not self._writes:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        elif self._writes and not wanted:
            self._loop.remove_writer(self._sock.fileno())
        self._writes = wanted

    def _writable(self) -> None:
        self._endpoint.safely(self._step if self._conn is None else self.flush)

    # ------------------------------------------------------------------ the end

    def _look_idle(self) -> None:
        left = self._active_s + self._idle_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_idle)
        else:
            self.abandon("the connection was idle for too long")

    def _shut_down(self) -> None:
        """Send the remaining output, and wait a moment for the peer to end as well (section 7.2)."""
        if self._closed:
            return
        if not self._lingers:
            self._lingers = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(_LINGER_S, self.drop)
        if not (self._shut or self._waits):
            self._shut = True
            self._channel.finish()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)


def _rest(buffers: list[memoryview], count: int) -> Iterator[memoryview]:
    for buffer in buffers:
        if count < len(buffer):
            yield buffer[count:]
        count = max(0, count - len(buffer))


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLEOFError):
        return "the peer has closed the connection"
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(error.verify_message)
    if isinstance(error, ssl.SSLError):
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            return "the peer does not speak TLS there"
        return f"TLS failed ({(error.reason or str(error)).replace('_', ' ').lower()})"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "the peer has reset the connection"
    return f"the connection was lost ({getattr(error, 'strerror', None) or error})"
