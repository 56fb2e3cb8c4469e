"""QMux: bytes of a peer, in pieces, while this end sends, resets and stops streams.

The first byte of an input says which end this is (bit 0), whether data is read to where it is wanted (bit 1), and how
the bytes are cut.
"""

from kvabr.qmux.connection import _MAX_EMPTY_FRAMES, QmuxConnection
from kvabr.qmux.frames import MAX_FRAME_BYTES, FrameType, QuicCode, frame
from tests.fuzz.target import Target, chunks
from tests.qmux.ends import PARAMETERS, begun, end, record, stream

_MAX_STREAMS = 2 * (PARAMETERS.max_streams_bidi + PARAMETERS.max_streams_uni)


def _fed(data: bytes, cut: int, *, client: bool, direct: bool) -> QmuxConnection:
    this = end(client=client)
    for piece in chunks(data, cut):
        rest = piece
        if direct and this.expected is not None:
            count = min(this.expected[1], len(piece))
            this.took(count)
            rest = piece[count:]
        this.receive(rest)
        this.take_events()
        while this.waits:
            left = len(this._rest)
            this.go_on()
            this.take_events()
            assert len(this._rest) < left
        assert this._empty <= _MAX_EMPTY_FRAMES + 1
        assert len(this._head) <= MAX_FRAME_BYTES + 32
        assert len(this._streams) <= _MAX_STREAMS + 2
        if this.peer is not None and this.terminated is None:
            for number in (0 if client else 1, 2 if client else 3):
                if this.may_open(number) and not this._opened[number >> 1 & 1]:
                    this.send(number, b"question")
                    this.stop(number, 1)
    return this


def _take(data: bytes) -> bool:
    how, data = data[0] if data else 0, data[1:]
    client, direct = bool(how & 1), bool(how & 2)
    this = _fed(data, how >> 2, client=client, direct=direct)
    other = end(client=not client)
    other.receive(b"".join(this.data_to_send(1 << 20)))
    if other.terminated not in (None, this.terminated):  # it can be read, but answers what this other never said
        assert other.terminated.code in (QuicCode.STREAM_STATE_ERROR, QuicCode.PROTOCOL_VIOLATION)
    return this.peer is not None and this.terminated is None


def _valid() -> list[bytes]:
    some = [
        record(stream(0, b"data")),
        record(stream(0, b"data"), stream(0, b"more", offset=4, fin=True), stream(2, bytes(300))),
        record(frame(FrameType.RESET_STREAM, 0, 1, 4), frame(FrameType.STOP_SENDING, 0, 3)),
        record(frame(FrameType.MAX_DATA, 1 << 20), frame(FrameType.MAX_STREAM_DATA, 0, 1 << 20), bytes(9)),
        record(
            frame(FrameType.MAX_STREAMS_UNI, 9), frame(FrameType.MAX_STREAMS_BIDI, 9), frame(FrameType.DATA_BLOCKED, 3)
        ),
        record(
            frame(FrameType.STREAM_DATA_BLOCKED, 0, 3),
            frame(FrameType.STREAMS_BLOCKED_UNI, 3),
            frame(FrameType.PING, 1),
        ),
        record(frame(FrameType.PING, 1), frame(FrameType.PING, 7)),
        record(bytes(3), *200 * [frame(FrameType.MAX_DATA, 0) + b"\0"], stream(0, b"data"), bytes(300)),
        200 * record() + record(stream(0, b"data")),
    ]
    return [bytes([how]) + begun() + each for how in (0, 2, 4) for each in some]


QMUX = Target(_take, _valid)
