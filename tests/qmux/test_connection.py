"""One QMux connection: what two ends tell each other, and what a peer must not do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.qmux.connection import (
    ParametersReceived,
    Ponged,
    StopReceived,
    StreamData,
    StreamReset,
    Terminated,
)
from kvabr.qmux.frames import MAX_FRAME_BYTES, FrameType, TransportParameters, frame, write_varint
from kvabr.qmux.frames import QuicCode as Code
from tests.qmux.ends import PARAMETERS, begun, end, fixed, flush, pair, record, stream

PARAMS = FrameType.TRANSPORT_PARAMETERS
WINDOW = PARAMETERS.max_stream_data_bidi_remote


def data_of(events, number):
    return b"".join(event.data for event in events if isinstance(event, StreamData) and event.stream == number)


@given(st.integers(1, 40), st.binary(max_size=9000), st.integers(1, 5000))
def test_streams_arrive_whole_however_they_are_cut(cut, data, most):
    client, server = pair()
    client.send(0, data)
    client.send(2, data[::-1], fin=True)
    client.send(0, b"end", fin=True)
    events = flush(client, server, most=most, cut=cut)
    assert data_of(events, 0) == data + b"end"
    assert data_of(events, 2) == data[::-1]
    assert sorted(event.stream for event in events if isinstance(event, StreamData) and event.fin) == [0, 2]


def test_nothing_but_parameters_goes_before_the_peers():
    client, server = end(client=True), end(client=False)
    assert not client.may_open(0)
    first = b"".join(client.data_to_send(1 << 20))
    assert first == begun()
    assert first[1:9] == b"\xffQS0\r\n\r\n"  # behind the size of the record
    assert client.data_to_send(1 << 20) == []
    server.receive(first)
    (event,) = server.take_events()
    assert event == ParametersReceived(PARAMETERS)
    assert server.may_open(1)
    assert not server.may_open(1 + 4 * PARAMETERS.max_streams_bidi)


def test_a_window_is_kept_and_opened_again():
    client, server = pair()
    most = PARAMETERS.max_stream_data_uni
    client.send(2, bytes(3 * most), fin=True)
    first = client.data_to_send(1 << 20)
    assert sum(len(part) for part in first) < most + 200
    assert client.backlog(2) == 2 * most
    assert client.data_to_send(1 << 20) == []
    server.receive(b"".join(first))
    got = len(data_of(server.take_events(), 2))
    for _ in range(10):
        flush(server, client)
        got += len(data_of(flush(client, server), 2))
    assert got == 3 * most
    assert not client.backlog(2)
    assert not client.sending(2)


def test_more_streams_than_at_once_when_earlier_ones_are_over():
    client, server = pair()
    for number in range(0, 400, 4):
        assert client.may_open(number)
        client.send(number, b"question", fin=True)
        flush(client, server)
        server.send(number, b"answer", fin=True)
        assert data_of(flush(server, client), number) == b"answer"
    assert not client._streams
    assert not server._streams


def test_what_is_blocked_holds_up_nothing_else():
    client, server = pair()
    client.send(2, bytes(2 * PARAMETERS.max_stream_data_uni))
    client.send(6, b"urgent", fin=True)
    assert data_of(flush(client, server), 6) == b"urgent"


def test_large_data_is_not_copied():
    client, _ = pair()
    data = bytes(8192)
    client.send(2, memoryview(data), fin=True)
    assert any(part.obj is data for part in client.data_to_send(1 << 20) if isinstance(part, memoryview))


def test_data_may_be_read_to_where_it_is_wanted():
    _, server = pair()
    server.receive(record(stream(2, b"head" + bytes(96)), stream(2, b"", offset=100, fin=True))[:-100])
    server.take_events()
    number, left = server.expected
    assert number == 2
    server.took(left - 1)
    assert server.take_events() == []
    server.took(1)
    assert server.expected is None
    server.receive(stream(2, b"", offset=100, fin=True))
    assert [fixed(event) for event in server.take_events()] == [StreamData(2, b"", True)]


def test_resets_and_stops():
    client, server = pair()
    client.send(0, b"x")
    flush(client, server)
    client.reset(0, 7)
    client.stop(0, 8)
    assert flush(client, server) == [StreamReset(0, 7), StopReceived(0, 8)]
    assert flush(server, client) == [StreamReset(0, 8)]  # a stopped stream is reset
    assert not client._streams
    assert not server._streams
    with pytest.raises(ValueError, match="over"):
        server.send(0, b"late")
    client.stop(0, 9)  # crossing its end is no fault
    assert flush(client, server) == []


def test_pings():
    client, server = pair()
    client.ping()
    client.ping()
    flush(client, server)
    assert flush(server, client) == [Ponged()]


def test_closing_tells_code_and_reason():
    client, server = pair()
    client.close(3, "why")
    assert client.take_events() == [Terminated(3, "why", True)]
    assert flush(client, server) == [Terminated(3, "why", True)]
    assert server.data_to_send(1 << 20) == []
    server.lost("gone")
    server.receive(b"anything")
    assert server.take_events() == []
    with pytest.raises(ValueError, match="over"):
        client.send(0, b"")


def test_a_stream_that_ends_without_it_is_told_of_a_lost_connection():
    client, _ = pair()
    client.lost("the peer has gone")
    assert client.take_events() == [Terminated(0, "the peer has gone", False)]


def after(*frames):
    return begun() + record(*frames)


VIOLATIONS = {
    "no parameters": (record(frame(FrameType.MAX_DATA, 1)), Code.PROTOCOL_VIOLATION),
    "parameters twice": (begun() + begun(), Code.PROTOCOL_VIOLATION),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", Code.PROTOCOL_VIOLATION),
    "a record that is too long": (
        begun() + write_varint(PARAMETERS.max_record_size + 1),
        Code.FRAME_ENCODING_ERROR,
    ),
    "a frame over the end of its record": (begun() + b"\x02\x10\x40", Code.FRAME_ENCODING_ERROR),
    "stream data over the end": (after(stream(0, b"x", size=9)), Code.FRAME_ENCODING_ERROR),
    "PING of QUIC": (after(b"\x01"), Code.FRAME_ENCODING_ERROR),
    "ACK": (after(b"\x02\0\0\0\0"), Code.FRAME_ENCODING_ERROR),
    "DATAGRAM": (after(b"\x30x"), Code.FRAME_ENCODING_ERROR),
    "a gap": (after(stream(0, b"x", offset=1)), Code.PROTOCOL_VIOLATION),
    "data again": (after(stream(0, b"xy"), stream(0, b"y", offset=1)), Code.PROTOCOL_VIOLATION),
    "data behind the end": (
        after(stream(2, b"x", fin=True), stream(2, b"y", offset=1)),
        Code.STREAM_STATE_ERROR,
    ),
    "data of a stream of ours": (after(stream(1, b"x")), Code.STREAM_STATE_ERROR),
    "data on our own direction": (after(stream(3, b"x")), Code.STREAM_STATE_ERROR),
    "too many streams": (after(stream(16, b"x")), Code.STREAM_LIMIT_ERROR),
    "more than the window": (
        after(stream(0, bytes(WINDOW + 1))),
        Code.FLOW_CONTROL_ERROR,
    ),
    "an end beyond the window": (
        after(frame(FrameType.RESET_STREAM, 0, 0, 1 << 20)),
        Code.FLOW_CONTROL_ERROR,
    ),
    "an end before what came": (
        after(stream(0, b"xy"), frame(FrameType.RESET_STREAM, 0, 0, 1)),
        Code.FINAL_SIZE_ERROR,
    ),
    "reset of what was never opened": (
        after(frame(FrameType.RESET_STREAM, 1, 0, 0)),
        Code.STREAM_STATE_ERROR,
    ),
    "reset of too many": (after(frame(FrameType.RESET_STREAM, 4000, 0, 0)), Code.STREAM_LIMIT_ERROR),
    "stop of what was never opened": (after(frame(FrameType.STOP_SENDING, 1, 0)), Code.STREAM_STATE_ERROR),
    "stop of the peer's own": (after(frame(FrameType.STOP_SENDING, 2, 0)), Code.STREAM_STATE_ERROR),
    "a window of what was never opened": (
        after(frame(FrameType.MAX_STREAM_DATA, 1, 9)),
        Code.STREAM_STATE_ERROR,
    ),
    "streams without end": (
        after(frame(FrameType.MAX_STREAMS_UNI, (1 << 60) + 1)),
        Code.FRAME_ENCODING_ERROR,
    ),
    "pings out of order": (after(frame(FrameType.PING, 4), frame(FrameType.PING, 4)), Code.PROTOCOL_VIOLATION),
    "an answer to no ping": (after(frame(FrameType.PONG, 0)), Code.PROTOCOL_VIOLATION),
    "a long reason": (
        begun() + b"\x80\x00\x7f\xff" + frame(FrameType.APPLICATION_CLOSE, 0, MAX_FRAME_BYTES + 1),
        Code.FRAME_ENCODING_ERROR,
    ),
    "a forbidden parameter": (
        record(frame(PARAMS, 2) + b"\x00\x00"),
        Code.TRANSPORT_PARAMETER_ERROR,
    ),
    "a parameter twice": (
        record(frame(PARAMS, 6) + b"\x04\x01\x01" * 2),
        Code.TRANSPORT_PARAMETER_ERROR,
    ),
    "half a parameter": (
        record(frame(PARAMS, 2) + b"\x04\x05"),
        Code.TRANSPORT_PARAMETER_ERROR,
    ),
    "small records": (begun(replace(PARAMETERS, max_record_size=100)), Code.TRANSPORT_PARAMETER_ERROR),
    "too many streams declared": (
        begun(replace(PARAMETERS, max_streams_uni=1 << 61)),
        Code.TRANSPORT_PARAMETER_ERROR,
    ),
}


@pytest.mark.parametrize("cut", [1, 1 << 20])
@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_ends_the_connection_with_its_code(what, cut):
    sent, code = VIOLATIONS[what]
    server, client = end(client=False), end(client=True)
    for at in range(0, len(sent), cut):
        server.receive(sent[at : at + cut])
    assert server.terminated is not None
    assert (server.terminated.code, server.terminated.application) == (code, False)
    assert server.terminated.reason
    assert flush(server, client)[-1] == server.terminated


def test_more_than_the_window_of_the_connection():
    parameters = replace(PARAMETERS, max_data=10)
    server = end(client=False, parameters=parameters)
    server.receive(begun() + record(stream(0, bytes(6)), stream(2, bytes(5))))
    assert server.terminated is None or server.terminated.code == Code.FLOW_CONTROL_ERROR
    server = end(client=False, parameters=parameters)
    server.receive(begun() + record(stream(0, bytes(11))))
    assert server.terminated.code == Code.FLOW_CONTROL_ERROR


def test_windows_without_end_cost_nothing():
    client, server = pair()
    client.send(2, b"x")
    flush(client, server)
    for limit in range(1 << 20, (1 << 20) + 1000):
        client.receive(record(frame(FrameType.MAX_DATA, limit), frame(FrameType.MAX_STREAM_DATA, 2, limit)))
    client.receive(record(frame(FrameType.MAX_DATA, (1 << 62) - 1), frame(FrameType.MAX_DATA, 0)))
    assert client.terminated is None
    assert client.data_to_send(1 << 20) == []


def test_what_is_kept_of_an_incomplete_head_is_bounded():
    server = end(client=False)
    server.receive(begun())
    server.receive(write_varint(PARAMETERS.max_record_size) + frame(FrameType.APPLICATION_CLOSE, 0, MAX_FRAME_BYTES))
    for _ in range(20):
        server.receive(bytes(1000))
        assert len(server._head) <= MAX_FRAME_BYTES + 32
    assert server.terminated is not None


def test_padding_and_unknown_parameters_are_ignored():
    server = end(client=False)
    known = TransportParameters(max_data=5).encode()
    unknown = frame(FrameType.TRANSPORT_PARAMETERS, len(known) - 9 + 4) + known[9:] + b"\x7f\xff\x01\x00"
    server.receive(record(unknown, bytes(500)) + record(bytes(100), frame(FrameType.MAX_DATA, 7)))
    (event,) = server.take_events()
    assert event.parameters == TransportParameters(max_data=5)


SOME = st.integers(0, 1 << 59)


@given(st.builds(TransportParameters, *[SOME] * 7, st.integers(16382, 1 << 61)))
def test_parameters_are_read_as_they_are_written(parameters):
    server = end(client=False)
    server.receive(record(parameters.encode()))
    (event,) = server.take_events()
    assert event == ParametersReceived(parameters)


def test_a_peer_that_makes_us_answer_and_reads_nothing_is_closed():
    """Each stream that it stops and resets is answered; nothing of that may be kept without end."""
    _, server = pair()
    for number in range(0, 4 * 100_000, 4):
        server.receive(record(frame(FrameType.STOP_SENDING, number, 0), frame(FrameType.RESET_STREAM, number, 0, 0)))
        server.take_events()
        if server.terminated is not None:
            break
        assert len(server._frames) <= 4098
    assert server.terminated is not None
    assert "wait for the peer to read" in server.terminated.reason
    assert not server._frames


def taken(connection, data):
    """Pass in bytes; return how many calls it took to parse them."""
    connection.receive(data)
    calls = 1
    while connection.waits:
        connection.go_on()
        calls += 1
    return calls


@pytest.mark.parametrize(
    "empty", [b"\0" + frame(FrameType.MAX_DATA, 0), frame(FrameType.DATA_BLOCKED, 0), stream(0, b"")], ids=str
)
def test_frames_without_data_end_a_connection(empty):
    _, server = pair()
    calls = taken(server, record(*3000 * [empty]))
    assert server.terminated is not None
    assert server.terminated.code == Code.PROTOCOL_VIOLATION
    assert not server.terminated.application
    assert 1 < calls <= 20


def test_empty_records_end_a_connection():
    _, server = pair()
    taken(server, 3000 * record())
    assert server.terminated is not None
    assert server.terminated.code == Code.PROTOCOL_VIOLATION


def test_frames_without_data_between_others_are_allowed():
    """Two for each frame with data, and those that come later."""
    _, server = pair()
    grants = 2 * [frame(FrameType.MAX_DATA, 0)]
    for number in range(0, 4000, 4):
        taken(server, record(stream(0, b"data", offset=number), *grants))
    many = b"".join(record(stream(0, b"d", offset=4000 + number), *grants) for number in range(3000))
    assert taken(server, many) > 10
    assert server.terminated is None
    data = b"".join(bytes(event.data) for event in server.take_events() if isinstance(event, StreamData))
    assert data.endswith(3000 * b"d")


def test_padding_is_skipped_at_once():
    _, server = pair()
    assert taken(server, record(bytes(1 << 14), stream(0, b"data"), bytes(1 << 13))) == 1
    (event,) = server.take_events()
    assert bytes(event.data) == b"data"
