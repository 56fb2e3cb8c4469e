"""Integers, locations, namespaces, names, reasons and key-value pairs, by the drafts' text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.codes import REASONS, RequestCode, SessionCode, SessionFault, code_of, name_of
from kvabr.moqt.wire import (
    MAX_INTEGER,
    Reader,
    peek_varint,
    read_pairs,
    write_namespace,
    write_pairs,
    write_text,
    write_varint,
)
from kvabr.server.limits import refusal
from kvabr.types.errors import Reason, RequestError
from tests.moqt.tables import table


def reader(data: str | bytes) -> Reader:
    return Reader(bytes.fromhex(data) if isinstance(data, str) else data)


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
    assert peek_varint(raw, 0) == (value, len(raw))
    assert all(peek_varint(raw[:cut], 0) is None for cut in range(len(raw)))
    if data != "8025":  # the one that is longer than it need be
        assert write_varint(value) == raw


def test_integers_are_as_short_as_they_can_be():
    for size in range(1, 9):
        most = (1 << 7 * size) - 1
        assert (len(write_varint(most)), len(write_varint(most + 1))) == (size, size + 1)
        assert [peek_varint(write_varint(each), 0)[0] for each in (most, most + 1)] == [most, most + 1]


@given(st.integers(0, (1 << 64) - 1), st.integers(1, 9))
def test_any_length_that_fits_is_valid(value, size):
    """Draft 18, section 1.4.1: integers need not be as short as possible."""
    usable = 64 if size == 9 else 7 * size
    value &= (1 << usable) - 1
    lead = (0xFF00 >> (size - 1)) & 0xFF
    raw = b"\xff" + value.to_bytes(8, "big") if size == 9 else (value | lead << (8 * size - 8)).to_bytes(size, "big")
    assert peek_varint(raw, 0) == (value, size)


def test_limits_of_namespaces():
    """Draft 18, section 2.4.1: 32 fields, none empty, 4,096 bytes; `test_messages` reads what others write beyond."""
    for fields in ((b"f",) * 32, (b"a" * 4000, b"b" * 96)):
        assert reader(write_namespace(fields)).namespace() == fields
    for fields in ((b"f",) * 33, (b"",), (b"a" * 4000, b"b" * 97)):
        with pytest.raises(ValueError, match="namespace"):
            write_namespace(fields)


def test_reasons():
    """Draft 18, section 1.4.4: text that is not UTF-8 only informs worse."""
    assert reader(write_text("gelöscht".encode())).reason() == "gelöscht"
    assert reader("02c328").reason() == "�("


def test_pairs_of_draft_18():
    """Draft 18, section 1.4.3: types as differences; an even one has an integer, an odd one length and bytes."""
    data = "0264" + "0102aabb" + "0001cc" + "7f8101"
    pairs = ((2, 100), (3, b"\xaa\xbb"), (3, b"\xcc"), (130, 257))
    assert read_pairs(reader(data)) == pairs
    assert write_pairs(pairs) == bytes.fromhex(data)


def test_limits_of_pairs():
    """Draft 18, section 1.4.3: values of 2^16-1 bytes; types within 64 bits, the last of which is odd."""
    longest, largest = b"v" * 0xFFFF, b"\xff" * 9
    assert read_pairs(reader(write_pairs([(1, longest)]))) == ((1, longest),)
    assert read_pairs(reader(largest + b"\0")) == (((1 << 64) - 1, b""),)
    for beyond in (b"\x01" + write_varint(0x10000) + b"v" * 0x10000, largest + b"\0\1\0"):
        with pytest.raises(SessionFault) as caught:
            read_pairs(reader(beyond))
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION
    with pytest.raises(ValueError, match="cannot have"):
        write_pairs([(1, b"v" * 0x10000)])


@table("data", ["02", "0103aabb", "01", "0280"])
def test_pairs_that_are_cut_short(data):
    with pytest.raises(SessionFault):
        read_pairs(reader(data))


def value_of(kind: int, top: int) -> st.SearchStrategy:
    return st.tuples(st.just(kind), st.binary(max_size=40) if kind % 2 else st.integers(0, top))


def test_pairs_come_back():
    kinds = st.integers(0, MAX_INTEGER) | st.integers(0, 70)

    @given(st.lists(kinds.flatmap(lambda kind: value_of(kind, MAX_INTEGER)), max_size=8))
    def check(pairs):
        pairs.sort(key=lambda pair: pair[0])
        raw = write_pairs(pairs)
        assert read_pairs(reader(raw)) == tuple(pairs)

    check()


def test_codes_for_people():
    """Codes that nobody knows are no error (draft 18, section 14)."""
    assert name_of(0x10, RequestCode) == "DOES_NOT_EXIST"
    assert name_of(0x9D, RequestCode) == "code 0x9d"


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_survives_the_wire_and_a_relay(reason):
    code = code_of(reason)
    assert REASONS.get(code, Reason.OTHER) == (Reason.INTERNAL if reason is Reason.OTHER else reason)
    assert refusal(RequestError("why", reason=reason))[0] == code


def test_codes_that_answer_no_request_of_ours_are_other():
    assert not REASONS.keys() & {RequestCode.PREFIX_OVERLAP, 0x7777}
    assert code_of(Reason.OTHER) is RequestCode.INTERNAL_ERROR
