"""Requests that a peer may not make, and what becomes of those that never come whole."""

from kvabr.moqt.codes import RequestCode, SessionCode
from kvabr.moqt.events import Ended, Ready, Requested, Reset
from kvabr.moqt.wire import write_varint
from tests.moqt.raw import NAME, VIOLATION, Raw, fetch_of, frame, goaway_of
from tests.moqt.tables import table

FIRST_18 = ["03", "1d", "16", "0d", "06", "50", "51"]
REST_18 = {
    "04": "07 00", "1e": "00", "0b": "02 00 00", "18": "00 00 00 00", "08": "00", "0e": "00", "0f": "00 00",
    "02": "00 00", "07": "00", "05": "00 00 00", "10": "00 00", "af00": "",
}  # fmt: skip


@table("kind", REST_18)
def test_what_begins_no_request(kind):
    """Draft 18, section 3.3: one of seven messages."""
    raw = Raw(client=False)
    raw.receive(0, frame(kind, REST_18[kind]))
    assert raw.code == VIOLATION


@table("kind", [*REST_18, "16"])
def test_what_comes_behind_no_request(kind):
    """Draft 18, section 10: requests come first; only REQUEST_UPDATE and GOAWAY come behind them."""
    raw = Raw(client=False)
    raw.receive(0, frame("03", "00", NAME, "00"))
    body = "02 00" if kind == "02" else "02 01" + NAME + "0000 0000 00" if kind == "16" else REST_18[kind]
    raw.receive(0, frame(kind, body))
    assert raw.code == (None if kind in ("02", "10") else VIOLATION)


@table("kind", [*FIRST_18, *(kind for kind in REST_18 if kind not in ("10", "af00"))])
def test_what_is_not_on_a_control_stream(kind):
    """Draft 18, section 10: GOAWAY alone."""
    bodies = {"03": NAME + "00", "1d": NAME + "0000", "16": "01" + NAME + "0000 0000 00", "0d": NAME + "00"}
    body = REST_18.get(kind, "00" + bodies.get(kind, "00 00"))
    raw = Raw(client=False)
    raw.receive(2, frame(kind, body))
    assert raw.code == VIOLATION


@table(
    ("client", "requests"),
    [
        (False, ((0, fetch_of("01")),)),  # the sender's parity
        (True, ((1, fetch_of("02")),)),
        (False, ((0, fetch_of("00")), (4, fetch_of("00")))),  # none twice
        (False, ((0, fetch_of("00") + frame("02", "02 00")), (4, fetch_of("02")))),  # a REQUEST_UPDATE consumes one
    ],
)
def test_request_ids(client, requests):
    """Draft 18, section 10.1."""
    raw = Raw(client=client)
    for stream, data in requests:
        assert raw.code is None
        raw.receive(stream, data)
    assert raw.code == SessionCode.INVALID_REQUEST_ID


def test_request_ids_in_any_order():
    """Draft 18: streams overtake each other, and what is cancelled early may never come."""
    raw = Raw(client=False)
    for stream, number in ((8, "04"), (0, "00"), (40, "14"), (4, "02")):
        raw.receive(stream, fetch_of(number))
    assert [event.request_id for event in raw.told(Requested)] == [4, 0, 20, 2]
    assert raw.code is None
    raw.receive(44, fetch_of("04"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID


def test_request_ids_that_never_come():
    """However many: a client that changes its mind quickly is no attacker. What is kept of them is bounded."""
    raw = Raw(client=False)
    encode = write_varint
    for index in range(5000):
        raw.receive(4 * index, fetch_of(encode(4 * index).hex()))
    raw.receive(4 * 5000, fetch_of("02"))
    assert raw.code is None
    raw.receive(4 * 6000, fetch_of(encode((1 << 63) - 2).hex()))
    assert raw.code is None
    assert raw.session.responder.ids._used.bit_length() == 1
    raw.receive(4 * 6001, fetch_of(encode((1 << 63) - 6).hex()))
    assert raw.code is None
    raw.receive(4 * 6002, fetch_of("06"))  # so long ago that it counts as used
    assert raw.code == SessionCode.INVALID_REQUEST_ID


@table(
    ("head", "parameter"),
    [  # by request: what its REQUEST_UPDATE cannot have, draft 18, sections 10.2.3 to 10.2.14
        (("16", "00" + NAME + "00"), "10 01"),
        (("16", "00" + NAME + "00"), "21 01 00"),
        (("16", "00" + NAME + "00"), "02 05"),
        (("16", "00" + NAME + "00"), "34 01 00"),
        (("03", "00" + NAME + "00"), "34 01 00"),
        (("06", "00 00 00"), "20 05"),
        (("50", "00 00 00"), "20 05"),
        (("51", "00 00 00"), "20 05"),
        (("0d", "00" + NAME + "00"), ""),  # TRACK_STATUS cannot be changed, section 10.14
    ],
)
def test_changes_that_do_not_fit(head, parameter):
    raw = Raw(client=False)
    raw.receive(0, frame(*head))
    raw.receive(0, frame("02", "02", "01" if parameter else "00", parameter))
    assert raw.code == VIOLATION


def test_publish_with_a_mandatory_property():
    """Draft 18, section 2.5.1: UNSUPPORTED_EXTENSION, and the owner never hears of it."""
    raw = Raw(client=True)
    raw.receive(1, frame("1d", "01", NAME, "07 00", "c04000 00"))
    raw.receive(5, frame("1d", "03", NAME, "07 00", "0b 02 0b00"))
    raw.receive(9, frame("1d", "05", NAME, "07 00", "c04001 00"))
    assert raw.told(Requested) == []
    refusals = [command.data for command in raw.commands if getattr(command, "data", b"")]
    assert [data[3] for data in refusals] == [0x33, 0x12, 0x33]
    assert raw.code is None


def test_unfinished_messages_are_bounded():
    """On all streams together."""
    raw = Raw(client=False)
    for stream in range(0, 4 * 20, 4):
        raw.receive(stream, bytes.fromhex("16 ffff") + b"x" * 60_000)
    assert raw.code == SessionCode.INTERNAL_ERROR


def test_what_comes_for_a_request_that_is_over():
    """It is not even read."""
    raw = Raw(client=False)
    raw.receive(0, fetch_of("00"))
    raw.session.responder.refuse(0, RequestCode.DOES_NOT_EXIST, "")
    raw.receive(0, frame("02", "02 00"))
    raw.receive(0, b"\xff" * 100_000)
    assert raw.code is None
    assert raw.session._messages == {0: None}
    raw.receive(0, b"\xff", fin=True)
    assert raw.session._messages == {}


@table(
    ("sent", "how"),
    [("", "fin"), *((sent, f"receive_{how}") for sent in ("", "16", "16 0005 00") for how in ("reset", "stop"))],
)
def test_requests_that_never_come_whole(sent, how):
    """Reset, stopped, or ended before they said anything: our side of the stream ends, too."""
    raw = Raw(client=False)
    raw.receive(0, sent, fin=how == "fin")
    if how != "fin":
        getattr(raw.session, how)(0, 0)
    raw.collect()
    assert raw.commands == [Reset(0, 1)]
    if how == "receive_stop":
        raw.receive(0, fetch_of("00")[len(bytes.fromhex(sent)) :], fin=True)
    assert raw.told(Requested) == []
    assert raw.session._messages == {}
    assert raw.code is None


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
