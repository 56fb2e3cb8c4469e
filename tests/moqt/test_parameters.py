"""Message parameters, filters and setup options, by the drafts' text."""

import pytest

from kvabr.moqt.codes import Param, SessionCode, SessionFault
from kvabr.moqt.setup_options import SetupOptions, setup_options
from kvabr.moqt.wire import (
    DELETE,
    DRAFT_20,
    DRAFT_22,
    DRAFTS,
    EVERYTHING,
    IN_FILL,
    MAX_INTEGER,
    MAX_TOKENS,
    REGISTER,
    USE_ALIAS,
    Filter,
    Location,
    Parameters,
    Reader,
    Token,
    read_pairs,
    read_parameters,
    token_values,
    write_parameters,
    write_varint,
)
from tests.moqt.tables import table

EVERY = frozenset(Param)


def read(data: str | bytes, draft=DRAFT_20, allowed=EVERY) -> Parameters:
    raw = bytes.fromhex(data) if isinstance(data, str) else data
    reader = Reader(raw)
    found = read_parameters(reader, draft, allowed)
    reader.end()
    return found


def fault(data: str | bytes, draft=DRAFT_20, allowed=EVERY) -> SessionCode:
    with pytest.raises(SessionFault) as caught:
        read(data, draft, allowed)
    return caught.value.code


@table(
    ("data", "parameters"),
    [  # count, then type and value as draft 20 encodes each
        ("00", Parameters()),
        ("01 02 8064", Parameters(object_delivery_timeout=100)),
        ("01 02 00", Parameters(object_delivery_timeout=0)),
        ("01 03 03 0300 6b", Parameters(tokens=(Token(b"k"),))),
        ("02 03 03 0300 6b 00 02 0207", Parameters(tokens=(Token(b"k"), Token(b"", 2, 7)))),
        ("01 04 0a", Parameters(rendezvous_timeout=10)),
        ("01 06 bfff", Parameters(subgroup_delivery_timeout=16383)),
        ("01 08 00", Parameters(expires=0)),
        ("01 09 05 80c8", Parameters(largest=Location(5, 200))),
        ("01 0a 09", Parameters(fill_timeout=9)),
        ("01 10 00", Parameters(forward=0)),
        ("01 20 c8", Parameters(priority=200)),
        ("01 20 ff", Parameters(priority=255)),
        ("01 22 01", Parameters(group_order=1)),
        ("01 22 02", Parameters(group_order=2)),
        ("01 32 8080", Parameters(new_group=128)),
        ("01 34 06 02 0161 0262 63", Parameters(namespace_prefix=(b"a", b"bc"))),
        ("01 34 01 00", Parameters(namespace_prefix=())),
        ("01 35 00", Parameters(include_properties=0)),
        (
            "0d 0205 01 020300 0104 0206 0208 01 0901 010a 0601 1020 01 0100 0102 1032 02 01 00",
            Parameters(
                object_delivery_timeout=5, tokens=(Token(b""),), rendezvous_timeout=4, subgroup_delivery_timeout=6,
                expires=8, largest=Location(9, 1), fill_timeout=10, forward=1, priority=0x20,
                filter=Filter(groups_back=0), group_order=2, new_group=0x32, namespace_prefix=(),
            ),
        ),
    ],
)  # fmt: skip
def test_encodings(data, parameters):
    assert read(data) == parameters
    if parameters != Parameters(object_delivery_timeout=100):  # 100 is written with fewer bytes
        assert write_parameters(parameters, DRAFT_20) == bytes.fromhex(data)


AT = Location(8, 5)
FILTERS = [  # a filter in drafts 20 and 22, behind its type
    (EVERYTHING, "00", "00"),
    (Filter(groups_back=0), "0100", "0100"),
    (Filter(groups_back=2), "0102", "0102"),
    (Filter(), "020000", "05"),
    (Filter(AT), "020805", "020805"),
    (Filter(AT, None, 10), "03080502", "03080502"),
    (Filter(AT, None, 8, 9), "0408050009", "0408050009"),
    (Filter(Location(0, 0), None, 0), "03000000", "03000000"),
]


@table(("value", "counted", "formed"), FILTERS)
def test_filters(value, counted, formed):
    for draft, data in ((DRAFT_20, counted), (DRAFT_22, formed)):
        assert read("01 21" + data, draft) == Parameters(filter=value)
        assert write_parameters(Parameters(filter=value), draft) == bytes.fromhex("01 21" + data)


@table(
    ("value", "largest", "first", "last"),
    [
        (Filter(), (4, 2), (4, 3), None), (Filter(), None, (0, 0), None), (Filter(groups_back=0), (4, 2), (5, 0), None),
        (Filter(groups_back=1), (4, 2), (4, 0), None), (Filter(groups_back=9), (4, 2), (0, 0), None),
        (Filter(AT), (4, 2), AT, None), (Filter(AT, None, 9), None, AT, (9, MAX_INTEGER)),
        (Filter(AT, None, 9, 3), (4, 2), AT, (9, 3)),
    ],
)  # fmt: skip
def test_what_filters_mean(value, largest, first, last):
    assert value.within(None if largest is None else Location(*largest)) == (first, last)


