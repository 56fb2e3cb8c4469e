"""Events that a session reports to its owner, and commands for the owner to carry out on streams."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.moqt.messages import FetchOk, Request, RequestErrorMessage
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
    """The peer accepts a FETCH."""

    request_id: int
    message: FetchOk


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer refuses or aborts a FETCH."""

    request_id: int
    message: RequestErrorMessage


@dataclass(frozen=True, slots=True)
class Received:
    """Objects, or parts of them, arrived for a FETCH; payload belongs to the last header before it."""

    request_id: int
    items: list[Item]


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream of objects for a FETCH has ended or was reset."""

    request_id: int
    reset: int | None = None
    """Code of the reset; None if all objects have arrived."""


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


Event = Ready | Requested | Updated | Cancelled | Answered | Refused | Received | Ended | GoingAway | Closed


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
