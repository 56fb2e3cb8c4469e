"""What a peer may not do: every rule that the drafts want the session closed for, with the code that they want."""

import pytest

from kvabr.moqt.codes import RequestCode, SessionCode
from kvabr.moqt.draft import DRAFT_16, DRAFT_18, DRAFTS, Draft
from kvabr.moqt.events import Answered, Cancelled, Close, Ended, Ready, Refused, Requested, Reset, Stop, Updated
from kvabr.moqt.parameters import Parameters, SetupOptions
from kvabr.moqt.requester import MAX_NAMESPACES
from kvabr.moqt.session import Session
from kvabr.moqt.wire import Location

both = pytest.mark.parametrize("draft", DRAFTS)
NAME = "01 0161 0174"  # namespace ("a"), track "t"
START = Location(0, 0)


def frame(kind: str, *parts: str) -> bytes:
    body = bytes.fromhex("".join(parts))
    return bytes.fromhex(kind) + len(body).to_bytes(2, "big") + body


class Raw:
    """A session whose peer is the test: it sends bytes, and looks at what comes of them."""

    def __init__(self, draft: Draft, *, client: bool, ready: bool = True, options: SetupOptions | None = None) -> None:
        self.draft, self.client = draft, client
        self.session = Session(draft, client=client, options=options)
        self.session.start()
        if ready:
            self.setup()
        self.commands: list[object] = []
        self.events: list[object] = []

    def setup(self, *options: str) -> None:
        if self.draft.streams:
            self.receive(3 if self.client else 2, frame("af00", *options))
        else:
            count = f"{1 + len(options):02x}"
            self.receive(0, frame("21" if self.client else "20", count, *options or ("02 40c8",)))
        self.session.take_commands()

    def receive(self, stream: int, data: str | bytes = b"", *, fin: bool = False) -> None:
        self.session.receive(stream, bytes.fromhex(data) if isinstance(data, str) else data, fin=fin)

    def ask(self, stream: int, *messages: bytes, fin: bool = False) -> None:
        """Requests: each on a stream of its own in draft 18, all on one in draft 16."""
        self.receive(stream if self.draft.streams else 0, b"".join(messages), fin=fin)

    def fetch(self) -> int:
        number = self.session.fetch((b"a",), b"t", START, START, Parameters())
        self.session.take_commands()
        return number

    def collect(self) -> None:
        self.commands += self.session.take_commands()
        self.events += self.session.take_events()

    def told(self, *kinds: type) -> list:
        self.collect()
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def code(self) -> int | None:
        """Why the session was closed, None if it was not."""
        self.collect()
        closes = [command for command in self.commands if isinstance(command, Close)]
        assert len(closes) <= 1
        assert bool(closes) == (self.session.closed is not None)
        return closes[0].code if closes else None


VIOLATION = SessionCode.PROTOCOL_VIOLATION


# ------------------------------------------------------------------ SETUP


