"""SETUP, what comes before it, and the types of streams: what a peer may not do."""

import pytest

from kvabr.moqt.codes import SessionCode
from kvabr.moqt.events import Ended, Ready, Requested
from kvabr.moqt.wire import DRAFT_20, DRAFTS
from tests.moqt.raw import VIOLATION, Raw, frame
from tests.moqt.tables import table

both = pytest.mark.parametrize("draft", DRAFTS)


# ------------------------------------------------------------------ SETUP


@both
@table(
    ("options", "client", "code"),
    [
        ("01 01 2f", True, SessionCode.INVALID_PATH),  # draft 18, section 10.3.1.2
        ("05 01 68", True, SessionCode.INVALID_AUTHORITY),  # section 10.3.1.1
        ("01 02 2f20", False, SessionCode.MALFORMED_PATH),
        ("01 01 70", False, SessionCode.MALFORMED_PATH),
        ("01 03 2f2531", False, SessionCode.MALFORMED_PATH),
        ("05 00", False, SessionCode.MALFORMED_AUTHORITY),
        ("05 03 682f70", False, SessionCode.MALFORMED_AUTHORITY),
        ("05 04 683a3a31", False, SessionCode.MALFORMED_AUTHORITY),
        ("03 02 0205", False, VIOLATION),  # USE_ALIAS, section 10.2.2
        ("03 02 0005", False, VIOLATION),  # DELETE
        ("03 01 07", False, SessionCode.KEY_VALUE_FORMATTING_ERROR),
        ("04 05 00 06", False, VIOLATION),  # twice
        ("03", False, VIOLATION),
    ],
)
def test_setup_that_is_wrong(draft, options, client, code):
    raw = Raw(draft, client=client, ready=False)
    raw.setup(options)
    assert raw.session.closed.code == code


@table(
    ("path", "authority"),
    [
        (b"", b"h"), (b"/", b"h:1"), (b"/a/b;c=d@e:f%20?q=/?", b"u:p@h:443"), (b"?token=a.b", b"[::1]:4433"),
        (b"//", b"h:"),
    ],
)  # fmt: skip
def test_setup_that_is_right(path, authority):
    raw = Raw(DRAFT_20, client=False, ready=False)
    raw.setup("01", f"{len(path):02x}", path.hex(), "04", f"{len(authority):02x}", authority.hex())
    (ready,) = raw.told(Ready)
    assert (ready.options.path, ready.options.authority) == (path, authority)


@both
def test_a_second_setup(draft):
    raw = Raw(draft, client=False)
    raw.setup()
    assert raw.session.closed.code == VIOLATION


def test_a_second_control_stream():
    """Draft 18, section 3.3: each peer opens one."""
    raw = Raw(DRAFT_20, client=False)
    raw.receive(6, frame("af00"))
    assert raw.code == VIOLATION


@both
@table("how", ["fin", "reset", "stop"])
def test_the_control_stream_must_stay(draft, how):
    """Draft 18, section 3.3."""
    raw = Raw(draft, client=False)
    theirs, ours = (2, 3)
    if how == "fin":
        raw.receive(theirs, b"", fin=True)
    elif how == "reset":
        raw.session.receive_reset(theirs, 0)
    else:
        raw.session.receive_stop(ours, 0)
    assert raw.code == VIOLATION


def test_a_message_before_setup():
    raw = Raw(DRAFT_20, client=False, ready=False)
    raw.receive(2, bytes.fromhex("af00") + bytes.fromhex("0000") + frame("10", "00 00"))
    assert raw.code is None


# ------------------------------------------------------------------ what comes before SETUP


@both
def test_early_data_waits(draft):
    """Draft 18, section 3.3: buffered until setup is complete; in pieces, too."""
    raw = Raw(draft, client=False, ready=False)
    asked = frame("50", "00 00 00")
    for byte in asked:
        raw.receive(4, bytes([byte]))
    assert raw.told(Requested) == []
    raw.setup()
    assert len(raw.told(Requested)) == 1
    assert raw.code is None


def test_early_objects_in_pieces():
    """A stream's second piece is no header."""
    raw = Raw(DRAFT_20, client=True, ready=False)
    number = raw.fetch()
    raw.receive(7, "05 00 1c 00 00 80 03 61")
    raw.receive(7, "62")
    raw.receive(7, "63", fin=True)
    raw.setup()
    assert raw.told(Ended) == [Ended(number, None)]
    assert raw.code is None
    assert raw.session._early == {}


@both
@table("how", ["reset", "stop", "both"])
def test_early_data_that_is_taken_back(draft, how):
    raw = Raw(draft, client=False, ready=False)
    asked = frame("50", "00 00 00")
    raw.receive(4, asked[:3])
    if how != "reset":
        raw.session.receive_stop(4, 1)
        raw.receive(4, asked[3:])
    if how != "stop":
        raw.session.receive_reset(4, 1)
    raw.setup()
    assert raw.told(Requested) == []
    assert raw.code is None
    raw.session.receive_reset(4, 1)
    assert raw.session._messages == {}


@both
def test_too_much_early_data(draft):
    raw = Raw(draft, client=False, ready=False)
    for _ in range(3):
        raw.receive(4, b"x" * 60_000)
    assert raw.code == SessionCode.INTERNAL_ERROR
    raw = Raw(draft, client=False, ready=False)
    for stream in range(4, 4 * 3000, 4):
        raw.receive(stream, b"")
    assert raw.code == SessionCode.INTERNAL_ERROR


# ------------------------------------------------------------------ streams


@both
@table("kind", ["00", "04", "06", "0f", "16", "1e", "1f", "36", "3f", "20", "2f"])
def test_streams_of_an_unknown_type(draft, kind):
    """Draft 18, section 3.4."""
    for client in (True, False):
        raw = Raw(draft, client=client)
        raw.receive(7 if client else 6, f"{kind} 00 00 00 00")
        assert raw.code == VIOLATION


def test_a_stream_that_ends_within_its_header():
    raw = Raw(DRAFT_20, client=True)
    raw.receive(7, "05 80", fin=True)
    assert raw.code == VIOLATION


@both
def test_objects_for_a_request_that_was_never_made(draft):
    for data in ("05 00", "05 01", "05 02"):
        raw = Raw(draft, client=True)
        if data == "05 02":
            raw.fetch()
        raw.receive(7, data)
        assert raw.code == VIOLATION


@both
@table("fin", [False, True])
def test_a_second_stream_for_a_fetch(draft, fin):
    """Draft 18, section 10.12.3: a single one."""
    raw = Raw(draft, client=True)
    raw.fetch()
    raw.receive(7, "05 00", fin=fin)
    raw.receive(11, "05 00")
    assert raw.code == VIOLATION


@both
def test_objects_that_end_early(draft):
    """Draft 18, section 11.4."""
    raw = Raw(draft, client=True)
    raw.fetch()
    raw.receive(7, "05 00 1c 00 00 80 03 61", fin=True)
    assert raw.code == VIOLATION
