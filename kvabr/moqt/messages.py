"""Control messages as dataclasses (draft 18, sections 10.3 to 10.20); `kvabr.moqt.encoding` has their wire format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvabr.moqt.codes import Param
from kvabr.moqt.parameters import Parameters, SetupOptions
from kvabr.moqt.wire import KeyValue, Location

_NO_PARAMS: frozenset[Param] = frozenset()


@dataclass(frozen=True, slots=True)
class Message:
    """One control message."""

    allowed: ClassVar[frozenset[Param]] = _NO_PARAMS
    """Parameters that it may have."""


@dataclass(frozen=True, slots=True)
class Setup(Message):
    """SETUP (18); CLIENT_SETUP and SERVER_SETUP (16)."""

    options: SetupOptions


@dataclass(frozen=True, slots=True)
class Goaway(Message):
    """GOAWAY: the sender will end the session soon."""

    uri: bytes = b""
    timeout_ms: int = 0
    """Draft 18."""
    request_id: int | None = None
    """Draft 18, on the control stream: the first request of the peer that was not processed."""


@dataclass(frozen=True, slots=True)
class MaxRequestId(Message):
    """MAX_REQUEST_ID (16): request IDs below this may be used."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RequestsBlocked(Message):
    """REQUESTS_BLOCKED (16)."""

    request_id: int


@dataclass(frozen=True, slots=True)
class RequestOk(Message):
    """REQUEST_OK."""

    request_id: int | None = None
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    """Draft 18, in answer to TRACK_STATUS."""
    allowed: ClassVar[frozenset[Param]] = frozenset({
        Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBGROUP_DELIVERY_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.GROUP_ORDER,
        Param.SUBSCRIPTION_FILTER, Param.EXPIRES, Param.LARGEST_OBJECT, Param.FORWARD, Param.NEW_GROUP_REQUEST,
    })  # fmt: skip
    """In answer to anything; the session knows what it answers."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where a request may succeed (18)."""

    uri: bytes
    namespace: tuple[bytes, ...]
    track: bytes


@dataclass(frozen=True, slots=True)
class RequestError(Message):
    """REQUEST_ERROR."""

    request_id: int | None
    code: int
    retry_interval: int
    """Milliseconds plus one before asking again may help; 0: it will not."""
    reason: str
    redirect: Redirect | None = None


@dataclass(frozen=True, slots=True)
class Subscribe(Message):
    """SUBSCRIBE."""

    request_id: int
    namespace: tuple[bytes, ...]
    track: bytes
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({
        Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBGROUP_DELIVERY_TIMEOUT, Param.AUTHORIZATION_TOKEN,
        Param.RENDEZVOUS_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.GROUP_ORDER, Param.SUBSCRIPTION_FILTER,
        Param.FORWARD, Param.NEW_GROUP_REQUEST,
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrackStatus(Message):
    """TRACK_STATUS: a SUBSCRIBE that delivers nothing, and says nothing about delivery."""

    request_id: int
    namespace: tuple[bytes, ...]
    track: bytes
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({Param.AUTHORIZATION_TOKEN})


@dataclass(frozen=True, slots=True)
class SubscribeOk(Message):
    """SUBSCRIBE_OK."""

    request_id: int | None
    track_alias: int
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    allowed: ClassVar[frozenset[Param]] = frozenset({Param.EXPIRES, Param.LARGEST_OBJECT})


@dataclass(frozen=True, slots=True)
class RequestUpdate(Message):
    """REQUEST_UPDATE."""

    request_id: int
    existing: int | None = None
    """Draft 16: the request to change; in 18 the stream says."""
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({
        Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBGROUP_DELIVERY_TIMEOUT, Param.AUTHORIZATION_TOKEN,
        Param.SUBSCRIBER_PRIORITY, Param.SUBSCRIPTION_FILTER, Param.FORWARD, Param.NEW_GROUP_REQUEST,
        Param.TRACK_NAMESPACE_PREFIX,
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unsubscribe(Message):
    """UNSUBSCRIBE (16)."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Publish(Message):
    """PUBLISH."""

    request_id: int
    namespace: tuple[bytes, ...]
    track: bytes
    track_alias: int
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    allowed: ClassVar[frozenset[Param]] = frozenset({
        Param.AUTHORIZATION_TOKEN, Param.EXPIRES, Param.LARGEST_OBJECT, Param.FORWARD,
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishOk(Message):
    """PUBLISH_OK (16; in 18 it is a REQUEST_OK)."""

    request_id: int
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({
        Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.GROUP_ORDER, Param.SUBSCRIPTION_FILTER,
        Param.EXPIRES, Param.FORWARD, Param.NEW_GROUP_REQUEST,
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishDone(Message):
    """PUBLISH_DONE."""

    request_id: int | None
    code: int
    streams: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fetch(Message):
    """FETCH, standalone: a range of published objects."""

    request_id: int
    namespace: tuple[bytes, ...]
    track: bytes
    start: Location
    end: Location
    """The last location plus one; object 0 means all of its group."""
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({
        Param.AUTHORIZATION_TOKEN, Param.FILL_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.GROUP_ORDER,
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class JoiningFetch(Message):
    """FETCH, joining: what comes before a subscription."""

    request_id: int
    joining_request_id: int
    joining_start: int
    relative: bool
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = Fetch.allowed


@dataclass(frozen=True, slots=True)
class FetchOk(Message):
    """FETCH_OK."""

    request_id: int | None
    end_of_track: bool
    end: Location
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchCancel(Message):
    """FETCH_CANCEL (16)."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PublishNamespace(Message):
    """PUBLISH_NAMESPACE."""

    request_id: int
    namespace: tuple[bytes, ...]
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({Param.AUTHORIZATION_TOKEN})


@dataclass(frozen=True, slots=True)
class PublishNamespaceDone(Message):
    """PUBLISH_NAMESPACE_DONE (16)."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PublishNamespaceCancel(Message):
    """PUBLISH_NAMESPACE_CANCEL (16)."""

    request_id: int
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Namespace(Message):
    """NAMESPACE: one that matches a SUBSCRIBE_NAMESPACE."""

    suffix: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NamespaceDone(Message):
    """NAMESPACE_DONE."""

    suffix: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SubscribeNamespace(Message):
    """SUBSCRIBE_NAMESPACE."""

    request_id: int
    prefix: tuple[bytes, ...]
    subscribe_options: int = 1
    """Draft 16: 0 PUBLISH, 1 NAMESPACE, 2 both are wanted."""
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({Param.AUTHORIZATION_TOKEN, Param.FORWARD})
    """FORWARD: draft 16, where it may bring PUBLISH messages."""


@dataclass(frozen=True, slots=True)
class SubscribeTracks(Message):
    """SUBSCRIBE_TRACKS (18)."""

    request_id: int
    prefix: tuple[bytes, ...]
    parameters: Parameters = field(default_factory=Parameters)
    allowed: ClassVar[frozenset[Param]] = frozenset({Param.AUTHORIZATION_TOKEN, Param.FORWARD})


@dataclass(frozen=True, slots=True)
class PublishBlocked(Message):
    """PUBLISH_BLOCKED (18)."""

    suffix: tuple[bytes, ...]
    track: bytes


Request = (
    Subscribe | TrackStatus | Publish | Fetch | JoiningFetch | PublishNamespace | SubscribeNamespace | SubscribeTracks
)
"""Messages that open a request."""