@both
@pytest.mark.parametrize(
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
    if draft.streams:
        raw.setup(options)
    else:
        raw.receive(0, frame("21" if client else "20", "02" if options == "04 05 00 06" else "01", options))
    assert raw.session.closed.code == code


@pytest.mark.parametrize(
    ("path", "authority"),
    [
        (b"", b"h"), (b"/", b"h:1"), (b"/a/b;c=d@e:f%20?q=/?", b"u:p@h:443"), (b"?token=a.b", b"[::1]:4433"),
        (b"//", b"h:"),
    ],
)  # fmt: skip
def test_setup_that_is_right(path, authority):
    raw = Raw(DRAFT_18, client=False, ready=False)
    raw.setup("01", f"{len(path):02x}", path.hex(), "04", f"{len(authority):02x}", authority.hex())
    (ready,) = raw.told(Ready)
    assert (ready.options.path, ready.options.authority) == (path, authority)


@both
def test_a_second_setup(draft):
    raw = Raw(draft, client=False)
    raw.setup()
    assert raw.session.closed.code == VIOLATION


def test_a_setup_of_the_wrong_end():
    """Draft 16, section 9.3: clients send CLIENT_SETUP, servers SERVER_SETUP."""
    for client, kind in ((True, "20"), (False, "21")):
        raw = Raw(DRAFT_16, client=client, ready=False)
        raw.receive(0, frame(kind, "00"))
        assert raw.code == VIOLATION


def test_a_second_control_stream():
    """Draft 18, section 3.3: each peer opens one."""
    raw = Raw(DRAFT_18, client=False)
    raw.receive(6, frame("af00"))
    assert raw.code == VIOLATION


@both
@pytest.mark.parametrize("how", ["fin", "reset", "stop"])
def test_the_control_stream_must_stay(draft, how):
    """Draft 18, section 3.3."""
    raw = Raw(draft, client=False)
    theirs, ours = (2, 3) if draft.streams else (0, 0)
    if how == "fin":
        raw.receive(theirs, b"", fin=True)
    elif how == "reset":
        raw.session.receive_reset(theirs, 0)
    else:
        raw.session.receive_stop(ours, 0)
    assert raw.code == VIOLATION


def test_a_message_before_setup():
    raw = Raw(DRAFT_18, client=False, ready=False)
    raw.receive(2, bytes.fromhex("af00") + bytes.fromhex("0000") + frame("10", "00 00 01"))
    assert raw.code is None
    raw = Raw(DRAFT_16, client=False, ready=False)
    raw.receive(0, frame("10", "00"))
    assert raw.code == VIOLATION


# ------------------------------------------------------------------ what comes before SETUP


@both
def test_early_data_waits(draft):
    """Draft 18, section 3.3: buffered until setup is complete; in pieces, too."""
    raw = Raw(draft, client=False, ready=False)
    asked = frame("50", "00 00 00") if draft.streams else frame("11", "00 00 01 00")
    for byte in asked:
        raw.receive(4, bytes([byte]))
    assert raw.told(Requested) == []
    raw.setup()
    assert len(raw.told(Requested)) == 1
    assert raw.code is None


def test_early_objects_in_pieces():
    """A stream's second piece is no header."""
    raw = Raw(DRAFT_18, client=True, ready=False)
    number = raw.fetch()
    raw.receive(7, "05 00 1c 00 00 80 03 61")
    raw.receive(7, "62")
    raw.receive(7, "63", fin=True)
    raw.setup()
    assert raw.told(Ended) == [Ended(number, None)]
    assert raw.code is None
    assert raw.session._early == {}


@both
@pytest.mark.parametrize("how", ["reset", "stop", "both"])
def test_early_data_that_is_taken_back(draft, how):
    raw = Raw(draft, client=False, ready=False)
    asked = frame("50", "00 00 00") if draft.streams else frame("11", "00 00 01 00")
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


def test_draft_16_has_its_control_stream_first():
    """Draft 16, section 3.3: the first stream, even if another's bytes come before it."""
    raw = Raw(DRAFT_16, client=False, ready=False)
    raw.receive(4, frame("11", "00 00 01 00"))
    raw.receive(0, frame("20", "00"))
    assert raw.code is None
    assert len(raw.told(Requested)) == 1


# ------------------------------------------------------------------ streams


@both
@pytest.mark.parametrize("kind", ["00", "04", "06", "0f", "16", "1e", "1f", "36", "3f", "20", "2f"])
def test_streams_of_an_unknown_type(draft, kind):
    """Draft 18, section 3.4."""
    for client in (True, False):
        raw = Raw(draft, client=client)
        raw.receive(7 if client else 6, f"{kind} 00 00 00 00")
        assert raw.code == VIOLATION


@pytest.mark.parametrize(("draft", "data"), [(DRAFT_16, "932b3e28"), (DRAFT_16, "6f00"), (DRAFT_16, "4050 00 00 00")])
def test_types_that_came_later(draft, data):
    raw = Raw(draft, client=True)
    raw.receive(7, data)
    assert raw.code == VIOLATION


def test_a_stream_that_ends_within_its_header():
    raw = Raw(DRAFT_18, client=True)
    raw.receive(7, "14 00", fin=True)
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
def test_objects_for_what_is_no_fetch(draft):
    raw = Raw(draft, client=True)
    raw.session.track_status((b"a",), b"t", Parameters())
    raw.receive(7, "05 00")
    assert raw.code == VIOLATION


@both
@pytest.mark.parametrize("fin", [False, True])
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


@both
def test_datagrams_of_an_unknown_type(draft):
    """Draft 18, section 11.3.1."""
    raw = Raw(draft, client=True)
    raw.session.receive_datagram(bytes.fromhex("22 00 00 00 00"))
    assert raw.code == VIOLATION
    raw = Raw(draft, client=True, ready=False)
    raw.session.receive_datagram(b"\x22")  # before SETUP nobody knows what they mean
    assert raw.code is None


# ------------------------------------------------------------------ requests


FIRST_18 = ["03", "1d", "16", "0d", "06", "50", "51"]
REST_18 = {
    "04": "07 00", "1e": "00", "0b": "02 00 00", "18": "00 00 00 00", "08": "00", "0e": "00", "0f": "00 00",
    "02": "00 00", "07": "00", "05": "00 00 00", "10": "00 00", "af00": "",
}  # fmt: skip


@pytest.mark.parametrize("kind", REST_18)
def test_what_begins_no_request(kind):
    """Draft 18, section 3.3: one of seven messages."""
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, frame(kind, REST_18[kind]))
    assert raw.code == VIOLATION


