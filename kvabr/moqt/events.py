"""What a session tells its owner, and what it wants done with streams."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.moqt.messages import (
    FetchOk,
    PublishDone,
    Request,
    RequestError,
    RequestOk,
    SubscribeOk,
)
from kvabr.moqt.objects import Item, ObjectHeader
from kvabr.moqt.parameters import Parameters, SetupOptions


@dataclass(frozen=True, slots=True)
class Ready:
    """The peer's SETUP has come."""

    options: SetupOptions
    tokens: tuple[bytes, ...]
    """Values of the tokens in it."""


@dataclass(frozen=True, slots=True)
class Requested:
    """The peer asks for something; answer it by its ID."""

    request_id: int
    message: Request
    tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Updated:
    """The peer changes a request of its own, which has been acknowledged."""

    request_id: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The peer wants nothing more of a request of its own."""

    request_id: int
    code: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The peer agrees to a request of ours."""

    request_id: int
    message: FetchOk | SubscribeOk | RequestOk


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer refuses a request of ours, or breaks it off."""

    request_id: int
    message: RequestError


@dataclass(frozen=True, slots=True)
class Received:
    """Objects, and pieces of them, of a request of ours."""

    request_id: int
    items: list[Item]
    stream: int = 0
    """Which they came on: a subscription has many, and pieces of an object belong to the header on their stream."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream of a request of ours has ended: all is there, or it was reset."""

    request_id: int
    reset: int | None = None
    """Why it was reset."""


@dataclass(frozen=True, slots=True)
class DatagramReceived:
    """An object of a subscription of ours came as a datagram."""

    request_id: int
    header: ObjectHeader
    payload: bytes


@dataclass(frozen=True, slots=True)
class SubscriptionDone:
    """The peer will send no more of a subscription of ours."""

    request_id: int
    message: PublishDone


@dataclass(frozen=True, slots=True)
class NamespaceChanged:
    """A namespace that matches a SUBSCRIBE_NAMESPACE of ours came or went."""

    request_id: int
    suffix: tuple[bytes, ...]
    gone: bool


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The peer will end the session soon: no new requests, please."""

    uri: bytes
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over, by our doing: what the peer did, or what we wanted."""

    code: int
    reason: str


Event = (
    Ready
    | Requested
    | Updated
    | Cancelled
    | Answered
    | Refused
    | Received
    | Ended
    | DatagramReceived
    | SubscriptionDone
    | NamespaceChanged
    | GoingAway
    | Closed
)


@dataclass(frozen=True, slots=True)
class Write:
    """Send bytes on a stream; the first write opens it."""

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
    """Ask the peer to send no more on a stream."""

    stream: int
    code: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection with an application error code."""

    code: int
    reason: str


Command = Write | Reset | Stop | Close
