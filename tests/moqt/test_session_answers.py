"""Answers that a peer may not give, tracks that may not be touched, and GOAWAY."""

from kvabr.moqt.codes import RequestCode
from kvabr.moqt.events import Answered, Ended, Refused, Stop
from kvabr.moqt.wire import Location, Parameters
from tests.moqt.raw import START, VIOLATION, Raw, frame
from tests.moqt.tables import table

ANSWERS = {"07": "00", "04": "07 00", "18": "00 00 00 00", "0b": "02 00 00"}
ASK = {
    "16": lambda session: session.fetch((b"a",), b"t", START, START, Parameters()),
    "03": lambda session: session.subscribe((b"a",), b"t", Parameters()),
}
FITS = {("16", "18"), ("03", "04")}


@table("answer", ANSWERS)
@table("asked", ASK)
def test_answers_that_are_none(asked, answer):
    raw = Raw(client=True)
    ASK[asked](raw.session)
    raw.ask(0, frame(answer, ANSWERS[answer]))
    assert raw.code == (None if (asked, answer) in FITS else VIOLATION)
    if (asked, answer) in FITS:  # exactly one, and whole
        raw.ask(0, frame(answer, ANSWERS[answer]))
        assert raw.code == VIOLATION
        cut = Raw(client=True)
        ASK[asked](cut.session)
        cut.receive(0, frame(answer, ANSWERS[answer])[:-1], fin=True)
        assert cut.code == VIOLATION


@table(
    ("start", "end", "fine"),
    [((5, 3), "05 03", True), ((5, 3), "06 00", True), ((5, 0), "05 00", True), ((5, 3), "05 ffffffffffffffffff", True),
     ((5, 3), "04 09", False), ((5, 3), "05 01", False)],
)  # fmt: skip
def test_the_end_of_a_fetch(start, end, fine):
    """It is the last location itself."""
    raw = Raw(client=True)
    raw.session.fetch((b"a",), b"t", Location(*start), Location(9, 0), Parameters())
    raw.ask(0, frame("18", f"00 {end} 00"))
    assert raw.code == (None if fine else VIOLATION)


@table(
    ("body", "fine"),
    [("01 08 05", True), ("01 09 0500", True), ("01 20 05", False), ("01 10 01", False), ("00 30 01", False)],
)
def test_what_request_ok_may_have(body, fine):
    """In answer to a REQUEST_UPDATE, some parameters and no properties (draft 18, section 10.2.10, 10.2.11, 10.5)."""
    raw = Raw(client=True)
    number = raw.fetch()
    raw.receive(0, frame("18", "00 00 00 00"))
    raw.session.requester.update(number, Parameters(priority=1))
    raw.receive(0, frame("07", body))
    assert raw.code == (None if fine else VIOLATION)


def test_redirects():
    """Draft 18, section 10.6.1: a client cannot send its server to a URI."""
    raw = Raw(client=True)
    raw.fetch()
    raw.receive(0, frame("05", "34 01 00", "03 6d3a2f", "01 0161", "01 74"))
    (refused,) = raw.told(Refused)
    assert (refused.message.redirect.uri, refused.message.redirect.track) == (b"m:/", b"t")
    for to, code in (("01 6d 00 00", VIOLATION), ("00 00 00", None), ("00 00 0174", None)):
        raw = Raw(client=False)
        raw.fetch()
        raw.receive(1, frame("05", "34 01 00", to))
        assert raw.code == code


@table("property_", ["c0409d 01 05", "c04000 05", "c07fff 00", "0b 04 c04000 05"])
@table("asked", ["16", "03"])
def test_mandatory_track_properties(asked, property_):
    """Draft 18, section 2.5.1: the request is cancelled, the session goes on."""
    raw = Raw(client=True)
    number = ASK[asked](raw.session)
    raw.receive(0, frame("18" if asked == "16" else "04", "00 00 00 00" if asked == "16" else "07 00", property_))
    (refused,) = raw.told(Refused)
    assert (refused.request_id, refused.message.code) == (number, RequestCode.UNSUPPORTED_EXTENSION)
    assert raw.told(Answered) == []
    assert Stop(0, 1) in raw.commands
    raw.forgotten()


def test_a_malformed_track():
    """Draft 18, section 2.4.2: what was asked of it is cancelled, the session goes on."""
    raw = Raw(client=True)
    number = raw.fetch()
    raw.receive(7, "05 00 3c 05 03 80 03 0b 01 04 00")
    (refused,) = raw.told(Refused)
    assert (refused.request_id, refused.message.code) == (number, RequestCode.MALFORMED_TRACK)
    assert Stop(7, 1) in raw.commands
    raw.receive(7, b"\xff" * 100, fin=True)
    raw.forgotten()


def test_unknown_error_codes():
    """Draft 18, section 14: as INTERNAL_ERROR, and no reason to close the session."""
    raw = Raw(client=True)
    raw.fetch()
    raw.ask(0, frame("05", ("809d") + "00 00"))
    (refused,) = raw.told(Refused)
    assert refused.message.code == 0x9D
    raw.session.fetch((b"a",), b"t", START, START, Parameters())
    raw.receive(7, "05 02")
    raw.session.receive_reset(7, 0x11C)
    assert raw.told(Ended) == [Ended(2, 0x11C)]
    assert raw.code is None


def test_goaway_on_a_requests_stream():
    """Draft 18, section 10.4: once, and only a server names another."""
    for client in (True, False):
        for messages, code in (
            ((frame("10", "00 00"),), None),
            ((frame("10", "00 00"), frame("10", "00 00")), VIOLATION),
            ((frame("10", "01 6d 00"),), None if client else VIOLATION),
        ):
            raw = Raw(client=client)
            ours = 0 if client else 1
            raw.fetch()
            raw.receive(ours, b"".join(messages))
            assert raw.code == code
            raw = Raw(client=client)
            raw.receive(1 if client else 0, frame("06", "01" if client else "00", "01 0161 00") + b"".join(messages))
            assert raw.code == code
    raw = Raw(client=True)
    raw.fetch()
    raw.receive(0, frame("10", "00 00") + frame("18", "00 00 00 00"))
    assert raw.told(Answered)