@pytest.mark.parametrize("kind", [*REST_18, "16"])
def test_what_comes_behind_no_request(kind):
    """Draft 18, section 10: requests come first; only REQUEST_UPDATE and GOAWAY come behind them."""
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, frame("03", "00", NAME, "00"))
    body = "02 00" if kind == "02" else "02 01" + NAME + "0000 0000 00" if kind == "16" else REST_18[kind]
    raw.receive(0, frame(kind, body))
    assert raw.code == (None if kind in ("02", "10") else VIOLATION)


@pytest.mark.parametrize("kind", [*FIRST_18, *(kind for kind in REST_18 if kind not in ("10", "af00"))])
def test_what_is_not_on_a_control_stream(kind):
    """Draft 18, section 10: GOAWAY alone."""
    bodies = {"03": NAME + "00", "1d": NAME + "0000", "16": "01" + NAME + "0000 0000 00", "0d": NAME + "00"}
    body = REST_18.get(kind, "00" + bodies.get(kind, "00 00"))
    raw = Raw(DRAFT_18, client=False)
    raw.receive(2, frame(kind, body))
    assert raw.code == VIOLATION


@pytest.mark.parametrize("kind", ["03", "0d", "16", "06", "20", "07"])
def test_streams_of_draft_16(kind):
    """Draft 16, section 3.3: only SUBSCRIBE_NAMESPACE begins a bidirectional stream."""
    named = "00" + NAME + "00"
    bodies = {"03": named, "0d": named, "16": "0001" + NAME + "00000000 00", "06": "00 010161 00"}
    raw = Raw(DRAFT_16, client=False)
    raw.receive(4, frame(kind, bodies.get(kind, "00 00" if kind == "07" else "00")))
    assert raw.code == VIOLATION


def test_subscribe_namespace_on_the_control_stream_of_draft_16():
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, frame("11", "00 00 01 00"))
    assert raw.code == VIOLATION


@pytest.mark.parametrize("kind", ["08", "0e"])
def test_namespaces_on_the_control_stream_of_draft_16(kind):
    raw = Raw(DRAFT_16, client=True)
    raw.receive(0, frame(kind, "00"))
    assert raw.code == VIOLATION


@both
def test_an_unknown_message(draft):
    raw = Raw(draft, client=False)
    raw.receive(2 if draft.streams else 0, frame("3f"))
    assert raw.code == VIOLATION


def fetch_of(number: str) -> bytes:
    return frame("16", number, "01", NAME, "0000 0000 00")


