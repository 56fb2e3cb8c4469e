"""The state machine of one QMux connection.

Theory of operation. The owner passes in bytes from the byte stream (`receive`), takes events (`take_events`), and
writes the result of `data_to_send`. Each end begins with its transport parameters; stream data waits for those of the
peer.

1. Stream data arrives in order, so an event carries a view of the received bytes without reassembly.
2. While a STREAM frame is incomplete, `expected` names the stream of the next bytes. The owner may read them directly
   to their destination, and report them by `took`.
3. One call parses a limited number of frames. While unparsed bytes remain (`waits`), the owner calls `go_on` instead of
   `receive`, and must not modify the passed buffer.
4. Received data counts as consumed, and windows reopen when half used: the owner must limit what it stores.
5. If the peer breaks a rule, the connection ends with CONNECTION_CLOSE and a `Terminated` event.

Section numbers without a document are those of draft-ietf-quic-qmux-01.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvabr.qmux.frames import (
    INTEGERS,
    MAX_FRAME_BYTES,
    MAX_STREAMS,
    MAX_VARINT,
    STREAM_FIN,
    STREAM_LENGTH,
    STREAM_OFFSET,
    FrameType,
    QmuxFault,
    QuicCode,
    TransportParameters,
    Truncated,
    close_frame,
    frame,
    read_text,
    read_varint,
    write_varint,
)

Buffer = bytes | memoryview
_MAX_HEAD = MAX_FRAME_BYTES + 32
"""Maximum buffered bytes of an incomplete frame without stream data."""
_STREAM_HEAD = 32
"""Maximum bytes of a record size and the head of a STREAM frame."""
_MAX_WAITING_FRAMES = 4096
"""Maximum waiting frames without stream data: a peer may cause answers that it never reads."""
_FRAMES_PER_CALL = 128
"""Frames and record sizes parsed per call of `QmuxConnection.receive`."""
_MAX_EMPTY_FRAMES = 1024
"""Maximum frames without stream data, beyond two for each frame with some."""
_ZEROS = re.compile(rb"\0*")
_MIN_RECORD = 1 << 10
"""Minimum stream data of a record, in bytes, if more follows."""


@dataclass(frozen=True, slots=True)
class ParametersReceived:
    """The peer's transport parameters have arrived: the connection is established."""

    parameters: TransportParameters


@dataclass(frozen=True, slots=True)
class StreamData:
    """Received bytes of a stream, as a view; `fin` if they are the last."""

    stream: int
    data: Buffer
    fin: bool


@dataclass(frozen=True, slots=True)
class StreamReset:
    """The peer has reset a stream."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class StopReceived:
    """The peer has sent STOP_SENDING for a stream; it is reset."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class Ponged:
    """The peer has answered a ping."""


@dataclass(frozen=True, slots=True)
class Terminated:
    """The connection has ended."""

    code: int
    reason: str
    application: bool
    """True for a code of the application, False for one of QUIC's."""


Event = ParametersReceived | StreamData | StreamReset | StopReceived | Ponged | Terminated


class _Stream:
    __slots__ = (
        "fin", "number", "pending", "queued", "receive_limit", "received", "receives", "send_limit", "sends", "sent",
    )  # fmt: skip

    def __init__(self, number: int, receive_limit: int, send_limit: int, *, receives: bool, sends: bool) -> None:
        self.number = number
        self.receive_limit, self.received, self.receives = receive_limit, 0, receives
        self.send_limit, self.sent, self.sends = send_limit, 0, sends
        self.pending: deque[Buffer] = deque()
        self.queued = 0
        self.fin = False
        """No data follows ``pending``."""


