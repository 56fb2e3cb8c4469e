"""Objects in datagrams (draft 18, section 11.3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.objects import (
    DEFAULT_PRIORITY,
    ObjectHeader,
    Status,
    read_datagram,
)
from kvabr.moqt.wire import DRAFT_16, DRAFT_18, DRAFTS
from tests.moqt.tables import table
from tests.moqt.writers import write_datagram


@pytest.mark.parametrize("draft", DRAFTS)
@table("kind", range(0x100))
def test_every_type_of_datagram(draft, kind):
    """Section 11.3.1: bit 0 properties, 1 end of group, 2 object 0, 3 default priority, 5 status."""
    raw = draft.varint.encode
    data = raw(kind) + raw(200) + raw(5)
    number, priority, properties, status = 7, 9, (), Status.NORMAL
    data += b"" if kind & 4 else raw(7)
    data += b"" if kind & 8 else b"\x09"
    if kind & 1:
        data, properties = data + raw(2) + raw(4) + raw(6), ((4, 6),)
    if kind & 0x20:
        status = Status.NORMAL if kind & 1 else Status.END_OF_GROUP
        data, payload = data + raw(status), b""
    else:
        data, payload = data + b"payload", b"payload"
    if kind & ~0x2F or kind & 0x22 == 0x22:
        with pytest.raises(SessionFault) as caught:
            read_datagram(data, draft)
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION
        return
    number, priority = 0 if kind & 4 else 7, DEFAULT_PRIORITY if kind & 8 else 9
    header = ObjectHeader(5, None, number, priority, len(payload), properties, status)
    assert read_datagram(data, draft) == (200, header, payload, bool(kind & 2))


@table(
    "data",
    [
        "01 07 05 01 80 00 61",  # properties of no length, section 11.3.1
        "21 07 05 01 80 02 0405 03",  # a status and properties
        "20 07 05 01 80 02",  # no status
        "20 07 05 01 80 03 00",  # something behind a status
        "20 07 05 01 80",
        "00 07 05 01",
        "",
        "00 07 05 80",
    ],
)
def test_faults_of_datagrams(data):
    for draft in DRAFTS:
        with pytest.raises(SessionFault) as caught:
            read_datagram(bytes.fromhex(data), draft)
        assert caught.value.code == SessionCode.PROTOCOL_VIOLATION


def test_padding():
    """Section 11.5.2; draft 16 has none."""
    assert read_datagram(bytes.fromhex("f0132b3e29 0000"), DRAFT_18) is None
    with pytest.raises(SessionFault):
        read_datagram(bytes.fromhex("932b3e29 0000"), DRAFT_16)


@pytest.mark.parametrize("draft", DRAFTS)
def test_datagrams_come_back(draft):
    number = st.integers(0, draft.varint.largest)

    @given(number, number, number, st.integers(0, 255), st.booleans(), st.binary(max_size=30), st.booleans())
    def check(alias, group, at, priority, end_of_group, payload, properties):
        extra = ((4, 5), (7, b"x")) if properties else ()
        header = ObjectHeader(group, None, at, priority, len(payload), extra)
        data = write_datagram(draft, alias, header, payload, end_of_group=end_of_group)
        assert read_datagram(data, draft) == (alias, header, payload, end_of_group)
        last = ObjectHeader(group, None, at, priority, 0, (), Status.END_OF_TRACK)
        assert read_datagram(write_datagram(draft, alias, last, b""), draft) == (alias, last, b"", False)

    check()
