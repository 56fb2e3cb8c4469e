"""Data streams: bytes by the drafts' text, what closes the session, and that what is written comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.objects import (
    DEFAULT_PRIORITY,
    FREE_OBJECTS,
    MIN_MEAN_BYTES,
    FetchWriter,
    Item,
    MalformedTrack,
    ObjectHeader,
    ObjectParser,
    RangeEnd,
    is_subgroup,
    read_stream_header,
)
from kvabr.moqt.wire import MAX_INTEGER, Location, write_varint
from tests.examples import examples
from tests.moqt import strategies
from tests.moqt.counting import CountingBuffer
from tests.moqt.tables import table
from tests.moqt.writers import RangeWriter


def parse(data: str, *, descending: bool = False) -> list[Item]:
    parser = ObjectParser(descending=descending)
    items = parser.feed(bytes.fromhex(data))
    parser.finish()
    return items


def fault(data: str, *, descending: bool = False) -> SessionCode:
    with pytest.raises(SessionFault) as caught:
        parse(data, descending=descending)
    return caught.value.code


def join(items: list[Item]) -> list[object]:
    """The same items, with each payload in one piece."""
    out: list[object] = []
    for item in items:
        piece = bytes(item) if isinstance(item, memoryview) else item
        if isinstance(piece, bytes) and out and isinstance(out[-1], bytes):
            out[-1] += piece
        else:
            out.append(piece)
    return out


def test_types_of_streams():
    """Sections 3.4 and 11.4.2: 0b0XX1XXXX, but for SUBGROUP_ID_MODE 0b11."""
    valid = {low + kind for low in (0x10, 0x18, 0x30, 0x38, 0x50, 0x58, 0x70, 0x78) for kind in range(6)}
    assert {kind for kind in range(0x2000) if is_subgroup(kind)} == valid


def test_headers_of_streams():
    assert read_stream_header(bytes.fromhex("14 07 05")) is None
    assert read_stream_header(bytes.fromhex("05 80c8 00")) == (0x05, 200, 3)
    assert read_stream_header(bytes.fromhex("05 80")) is None
    assert read_stream_header(bytes.fromhex("af00 0000")) == (0x2F00, None, 2)
    assert read_stream_header(bytes.fromhex("f0132b3e28 00")) == (0x132B3E28, None, 5)
    assert read_stream_header(b"") is None


def test_a_fetch():
    """Section 11.4.4: flags, group and object as differences, subgroup, priority, properties, length, payload."""
    items = parse(
        "1f 05 02 03 64 02 6162"  # all there: group 5, subgroup 2, object 3, priority 100
        "01 01 63"  # subgroup as before, object 4
        "02 00"  # subgroup plus one, object 5, no payload
        "04 0a 01 64"  # subgroup 0, object 5 + 10
        "08 01 00"  # group 5 + 1 + 1, object 16: one more, regardless of the group
        "3c 00 07 09 02 0405 01 65"  # group 8, object 7, priority 9, properties
        "40 00"  # a datagram, object 8
        "43 01 66"  # whose low bits mean nothing
    )
    assert items == [
        ObjectHeader(5, 2, 3, 100, 2), b"ab",
        ObjectHeader(5, 2, 4, 100, 1), b"c",
        ObjectHeader(5, 3, 5, 100, 0),
        ObjectHeader(5, 0, 15, 100, 1), b"d",
        ObjectHeader(7, 0, 16, 100, 0),
        ObjectHeader(8, 0, 7, 9, 1, ((4, 5),)), b"e",
        ObjectHeader(8, None, 8, 9, 0),
        ObjectHeader(8, None, 9, 9, 1), b"f",
    ]  # fmt: skip


def test_a_descending_fetch():
    """Section 11.4.4.1: a group's difference counts down."""
    assert parse("1c 09 00 80 00 0c 00 00 00 0c 04 02 00", descending=True) == [
        ObjectHeader(9, 0, 0, 128, 0), ObjectHeader(8, 0, 0, 128, 0), ObjectHeader(3, 0, 2, 128, 0),
    ]  # fmt: skip


@table("flags", range(0x80))
def test_every_combination_of_flags(flags):
    """Section 11.4.4.1, on the second object of a stream."""
    raw = write_varint
    first = raw(0x1F) + raw(10) + raw(20) + raw(30) + bytes([40]) + raw(0)
    data = raw(flags)
    group, subgroup, number, priority, properties = 10, 0, 31, 40, ()
    if flags & 0x08:
        data += raw(2)
        group = 13
    if flags & 0x40:
        subgroup = None
    elif flags & 3:
        subgroup = 19 + (flags & 3)
        if flags & 3 == 3:
            data, subgroup = data + raw(77), 77
    if flags & 0x04:
        data += raw(35)
        number = 35 if flags & 0x08 else 65
    if flags & 0x10:
        data, priority = data + bytes([200]), 200
    if flags & 0x20:
        data, properties = data + raw(2) + raw(4) + raw(9), ((4, 9),)
    data += raw(3) + b"abc"
    assert parse((first + data).hex()) == [
        ObjectHeader(10, 20, 30, 40, 0), ObjectHeader(group, subgroup, number, priority, 3, properties), b"abc",
    ]  # fmt: skip
    if flags & 0x1C == 0x1C and (flags & 0x40 or flags & 3 not in (1, 2)):
        assert len(parse(data.hex())) == 2
    else:  # the first object refers to one before it
        assert fault(data.hex()) == SessionCode.PROTOCOL_VIOLATION


