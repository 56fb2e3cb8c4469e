"""A session with the test itself as its peer."""

from kvabr.moqt.codes import SessionCode
from kvabr.moqt.events import Close, Write
from kvabr.moqt.messages import Message, MessageParser, decode
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import DRAFT_22, Draft, Location, Parameters

NAME = "01 0161 0174"
"""The namespace ("a") and the track "t"."""
START = Location(0, 0)
VIOLATION = SessionCode.PROTOCOL_VIOLATION


def frame(kind: str, *parts: str) -> bytes:
    body = bytes.fromhex("".join(parts))
    return bytes.fromhex(kind) + len(body).to_bytes(2, "big") + body


class Raw:
    """Feed bytes to a session and collect its events and commands."""

    def __init__(
        self, draft: Draft = DRAFT_22, *, client: bool, ready: bool = True, options: SetupOptions | None = None
    ) -> None:
        self.draft, self.client = draft, client
        self.session = MoqtSession(draft, client=client, options=options)
        self.session.start()
        if ready:
            self.setup()
        self.commands: list[object] = []
        self.events: list[object] = []

    def setup(self, *options: str) -> None:
        self.receive(3 if self.client else 2, frame("af00", *options))
        self.session.take_commands()

    def receive(self, stream: int, data: str | bytes = b"", *, fin: bool = False) -> None:
        self.session.receive(stream, bytes.fromhex(data) if isinstance(data, str) else data, fin=fin)

    def ask(self, stream: int, *messages: bytes, fin: bool = False) -> None:
        """Send messages of a request: on its own stream."""
        self.receive(stream, b"".join(messages), fin=fin)

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

    def said(self) -> list[Message]:
        """Return the messages that the session has sent."""
        self.collect()
        data = b"".join(command.data for command in self.commands if isinstance(command, Write))
        return [decode(kind, body, self.draft) for kind, body in MessageParser().feed(data)]

    @property
    def code(self) -> int | None:
        """The code with which the session was closed, None if it is open."""
        self.collect()
        closes = [command for command in self.commands if isinstance(command, Close)]
        assert len(closes) <= 1
        assert bool(closes) == (self.session.closed is not None)
        return closes[0].code if closes else None

    def drained(self) -> None:
        """Assert that the session goes on and holds no objects."""
        assert self.session.requester._held_bytes == 0
        assert self.session.requester._by_data == {}
        assert self.code is None

    def forgotten(self) -> None:
        """Assert that the session goes on and that nothing is left of its requests."""
        self.drained()
        assert self.session.requester._requests == self.session.requester._by_alias == {}


def fetch_of(number: str) -> bytes:
    return frame("16", number, NAME, "00")


def goaway_of(uri: str = "") -> bytes:
    return frame("10", f"{len(bytes.fromhex(uri)):02x}", uri, "00")
