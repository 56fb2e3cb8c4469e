"""Events that a session reports to its owner, and commands for the owner to carry out on streams."""

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
    """Values of the tokens in the SETUP."""


@dataclass(frozen=True, slots=True)
class Requested:
    """The peer makes a request; answer it by its ID through `MoqtSession.responder`."""

    request_id: int
    message: Request
    tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """The peer changes one of its requests; the session has acknowledged the change."""

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
    """Objects, or parts of them, arrived for a request of this end; payload belongs to the last header before it."""

    request_id: int
    items: list[Item]
    stream: int | None = None
    """The stream that carries them, of a subscription, which has several; None for a FETCH."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream of objects has ended or was reset: the only one of a FETCH, or one of a subscription."""

    request_id: int
    reset: int | None = None
    """Code of the reset; None if all its objects have arrived."""
    stream: int | None = None
    """See `Received.stream`."""


@dataclass(frozen=True, slots=True)
class SubscriptionEnding:
    """The peer begins no more streams for a subscription; some may still be on their way.

    `SubscriptionDone` follows, unless the peer has counted its streams wrongly or reset one before its header: cancel
    the subscription when it takes too long.
    """

    request_id: int
    message: PublishDone


@dataclass(frozen=True, slots=True)
class SubscriptionDone:
    """All streams of a subscription have arrived; nothing follows."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The peer no longer wants one of the streams that `Responder.push` opened; it is reset."""

    request_id: int
    stream: int


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The peer will close the session soon; make no new requests."""

    uri: bytes
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Closed:
    """This end has closed the session, on request or because the peer broke the protocol."""

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
    """Send bytes on a stream; the first write opens the stream."""

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
    """Ask the peer to stop sending on a stream (STOP_SENDING)."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection with an application error code."""

    code: int
    reason: str


Command = Write | Reset | Stop | Close
