"""Valid input for the parsers that `tests.fuzz.wire` and `tests.fuzz.sessions` feed: something of every kind."""

from functools import cache

from kvabr.moqt import messages as m
from kvabr.moqt.codes import Param
from kvabr.moqt.messages import encode
from kvabr.moqt.objects import SubgroupHeader, SubgroupWriter
from kvabr.moqt.wire import Draft, Location, Parameters, Token
from tests.moqt import vectors
from tests.moqt.writers import RangeWriter

SPACE, TRACK = (b"root", b"model"), b"FP16"
SOME = Parameters(tokens=(Token(b"secret"), Token(b"x", 1, 5, 2), Token(b"", 2, 5)))


MESSAGES: tuple[m.Message, ...] = (
    *(message for _, _, message in (*vectors.MESSAGES, *vectors.MESSAGES_20, *vectors.MESSAGES_22)),
    m.Fetch(
        0, SPACE, TRACK, Location(3, 0), m.OPEN_END, Parameters(range_filters=((Param.OBJECTID_FILTER, b"\0\1\2"),))
    ),
)
"""Of every kind one, at least."""


@cache
def control(draft: Draft) -> tuple[bytes, ...]:
    return tuple(encode(message, draft) for message in MESSAGES)


@cache
def fetch_streams() -> tuple[bytes, ...]:
    """Objects of FETCHes, without the stream's header."""
    out = []
    for properties in ((), ((4, 9), (11, b"\x3c\x01"), (0x81, b"value"))):
        writer = RangeWriter()
        data = writer.header(3, 0, 5, properties) + b"hello" + writer.header(3, 4, 0) + writer.header(5, 0, 200)
        data += bytes(200) + writer.range_end(Location(9, 1), unknown=True) + writer.header(9, 2, 1, priority=7) + b"x"
        out.append(data)
    return tuple(out)


SUBGROUPS = (
    SubgroupHeader(7, 5, 0, 9, properties=True, end_of_group=False),
    SubgroupHeader(7, 6, None, None, properties=False, end_of_group=True, first_object=True),
    SubgroupHeader(700, 5, 6, 9, properties=False, end_of_group=False),
)
"""The first two of a track alias that sample sessions know."""


@cache
def subgroup_streams() -> tuple[bytes, ...]:
    """Objects of subgroups, with their stream's header."""
    out = []
    for header in SUBGROUPS:
        writer = SubgroupWriter(header)
        properties = ((4, 9), (0x81, b"value")) if header.properties else ()
        data = writer.begin() + writer.header(3, 5, properties) + b"hello" + writer.header(9, 0)
        out.append(data + writer.header(10, 200) + bytes(200))
    return tuple(out)


@cache
def data_streams() -> tuple[bytes, ...]:
    """Unidirectional streams with their headers: of request 0, and of subgroups."""
    fetched = [b"\x05\x00" + each for each in fetch_streams()]
    return (
        *fetched,
        *(bytes.fromhex(each) for each in ("11 07 05 09 03 00 05 68656c6c6f", "3a 07 05", "14 02 00 00 00")),
        *subgroup_streams(),
    )
