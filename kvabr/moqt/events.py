"""Events for the owner of a session, and commands for it to carry out on streams.

A `Channel` collects them, and allocates stream and request IDs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.messages import FetchOk, Goaway, Message, PublishDone, Request, RequestErrorMessage, SubscribeOk, encode
from kvabr.moqt.objects import Item
from kvabr.moqt.parameters import Parameters, SetupOptions
from kvabr.moqt.wire import Draft


@dataclass(frozen=True, slots=True)
class Ready:
    """The peer's SETUP was received."""

    options: SetupOptions
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Requested:
    """The peer made a request. Answer it by ID through `MoqtSession.responder`."""

    request_id: int
    message: Request
    tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """The peer changed one of its requests; the session has acknowledged the change."""

    request_id: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The peer cancelled one of its requests."""

    request_id: int
    code: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The peer accepted a request of this end."""

    request_id: int
    message: FetchOk | SubscribeOk


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer refused or aborted a request of this end."""

    request_id: int
    message: RequestErrorMessage


@dataclass(frozen=True, slots=True)
class Received:
    """Objects, or parts of objects, for a request of this end. Payload belongs to the preceding header."""

    request_id: int
    items: list[Item]
    stream: int | None = None
    """Stream ID for subscriptions; None for a FETCH, which has a single stream."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream of objects ended or was reset."""

    request_id: int
    reset: int | None = None
    """Code of the reset; None for a regular end."""
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionEnding:
    """The peer will open no further streams for a subscription; open streams continue.

    `SubscriptionDone` follows, unless the peer miscounted its streams, or reset a stream before its header. So cancel
    the subscription after a time limit.
    """

    request_id: int
    message: PublishDone


@dataclass(frozen=True, slots=True)
class SubscriptionDone:
    """All streams of a subscription have been received."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The peer stopped a stream of `Responder.push`; the session has reset it."""

    request_id: int
    stream: int


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The peer will close the session soon. Do not make new requests."""

    uri: bytes
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Closed:
    """This end has closed the session, by request of the owner or because the peer violated the protocol."""

    code: int
    reason: str


Event = (
    Ready
    | Requested
    | Updated
    | Cancelled
    | Stopped
    | Answered
    | Refused
    | Received
    | Ended
    | SubscriptionEnding
    | SubscriptionDone
    | GoingAway
    | Closed
)


@dataclass(frozen=True, slots=True)
class Write:
    """Send bytes on a stream; open it if it is new."""

    stream: int
    data: bytes
    fin: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset the sending side of a stream."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Send STOP_SENDING for a stream."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection with an application error code."""

    code: int
    reason: str


Command = Write | Reset | Stop | Close


_ID_WINDOW = 1 << 16
"""Number of recent request IDs tracked individually; older IDs count as used."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One open request of either end."""

    number: int
    message: Request
    stream: int
    answered: bool = False
    updates: int = 0
    """Number of unanswered REQUEST_UPDATEs."""
    going_away: bool = False
    """True if a GOAWAY was received on the request's stream."""


class Channel:
    """Allocates stream and request IDs, and collects commands and events."""

    def __init__(self, draft: Draft, *, client: bool) -> None:
        self.draft, self.client = draft, client
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.control_stream: int | None = None
        self.open_bidi: Callable[[], int] = partial(next, count(0 if client else 1, 4))
        self.open_uni: Callable[[], int] = partial(next, count(2 if client else 3, 4))
        self.next_id = 0 if client else 1

    def take_id(self) -> int:
        """Return a new request ID."""
        self.next_id += 2
        return self.next_id - 2

    def made(self, number: int) -> bool:
        """Return True if this end has used a request ID."""
        return 0 <= number < self.next_id and number % 2 == (not self.client)

    def retract(self, request_id: int) -> bool:
        """Remove a peer's request from the pending events; return False if the owner already has the event."""
        if not any(isinstance(event, Requested) and event.request_id == request_id for event in self.events):
            return False
        over = (Requested, Updated)
        self.events = [event for event in self.events if not isinstance(event, over) or event.request_id != request_id]
        return True

    def write(self, stream: int, message: Message, *, fin: bool = False) -> None:
        """Send a message on a stream."""
        self.commands.append(Write(stream, encode(message, self.draft), fin))

    def control(self, message: Message) -> None:
        """Send a message on the control stream."""
        assert self.control_stream is not None  # noqa: S101  # SETUP is sent first
        self.write(self.control_stream, message)

    def check_goaway(self, message: Goaway, *, repeated: bool) -> None:
        """Raise SessionFault for a second GOAWAY, or a URI from a client (draft 18, section 10.4)."""
        if repeated:
            raise SessionFault("second GOAWAY on the same stream")
        self.check_uri(message.uri, message)

    def check_uri(self, uri: bytes, message: Message) -> None:
        """Raise SessionFault if a client sent a redirect URI."""
        if uri and not self.client:
            raise SessionFault(f"{type(message).__name__} from a client carries a URI")


class PeerIds:
    """The peer's request IDs. Each must be new and have the peer's parity (draft 18, section 10.1).

    Gaps are accepted: streams can overtake each other, and a request that is cancelled early may never arrive.
    """

    def __init__(self, channel: Channel) -> None:
        self._parity = int(channel.client)
        self.next = self._parity
        """Smallest ID of the peer above all used IDs."""
        self._used = 0
        """Bit mask of used IDs below `next`; the lowest bit is the largest ID."""

    def take(self, number: int) -> None:
        """Record an ID; raise SessionFault if it is invalid."""
        code = SessionCode.INVALID_REQUEST_ID
        if number % 2 != self._parity:
            raise SessionFault(f"request ID {number} has the wrong parity", code)
        if self.used(number):
            raise SessionFault(f"request ID {number} was used before", code)
        if number < self.next:
            self._used |= 1 << (self.next - number) // 2 - 1
        else:
            ahead = (number - self.next) // 2 + 1
            known = self._used << ahead & ((1 << _ID_WINDOW) - 1) if ahead < _ID_WINDOW else 0
            self._used = known | 1
            self.next = number + 2

    def used(self, number: int) -> bool:
        """Return True if the peer has used an ID."""
        if not 0 <= number < self.next or number % 2 != self._parity:
            return False
        behind = (self.next - number) // 2 - 1
        return behind >= _ID_WINDOW or bool(self._used >> behind & 1)
