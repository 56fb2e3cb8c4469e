"""Integers, locations, namespaces, names, reasons and key-value pairs, by the drafts' text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.wire import (
    NARROW,
    WIDE,
    Location,
    Reader,
    read_pairs,
    write_location,
    write_namespace,
    write_pairs,
    write_text,
)
from tests.moqt.tables import table

KINDS = [WIDE, NARROW]


def reader(data: str | bytes, varint=WIDE) -> Reader:
    return Reader(bytes.fromhex(data) if isinstance(data, str) else data, varint)


# ------------------------------------------------------------------ integers


@table(
    ("data", "value"),
    [  # draft 18, section 1.4.1, "Example Integer Encodings"
        ("25", 37),
        ("8025", 37),
        ("bbbd", 15_293),
        ("ed7f3e7d", 226_442_877),
        ("faa1a0e403d8", 2_893_212_287_960),
        ("fc8998abc66bc0", 151_288_809_941_952),
        ("fefa318fa8e3ca11", 70_423_237_261_249_041),
        ("ffffffffffffffffff", 18_446_744_073_709_551_615),
    ],
)
def test_examples_of_draft_18(data, value):
    raw = bytes.fromhex(data)
    assert WIDE.peek(raw, 0) == (value, len(raw))
    assert all(WIDE.peek(raw[:cut], 0) is None for cut in range(len(raw)))
    if data != "8025":  # the one that is longer than it need be
        assert WIDE.encode(value) == raw


@table(
    ("data", "value"),
    [  # RFC 9000, appendix A.1, which draft 16 refers to
        ("c2197c5eff14e88c", 151_288_809_941_952_652),
        ("9d7f3e7d", 494_878_333),
        ("7bbd", 15_293),
        ("25", 37),
        ("4025", 37),
    ],
)
def test_examples_of_quic(data, value):
    raw = bytes.fromhex(data)
    assert NARROW.peek(raw, 0) == (value, len(raw))
    if data != "4025":
        assert NARROW.encode(value) == raw


@table(
    ("value", "data"),
    [  # draft 18, section 1.4.1, "Summary of Integer Encodings": the ends of every range
        (0, "00"),
        (127, "7f"),
        (128, "8080"),
        (16_383, "bfff"),
        (16_384, "c04000"),
        (2_097_151, "dfffff"),
        (2_097_152, "e0200000"),
        (268_435_455, "efffffff"),
        (268_435_456, "f010000000"),
        (34_359_738_367, "f7ffffffff"),
        (34_359_738_368, "f80800000000"),
        (4_398_046_511_103, "fbffffffffff"),
        (4_398_046_511_104, "fc040000000000"),
        (562_949_953_421_311, "fdffffffffffff"),
        (562_949_953_421_312, "fe02000000000000"),
        (72_057_594_037_927_935, "feffffffffffffff"),
        (72_057_594_037_927_936, "ff0100000000000000"),
        ((1 << 64) - 1, "ffffffffffffffffff"),
    ],
)
def test_ranges_of_draft_18(value, data):
    assert WIDE.encode(value) == bytes.fromhex(data)
    assert WIDE.peek(bytes.fromhex(data), 0) == (value, len(data) // 2)


@table(
    ("value", "data"),
    [
        (0, "00"),
        (63, "3f"),
        (64, "4040"),
        (16_383, "7fff"),
        (16_384, "80004000"),
        (1_073_741_823, "bfffffff"),
        (1_073_741_824, "c000000040000000"),
        ((1 << 62) - 1, "ffffffffffffffff"),
    ],
)
def test_ranges_of_quic(value, data):
    assert NARROW.encode(value) == bytes.fromhex(data)
    assert NARROW.peek(bytes.fromhex(data), 0) == (value, len(data) // 2)


@given(st.integers(0, (1 << 64) - 1), st.integers(1, 9))
def test_any_length_that_fits_is_valid(value, size):
    """Draft 18, section 1.4.1: integers need not be as short as possible."""
    usable = 64 if size == 9 else 7 * size
    value &= (1 << usable) - 1
    lead = (0xFF00 >> (size - 1)) & 0xFF
    raw = b"\xff" + value.to_bytes(8, "big") if size == 9 else (value | lead << (8 * size - 8)).to_bytes(size, "big")
    assert WIDE.peek(raw, 0) == (value, size)


@given(st.integers(0, (1 << 64) - 1))
def test_wide_integers_come_back(value):
    raw = WIDE.encode(value)
    assert WIDE.peek(b"x" + raw + b"y", 1) == (value, len(raw) + 1)
    assert all(WIDE.peek(raw[:cut], 0) is None for cut in range(len(raw)))


@given(st.integers(0, (1 << 62) - 1))
def test_narrow_integers_come_back(value):
    raw = NARROW.encode(value)
    assert NARROW.peek(b"x" + raw + b"y", 1) == (value, len(raw) + 1)
    assert all(NARROW.peek(raw[:cut], 0) is None for cut in range(len(raw)))


@table(("varint", "value"), [(WIDE, -1), (WIDE, 1 << 64), (NARROW, 1 << 62), (NARROW, -1)])
def test_what_cannot_be_written(varint, value):
    with pytest.raises(ValueError, match="outside 0 to"):
        varint.encode(value)


def test_an_integer_that_is_cut_short():
    for data in ("", "80", "ffffff"):
        with pytest.raises(SessionFault) as caught:
            reader(data).varint()
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


# ------------------------------------------------------------------ locations


def test_locations():
    """Draft 18, section 1.4.2."""
    assert write_location(WIDE, Location(200, 3)).hex() == "80c803"
    assert reader("80c803").location() == (200, 3)
    assert write_location(NARROW, Location(200, 3)).hex() == "40c803"
    assert Location(1, 9) < Location(2, 0)
    assert Location(2, 0) < Location(2, 1)
    assert not Location(2, 1) < Location(2, 1)


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("varint", KINDS)
def test_namespace(varint):
    """Draft 18, section 2.4.1: the number of fields, then length and value of each."""
    assert write_namespace(varint, (b"ab", b"c")).hex() == "020261620163"
    assert reader("020261620163", varint).namespace() == (b"ab", b"c")
    assert reader("00", varint).namespace() == ()


def test_namespaces_of_draft_16_are_not_empty():
    """Draft 16, section 2.4.1: one of 0 fields closes the session."""
    with pytest.raises(SessionFault) as caught:
        reader("00", NARROW).namespace(least=1)
    assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("varint", KINDS)
def test_limits_of_namespaces(varint):
    """Draft 18, section 2.4.1: 32 fields, none empty, 4,096 bytes."""
    fields = (b"f",) * 32
    assert reader(write_namespace(varint, fields), varint).namespace() == fields
    whole = (b"a" * 4000, b"b" * 96)
    assert reader(write_namespace(varint, whole), varint).namespace() == whole
    too_many = varint.encode(33) + write_text(varint, b"f") * 33
    empty_field = bytes.fromhex("02016100")
    too_long = varint.encode(2) + write_text(varint, b"a" * 4000) + write_text(varint, b"b" * 97)
    for data in (too_many, empty_field, too_long, varint.encode(1) + write_text(varint, b"a" * 4097)):
        with pytest.raises(SessionFault) as caught:
            reader(data, varint).namespace()
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION
    for fields in ((b"f",) * 33, (b"",), (b"a" * 4000, b"b" * 97)):
        with pytest.raises(ValueError, match="namespace"):
            write_namespace(varint, fields)


# ------------------------------------------------------------------ reasons


@pytest.mark.parametrize("varint", KINDS)
def test_reasons(varint):
    """Draft 18, section 1.4.4: 1,024 bytes at most; text that is not UTF-8 only informs worse."""
    assert reader(write_text(varint, "gelöscht".encode()), varint).reason() == "gelöscht"
    assert reader(write_text(varint, b"r" * 1024), varint).reason() == "r" * 1024
    assert reader("02c328").reason() == "�("
    with pytest.raises(SessionFault) as caught:
        reader(write_text(varint, b"r" * 1025), varint).reason()
    assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


# ------------------------------------------------------------------ key-value pairs


def test_pairs_of_draft_18():
    """Draft 18, section 1.4.3: types as differences; an even one has an integer, an odd one length and bytes."""
    data = "0264" + "0102aabb" + "0001cc" + "7f8101"
    pairs = ((2, 100), (3, b"\xaa\xbb"), (3, b"\xcc"), (130, 257))
    assert read_pairs(reader(data)) == pairs
    assert write_pairs(WIDE, pairs) == bytes.fromhex(data)


def test_pairs_of_draft_16():
    data = "024064" + "0102aabb" + "0001cc" + "407f4101"
    pairs = ((2, 100), (3, b"\xaa\xbb"), (3, b"\xcc"), (130, 257))
    assert read_pairs(reader(data, NARROW)) == pairs
    assert read_pairs(reader(data + "ffff", NARROW), 4) == pairs
    assert write_pairs(NARROW, pairs) == bytes.fromhex(data)


def test_pairs_are_written_in_order():
    """Those of one type stay in the order they were given."""
    assert write_pairs(WIDE, [(7, b"x"), (3, b"b"), (3, b"a")]) == bytes.fromhex("030162 000161 040178")


def test_limit_of_values():
    """Draft 18, section 1.4.3: 2^16-1 bytes; the type stays within 64 bits."""
    longest = b"v" * 0xFFFF
    assert read_pairs(reader(write_pairs(WIDE, [(1, longest)]))) == ((1, longest),)
    with pytest.raises(SessionFault) as caught:
        read_pairs(reader(b"\x01" + WIDE.encode(0x10000) + b"v" * 0x10000))
    assert caught.value.code == SessionCode.PROTOCOL_VIOLATION
    with pytest.raises(ValueError, match="cannot have"):
        write_pairs(WIDE, [(1, b"v" * 0x10000)])


def test_types_beyond_64_bits():
    """Draft 18, section 1.4.3: closes the session with PROTOCOL_VIOLATION."""
    largest = "ffffffffffffffffff"  # 2^64 - 1 is odd
    assert read_pairs(reader(largest + "00")) == (((1 << 64) - 1, b""),)
    with pytest.raises(SessionFault) as caught:
        read_pairs(reader(largest + "00" + "0100"))
    assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


@table("data", ["02", "0103aabb", "01", "0280"])
def test_pairs_that_are_cut_short(data):
    with pytest.raises(SessionFault):
        read_pairs(reader(data))


@table("pairs", [[(1, 5)], [(2, b"x")]])
def test_pairs_of_the_wrong_sort(pairs):
    with pytest.raises(ValueError, match="type 0x"):
        write_pairs(WIDE, pairs)


def value_of(kind: int, top: int) -> st.SearchStrategy:
    return st.tuples(st.just(kind), st.binary(max_size=40) if kind % 2 else st.integers(0, top))


@pytest.mark.parametrize("varint", KINDS)
def test_pairs_come_back(varint):
    kinds = st.integers(0, varint.largest) | st.integers(0, 70)

    @given(st.lists(kinds.flatmap(lambda kind: value_of(kind, varint.largest)), max_size=8))
    def check(pairs):
        pairs.sort(key=lambda pair: pair[0])
        raw = write_pairs(varint, pairs)
        assert read_pairs(reader(raw, varint)) == tuple(pairs)
        assert read_pairs(reader(raw, varint), len(pairs)) == tuple(pairs)

    check()


def test_nothing_may_be_left():
    one = reader("0102")
    one.varint()
    with pytest.raises(SessionFault):
        one.end()
    assert one.left == 1
    assert one.rest() == b"\x02"
    one.end()
