"""SETUP, what comes before it, and the types of streams: what a peer may not do."""

from kvabr.moqt.codes import SessionCode
from kvabr.moqt.events import Ended, Ready, Requested
from tests.moqt.raw import VIOLATION, Raw, fetch_of, frame, goaway_of
from tests.moqt.tables import table

UNKNOWN = ("00", "04", "06", "0f", "16", "1e", "1f", "36", "3f", "20", "2f")
"""Types of no stream."""


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
def test_setup_that_is_wrong(options, client, code):
    raw = Raw(client=client, ready=False)
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
    raw = Raw(client=False, ready=False)
    raw.setup("01", f"{len(path):02x}", path.hex(), "04", f"{len(authority):02x}", authority.hex())
    (ready,) = raw.told(Ready)
    assert (ready.options.path, ready.options.authority) == (path, authority)


@table("how", ["fin", "reset", "stop"])
def test_the_control_stream_must_stay(how):
    """Draft 18, section 3.3."""
    raw = Raw(client=False)
    theirs, ours = (2, 3)
    if how == "fin":
        raw.receive(theirs, b"", fin=True)
    elif how == "reset":
        raw.session.receive_reset(theirs, 0)
    else:
        raw.session.receive_stop(ours, 0)
    assert raw.code == VIOLATION


def test_early_data_waits():
    """Draft 18, section 3.3: buffered until setup is complete; in pieces, too."""
    raw = Raw(client=False, ready=False)
    asked = frame("50", "00 00 00")
    for byte in asked:
        raw.receive(4, bytes([byte]))
    assert raw.told(Requested) == []
    raw.setup()
    assert len(raw.told(Requested)) == 1
    assert raw.code is None


def test_early_objects_in_pieces():
    """A stream's second piece is no header."""
    raw = Raw(client=True, ready=False)
    number = raw.fetch()
    raw.receive(7, "05 00 1c 00 00 80 03 61")
    raw.receive(7, "62")
    raw.receive(7, "63", fin=True)
    raw.setup()
    assert raw.told(Ended) == [Ended(number, None)]
    assert raw.code is None
    assert raw.session._early == {}


@table("how", ["reset", "stop", "both"])
def test_early_data_that_is_taken_back(how):
    raw = Raw(client=False, ready=False)
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


def test_too_much_early_data():
    raw = Raw(client=False, ready=False)
    for _ in range(3):
        raw.receive(4, b"x" * 60_000)
    assert raw.code == SessionCode.INTERNAL_ERROR
    raw = Raw(client=False, ready=False)
    for stream in range(4, 4 * 3000, 4):
        raw.receive(stream, b"")
    assert raw.code == SessionCode.INTERNAL_ERROR


@table(
    ("client", "asked", "sent"),
    [  # only the last is one too many, or wrong
        (False, False, [(2, frame("af00"))]),  # a second SETUP
        (False, False, [(6, frame("af00"))]),  # a second control stream, draft 18, section 3.3
        (False, False, [(0, fetch_of("00")[:-1], True)]),  # ends within a message
        (False, False, [(2, goaway_of()), (2, goaway_of())]),  # section 10.4
        (False, False, [(2, goaway_of("6d"))]),  # clients cannot name a server
        (True, False, [(7, "05 80", True)]),  # ends within its header
        (True, False, [(7, "05 00")]),  # objects for a request that was never made
        (True, True, [(7, "05 02")]),
        (True, True, [(7, "05 00 1c 00 00 80 03 61", True)]),  # ends within an object, section 11.4
        (True, True, [(7, "05 00"), (11, "05 00")]),  # a second stream for a FETCH, section 10.12.3
        (True, True, [(7, "05 00", True), (11, "05 00")]),
        *((True, False, [(7, f"{kind} 00 00 00 00")]) for kind in UNKNOWN),  # section 3.4
        *((False, False, [(6, f"{kind} 00 00 00 00")]) for kind in UNKNOWN),
    ],
)
def test_streams_that_close_the_session(client, asked, sent):
    raw = Raw(client=client)
    if asked:
        raw.fetch()
    for stream, data, *fin in sent:
        assert raw.code is None
        raw.receive(stream, data, fin=bool(fin))
    assert raw.code == VIOLATION