@table(
    ("draft", "data"),
    [
        (DRAFT_20, "0508050009 00"),  # five fields
        (DRAFT_20, "0108 05"),  # a field less than its length
        (DRAFT_20, "0d 05 00 ffffffffffffffffff 00"),  # beyond the last group
        (DRAFT_22, "06"),  # an unknown form
        (DRAFT_22, "03 05 00 ffffffffffffffffff"),
        (DRAFT_22, "0408"),
    ],
)
def test_filters_that_are_none(draft, data):
    assert fault("01 21" + data, draft) == SessionCode.PROTOCOL_VIOLATION


def test_parameters_that_fill():
    """FILL may contain only some parameters, and no other FILL."""
    assert {0x0A, 0x20, 0x21, 0x22, 0x25, 0x26, 0x27, 0x28} == IN_FILL
    assert read("01 23 01 00", DRAFT_20) == Parameters(fill=Parameters())
    for data in ("01 23 04 01 23 01 00", "01 23 03 01 0405", "01 23 02 0000", "01 23 00", "01 35 02"):
        assert fault(data, DRAFT_20) == SessionCode.PROTOCOL_VIOLATION


@table(
    "data",
    [
        "01 1002",  # FORWARD beyond 1, section 10.2.12
        "01 10ff",
        "01 2200",  # GROUP_ORDER outside 1 and 2, section 10.2.8
        "01 2203",
        "02 0205 0006",  # one type twice, section 10.2
        "01 0105",  # an unknown type, section 10.2
        "01 8134 05",
        "02 0205",  # fewer than announced
        "02 0205 ffffffffffffffffff 00",  # a type beyond 2^64 - 1, section 10.2
        "01 20",
        "01 34 02 0100",  # a namespace with an empty field
        "01 34 43 21" + "0161" * 33,
        "01 34 03 01 0161 00",  # longer than its length
    ],
)
def test_faults(data):
    assert fault(data) == SessionCode.PROTOCOL_VIOLATION


def options(data: str) -> SetupOptions:
    return setup_options(read_pairs(Reader(bytes.fromhex(data))))


def test_unknown_setup_options_are_ignored():
    """Draft 18, sections 10.3 and 14: also twice, also those reserved for greasing."""
    assert options("02 05 0b 01ff 00 02abcd 8090 0101 807f 05") == SetupOptions()


def in_message(pairs, count, draft):
    data = write_varint(count) + pairs
    return read_parameters(Reader(data), draft, frozenset(Param))


def in_setup(pairs, count, _draft):
    return setup_options(read_pairs(Reader(pairs)))


@table("draft", DRAFTS)
@table("parse", [in_message, in_setup])
def test_more_tokens_than_anyone_needs_are_not_read(parse, draft, monkeypatch):
    """A message has room for 16,000 of them; reading them all stopped the event loop for half a second."""
    read = []
    decode = Token.decode
    monkeypatch.setattr(Token, "decode", lambda *given: read.append(given) or decode(*given))
    token = b"\2\3\0"
    tokens = lambda count: b"\3" + token + (b"\0" + token) * (count - 1)  # noqa: E731
    assert len(parse(tokens(MAX_TOKENS), MAX_TOKENS, draft).tokens) == MAX_TOKENS
    for count in (MAX_TOKENS + 1, 16_000):
        read.clear()
        with pytest.raises(SessionFault, match="more than 16 authorization tokens"):
            parse(tokens(count), count, draft)
        assert len(read) == MAX_TOKENS + 1


def register(alias: int, value: bytes) -> Token:
    return Token(value, REGISTER, alias)


def use(alias: int) -> Token:
    return Token(b"", USE_ALIAS, alias)


def delete(alias: int) -> Token:
    return Token(b"", DELETE, alias)


@table(
    ("data", "token"),
    [  # alias type; alias, type and value where it has them
        ("00 80c8", delete(200)),
        ("01 05 02 616263", Token(b"abc", REGISTER, 5, 2)),
        ("02 05", use(5)),
        ("03 00 616263", Token(b"abc")),
        ("03 00", Token(b"")),
    ],
)
def test_structure(data, token):
    assert Token.decode(bytes.fromhex(data)) == token
    assert token.encode() == bytes.fromhex(data)


@table("data", ["", "04", "00", "01", "0105", "02", "03", "000500", "020500", "0280"])
def test_no_token(data):
    """A token that cannot be decoded closes the session with KEY_VALUE_FORMATTING_ERROR."""
    with pytest.raises(SessionFault) as caught:
        Token.decode(bytes.fromhex(data))
    assert caught.value.code == SessionCode.KEY_VALUE_FORMATTING_ERROR


def test_setup_never_overflows():
    """Section 10.3.1.4: a token that does not fit is used, not registered."""
    assert token_values((register(1, b"four"), register(2, b"x")), setup=True) == (b"four", b"x")


@table(
    ("tokens", "setup", "code"),
    [
        ((use(3),), False, SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        ((Token(b"a"), delete(3)), False, SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        ((register(1, b""),), False, SessionCode.AUTH_TOKEN_CACHE_OVERFLOW),  # 0, the default, prohibits aliases
        ((register(1, b"x"), use(1)), True, SessionCode.PROTOCOL_VIOLATION),
        ((register(1, b"x"), delete(1)), True, SessionCode.PROTOCOL_VIOLATION),
    ],
)
def test_faults_of_tokens(tokens, setup, code):
    with pytest.raises(SessionFault) as caught:
        token_values(tokens, setup=setup)
    assert caught.value.code == code