@both
def test_request_ids(draft):
    """Draft 18, section 10.1: the sender's parity, none twice."""
    raw = Raw(draft, client=False)
    raw.ask(0, fetch_of("01"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID
    raw = Raw(draft, client=False)
    raw.ask(0, fetch_of("00"))
    raw.ask(4, fetch_of("00"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID
    raw = Raw(draft, client=True)
    raw.ask(1, fetch_of("02"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID


def test_request_ids_of_updates():
    """Draft 18, section 10.1: a REQUEST_UPDATE consumes one."""
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, fetch_of("00") + frame("02", "02 00"))
    assert raw.told(Updated)
    raw.receive(4, fetch_of("02"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID


def test_request_ids_in_any_order():
    """Draft 18: streams overtake each other, and what is cancelled early may never come."""
    raw = Raw(DRAFT_18, client=False)
    for stream, number in ((8, "04"), (0, "00"), (40, "14"), (4, "02")):
        raw.receive(stream, fetch_of(number))
    assert [event.request_id for event in raw.told(Requested)] == [4, 0, 20, 2]
    assert raw.code is None
    raw.receive(44, fetch_of("04"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID


def test_request_ids_that_never_come():
    """However many: a client that changes its mind quickly is no attacker. What is kept of them is bounded."""
    raw = Raw(DRAFT_18, client=False)
    encode = DRAFT_18.varint.encode
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


def test_request_ids_of_draft_16():
    """Draft 16, section 9.1 wants them in sequence; what stands in for a SUBSCRIBE_NAMESPACE may be missing."""
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, fetch_of("02"))
    raw.receive(4, frame("11", "00 00 01 00"))
    assert raw.code is None
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, fetch_of("02") + fetch_of("00"))
    assert raw.code == SessionCode.INVALID_REQUEST_ID


def test_too_many_requests():
    """Draft 16, section 9.5: an ID that was not granted."""
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, fetch_of("4200"))
    assert raw.code == SessionCode.TOO_MANY_REQUESTS


@pytest.mark.parametrize("limit", ["40c8", "4001", "00"])
def test_a_max_request_id_that_does_not_grow(limit):
    """Draft 16, section 9.5; the SETUP here grants 200."""
    raw = Raw(DRAFT_16, client=True)
    raw.receive(0, frame("15", limit))
    assert raw.code == VIOLATION


def test_max_request_id_in_draft_18_and_later():
    raw = Raw(DRAFT_18, client=True)
    raw.receive(3, frame("15", "05"))
    assert raw.code == VIOLATION


@pytest.mark.parametrize(
    ("head", "parameter"),
    [  # by request: what its REQUEST_UPDATE cannot have, draft 18, sections 10.2.3 to 10.2.14
        (("16", "00 01" + NAME + "0000 0000 00"), "10 01"),
        (("16", "00 01" + NAME + "0000 0000 00"), "21 01 01"),
        (("16", "00 01" + NAME + "0000 0000 00"), "02 05"),
        (("16", "00 01" + NAME + "0000 0000 00"), "34 00"),
        (("03", "00" + NAME + "00"), "34 00"),
        (("06", "00 00 00"), "20 05"),
        (("50", "00 00 00"), "20 05"),
        (("51", "00 00 00"), "10 01"),
        (("0d", "00" + NAME + "00"), ""),  # TRACK_STATUS cannot be changed, section 10.14
    ],
)
def test_changes_that_do_not_fit(head, parameter):
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, frame(*head))
    raw.receive(0, frame("02", "02", "01" if parameter else "00", parameter))
    assert raw.code == VIOLATION


def test_changes_of_draft_16():
    """Draft 16, section 9.11."""
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, fetch_of("00") + frame("02", "02 00 01 20 05"))
    assert raw.told(Updated) == [Updated(0, Parameters(priority=5))]
    raw.receive(0, frame("02", "04 00 01 10 01"))
    assert raw.code == VIOLATION  # FORWARD is nothing that a FETCH has
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, frame("02", "00 02 00"))
    assert raw.code == VIOLATION  # there never was a request 2


def test_a_change_that_comes_too_late():
    """Draft 16 would have the session closed; nobody can rule it out, so it is only refused."""
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, fetch_of("00"))
    raw.session.responder.refuse(0, RequestCode.DOES_NOT_EXIST, "")
    raw.receive(0, frame("02", "02 00 00"))
    assert raw.code is None
    assert raw.commands[-1].data[:1] == b"\x05"


@pytest.mark.parametrize("kind", ["0a", "17", "09"])
def test_cancelling_what_never_was(kind):
    raw = Raw(DRAFT_16, client=False)
    raw.receive(0, fetch_of("00") + frame(kind, "00"))
    assert raw.told(Cancelled) == []
    assert raw.told(Requested) == []
    raw.receive(0, frame(kind, "00"))
    assert raw.code is None
    raw.receive(0, frame(kind, "02"))
    assert raw.code == VIOLATION


def test_publish_with_an_alias_that_is_taken():
    """Draft 18, section 11.1: by a different track."""
    for track, code in (("74", None), ("75", SessionCode.DUPLICATE_TRACK_ALIAS)):
        raw = Raw(DRAFT_18, client=True)
        raw.session.subscribe((b"a",), b"t", Parameters())
        raw.receive(0, frame("04", "07 00"))
        raw.receive(1, frame("1d", "01 01 0161 01", track, "07 00"))
        assert raw.code == code


def test_publish_with_a_mandatory_property():
    """Draft 18, section 2.5.1: UNSUPPORTED_EXTENSION, and the owner never hears of it."""
    raw = Raw(DRAFT_18, client=True)
    raw.receive(1, frame("1d", "01", NAME, "07 00", "c04000 00"))
    raw.receive(5, frame("1d", "03", NAME, "07 00", "0b 02 0b00"))
    raw.receive(9, frame("1d", "05", NAME, "07 00", "c04001 00"))
    assert raw.told(Requested) == []
    refusals = [command.data for command in raw.commands if getattr(command, "data", b"")]
    assert [data[3] for data in refusals] == [0x33, 0x12, 0x33]
    assert raw.code is None


def test_unfinished_messages_are_bounded():
    """On all streams together."""
    raw = Raw(DRAFT_18, client=False)
    for stream in range(0, 4 * 20, 4):
        raw.receive(stream, bytes.fromhex("16 ffff") + b"x" * 60_000)
    assert raw.code == SessionCode.INTERNAL_ERROR


def test_what_comes_for_a_request_that_is_over():
    """It is not even read."""
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, fetch_of("00"))
    raw.session.responder.refuse(0, RequestCode.DOES_NOT_EXIST, "")
    raw.receive(0, frame("02", "02 00"))
    raw.receive(0, b"\xff" * 100_000)
    assert raw.code is None
    assert raw.session._messages == {0: None}
    raw.receive(0, b"\xff", fin=True)
    assert raw.session._messages == {}


@pytest.mark.parametrize("sent", ["", "16", "16 0005 00"])
def test_requests_that_never_come_whole(sent):
    """Reset, stopped, or ended before they said anything: our side of the stream ends, too."""
    for how in ("receive_reset", "receive_stop"):
        raw = Raw(DRAFT_18, client=False)
        raw.receive(0, sent)
        getattr(raw.session, how)(0, 0)
        raw.collect()
        assert raw.commands == [Reset(0, 1)]
        if how == "receive_stop":
            raw.receive(0, fetch_of("00")[len(bytes.fromhex(sent)) :], fin=True)
        assert raw.told(Requested) == []
        assert raw.session._messages == {}
        assert raw.code is None


def test_an_empty_stream():
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, b"", fin=True)
    raw.collect()
    assert raw.commands == [Reset(0, 1)]
    assert raw.session._messages == {}


