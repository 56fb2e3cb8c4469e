"""What the parts of a session share: its streams and IDs, and what is to be sent and told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.draft import Draft
from kvabr.moqt.encoding import encode
from kvabr.moqt.events import Command, Event, Write
from kvabr.moqt.messages import Message, Request

_MAX_GAPS = 1024


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from its message until it is over."""

    number: int
    """Its request ID."""
    message: Request
    stream: int | None
    """Its bidirectional stream; None where requests share one."""
    answered: bool = False
    streams: set[int] = field(default_factory=set)
    """Unidirectional streams with its objects."""
    data_ended: bool = False
    """FETCH: the stream with its objects has ended."""
    updates: int = 0
    """REQUEST_UPDATEs without an answer."""
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

    def write(self, stream: int, message: Message, *, fin: bool = False) -> None:
        """Send a message on a stream."""
        self.commands.append(Write(stream, encode(message, self.draft, client=self.client), fin))

    def control(self, message: Message) -> None:
        """Send a message on the control stream."""
        assert self.control_stream is not None  # noqa: S101  # nothing is sent before SETUP
        self.write(self.control_stream, message)


class PeerIds:
    """The request IDs that the peer has used: of its parity, none twice (draft 18, section 9.1)."""

    def __init__(self, channel: Channel, granted: int) -> None:
        """Nothing has been used.

        Args:
            channel: the session's.
            granted: draft 16: IDs must be below this, and come in sequence.
        """
        self._parity = int(channel.client)
        self._strict = not channel.draft.streams
        self.granted = granted
        self.next = self._parity
        """The smallest ID above all that were used."""
        self._gaps: set[int] = set()

    def take(self, number: int) -> None:
        """The peer uses an ID.

        Raises:
            SessionFault: it must not.
        """
        code = SessionCode.INVALID_REQUEST_ID
        if number % 2 != self._parity:
            raise SessionFault(f"request ID {number} is not one of the peer's", code)
        if self._strict and number >= self.granted:
            raise SessionFault(f"request ID {number}, where {self.granted} is the limit", SessionCode.TOO_MANY_REQUESTS)
        if number < self.next and number not in self._gaps:
            raise SessionFault(f"request ID {number} was used before", code)
        if self._strict and number != self.next:
            raise SessionFault(f"request ID {number} where {self.next} is next", code)
        self._gaps.discard(number)
        if number >= self.next:
            # Streams overtake each other, so IDs may be left out for a while; how many is bounded.
            if len(self._gaps) + (number - self.next) // 2 > _MAX_GAPS:
                raise SessionFault(f"request ID {number} where {self.next} is next", code)
            self._gaps.update(range(self.next, number, 2))
            self.next = number + 2

    def used(self, number: int) -> bool:
        """Whether the peer has used an ID."""
        return 0 <= number < self.next and number % 2 == self._parity and number not in self._gaps

    def widen(self, window: int, active: int) -> int | None:
        """Draft 16: grant as many IDs as keep ``window`` requests possible; returns the new limit when it is time."""
        wanted = self.next + 2 * max(0, window - active)
        if wanted - self.granted < window:
            return None
        self.granted = wanted
        return wanted
