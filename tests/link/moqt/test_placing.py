"""Objects that are read to their places are those that the parser would have found, wherever reads end."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvabr.link.moqt.connection import filled, place
from kvabr.moqt.objects import FetchWriter, ObjectHeader, ObjectParser
from kvabr.moqt.requester import NextPayload
from kvabr.moqt.wire import write_varint
from kvabr.transfer.interface import GroupRequest, GroupTransfer
from kvabr.types.naming import TrackNamespace

SIZES = st.sampled_from([1, 63, 64, 100, 100, 100, 100, 300])
OBJECTS = st.lists(st.tuples(SIZES, st.sampled_from([1, 1, 1, 5]), st.sampled_from([None, None, None, 7])), min_size=1)


async def read_in_place(wire: bytes, reads: list[int], limit: int, *, exact: bool) -> tuple[bytes, ObjectParser, int]:
    """What a transfer has after reads that place what they can; the parser; and the bytes that were fed to it."""
    parser, fed = ObjectParser(), 0
    transfer = GroupTransfer(GroupRequest(TrackNamespace("m", "0" * 64), "t", 5, limit, exact))
    at, turn = 0, 0
    while at < len(wire):
        size = min(reads[turn % len(reads)], len(wire) - at)
        part, turn = wire[at : at + size], turn + 1
        at += size
        buffers = []
        if parser.left:
            buffers = place(NextPayload(0, parser.left, parser.follower, parser.size), transfer, size)
        for buffer in buffers:
            buffer[:], part = part[: len(buffer)].ljust(len(buffer), b"?"), part[len(buffer) :]
        others: list[bytes | memoryview] = [part]
        if buffers:
            count, behind = parser.took(list(filled(buffers, size)))
            transfer.written(count)
            others = [*behind, part]
        if rest := b"".join(others):
            fed += len(rest)
            for item in parser.feed(rest):
                if isinstance(item, memoryview):
                    transfer.append(item)
    parser.finish()
    transfer.progressed()
    transfer.finish()
    return bytes(transfer.data), parser, fed


def written(objects: list[tuple[int, int, int | None]]) -> tuple[bytes, bytes]:
    """A stream of objects of some sizes, steps of their numbers and priorities; and its payload."""
    writer, number, wire, payload = FetchWriter(), 0, b"", b""
    for index, (size, step, priority) in enumerate(objects):
        number += step
        data = bytes([index % 251]) * size
        properties = ((4, 9),) if index == 0 else ()
        wire += writer.header(5, number, size, properties, priority=priority) + data
        payload += data
    return wire, payload


@settings(max_examples=150, deadline=None)
@given(OBJECTS, st.lists(st.integers(1, 700), min_size=1, max_size=5), st.booleans())
def test_reads_that_end_anywhere(objects, reads, exact):
    wire, payload = written(objects)
    plain = ObjectParser()
    headers = [item for item in plain.feed(wire) if isinstance(item, ObjectHeader)]
    data, parser, _ = asyncio.run(read_in_place(wire, reads, len(payload), exact=exact))
    assert data == payload
    following = FetchWriter()
    following.header(5, headers[-1].object, 1)
    more = following.header(5, headers[-1].object + 1, 1)
    assert parser.feed(more) == plain.feed(more)  # both know where they are


def test_equal_objects_are_neither_copied_nor_parsed_one_by_one():
    wire, payload = written([(1000, 1, None)] * 200)
    data, _, fed = asyncio.run(read_in_place(wire, [10_000], len(payload), exact=True))
    assert data == payload
    assert fed < len(wire) / 8


def test_the_group_in_a_header_that_is_written_longer_than_needed_is_not_overlooked():
    flags = b"\x80\x1c"
    header = flags + write_varint(5) + write_varint(0) + b"\1" + write_varint(100)
    parser = ObjectParser()
    assert parser.feed(header)[0].group == 5
    assert parser.took([memoryview(bytes(100)), memoryview(header)])[1]
    assert parser.feed(header)[0].group == 11