def test_a_request_that_ends_within_a_message():
    raw = Raw(DRAFT_18, client=False)
    raw.receive(0, fetch_of("00")[:-1], fin=True)
    assert raw.code == VIOLATION


# ------------------------------------------------------------------ answers


def answered(kind: str, draft: Draft, body: str, number: str = "00") -> bytes:
    """An answer, with its request's ID where it has one."""
    return frame(kind, "" if draft.streams else number, body)


ANSWERS = {"07": "00", "04": "07 00", "18": "00 00 00 00", "0b": "02 00 00"}
ASK = {
    "16": lambda session: session.fetch((b"a",), b"t", START, START, Parameters()),
    "03": lambda session: session.subscribe((b"a",), b"t", Parameters()),
    "0d": lambda session: session.track_status((b"a",), b"t", Parameters()),
    "06": lambda session: session.publish_namespace((b"a",)),
}
FITS = {("16", "18"), ("03", "04"), ("0d", "07"), ("06", "07"), ("03", "0b")}


@both
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("asked", ASK)
def test_answers_that_are_none(draft, asked, answer):
    raw = Raw(draft, client=True)
    ASK[asked](raw.session)
    raw.ask(0, answered(answer, draft, ANSWERS[answer]))
    assert raw.code == (None if (asked, answer) in FITS else VIOLATION)


@both
@pytest.mark.parametrize(("asked", "answer"), [("16", "18"), ("03", "04"), ("06", "07")])
def test_a_second_answer(draft, asked, answer):
    """Draft 18, sections 5.1, 5.2 and 6.2: exactly one."""
    raw = Raw(draft, client=True)
    ASK[asked](raw.session)
    raw.ask(0, answered(answer, draft, ANSWERS[answer]))
    raw.ask(0, answered(answer, draft, ANSWERS[answer]))
    assert raw.code == VIOLATION


@pytest.mark.parametrize("kind", ["07", "05", "04", "18", "0b", "1e", "0c"])
def test_answers_to_what_was_never_asked(kind):
    bodies = {**ANSWERS, "05": "00 00 00", "1e": "00", "0c": "00 00"}
    for number in ("00", "01"):
        raw = Raw(DRAFT_16, client=True)
        raw.receive(0, frame(kind, number, bodies[kind]))
        assert raw.code == VIOLATION


