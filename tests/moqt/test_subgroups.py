"""The objects of subgroups: bytes by the drafts' text, what closes the session, and that what is written comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.objects import (
    DEFAULT_PRIORITY,
    FREE_OBJECTS,
    Item,
    MalformedTrack,
    ObjectBudget,
    ObjectHeader,
    ObjectParser,
    Status,
    SubgroupHeader,
    SubgroupWriter,
    read_stream_header,
)
from tests.examples import examples
from tests.moqt.tables import table
from tests.moqt.test_objects import cut_and_feed, join, objects

PLAIN = SubgroupHeader(1, 5, 0, 0, properties=False, end_of_group=False)


def parse(data: str, subgroup: SubgroupHeader = PLAIN) -> list[Item]:
    parser = ObjectParser(subgroup)
    items = parser.feed(bytes.fromhex(data))
    parser.finish()
    return items


def fault(data: str, *how) -> SessionCode:
    with pytest.raises(SessionFault) as caught:
        parse(data, *how)
    return caught.value.code


@table(
    ("data", "header"),
    [  # draft 18, section 11.4.2: type, alias, group, perhaps subgroup and priority
        ("10 07 05 09", SubgroupHeader(7, 5, 0, 9, properties=False, end_of_group=False)),
        ("11 07 05 09", SubgroupHeader(7, 5, 0, 9, properties=True, end_of_group=False)),
        ("12 07 05 09", SubgroupHeader(7, 5, None, 9, properties=False, end_of_group=False)),
        ("14 07 05 06 09", SubgroupHeader(7, 5, 6, 9, properties=False, end_of_group=False)),
        ("18 07 05 09", SubgroupHeader(7, 5, 0, 9, properties=False, end_of_group=True)),
        ("30 07 05", SubgroupHeader(7, 5, 0, None, properties=False, end_of_group=False)),
        ("3d 07 05 06", SubgroupHeader(7, 5, 6, None, properties=True, end_of_group=True)),
        ("50 07 05 09", SubgroupHeader(7, 5, 0, 9, properties=False, end_of_group=False, first_object=True)),
        ("7d 8080 8081 8082", SubgroupHeader(128, 129, 130, None, True, True, True)),
        ("14 02 00 00 00", SubgroupHeader(2, 0, 0, 0, properties=False, end_of_group=False)),  # section 11.6
    ],
)  # fmt: skip
def test_headers(data, header):
    raw = bytes.fromhex(data)
    assert read_stream_header(raw + b"rest") == (raw[0], header, len(raw))
    if header.subgroup or raw[0] & 6 != 4:
        assert SubgroupWriter(header).begin() == raw
    assert all(read_stream_header(raw[:cut]) is None for cut in range(len(raw)))


def test_the_drafts_examples():
    """Draft 18, section 11.6."""
    stream = bytes.fromhex("14 02 00 00 00 00 04 61626364 00 04 65666768")
    kind, header, size = read_stream_header(stream)
    assert kind == 0x14
    assert join(parse(stream[size:].hex(), header)) == [
        ObjectHeader(0, 0, 0, 0, 4), b"abcd", ObjectHeader(0, 0, 1, 0, 4), b"efgh",
    ]  # fmt: skip
    # The second, with the lengths that its text really has: 6 + 1 + 1 + 14 bytes of properties.
    stream = bytes.fromhex("35 02 00 00") + bytes.fromhex("00 16 04 f08257dcd3") + b"\x49\x0etraceID:123456"
    stream += bytes.fromhex("04 61626364 00 00 04 65666768")
    kind, header, size = read_stream_header(stream)
    properties = ((4, 2186796243), (77, b"traceID:123456"))
    assert join(parse(stream[size:].hex(), header)) == [
        ObjectHeader(0, 0, 0, DEFAULT_PRIORITY, 4, properties), b"abcd",
        ObjectHeader(0, 0, 1, DEFAULT_PRIORITY, 4), b"efgh",
    ]  # fmt: skip


def test_objects():
    """Draft 18, section 11.4.2: differences less one, but for the first."""
    items = parse("03 01 61 00 00 00 04 00 03")
    assert items == [
        ObjectHeader(5, 0, 3, 0, 1), b"a", ObjectHeader(5, 0, 4, 0, 0),
        ObjectHeader(5, 0, 9, 0, 0, (), Status.END_OF_GROUP),
    ]  # fmt: skip
    by_first = SubgroupHeader(1, 5, None, None, properties=False, end_of_group=False)
    assert parse("03 01 61 00 00 04", by_first) == [
        ObjectHeader(5, 3, 3, DEFAULT_PRIORITY, 1), b"a",
        ObjectHeader(5, 3, 4, DEFAULT_PRIORITY, 0, (), Status.END_OF_TRACK),
    ]  # fmt: skip


def test_statuses_have_no_properties():
    """Draft 18, section 11.2.1.2."""
    header = SubgroupHeader(1, 5, 0, 0, properties=True, end_of_group=False)
    assert parse("00 02 0405 00 00 00 00 00 03", header) == [
        ObjectHeader(5, 0, 0, 0, 0, ((4, 5),)), ObjectHeader(5, 0, 1, 0, 0, (), Status.END_OF_GROUP),
    ]  # fmt: skip
    assert fault("00 02 0405 00 03", header) == SessionCode.PROTOCOL_VIOLATION


@table(
    "data", ["00", "00 05 61", "00 00", "ffffffffffffffffff 00 00 00 00 00", *(f"00 00 {n:02x}" for n in (1, 2, 5, 63))]
)
def test_faults(data):
    """A stream that ends inside an object, an object beyond 64 bits, statuses that are none."""
    assert fault(data) == SessionCode.PROTOCOL_VIOLATION


def test_subgroups_come_back():
    @examples(60)
    @given(st.lists(objects), st.booleans(), st.none() | st.integers(0, 99), st.sampled_from(Status), st.data())
    def check(steps, has_properties, subgroup, status, data):
        header = SubgroupHeader(1, 5, subgroup, 9, has_properties, end_of_group=False)
        writer, whole, expected, before, first = SubgroupWriter(header), b"", [], None, None
        for _, step, payload, extra, _ in steps:
            number = step if before is None else before + 1 + step
            first = number if first is None else first
            mine = Status.NORMAL if payload else status
            extra = extra if has_properties and mine == Status.NORMAL else ()  # noqa: PLW2901  # what can be sent of it
            whole += writer.header(number, len(payload), extra, mine) + payload
            before = number
            where = first if subgroup is None else subgroup
            expected.append(ObjectHeader(5, where, number, 9, len(payload), extra, mine))
            expected += [payload] if payload else []
        assert cut_and_feed(ObjectParser(header), whole, data) == expected

    check()


def test_streams_share_a_budget():
    """Also streams without any object count."""
    budget = ObjectBudget()
    for _ in range(FREE_OBJECTS):
        ObjectParser(PLAIN, budget=budget).finish()
    with pytest.raises(MalformedTrack, match="more than 1024 objects"):
        ObjectParser(PLAIN, budget=budget).finish()
    with pytest.raises(MalformedTrack, match="more than 1024 objects"):
        ObjectParser(PLAIN, budget=budget).feed(bytes.fromhex("00 01 61"))
