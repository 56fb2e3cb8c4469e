"""Events for the owner of a session, and commands for it to carry out on streams."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.moqt.messages import FetchOk, PublishDone, Request, RequestErrorMessage, SubscribeOk
from kvabr.moqt.objects import Item
from kvabr.moqt.parameters import Parameters, SetupOptions


@dataclass(frozen=True, slots=True)
class Ready:
    """The peer's SETUP has arrived."""

    options: SetupOptions
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Requested:
    """The peer makes a request; answer it by ID through `MoqtSession.responder`."""

    request_id: int
    message: Request
    tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """The peer changes one of its requests; the session has acknowledged it."""

    request_id: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The peer cancels one of its requests."""

    request_id: int
    code: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The peer accepts a request of this end."""

    request_id: int
    message: FetchOk | SubscribeOk


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer refuses or aborts a request of this end."""

    request_id: int
    message: RequestErrorMessage


@dataclass(frozen=True, slots=True)
class Received:
    """Objects, or parts of them, for a request of this end; payload belongs to the last header before it."""

    request_id: int
    items: list[Item]
    stream: int | None = None
    """None for a FETCH, which has one stream."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream of objects has ended or was reset."""

    request_id: int
    reset: int | None = None
    """None at a regular end."""
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionEnding:
    """The peer opens no more streams for a subscription; open ones continue.

    `SubscriptionDone` follows, unless the peer miscounted its streams or reset one before its header: cancel the
    subscription after a time limit.
    """

    request_id: int
    message: PublishDone


@dataclass(frozen=True, slots=True)
class SubscriptionDone:
    """All streams of a subscription have arrived."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The peer stopped a stream of `Responder.push`; it is reset."""

    request_id: int
    stream: int


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The peer will close the session soon; make no new requests."""

    uri: bytes
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Closed:
    """This end has closed the session, on request or for a violation by the peer."""

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
    """Send bytes on a stream, opening it if new."""

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
    """One open request, of either end."""

    number: int
    message: Request
    stream: int
    answered: bool = False
    updates: int = 0
    """Unanswered REQUEST_UPDATEs."""
    going_away: bool = False
    """A GOAWAY has arrived on the request's stream."""
