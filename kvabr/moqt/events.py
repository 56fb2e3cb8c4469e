"""Events for the owner of a session, and commands for it to carry out on streams."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.moqt.messages import FetchOk, PublishDone, Request, RequestErrorMessage, SubscribeOk
from kvabr.moqt.objects import Item
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import Parameters


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