def test_other_flags():
    """Section 11.4.4: whatever is not below 128, 0x8C, 0x10C or 0x20C."""
    first = "1c 05 00 80 00"
    for flags in [*range(0x80, 0x300), 0x10000, MAX_INTEGER]:
        data = first + write_varint(flags).hex() + "07 03"
        if flags in (0x8C, 0x10C, 0x20C):
            end = parse(data)[1]
            assert isinstance(end, RangeEnd)
            assert end.unknown == (flags != 0x8C)
        else:
            assert fault(data) == SessionCode.PROTOCOL_VIOLATION


def test_ends_of_ranges():
    """Section 11.4.4.2: what follows counts from their location, but from the subgroup and priority before them."""
    items = parse("1f 05 02 03 64 00808c 01 0601 00810c 00 090c 01 02 00")
    assert items == [
        ObjectHeader(5, 2, 3, 100, 0),
        RangeEnd(Location(7, 6), unknown=False),
        ObjectHeader(7, 2, 7, 100, 0),
        RangeEnd(Location(8, 9), unknown=True),
        ObjectHeader(10, 0, 2, 100, 0),
    ]
    assert parse("808c 05 06 1c 01 00 64 00") == [
        RangeEnd(Location(5, 6), unknown=False), ObjectHeader(7, 0, 0, 100, 0),
    ]  # fmt: skip


@table(
    "data",
    [
        "808c 05 06 0c 01 00 00",  # no priority before the end of a range
        "808c 05 06 1d 01 00 64 00",  # no subgroup
        "808c 05 06 1e 01 00 64 00",
        "5c 05 00 64 00 01 00",  # none but that of a datagram
        "1c ffffffffffffffffff 00 80 00 08 00 00",  # a group beyond 2^64 - 1
        "1c 05 ffffffffffffffffff 80 00 00 00",  # an object beyond it
        "1c 05 02 80 00 04 ffffffffffffffffff 00",
        "1f 05 ffffffffffffffffff 02 80 00 02 00",  # a subgroup beyond it
        "3c 05 00 80 02 0480",  # properties that end within one
        "3c 05 00 80 02 0505",
        "3c 05 00 80 e0010000",  # properties that are too long
    ],
)
def test_faults_of_fetches(data):
    assert fault(data) == SessionCode.PROTOCOL_VIOLATION


def test_a_group_below_zero():
    assert fault("1c 01 00 80 00 08 01 00", descending=True) == SessionCode.PROTOCOL_VIOLATION
    assert len(parse("1c 01 00 80 00 08 00 00", descending=True)) == 2


@table("cut", range(1, 12))
def test_a_stream_that_ends_within_an_object(cut):
    """Section 11.4."""
    whole = bytes.fromhex("3f 05 00 00 80 02 0405 03 616263")
    assert fault(whole[:cut].hex()) == SessionCode.PROTOCOL_VIOLATION
    parse(whole.hex())


@table(
    "data",
    [
        "1c 05 03 80 00 04 00 00",  # one object twice
        "3c 05 03 80 04 c0400000 00",  # mandatory, section 2.5.1
        "3c 05 03 80 04 0b 02 0b00 00",  # immutable within immutable, section 12.7
        "3c 05 03 80 03 0b 01 04 00",  # immutable, and cannot be read
        "3c 05 03 80 04 0b 00 00 00 00",  # twice
        "3c 05 03 80 02 3c 06 00",  # a gap larger than the group, section 12.8
        "3c 05 03 80 02 3e 04 00",  # or than the object, section 12.9
        "3c 05 03 80 04 3c 01 00 01 00",  # twice
        "3c 05 03 80 06 0b 02 3c01 31 01 00",  # once within immutable properties
    ],
)
def test_malformed_tracks(data):
    """These end the request, not the session."""
    with pytest.raises(MalformedTrack):
        parse(data)


def test_properties_that_a_track_may_have():
    items = parse("3c 05 03 80 06 0b 02 3c05 33 03 00")
    assert items == [ObjectHeader(5, 0, 3, 128, 0, ((0x0B, b"\x3c\x05"), (0x3E, 3)))]
    unknown = parse("3c 05 03 80 07 bffe 01 c04002 05 00")
    assert unknown == [ObjectHeader(5, 0, 3, 128, 0, ((0x3FFE, 1), (0x8000, 5)))]


@table(("size", "good"), [(0, FREE_OBJECTS), (1, 1040), (MIN_MEAN_BYTES // 2, 2047), (MIN_MEAN_BYTES, None)])
def test_small_objects_without_end_are_refused(size, good):
    """Else a peer could keep this end busy for 4 microseconds with each two bytes."""
    writer, parser = FetchWriter(), ObjectParser()
    whole = [writer.header(0, number, size) + bytes(size) for number in range(3000)]
    if good is None:
        assert sum(isinstance(item, ObjectHeader) for item in parser.feed(b"".join(whole))) == 3000
        return
    parser.feed(b"".join(whole[:good]))
    with pytest.raises(MalformedTrack, match="more than 1024 objects of less than 64 bytes"):
        parser.feed(whole[good])


def test_ends_of_ranges_without_end_are_refused():
    with pytest.raises(MalformedTrack, match="more than 1024 objects"):
        ObjectParser().feed(bytes.fromhex("808c 05 05") * (FREE_OBJECTS + 1))


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