def test_publish_ok_for_what_is_no_publish():
    raw = Raw(DRAFT_16, client=True)
    raw.fetch()
    raw.receive(0, frame("1e", "00 00"))
    assert raw.code == VIOLATION


def test_publish_namespace_cancel():
    """Draft 16, section 9.24: revokes it, and PUBLISH_NAMESPACE_DONE is not sent."""
    raw = Raw(DRAFT_16, client=True)
    number = raw.session.publish_namespace((b"a",))
    raw.receive(0, frame("07", "00 00") + frame("0c", "00 05 0165"))
    (refused,) = raw.told(Refused)
    assert (refused.request_id, refused.message.code, refused.message.reason) == (number, 5, "e")
    raw.commands.clear()
    raw.session.requester.cancel(number)
    assert raw.session.take_commands() == []
    assert raw.code is None


@both
def test_track_aliases(draft):
    """Draft 18, section 11.1."""
    raw = Raw(draft, client=True)
    raw.session.subscribe((b"a",), b"t", Parameters())
    raw.session.subscribe((b"a",), b"u", Parameters())
    raw.ask(0, answered("04", draft, "07 00"))
    raw.ask(4, answered("04", draft, "07 00", "02"))
    assert raw.code == SessionCode.DUPLICATE_TRACK_ALIAS


@both
@pytest.mark.parametrize(
    ("start", "end", "fine"),
    [((5, 3), "05 04", True), ((5, 3), "05 00", True), ((5, 3), "05 03", True), ((5, 3), "06 00", True),
     ((5, 3), "05 02", False), ((5, 3), "04 00", False), ((5, 0), "04 09", False), ((5, 0), "05 00", True)],
)  # fmt: skip
def test_the_end_of_a_fetch(draft, start, end, fine):
    """Draft 18, section 10.13: not before its start; object 0 is the whole group."""
    raw = Raw(draft, client=True)
    raw.session.fetch((b"a",), b"t", Location(*start), Location(9, 0), Parameters())
    raw.ask(0, answered("18", draft, f"00 {end} 00"))
    assert raw.code == (None if fine else VIOLATION)


@pytest.mark.parametrize("asked", ["06", "50", "update", "update of an open fetch"])
def test_properties_of_request_ok(asked):
    """Draft 18, section 10.5: only in TRACK_STATUS_OK."""
    raw = Raw(DRAFT_18, client=True)
    if asked.startswith("update"):
        number = raw.fetch()
        if asked == "update":
            raw.receive(0, frame("18", "00 00 00 00"))
        raw.session.requester.update(number, Parameters(priority=1))
    elif asked == "50":
        raw.session.subscribe_namespace(())
    else:
        ASK[asked](raw.session)
    raw.receive(0, frame("07", "00 30 01"))
    assert raw.code == VIOLATION


@pytest.mark.parametrize(
    ("asked", "parameter", "fine"),
    [("0d", "09 0500", True), ("0d", "08 05", True), ("0d", "20 05", False), ("0d", "10 01", False),
     ("06", "08 05", False), ("06", "09 0500", False), ("update", "08 05", True), ("update", "09 0500", True),
     ("update", "10 01", False)],
)  # fmt: skip
def test_parameters_of_request_ok(asked, parameter, fine):
    """Draft 18, sections 10.2.10 and 10.2.11."""
    raw = Raw(DRAFT_18, client=True)
    if asked == "update":
        number = raw.session.subscribe((b"a",), b"t", Parameters())
        raw.receive(0, frame("04", "07 00"))
        raw.session.requester.update(number, Parameters(forward=1))
    else:
        ASK[asked](raw.session)
    raw.receive(0, frame("07", "01", parameter))
    assert raw.code == (None if fine else VIOLATION)


def test_parameters_of_request_ok_in_draft_16():
    """Out of place, they are ignored."""
    raw = Raw(DRAFT_16, client=True)
    raw.session.publish_namespace((b"a",))
    raw.receive(0, frame("07", "00 01 10 01"))
    assert raw.told(Answered)
    assert raw.code is None


@both
def test_namespaces_before_their_answer(draft):
    """Draft 18, section 10.18: REQUEST_OK or REQUEST_ERROR is the first message."""
    for kind in ("08", "0e"):
        raw = Raw(draft, client=True)
        raw.session.subscribe_namespace(())
        raw.receive(0 if draft.streams else 4, frame(kind, "00"))
        assert raw.code == VIOLATION


