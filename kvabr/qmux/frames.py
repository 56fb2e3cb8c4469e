"""Wire format: variable-length integers, transport parameters, and QUIC frames used by QMux (RFC 9000).

Section numbers without a document are those of draft-ietf-quic-qmux-01.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum

MAX_VARINT = (1 << 62) - 1
MAX_STREAMS = 1 << 60
"""Maximum of MAX_STREAMS frames (RFC 9000, section 19.11)."""
MAX_FRAME_BYTES = 1 << 14
"""Longest accepted frame without stream data; a limit of this implementation."""
DEFAULT_RECORD_BYTES = 16382
"""Default limit of a record (section 5.2)."""


class QuicCode(IntEnum):
    """Transport error codes of RFC 9000, section 20.1, used by QMux."""

    NO_ERROR = 0x0
    INTERNAL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_LIMIT_ERROR = 0x4
    STREAM_STATE_ERROR = 0x5
    FINAL_SIZE_ERROR = 0x6
    FRAME_ENCODING_ERROR = 0x7
    TRANSPORT_PARAMETER_ERROR = 0x8
    PROTOCOL_VIOLATION = 0xA


class FrameType(IntEnum):
    """Frame types (RFC 9000, section 19, and QMux, sections 4.2 and 4.3)."""

    PADDING = 0x00
    RESET_STREAM = 0x04
    STOP_SENDING = 0x05
    STREAM = 0x08
    MAX_DATA = 0x10
    MAX_STREAM_DATA = 0x11
    MAX_STREAMS_BIDI = 0x12
    MAX_STREAMS_UNI = 0x13
    DATA_BLOCKED = 0x14
    STREAM_DATA_BLOCKED = 0x15
    STREAMS_BLOCKED_BIDI = 0x16
    STREAMS_BLOCKED_UNI = 0x17
    CONNECTION_CLOSE = 0x1C
    APPLICATION_CLOSE = 0x1D
    PING = 0x348C67529EF8C7BD
    PONG = 0x348C67529EF8C7BE
    TRANSPORT_PARAMETERS = 0x3F5153300D0A0D0A


STREAM_FIN, STREAM_LENGTH, STREAM_OFFSET = 0x1, 0x2, 0x4
"""Type bits of a STREAM frame."""

INTEGERS = {
    FrameType.RESET_STREAM: 3,
    FrameType.STOP_SENDING: 2,
    FrameType.MAX_DATA: 1,
    FrameType.MAX_STREAM_DATA: 2,
    FrameType.MAX_STREAMS_BIDI: 1,
    FrameType.MAX_STREAMS_UNI: 1,
    FrameType.DATA_BLOCKED: 1,
    FrameType.STREAM_DATA_BLOCKED: 2,
    FrameType.STREAMS_BLOCKED_BIDI: 1,
    FrameType.STREAMS_BLOCKED_UNI: 1,
    FrameType.PING: 1,
    FrameType.PONG: 1,
}
"""Number of integers in frames without other fields."""


class QmuxFault(Exception):  # noqa: N818  # what the peer did wrong, as `SessionFault` in MoQT
    """The peer broke QMux; the connection ends with this code."""

    def __init__(self, code: QuicCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Truncated(Exception):  # noqa: N818  # not an error while more may come
    """The bytes end inside a value."""


def write_varint(value: int) -> bytes:
    """Encode an integer of at most 62 bits in as few bytes as possible (RFC 9000, section 16)."""
    if value < 0x40:
        return bytes((value,))
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x4000_0000:
        return (value | 0x8000_0000).to_bytes(4, "big")
    return (value | 0xC000_0000_0000_0000).to_bytes(8, "big")


def read_varint(data: bytes | bytearray | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the integer at an offset and the next offset; raise Truncated if it exceeds ``end``."""
    if at >= end:
        raise Truncated
    first = data[at]
    if first < 0x40:
        return first, at + 1
    after = at + (1 << (first >> 6))
    if after > end:
        raise Truncated
    return int.from_bytes(data[at:after], "big") & ((1 << (8 * (after - at) - 2)) - 1), after


