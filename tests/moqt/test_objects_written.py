"""Objects that are written come back, however they are cut, in linear time and little memory."""

from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.objects import (
    DEFAULT_PRIORITY,
    ObjectHeader,
    ObjectParser,
    RangeEnd,
)
from kvabr.moqt.wire import Location
from tests.examples import examples
from tests.moqt import strategies
from tests.moqt.counting import CountingBuffer
from tests.moqt.tables import table
from tests.moqt.test_objects import join
from tests.moqt.writers import RangeWriter

objects = st.tuples(
    st.integers(0, 3),
    st.integers(0, 1000),
    st.binary(max_size=40),
    strategies.properties(),
    st.none() | st.integers(0, 255),
)
"""Steps in group and object, payload, properties, priority."""
ends = st.tuples(st.integers(1, 3), st.integers(0, 9), st.booleans())
"""Of ranges: steps in group and object, and whether nobody knows."""


def cut_and_feed(parser: ObjectParser, whole: bytes, data) -> list[object]:
    items, at = [], 0
    while at < len(whole):
        size = data.draw(st.integers(1, min(60, len(whole) - at)))
        items += parser.feed(whole[at : at + size])
        at += size
    parser.finish()
    return join(items)


@table("descending", [False, True])
def test_fetches_come_back(descending):
    @examples(60)
    @given(st.lists(objects | ends, max_size=8), st.data())
    def check(steps, data):
        writer, whole, expected = RangeWriter(descending=descending), b"", []
        group, number, last, first = 1 << 30, -1, DEFAULT_PRIORITY, True
        for step in steps:
            if step[0]:
                group, number = group + (-step[0] if descending else step[0]), -1
            number += step[1] + 1
            if len(step) == 3:
                end = Location(group, number)
                whole += writer.range_end(end, unknown=step[2])
                expected.append(RangeEnd(end, unknown=step[2]))
                continue
            _, _, payload, extra, priority = step
            last = priority if priority is not None else DEFAULT_PRIORITY if first else last
            first = False
            whole += writer.header(group, number, len(payload), extra, priority=priority) + payload
            expected.append(ObjectHeader(group, 0, number, last, len(payload), extra))
            expected += [payload] if payload else []
        parser = ObjectParser(descending=descending)
        assert join(parser.feed(whole)) == expected
        parser.finish()
        assert cut_and_feed(ObjectParser(descending=descending), whole, data) == expected

    check()


def counting_parser() -> ObjectParser:
    parser = ObjectParser()
    parser._buffer = CountingBuffer()
    return parser


def test_a_long_stream_byte_by_byte():
    """Nothing is held but an object's header, and it is not copied for every byte."""
    writer = RangeWriter()
    whole = b"".join(writer.header(group, 0, 8) + b"x" * 8 for group in range(1000))
    parser = counting_parser()
    count, most = 0, 0
    for at in range(len(whole)):
        count += len(parser.feed(whole[at : at + 1]))
        most = max(most, len(parser._buffer))
    assert count == 9_000
    assert most < 16
    assert parser._buffer.touched < 4 * len(whole)


def test_a_long_payload_is_not_held():
    parser = ObjectParser()
    parser.feed(bytes.fromhex("1c 05 00 80 f0ffffffff"))
    piece = b"p" * 65536
    assert all(parser.feed(piece) == [piece] for _ in range(100))
    assert len(parser._buffer) == 0