@both
def test_namespace_done_without_its_namespace(draft):
    """Draft 18, section 10.18."""
    raw = Raw(draft, client=True)
    raw.session.subscribe_namespace(())
    messages = answered("07", draft, "00") + frame("08", "01 0161") + frame("0e", "01 0162")
    raw.receive(0 if draft.streams else 4, messages)
    assert raw.code == VIOLATION


@both
def test_namespaces_that_are_too_long_together(draft):
    """Draft 18, section 2.4.1: prefix and suffix make one namespace."""
    for suffix in ("1f" + "0161" * 31, "01 9f60" + "61" * 8032):
        raw = Raw(draft, client=True)
        raw.session.subscribe_namespace((b"a", b"b"))
        raw.receive(0 if draft.streams else 4, answered("07", draft, "00") + frame("08", suffix))
        assert raw.code == VIOLATION


def test_too_many_namespaces():
    """A peer that never stops is stopped."""
    raw = Raw(DRAFT_18, client=True)
    raw.session.subscribe_namespace(())
    raw.receive(0, frame("07", "00"))
    for index in range(MAX_NAMESPACES + 1):
        raw.receive(0, frame("08", "01 04", index.to_bytes(4, "big").hex()))
    assert raw.code == SessionCode.INTERNAL_ERROR


def test_an_answer_on_another_requests_stream():
    raw = Raw(DRAFT_16, client=True)
    raw.session.subscribe_namespace(())
    raw.receive(4, frame("07", "02 00"))
    assert raw.code == VIOLATION


@both
def test_an_answer_that_ends_within_a_message(draft):
    if draft.streams:
        raw = Raw(draft, client=True)
        raw.fetch()
        raw.receive(0, "18 0005 00", fin=True)
        assert raw.code == VIOLATION


def test_redirects():
    """Draft 18, section 10.6.1: servers are not sent elsewhere; namespaces have no track."""
    raw = Raw(DRAFT_18, client=True)
    raw.fetch()
    raw.receive(0, frame("05", "34 01 00", "03 6d3a2f", "01 0161", "01 74"))
    (refused,) = raw.told(Refused)
    assert (refused.message.redirect.uri, refused.message.redirect.track) == (b"m:/", b"t")
    for to, code in (("01 6d 00 00", VIOLATION), ("00 00 00", None), ("00 00 0174", VIOLATION)):
        raw = Raw(DRAFT_18, client=False)
        raw.session.publish_namespace((b"a",))
        raw.receive(1, frame("05", "34 01 00", to))
        assert raw.code == code
    raw = Raw(DRAFT_18, client=True)
    raw.session.subscribe_namespace((b"a",))
    raw.receive(0, frame("05", "34 01 00", "00 00 0174"))
    assert raw.code == VIOLATION


@pytest.mark.parametrize("property_", ["c0409d 01 05", "c04000 05", "c07fff 00", "0b 04 c04000 05"])
@pytest.mark.parametrize("asked", ["16", "03"])
def test_mandatory_track_properties(asked, property_):
    """Draft 18, section 2.5.1: the request is cancelled, the session goes on."""
    raw = Raw(DRAFT_18, client=True)
    number = ASK[asked](raw.session)
    head = "00 00 00 00" if asked == "16" else "07 00"
    raw.receive(0, frame("18" if asked == "16" else "04", head, property_))
    (refused,) = raw.told(Refused)
    assert (refused.request_id, refused.message.code) == (number, RequestCode.UNSUPPORTED_EXTENSION)
    assert raw.told(Answered) == []
    assert Stop(0, 1) in raw.commands
    assert raw.code is None
    assert raw.session.requester._requests == {}
    assert raw.session._channel.aliases == {}


def test_properties_beyond_the_mandatory_are_ignored():
    """Also those for greasing, and in draft 16 all."""
    for draft, kind in ((DRAFT_18, "c08000"), (DRAFT_18, "bffe"), (DRAFT_18, "811c"), (DRAFT_16, "80004000")):
        raw = Raw(draft, client=True)
        raw.fetch()
        raw.ask(0, answered("18", draft, "00 00 00 00" + kind + "05"))
        assert len(raw.told(Answered)) == 1


