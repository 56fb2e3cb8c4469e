"""Control messages: bytes by the drafts' text, and what closes the session."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt import messages as m
from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.messages import MAX_MESSAGES, MessageParser, decode, encode
from kvabr.moqt.wire import DRAFT_20, DRAFT_22, DRAFTS, Parameters, Token, peek_varint, write_varint
from tests.examples import examples
from tests.moqt import strategies
from tests.moqt.counting import CountingBuffer
from tests.moqt.raw import frame
from tests.moqt.tables import table
from tests.moqt.vectors import MESSAGES, MESSAGES_20, MESSAGES_22, NAME, TRACK


def one(data: bytes, draft) -> m.Message:
    ((kind, payload),) = MessageParser().feed(data)
    return decode(kind, payload, draft)


def fault(data: bytes, draft) -> SessionCode:
    with pytest.raises(SessionFault) as caught:
        one(data, draft)
    return caught.value.code


@table(("draft", "vectors"), [(DRAFT_20, MESSAGES + MESSAGES_20), (DRAFT_22, MESSAGES + MESSAGES_22)])
def test_vectors(draft, vectors):
    for kind, parts, message in vectors:
        data = frame(kind, *parts)
        assert one(data, draft) == message, kind
        assert encode(message, draft) == data, kind


@table(
    ("draft", "parameter", "kinds"),
    [
        (draft, parameter, kinds)
        for draft in DRAFTS
        for parameter, kinds in {
            "25 01 00": {"03", "16", "02", "51"}, "29 02 0004": {"02", "51"}, "23 01 00": {"03", "02", "51"},
            "35 00": {"03", "0d", "16", "51"}, "21 00": {"03", "16", "02", "1d", "22", "51"},
            "20 05": {"03", "16", "02", "1d", "51"}, "10 01": {"03", "02", "1d", "22", "51"}, "0a 05": {"16"},
            "32 05": {"03", "02", "51"}, "22 01": {"03", "16", "1d", "51"}, "04 05": {"03", "51"},
            "09 0500": {"04", "1d", "07", "22"}, "08 05": {"04", "1d", "07"}, "06 14": {"03", "02", "1d", "51"},
            "03 03 03006b": {"1d", "03", "02", "50", "51", "06", "0d", "16"}, "34 SPACE": {"02"},
        }.items()
    ],
)  # fmt: skip
def test_where_parameters_may_be(draft, parameter, kinds):
    """Anywhere else they close the session."""
    for kind, head in HEADS.items():
        data = frame(kind, head, "01", parameter.replace("SPACE", "0100" if draft.sized else "00"))
        if kind in kinds:
            assert one(data, draft), kind
        else:
            assert fault(data, draft) == SessionCode.PROTOCOL_VIOLATION, kind


LISTED = "2f00 10 3 4 1d b 16 18 d 6 50 51 8 2 7 5 22"
"""Message types, but for answers to requests that are never made here."""


def test_every_type_has_a_vector():
    listed = {int(kind, 16) for kind in LISTED.split()}
    assert {peek_varint(bytes.fromhex(kind), 0)[0] for kind, _, _ in MESSAGES + MESSAGES_20} == listed
    for kind in set(range(0x80)) - listed:
        assert fault(write_varint(kind) + bytes(2), DRAFT_20) == SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("draft", DRAFTS)
def test_come_back(draft):
    @examples(400)
    @given(strategies.message())
    def check(message):
        data = encode(message, draft)
        assert one(data, draft) == message

    check()


def test_lengths_that_do_not_match():
    """Draft 18, section 10: a message longer or shorter than its fields."""
    draft = DRAFT_20
    for kind, parts, message in MESSAGES + MESSAGES_20:
        body = "".join(parts)
        open_ended = isinstance(message, m.Setup) or hasattr(message, "properties")
        if not open_ended:
            assert fault(frame(kind, body, "00"), draft) == SessionCode.PROTOCOL_VIOLATION, message
        if body and not (open_ended and (isinstance(message, m.Setup) or message.properties)):
            assert fault(frame(kind, body[:-2]), draft) in (
                SessionCode.PROTOCOL_VIOLATION, SessionCode.KEY_VALUE_FORMATTING_ERROR,
            ), message  # fmt: skip


@pytest.mark.parametrize("draft", DRAFTS)
def test_limits(draft):
    """Draft 18, sections 1.4.4, 2.4.1 and 10.4."""

    def text(size: int) -> str:
        return (write_varint(size) + b"x" * size).hex()

    assert one(frame("05", "10", "00", text(1024)), draft).reason == "x" * 1024
    assert fault(frame("05", "10", "00", text(1025)), draft) == SessionCode.PROTOCOL_VIOLATION
    assert len(one(frame("10", text(8192), "00"), draft).uri) == 8192
    assert fault(frame("10", text(8193), "00"), draft) == SessionCode.PROTOCOL_VIOLATION
    heads = (("03", "00", "00"), ("0d", "00", "00"), ("1d", "00", "0500"), ("16", "00", "00"))
    for kind, head, tail in heads:
        space = "01" + text(4000)
        assert len(one(frame(kind, head, space, text(96), tail), draft).track) == 96
        assert fault(frame(kind, head, space, text(97), tail), draft) == SessionCode.PROTOCOL_VIOLATION
        assert fault(frame(kind, head, "01" + text(4097), "00", tail), draft) == SessionCode.PROTOCOL_VIOLATION
        assert fault(frame(kind, head, "21" + "0161" * 33, "00", tail), draft) == SessionCode.PROTOCOL_VIOLATION
    space = "01" + text(4000)
    assert len(one(frame("05", "340000", "00", space, text(96)), draft).redirect.track) == 96
    assert fault(frame("05", "340000", "00", space, text(97)), draft) == SessionCode.PROTOCOL_VIOLATION
    assert len(one(frame("50", "00", "20" + "0161" * 32, "00"), draft).prefix) == 32
    assert fault(frame("50", "00", "21" + "0161" * 33, "00"), draft) == SessionCode.PROTOCOL_VIOLATION
    assert fault(frame("50", "00", "0100", "00"), draft) == SessionCode.PROTOCOL_VIOLATION
    assert fault(frame("18", "02", "0500", "00"), draft) == SessionCode.PROTOCOL_VIOLATION  # a flag that is none


HEADS = {
    "03": "00" + NAME + TRACK, "0d": "00" + NAME + TRACK, "04": "07", "02": "06", "1d": "00" + NAME + TRACK + "05",
    "16": "00" + NAME + TRACK, "18": "000500", "06": "00" + NAME, "50": "00" + NAME, "51": "00" + NAME,
    "07": "", "22": "",
}  # fmt: skip


@table("property_", ["2203", "2200", "3002", "0e8100", "0b 02 3002"])
def test_properties_of_tracks(property_):
    """Draft 18, sections 12.4 to 12.6."""
    draft = DRAFT_20
    heads = (("04", "0700"), ("18", "00050000"), ("1d", "00" + NAME + TRACK + "0500"))
    for kind, head in heads:
        assert fault(frame(kind, head, property_), draft) == SessionCode.PROTOCOL_VIOLATION
        fine = one(frame(kind, head, "2201", "0e01", "8080", "05"), draft)
        assert fine.properties == ((0x22, 1), (0x30, 1), (0xB0, 5))


def test_reasons_are_cut_between_letters():
    message = one(encode(m.RequestErrorMessage(1, 0, "ä" * 600), DRAFT_20), DRAFT_20)
    assert message.reason == "ä" * 512
    message = one(encode(m.RequestErrorMessage(1, 0, "x" + "ä" * 600), DRAFT_20), DRAFT_20)
    assert message.reason == "x" + "ä" * 511


def test_reasons_that_cannot_be_encoded_are_sent_with_replacements():
    message = one(encode(m.RequestErrorMessage(1, 0, "a path with \udc80"), DRAFT_20), DRAFT_20)
    assert message.reason == "a path with ?"


@pytest.mark.parametrize("draft", DRAFTS)
def test_any_split_gives_the_same_messages(draft):
    @given(st.lists(strategies.message(), min_size=1, max_size=5), st.data())
    def check(messages, data):
        whole = b"".join(encode(message, draft) for message in messages)
        expected = list(MessageParser().feed(whole))
        assert len(expected) == len(messages)
        parser, found, at = MessageParser(), [], 0
        while at < len(whole):
            size = data.draw(st.integers(1, len(whole) - at))
            found += parser.feed(whole[at : at + size])
            at += size
        assert found == expected
        assert parser.buffered == 0
        assert parser.count == len(messages)
        single = MessageParser()
        assert [each for byte in whole for each in single.feed(bytes([byte]))] == expected

    check()


def test_the_longest_message_byte_by_byte():
    """It is held once, and not copied for every byte."""
    parser = MessageParser()
    parser._buffer = CountingBuffer()
    data = b"\x08\xff\xff" + b"x" * 0xFFFF
    for _ in range(2):
        found = [each for at in range(len(data)) for each in parser.feed(data[at : at + 1])]
        assert found == [(8, b"x" * 0xFFFF)]
        assert parser.buffered == 0
    assert parser._buffer.touched < 2 * 8 * len(data)


def test_many_messages_at_once():
    """What is left is not moved for every message."""
    parser = MessageParser()
    parser._buffer = CountingBuffer()
    data = b"\x08\x00\x01\x00" * MAX_MESSAGES
    assert sum(1 for _ in parser.feed(data)) == MAX_MESSAGES
    assert len(data) <= parser._buffer.touched < 8 * len(data)
    with pytest.raises(SessionFault):
        list(parser.feed(data[:4]))


UNWRITABLE = [
    m.TrackStatus(0, (b"a",), b"t", Parameters(priority=5)),
    m.SubscribeNamespace(0, (b"a",), Parameters(forward=1)),
    m.Subscribe(0, (b"a" * 4000,), b"t" * 97),
    m.Goaway(b"x" * 8193),
    m.RequestErrorMessage(0x34, 0, ""),
    m.PublishNamespace(0, (b"a",), Parameters(tokens=(Token(b"x" * 0xFFF0), Token(b"y" * 100)))),
]


@pytest.mark.parametrize("message", UNWRITABLE, ids=lambda message: type(message).__name__)
def test_what_cannot_be_written(message):
    with pytest.raises(ValueError, match=r"."):
        encode(message, DRAFT_20)
