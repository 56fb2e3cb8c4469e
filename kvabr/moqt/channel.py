"""What the parts of a session share: its streams and IDs, and what is to be sent and told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.encoding import MessageParser, encode
from kvabr.moqt.events import Command, Event, Requested, Updated, Write
from kvabr.moqt.messages import Message, Request
from kvabr.moqt.wire import Draft

_ID_WINDOW = 1 << 16
"""Of so many request IDs below the largest it is known whether they were used; older ones count as used."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from its message until it is over."""

    number: int
    """Its request ID."""
    message: Request
    stream: int | None
    """Its bidirectional stream; None where requests share one."""
    parser: MessageParser | None = None
    """Of what comes back on that stream, if the request is ours."""
    answered: bool = False
    streams: set[int] = field(default_factory=set)
    """Unidirectional streams with its objects."""
    data_ended: bool = False
    """FETCH: the stream with its objects has ended."""
    updates: int = 0
    """REQUEST_UPDATEs without an answer."""
    going_away: bool = False
    """A GOAWAY has come on its stream."""
    alias: int | None = None
    """SUBSCRIBE: what its objects call the track."""
    namespaces: set[tuple[bytes, ...]] = field(default_factory=set)
    """SUBSCRIBE_NAMESPACE: those that are announced."""


class Channel:
    """Allots stream and request IDs, collects commands and events."""

    def __init__(self, draft: Draft, *, client: bool) -> None:
        self.draft, self.client = draft, client
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.control_stream: int | None = None
        """Where our control messages go."""
        self._next_bidi, self._next_uni = (0, 2) if client else (1, 3)
        self.next_id = 0 if client else 1
        """The next request ID of ours."""
        self.aliases: dict[int, RequestState] = {}
        """Subscriptions of ours by what their objects call the track."""

    def open_bidi(self) -> int:
        """A new bidirectional stream."""
        self._next_bidi += 4
        return self._next_bidi - 4

    def open_uni(self) -> int:
        """A new unidirectional stream."""
        self._next_uni += 4
        return self._next_uni - 4

    def take_id(self) -> int:
        """A new request ID."""
        self.next_id += 2
        return self.next_id - 2

    def made(self, number: int) -> bool:
        """Whether a request ID is one that we have used."""
        return 0 <= number < self.next_id and number % 2 == (not self.client)

    def unsay(self, request_id: int) -> bool:
        """Forget that the peer asked for something, if the owner has not heard of it yet; returns whether so."""
        if not any(isinstance(event, Requested) and event.request_id == request_id for event in self.events):
            return False
        self.events = [
            event
            for event in self.events
            if not (isinstance(event, Requested | Updated) and event.request_id == request_id)
        ]
        return True

    def write(self, stream: int, message: Message, *, fin: bool = False) -> None:
        """Send a message on a stream."""
        self.commands.append(Write(stream, encode(message, self.draft, client=self.client), fin))

    def control(self, message: Message) -> None:
        """Send a message on the control stream."""
        assert self.control_stream is not None  # noqa: S101  # nothing is sent before SETUP
        self.write(self.control_stream, message)


class PeerIds:
    """The request IDs that the peer has used: of its parity, none twice (draft 18, section 10.1).

    Streams overtake each other, and one that is cancelled early may never come, so IDs may be left out. That holds for
    draft 16 too, which wants them in sequence: SUBSCRIBE_NAMESPACE has a stream of its own there.
    """

    def __init__(self, channel: Channel, granted: int) -> None:
        """Nothing has been used.

        Args:
            channel: the session's.
            granted: draft 16: IDs must be below this.
        """
        self._parity = int(channel.client)
        self._limited = not channel.draft.streams
        self.granted = granted
        self.next = self._parity
        """The smallest ID above all that were used."""
        self._used = 0
        """A bit for each ID below that, the largest ID's the lowest."""
        self._in_order = -1

    def take(self, number: int, *, in_order: bool = False) -> None:
        """The peer uses an ID.

        Args:
            number: the ID.
            in_order: whether it came on the stream that all requests share (draft 16), where IDs only grow.

        Raises:
            SessionFault: it must not.
        """
        code = SessionCode.INVALID_REQUEST_ID
        if number % 2 != self._parity:
            raise SessionFault(f"request ID {number} is not one of the peer's", code)
        if self._limited and number >= self.granted:
            raise SessionFault(f"request ID {number}, where {self.granted} is the limit", SessionCode.TOO_MANY_REQUESTS)
        if self.used(number):
            raise SessionFault(f"request ID {number} was used before", code)
        if in_order:
            if number < self._in_order:
                raise SessionFault(f"request ID {number} behind {self._in_order}", code)
            self._in_order = number
        if number < self.next:
            self._used |= 1 << (self.next - number) // 2 - 1
        else:
            ahead = (number - self.next) // 2 + 1
            known = self._used << ahead & ((1 << _ID_WINDOW) - 1) if ahead < _ID_WINDOW else 0
            self._used = known | 1
            self.next = number + 2

    def used(self, number: int) -> bool:
        """Whether the peer has used an ID."""
        if not 0 <= number < self.next or number % 2 != self._parity:
            return False
        behind = (self.next - number) // 2 - 1
        return behind >= _ID_WINDOW or bool(self._used >> behind & 1)

    def widen(self, window: int, active: int) -> int | None:
        """Draft 16: grant as many IDs as keep ``window`` requests possible; returns the new limit when it is time."""
        wanted = self.next + 2 * max(0, window - active)
        if wanted - self.granted < window:
            return None
        self.granted = wanted
        return wanted