@both
def test_a_malformed_track(draft):
    """Draft 18, section 2.4.2: what was asked of it is cancelled, the session goes on."""
    raw = Raw(draft, client=True)
    number = raw.fetch()
    raw.receive(7, "05 00 3c 05 03 80 03 0b 01 04 00")
    (refused,) = raw.told(Refused)
    assert (refused.request_id, refused.message.code) == (number, RequestCode.MALFORMED_TRACK)
    assert Stop(7, 1) in raw.commands
    raw.receive(7, b"\xff" * 100, fin=True)
    assert raw.code is None
    assert len(raw.session._incoming) == 0
    assert raw.session.requester._requests == {}


def test_a_malformed_datagram():
    raw = Raw(DRAFT_18, client=True)
    raw.session.subscribe((b"a",), b"t", Parameters())
    raw.receive(0, frame("04", "07 00"))
    raw.session.receive_datagram(bytes.fromhex("01 07 05 03 80 02 3e04 61"))
    (refused,) = raw.told(Refused)
    assert refused.message.code == RequestCode.MALFORMED_TRACK
    assert raw.code is None


@both
def test_unknown_error_codes(draft):
    """Draft 18, section 14: as INTERNAL_ERROR, and no reason to close the session."""
    raw = Raw(draft, client=True)
    raw.fetch()
    raw.ask(0, answered("05", draft, ("809d" if draft.streams else "409d") + "00 00"))
    (refused,) = raw.told(Refused)
    assert refused.message.code == 0x9D
    raw.session.fetch((b"a",), b"t", START, START, Parameters())
    raw.receive(7, "05 02")
    raw.session.receive_reset(7, 0x11C)
    assert raw.told(Ended) == [Ended(2, 0x11C)]
    assert raw.code is None


# ------------------------------------------------------------------ GOAWAY


@both
def test_a_second_goaway(draft):
    """Draft 18, section 10.4."""
    goaway = frame("10", "00 00 00" if draft.streams else "00")
    raw = Raw(draft, client=False)
    raw.receive(2 if draft.streams else 0, frame("10", "00 00 01" if draft.streams else "00"))
    assert raw.code is None
    raw.receive(2 if draft.streams else 0, goaway.replace(b"\x00\x00\x00\x00", b"\x00\x00\x00\x01"))
    assert raw.code == VIOLATION


@both
def test_a_goaway_that_names_a_server(draft):
    """Draft 18, section 10.4: clients cannot."""
    body = "01 6d" + ("00 01" if draft.streams else "")
    raw = Raw(draft, client=False)
    raw.receive(2 if draft.streams else 0, frame("10", body))
    assert raw.code == VIOLATION
    raw = Raw(draft, client=True)
    raw.receive(3 if draft.streams else 0, frame("10", "01 6d" + ("00 00" if draft.streams else "")))
    assert raw.code is None


def test_the_request_id_of_a_goaway():
    """Draft 18, section 10.4: the receiver's parity."""
    for client, number, code in (
        (True, "00", None), (True, "01", SessionCode.INVALID_REQUEST_ID), (False, "01", None),
        (False, "02", SessionCode.INVALID_REQUEST_ID),
    ):  # fmt: skip
        raw = Raw(DRAFT_18, client=client)
        raw.receive(3 if client else 2, frame("10", "00 00", number))
        assert raw.code == code


def test_goaway_on_a_requests_stream():
    """Draft 18, section 10.4: once, and only a server names another."""
    for client in (True, False):
        for messages, code in (
            ((frame("10", "00 00"),), None),
            ((frame("10", "00 00"), frame("10", "00 00")), VIOLATION),
            ((frame("10", "01 6d 00"),), None if client else VIOLATION),
        ):
            raw = Raw(DRAFT_18, client=client)
            ours = 0 if client else 1
            ASK["06"](raw.session)
            raw.receive(ours, b"".join(messages))
            assert raw.code == code
            raw = Raw(DRAFT_18, client=client)
            raw.receive(1 if client else 0, frame("06", "01" if client else "00", "01 0161 00") + b"".join(messages))
            assert raw.code == code
    raw = Raw(DRAFT_18, client=True)
    raw.fetch()
    raw.receive(0, frame("10", "00 00") + frame("18", "00 00 00 00"))
    assert raw.told(Answered)


@pytest.mark.parametrize("ours", [True, False])
def test_goaway_on_a_requests_stream_of_draft_16(ours):
    """There it is for the control stream alone."""
    raw = Raw(DRAFT_16, client=True)
    if ours:
        raw.session.subscribe_namespace(())
        raw.receive(4, frame("10", "00"))
    else:
        raw.receive(1, frame("11", "01 00 01 00") + frame("10", "00"))
    assert raw.code == VIOLATION
