"""Valid input for the parsers that `tests.fuzz.wire` and `tests.fuzz.sessions` feed: something of every kind."""

from __future__ import annotations

from functools import cache

from kvabr.moqt import messages as m
from kvabr.moqt.codes import Param
from kvabr.moqt.messages import encode
from kvabr.moqt.objects import SubgroupHeader, SubgroupWriter
from kvabr.moqt.parameters import Filter, Parameters, SetupOptions, Token
from kvabr.moqt.wire import Draft, Location
from tests.moqt.writers import RangeWriter

SPACE, TRACK = (b"root", b"model"), b"FP16"
SOME = Parameters(tokens=(Token(b"secret"), Token(b"x", 1, 5, 2), Token(b"", 2, 5)))


def sample_messages() -> list[m.Message]:
    """One of every kind, at least."""
    space, start, end = (b"a", b"bc"), Location(3, 0), Location(5, 7)
    rich = Parameters(
        object_delivery_timeout=100, tokens=SOME.tokens, forward=1, priority=9, filter=Filter(start, None, 9),
        group_order=2, new_group=5, rendezvous_timeout=7, subgroup_delivery_timeout=8,
    )  # fmt: skip
    properties = ((4, 9), (11, b"\x3c\x01"), (34, 1), (0x4001, b"x"))
    fill = Parameters(fill_timeout=5, priority=1, filter=Filter(groups_back=2), group_order=2)
    ranges = ((Param.OBJECTID_FILTER, b"\0\1\2"), (Param.OBJECT_PROPERTY_FILTER, b"\0\4\1"))
    to = m.Redirect(b"moqt://h/", space, b"t")
    return [
        m.Setup(SetupOptions(b"/p", b"h:1", (Token(b"t"),), 100, b"me")),
        m.Goaway(b"", 9),
        m.RequestOk(Parameters(expires=5, largest=start), properties),
        m.RequestErrorMessage(0x10, 5, "none"),
        m.Subscribe(0, space, b"t", rich),
        m.TrackStatus(0, space, b"t", SOME),
        m.SubscribeOk(7, Parameters(expires=1, largest=start), properties),
        m.RequestUpdate(2, Parameters(priority=3)),
        m.Publish(0, space, b"t", 7, Parameters(forward=0), properties),
        m.PublishDone(2, 3, "over"),
        m.Fetch(0, space, b"t", start, end, Parameters(priority=1, group_order=1)),
        m.FetchOk(True, end, Parameters(), properties),
        m.PublishNamespace(0, space, SOME),
        m.Namespace((b"x",)),
        m.SubscribeNamespace(0, (), SOME),
        m.PublishStateNotify(Parameters(largest=start, forward=1, filter=Filter(end, None, 9, 8))),
        m.Subscribe(0, space, b"u", Parameters(fill=fill, include_properties=0)),
        m.Subscribe(0, space, b"v", Parameters(fill=Parameters(), filter=Filter())),
        m.Fetch(0, space, b"t", Location(0, 0), m.OPEN_END, Parameters(filter=Filter(groups_back=3))),
        m.Fetch(0, space, b"t", start, m.OPEN_END, Parameters(range_filters=ranges)),
        m.RequestUpdate(2, Parameters(fill=Parameters(), filter=Filter(start))),
        m.RequestErrorMessage(0x34, 1, "there", to),
        m.SubscribeTracks(0, space),
    ]


@cache
def control(draft: Draft) -> tuple[bytes, ...]:
    """Messages with type and length."""
    return tuple(encode(message, draft) for message in sample_messages())


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