class QmuxConnection:
    """One end of a connection; the module docstring explains its use."""

    def __init__(self, *, client: bool, parameters: TransportParameters) -> None:
        self.client, self._ours = client, parameters
        self.peer: TransportParameters | None = None
        """The peer's parameters, once received."""
        self.terminated: Terminated | None = None
        self._events: list[Event] = []
        self._streams: dict[int, _Stream] = {}
        # Receiving.
        self._head = bytearray()
        """An incomplete frame or record size."""
        self._record_left = 0
        """Unparsed bytes of the current record; 0: a record size follows."""
        self._expected: _Stream | None = None
        """Stream of the incomplete frame."""
        self._data_left = 0
        self._data_fin = False
        self._receive_limit, self._received = parameters.max_data, 0
        self._peer_opened = [0, 0]
        """Streams opened by the peer: bidirectional, unidirectional."""
        self._peer_may_open = [parameters.max_streams_bidi, parameters.max_streams_uni]
        self._last_ping = -1
        self._rest = memoryview(b"")
        """Received bytes that are not parsed yet."""
        self._empty = 0
        """See `_MAX_EMPTY_FRAMES`."""
        # Sending.
        self._frames: list[bytes] = []
        """Waiting frames without stream data, those of the connection first."""
        self._pong: int | None = None
        self._pings = 0
        self._opened = [0, 0]
        self._may_open = [0, 0]
        self._send_limit, self._sent = 0, 0
        self._ready: deque[_Stream] = deque()
        """Streams with data to send, in order."""
        self._blocked: dict[int, _Stream] = {}
        """Streams that wait for the peer to open their windows."""
        self.unsent = 0
        """Waiting bytes of all streams."""
        self._begun = self._closing = False

    # ------------------------------------------------------------------ receiving

    def take_events(self) -> list[Event]:
        """Return the events since the last call; their views are valid until the next `receive`."""
        events, self._events = self._events, []
        return events

    @property
    def expected(self) -> tuple[int, int] | None:
        """Stream and number of the next bytes; None if the head of a frame is next."""
        return None if self._expected is None or not self._data_left else (self._expected.number, self._data_left)

    def took(self, count: int) -> None:
        """Report ``count`` of the `expected` bytes as read by the owner; an event follows at the end of the stream."""
        stream = self._expected
        assert stream is not None  # noqa: S101  # the caller has looked
        assert 0 < count <= self._data_left  # noqa: S101  # as above
        self._took(stream, count)
        if not self._data_left:
            self._expected = None
            if self._data_fin:
                self._events.append(StreamData(stream.number, b"", True))
                self._receiving_ends(stream)

    @property
    def waits(self) -> bool:
        """True if received bytes wait for `go_on`."""
        return len(self._rest) > 0

    def receive(self, data: Buffer) -> None:
        """Process bytes from the peer; call `go_on` instead while some wait. A violation ends the connection."""
        if self.terminated is None:
            assert not self.waits  # noqa: S101  # the caller has looked
            self._empty, self._rest = 0, memoryview(data)
            self.go_on()

    def go_on(self) -> None:
        """Parse more of the received bytes."""
        try:
            self._rest = self._parse(self._rest)
        except QmuxFault as fault:
            self.fail(fault.code, str(fault))

    def fail(self, code: QuicCode, reason: str) -> None:
        """End the connection with a QUIC code after a violation by the peer."""
        if self.terminated is None:
            self._events.append(self._end(code, reason, application=False, notify_peer=True))

    def lost(self, reason: str) -> None:
        """Handle the end of the byte stream."""
        if self.terminated is None:
            self._events.append(self._end(QuicCode.NO_ERROR, reason, application=False, notify_peer=False))

    def _parse(self, view: memoryview) -> memoryview:
        """Parse some frames, and return the remaining bytes."""
        at, end = 0, len(view)
        head, left = self._head, _FRAMES_PER_CALL
        while at < end and self.terminated is None:
            if self._data_left:
                at += self._deliver(view[at : at + self._data_left])
                continue
            if not left:
                return view[at:]
            left -= 1
            buffered = len(head)
            if buffered:
                head += view[at : at + _MAX_HEAD]
            source, begin = (head, 0) if buffered else (view, at)
            try:
                after = self._item(source, begin)
            except Truncated:
                if not buffered:
                    head += view[at:]
                if len(head) > _MAX_HEAD:
                    raise QmuxFault(
                        QuicCode.FRAME_ENCODING_ERROR, f"a frame of more than {MAX_FRAME_BYTES} bytes"
                    ) from None
                break
            at = at + after - buffered if buffered else after
            head.clear()
            if len(self._frames) > _MAX_WAITING_FRAMES:
                raise QmuxFault(
                    QuicCode.INTERNAL_ERROR, f"more than {_MAX_WAITING_FRAMES} frames wait for the peer to read"
                )
            self._empty = max(0, self._empty - 3) if self._data_left else self._empty + 1
            if self._empty > _MAX_EMPTY_FRAMES:
                raise QmuxFault(QuicCode.PROTOCOL_VIOLATION, f"{self._empty} frames in a row without stream data")
        return memoryview(b"")

    def _item(self, data: memoryview | bytearray, at: int) -> int:
        """Parse a record size, or a frame without its stream data; return the next offset."""
        available = len(data)
        if not self._record_left:
            size, after = read_varint(data, at, available)
            if size > self._ours.max_record_size:
                limit_bytes = self._ours.max_record_size
                raise QmuxFault(QuicCode.FRAME_ENCODING_ERROR, f"record of {size} bytes; the limit is {limit_bytes}")
            self._record_left = size
            return after
        end = min(available, at + self._record_left)
        try:
            after = self._frame(data, at, end)
        except Truncated:
            if end - at == self._record_left:
                raise QmuxFault(QuicCode.FRAME_ENCODING_ERROR, "a record ends inside a frame") from None
            raise
        self._record_left -= after - at
        return after

    def _frame(self, data: memoryview | bytearray, at: int, end: int) -> int:
        kind, after = read_varint(data, at, end)
        if (kind == FrameType.TRANSPORT_PARAMETERS) != (self.peer is None):
            what = "the first frame must be the transport parameters, and no other"
            raise QmuxFault(QuicCode.PROTOCOL_VIOLATION, what)
        if kind & ~0x7 == FrameType.STREAM:
            return self._stream_head(kind, data, after, end, self._record_left - (after - at))
        if kind == FrameType.PADDING:
            padding = _ZEROS.match(data, after, end)
            return end if padding is None else padding.end()
        if (count := INTEGERS.get(kind)) is not None:  # type: ignore[call-overload]
            values = []
            for _ in range(count):
                value, after = read_varint(data, after, end)
                values.append(value)
            if (handler := self._HANDLERS.get(kind)) is not None:
                handler(self, *values)
            return after
        if kind == FrameType.TRANSPORT_PARAMETERS:
            body, after = read_text(data, after, end)
            self._begin(TransportParameters.decode(body))
            return after
        if kind in (FrameType.CONNECTION_CLOSE, FrameType.APPLICATION_CLOSE):
            code, after = read_varint(data, after, end)
            if kind == FrameType.CONNECTION_CLOSE:
                _, after = read_varint(data, after, end)
            body, after = read_text(data, after, end)
            reason = body[:1000].decode("utf-8", "replace")
            application = kind == FrameType.APPLICATION_CLOSE
            self._events.append(self._end(code, reason, application=application, notify_peer=False))
            return after
        raise QmuxFault(QuicCode.FRAME_ENCODING_ERROR, f"unknown frame type 0x{kind:x}")

    def _stream_head(self, kind: int, data: memoryview | bytearray, at: int, end: int, record_left: int) -> int:
        begin = at
        number, at = read_varint(data, at, end)
        offset = 0
        if kind & STREAM_OFFSET:
            offset, at = read_varint(data, at, end)
        if kind & STREAM_LENGTH:
            size, at = read_varint(data, at, end)
            if size > record_left - (at - begin):
                raise QmuxFault(QuicCode.FRAME_ENCODING_ERROR, "a record ends inside a frame")
        else:
            size = record_left - (at - begin)
        stream = self._receiving(number)
        if offset != stream.received:
            raise QmuxFault(
                QuicCode.PROTOCOL_VIOLATION, f"data of stream {number} at offset {offset}, expected {stream.received}"
            )
        if offset + size > stream.receive_limit or self._received + size > self._receive_limit:
            raise QmuxFault(QuicCode.FLOW_CONTROL_ERROR, f"more data on stream {number} than its window allows")
        if size:
            self._expected, self._data_left, self._data_fin = stream, size, bool(kind & STREAM_FIN)
        elif kind & STREAM_FIN or not stream.received:
            self._events.append(StreamData(number, b"", bool(kind & STREAM_FIN)))
            if kind & STREAM_FIN:
                self._receiving_ends(stream)
        return at

    def _deliver(self, part: memoryview) -> int:
        stream = self._expected
        assert stream is not None  # noqa: S101  # there is data left
        self._took(stream, len(part))
        fin = not self._data_left and self._data_fin
        self._events.append(StreamData(stream.number, part, fin))
        if not self._data_left:
            self._expected = None
        if fin:
            self._receiving_ends(stream)
        return len(part)

    def _took(self, stream: _Stream, count: int) -> None:
        self._data_left -= count
        self._record_left -= count
        stream.received += count
        self._received += count
        ours = self._ours
        if self._receive_limit - self._received < ours.max_data // 2:
            self._receive_limit = self._received + ours.max_data
            self._frames.append(frame(FrameType.MAX_DATA, self._receive_limit))
        window = self._window(stream.number, ours, mine=self._mine(stream.number))
        if stream.receive_limit - stream.received < window // 2 and not (self._data_fin and not self._data_left):
            stream.receive_limit = stream.received + window
            self._frames.append(frame(FrameType.MAX_STREAM_DATA, stream.number, stream.receive_limit))

    def _receiving(self, number: int) -> _Stream:
        """Return the stream that the peer sends on, opening it if new."""
        stream = self._streams.get(number)
        if stream is None and not self._mine(number):
            stream = self._peer_opens(number)
        if stream is None or not stream.receives:
            raise QmuxFault(QuicCode.STREAM_STATE_ERROR, f"data on stream {number}, on which the peer must not send")
        return stream

    def _peer_opens(self, number: int) -> _Stream | None:
        """Open a stream of the peer, and those with lower numbers (RFC 9000, section 3.2); None if it has ended."""
        one_way, count = number >> 1 & 1, number // 4
        if count >= self._peer_may_open[one_way]:
            limit_bytes = self._peer_may_open[one_way]
            raise QmuxFault(
                QuicCode.STREAM_LIMIT_ERROR, f"stream {number} is beyond the limit of {limit_bytes} streams"
            )
        for index in range(self._peer_opened[one_way], count + 1):
            self._add(4 * index + (number & 3))
        self._peer_opened[one_way] = max(self._peer_opened[one_way], count + 1)
        return self._streams.get(number)

    def _add(self, number: int) -> _Stream:
        mine = self._mine(number)
        peer = self.peer or TransportParameters()
        one_way = bool(number & 2)
        stream = self._streams[number] = _Stream(
            number,
            self._window(number, self._ours, mine=mine),
            self._window(number, peer, mine=not mine),
            receives=not (one_way and mine),
            sends=not one_way or mine,
        )
        return stream

    def _window(self, number: int, parameters: TransportParameters, *, mine: bool) -> int:
        """Return a stream's window according to one end's parameters; ``mine``: that end opened the stream."""
        if number & 2:
            return parameters.max_stream_data_uni
        return parameters.max_stream_data_bidi_local if mine else parameters.max_stream_data_bidi_remote

    def _mine(self, number: int) -> bool:
        return number % 2 == (not self.client)

    def _receiving_ends(self, stream: _Stream) -> None:
        stream.receives = False
        self._forget_if_over(stream)

    def _forget_if_over(self, stream: _Stream) -> None:
        if stream.receives or stream.sends or self._streams.pop(stream.number, None) is None:
            return
        if not self._mine(stream.number):  # grant the peer another stream
            one_way = stream.number >> 1 & 1
            first = self._ours.max_streams_uni if one_way else self._ours.max_streams_bidi
            self._peer_may_open[one_way] += 1
            granted = self._peer_may_open[one_way]
            if (granted - first) % max(1, first // 2) == 0:
                self._frames.append(
                    frame(FrameType.MAX_STREAMS_UNI if one_way else FrameType.MAX_STREAMS_BIDI, granted)
                )

    # ------------------------------------------------------------------ frames without data

    def _begin(self, parameters: TransportParameters) -> None:
        self.peer = parameters
        self._send_limit = parameters.max_data
        self._may_open = [parameters.max_streams_bidi, parameters.max_streams_uni]
        for stream in self._streams.values():
            stream.send_limit = self._window(stream.number, parameters, mine=not self._mine(stream.number))
        self._events.append(ParametersReceived(parameters))

    def _sending(self, number: int) -> _Stream | None:
        """Return the stream of this end that a frame of the peer refers to; None if it has ended."""
        one_way = number >> 1 & 1
        if self._mine(number):
            if number // 4 >= self._opened[one_way]:
                raise QmuxFault(QuicCode.STREAM_STATE_ERROR, f"stream {number} has not been opened")
        elif one_way:
            raise QmuxFault(QuicCode.STREAM_STATE_ERROR, f"stream {number} is only for the peer to send on")
        elif number // 4 >= self._peer_opened[0]:
            self._peer_opens(number)
        stream = self._streams.get(number)
        return stream if stream is not None and stream.sends else None

    def _reset_received(self, number: int, code: int, final_size: int) -> None:
        stream = self._streams.get(number)
        if stream is None and self._mine(number):
            if number & 2 or number // 4 >= self._opened[0]:
                raise QmuxFault(QuicCode.STREAM_STATE_ERROR, f"reset of stream {number}, which does not receive")
            return
        if stream is None and (stream := self._peer_opens(number)) is None:
            return
        if not stream.receives:
            if self._mine(number) and number & 2:
                raise QmuxFault(QuicCode.STREAM_STATE_ERROR, f"reset of stream {number}, which does not receive")
            return
        more = final_size - stream.received
        if more < 0:
            raise QmuxFault(QuicCode.FINAL_SIZE_ERROR, f"stream {number} ends before its received data")
        if final_size > stream.receive_limit or self._received + more > self._receive_limit:
            raise QmuxFault(QuicCode.FLOW_CONTROL_ERROR, f"stream {number} ends beyond its window")
        self._received += more
        if self._receive_limit - self._received < self._ours.max_data // 2:
            self._receive_limit = self._received + self._ours.max_data
            self._frames.append(frame(FrameType.MAX_DATA, self._receive_limit))
        self._events.append(StreamReset(number, code))
        self._receiving_ends(stream)

    def _stop_received(self, number: int, code: int) -> None:
        if self._sending(number) is not None:
            self._events.append(StopReceived(number, code))
            self.reset(number, code)  # RFC 9000, section 3.5

    def _max_data(self, limit: int) -> None:
        if limit > self._send_limit:
            self._send_limit = limit
            self._unblock()

    def _max_stream_data(self, number: int, limit: int) -> None:
        stream = self._sending(number)
        if stream is not None and limit > stream.send_limit:
            stream.send_limit = limit
            self._unblock()

    def _max_streams(self, one_way: int, limit: int) -> None:
        if limit > MAX_STREAMS:
            raise QmuxFault(QuicCode.FRAME_ENCODING_ERROR, "a limit of streams exceeds 2^60")
        self._may_open[one_way] = max(self._may_open[one_way], limit)

    def _stream_blocked(self, number: int, _: int) -> None:
        if number not in self._streams and not self._mine(number):
            self._peer_opens(number)

    def _ping_received(self, number: int) -> None:
        if number <= self._last_ping:
            raise QmuxFault(QuicCode.PROTOCOL_VIOLATION, f"ping {number} after {self._last_ping}")
        self._last_ping = self._pong = number

    def _pong_received(self, number: int) -> None:
        if number >= self._pings:
            raise QmuxFault(QuicCode.PROTOCOL_VIOLATION, f"answer to ping {number}, which was not sent")
        self._events.append(Ponged())

    _HANDLERS: ClassVar[dict[int, Callable[..., None]]] = {
        FrameType.RESET_STREAM: _reset_received,
        FrameType.STOP_SENDING: _stop_received,
        FrameType.MAX_DATA: _max_data,
        FrameType.MAX_STREAM_DATA: _max_stream_data,
        FrameType.MAX_STREAMS_BIDI: lambda self, limit: self._max_streams(0, limit),
        FrameType.MAX_STREAMS_UNI: lambda self, limit: self._max_streams(1, limit),
        FrameType.STREAM_DATA_BLOCKED: _stream_blocked,
        FrameType.PING: _ping_received,
        FrameType.PONG: _pong_received,
    }
    """Handlers of frames that consist of integers; other such frames need none."""

    # ------------------------------------------------------------------ sending

    def may_open(self, number: int) -> bool:
        """Return True if a stream of this end is within the peer's limit."""
        return number // 4 < self._may_open[number >> 1 & 1]

    def sending(self, number: int) -> bool:
        """Return True if data or the end of a stream has not been sent yet."""
        stream = self._streams.get(number)
        return stream is not None and stream.sends and (stream.fin or bool(stream.queued))

    def backlog(self, number: int) -> int:
        """Return the unsent bytes of a stream."""
        stream = self._streams.get(number)
        return 0 if stream is None else stream.queued

    def send(self, number: int, data: Buffer, *, fin: bool = False) -> None:
        """Send on a stream, opening it if new; raise ValueError if this end may not (or no longer) send on it."""
        stream = self._own(number)
        if stream.fin:
            raise ValueError(f"stream {number} has ended already")
        stream.fin = fin
        if len(data):
            stream.pending.append(data)
            stream.queued += len(data)
            self.unsent += len(data)
        if (len(data) or fin) and number not in self._blocked and stream not in self._ready:
            self._ready.append(stream)

    def reset(self, number: int, code: int) -> None:
        """Reset a stream of this end, dropping waiting data. Errors as in `send`."""
        stream = self._own(number)
        self._drop_pending(stream)
        self._frames.append(frame(FrameType.RESET_STREAM, number, code, stream.sent))
        stream.sends = False
        self._forget_if_over(stream)

    def stop(self, number: int, code: int) -> None:
        """Send STOP_SENDING for a stream; do nothing if it has ended."""
        stream = self._streams.get(number)
        if stream is not None and stream.receives:
            self._frames.append(frame(FrameType.STOP_SENDING, number, code))

    def ping(self) -> None:
        """Send a ping."""
        if self.peer is not None:
            self._frames.append(frame(FrameType.PING, self._pings))
            self._pings += 1

    def close(self, code: int, reason: str) -> None:
        """End the connection with a code of the application."""
        if self.terminated is None:
            self._events.append(self._end(code, reason, application=True, notify_peer=True))

    def data_to_send(self, limit_bytes: int) -> list[Buffer]:
        """Return about ``limit_bytes`` bytes to send now, as buffers; large data is not copied."""
        out: list[Buffer] = []
        if not self._begun:
            self._begun = True
            out.append(_record(self._ours.encode()))
        left = limit_bytes
        if self.terminated is not None:
            if self._closing:
                self._closing = False
                closed = self.terminated
                out.append(_record(close_frame(closed.code, closed.reason, application=closed.application)))
            return out
        if self.peer is None:
            return out
        if self._pong is not None:
            self._frames.append(frame(FrameType.PONG, self._pong))
            self._pong = None
        for record in self._records():
            out.append(record)
            left -= len(record)
        while left > 0 and self._ready:
            left -= self._data_record(self._ready[0], left, self.peer.max_record_size, out)
        return out

    def _records(self) -> list[bytes]:
        """Return the waiting frames in records small enough for any peer."""
        frames, self._frames = self._frames, []
        records: list[bytes] = []
        batch: list[bytes] = []
        size = 0
        for each in frames:
            if batch and size + len(each) > _MIN_RECORD:
                records.append(_record(b"".join(batch)))
                batch, size = [], 0
            batch.append(each)
            size += len(each)
        if batch:
            records.append(_record(b"".join(batch)))
        return records

    def _data_record(self, stream: _Stream, limit: int, max_record: int, out: list[Buffer]) -> int:
        """Append a record with data of a stream, and return its bytes."""
        credit = min(stream.send_limit - stream.sent, self._send_limit - self._sent)
        size = min(stream.queued, credit, max(limit, _MIN_RECORD), max_record - _STREAM_HEAD)
        if size <= 0 and stream.queued:
            self._ready.popleft()
            self._blocked[stream.number] = stream
            return 0
        fin = stream.fin and size == stream.queued
        kind = FrameType.STREAM | STREAM_LENGTH | (STREAM_OFFSET if stream.sent else 0) | (STREAM_FIN if fin else 0)
        place = (stream.number, stream.sent) if stream.sent else (stream.number,)
        head = frame(kind, *place, size)
        out.append(write_varint(len(head) + size) + head)
        left = size
        while left:
            part = stream.pending[0]
            if len(part) <= left:
                stream.pending.popleft()
            else:
                whole = memoryview(part)
                part, stream.pending[0] = whole[:left], whole[left:]
            out.append(part)
            left -= len(part)
        stream.sent += size
        stream.queued -= size
        self._sent += size
        self.unsent -= size
        if fin or not stream.queued:
            self._ready.popleft()
        if fin:
            stream.sends = False
            self._forget_if_over(stream)
        return size + _STREAM_HEAD

    def _own(self, number: int) -> _Stream:
        """Return a stream that this end may send on, or raise ValueError."""
        if self.terminated is not None:
            raise ValueError("the connection is over")
        stream = self._streams.get(number)
        if stream is None and self._mine(number) and number // 4 >= self._opened[number >> 1 & 1]:
            if not self.may_open(number):
                raise ValueError(f"stream {number} is beyond the peer's limit")
            for index in range(self._opened[number >> 1 & 1], number // 4 + 1):
                stream = self._add(4 * index + (number & 3))
            self._opened[number >> 1 & 1] = number // 4 + 1
        if stream is None or not stream.sends:
            raise ValueError(f"stream {number} is over")
        return stream

    def _drop_pending(self, stream: _Stream) -> None:
        self.unsent -= stream.queued
        stream.pending.clear()
        stream.queued, stream.fin = 0, False
        self._blocked.pop(stream.number, None)
        if stream in self._ready:
            self._ready.remove(stream)

    def _unblock(self) -> None:
        self._ready.extend(self._blocked.values())
        self._blocked.clear()

    def _end(self, code: int, reason: str, *, application: bool, notify_peer: bool) -> Terminated:
        self.terminated = Terminated(min(code, MAX_VARINT), reason, application)
        self._closing = notify_peer
        self._frames.clear()
        self._ready.clear()
        self._blocked.clear()
        self._streams.clear()
        self._expected, self._data_left = None, 0
        self._rest = memoryview(b"")
        self.unsent = 0
        return self.terminated


def _record(frames: bytes) -> bytes:
    return write_varint(len(frames)) + frames