def read_text(data: bytes | bytearray | memoryview, at: int, end: int) -> tuple[bytes, int]:
    """Return length-prefixed bytes and the next offset; raise Truncated."""
    size, at = read_varint(data, at, end)
    if size > MAX_FRAME_BYTES:
        raise QmuxFault(QuicCode.FRAME_ENCODING_ERROR, f"frame of more than {MAX_FRAME_BYTES} bytes")
    if size > end - at:
        raise Truncated
    return bytes(data[at : at + size]), at + size


def frame(kind: int, *values: int) -> bytes:
    """Encode a frame of integers."""
    return b"".join(map(write_varint, (kind, *values)))


def close_frame(code: int, reason: str, *, application: bool) -> bytes:
    """Encode a CONNECTION_CLOSE; the reason is cut to 500 bytes."""
    text = reason.encode()[:500]
    kind = (FrameType.APPLICATION_CLOSE, code) if application else (FrameType.CONNECTION_CLOSE, code, 0)
    return frame(*kind, len(text)) + text


@dataclass(frozen=True, slots=True)
class TransportParameters:
    """Parameters that an end declares at the start (section 5); absent limits are 0."""

    max_idle_timeout: int = 0
    """Milliseconds; 0: none."""
    max_data: int = 0
    max_stream_data_bidi_local: int = 0
    """Window of streams opened by the declaring end."""
    max_stream_data_bidi_remote: int = 0
    max_stream_data_uni: int = 0
    max_streams_bidi: int = 0
    max_streams_uni: int = 0
    max_record_size: int = DEFAULT_RECORD_BYTES

    def encode(self) -> bytes:
        """Encode the whole frame."""
        out = b""
        for name, kind in _KINDS.items():
            value: int = getattr(self, name)
            if value != (DEFAULT_RECORD_BYTES if name == "max_record_size" else 0):
                body = write_varint(value)
                out += write_varint(kind) + write_varint(len(body)) + body
        return frame(FrameType.TRANSPORT_PARAMETERS, len(out)) + out

    @classmethod
    def decode(cls, data: bytes) -> TransportParameters:
        """Parse the content of the frame, or raise QmuxFault."""
        found: dict[str, int] = {}
        seen: set[int] = set()
        for kind, value in _pairs(data):
            if kind in seen:
                raise _wrong(f"transport parameter 0x{kind:x} is repeated")
            seen.add(kind)
            if kind in _FORBIDDEN:
                raise _wrong(f"transport parameter 0x{kind:x} must not be used in QMux")
            if (name := _NAMES.get(kind)) is not None:
                found[name] = _read_integer(value, name)
        parameters = cls(**found)
        if parameters.max_record_size < DEFAULT_RECORD_BYTES:
            raise _wrong(f"max_record_size {parameters.max_record_size} is less than {DEFAULT_RECORD_BYTES}")
        if max(parameters.max_streams_bidi, parameters.max_streams_uni) > MAX_STREAMS:
            raise _wrong("a limit of streams exceeds 2^60")
        return parameters


_KINDS = {
    "max_idle_timeout": 0x01,
    "max_data": 0x04,
    "max_stream_data_bidi_local": 0x05,
    "max_stream_data_bidi_remote": 0x06,
    "max_stream_data_uni": 0x07,
    "max_streams_bidi": 0x08,
    "max_streams_uni": 0x09,
    "max_record_size": 0x0571C59429CD0845,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
assert set(_KINDS) == {each.name for each in fields(TransportParameters)}  # noqa: S101  # of this file
_FORBIDDEN = {0x00, 0x02, 0x03, *range(0x0A, 0x11)}
"""QUIC parameters without meaning in QMux (section 5.1)."""


def _wrong(reason: str) -> QmuxFault:
    return QmuxFault(QuicCode.TRANSPORT_PARAMETER_ERROR, reason)


def _pairs(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    try:
        while at < len(data):
            kind, at = read_varint(data, at, len(data))
            value, at = read_text(data, at, len(data))
            yield kind, value
    except Truncated:
        raise _wrong("truncated transport parameters") from None


def _read_integer(value: bytes, name: str) -> int:
    try:
        number, end = read_varint(value, 0, len(value))
    except Truncated:
        raise _wrong(f"{name} is not an integer") from None
    if end != len(value):
        raise _wrong(f"{name} has trailing bytes")
    return number
