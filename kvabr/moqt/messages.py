"""Control messages as dataclasses (draft 18, sections 10.3 to 10.20); `kvabr.moqt.encoding` has their wire format.

Messages are listed that this end sends, or that a peer may rightly send it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvabr.moqt.codes import RANGE_FILTERS, Param
from kvabr.moqt.parameters import Filter, Parameters, SetupOptions
from kvabr.moqt.wire import MAX_INTEGER, KeyValue, Location

_TOKEN = frozenset({Param.AUTHORIZATION_TOKEN})
_OF_SUBSCRIPTIONS = frozenset({
    Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBGROUP_DELIVERY_TIMEOUT, Param.SUBSCRIBER_PRIORITY,
    Param.LOCATION_FILTER, Param.FORWARD, Param.NEW_GROUP_REQUEST,
})  # fmt: skip
_OF_OBJECTS_20 = RANGE_FILTERS - {Param.TRACK_PROPERTY_FILTER}


@dataclass(frozen=True, slots=True)
class Message:
    """One control message."""

    allowed: ClassVar[frozenset[Param]] = frozenset()
    """Parameters that the message may carry (draft 18, section 10.2), if its draft has them."""
    changed_20: ClassVar[frozenset[Param]] = frozenset()
    """Those that it may carry either since draft 20 or before it."""


@dataclass(frozen=True, slots=True)
class _Numbered(Message):
    request_id: int


@dataclass(frozen=True, slots=True)
class _OfTrack(_Numbered):
    namespace: tuple[bytes, ...]
    track: bytes


@dataclass(frozen=True, slots=True)
class Setup(Message):
    """SETUP."""

    options: SetupOptions


@dataclass(frozen=True, slots=True)
class Goaway(Message):
    """GOAWAY: the sender will close the session soon."""

    uri: bytes = b""
    timeout_ms: int = 0
    request_id: int | None = None
    """Draft 18, not draft 20, on the control stream: the first request of the receiver that was not processed."""


@dataclass(frozen=True, slots=True)
class RequestOk(Message):
    """REQUEST_OK. Answers have no request ID: their stream identifies the request."""

    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    """In answer to TRACK_STATUS."""
    allowed = _OF_SUBSCRIPTIONS | {Param.GROUP_ORDER, Param.EXPIRES, Param.LARGEST_OBJECT}
    changed_20 = _OF_SUBSCRIPTIONS | {Param.GROUP_ORDER}
    """In any answer; the session checks further, because it knows the request."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Another place to make a request."""

    uri: bytes
    namespace: tuple[bytes, ...]
    track: bytes


@dataclass(frozen=True, slots=True)
class RequestErrorMessage(Message):
    """REQUEST_ERROR."""

    code: int
    retry_interval: int
    """Milliseconds plus one after which a retry may succeed; 0 if it cannot."""
    reason: str
    redirect: Redirect | None = None


@dataclass(frozen=True, slots=True)
class Subscribe(_OfTrack):
    """SUBSCRIBE."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = _OF_SUBSCRIPTIONS | _TOKEN | {Param.RENDEZVOUS_TIMEOUT, Param.GROUP_ORDER}
    changed_20 = _OF_OBJECTS_20 | {Param.FILL_PARAMETERS, Param.INCLUDE_PROPERTIES}


@dataclass(frozen=True, slots=True)
class TrackStatus(_OfTrack):
    """TRACK_STATUS: asks for the state of a track without subscribing to it."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = _TOKEN
    changed_20 = frozenset({Param.INCLUDE_PROPERTIES})


@dataclass(frozen=True, slots=True)
class SubscribeOk(Message):
    """SUBSCRIBE_OK."""

    track_alias: int
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    allowed = frozenset({Param.EXPIRES, Param.LARGEST_OBJECT})


@dataclass(frozen=True, slots=True)
class RequestUpdate(_Numbered):
    """REQUEST_UPDATE."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = _OF_SUBSCRIPTIONS | _TOKEN | {Param.TRACK_NAMESPACE_PREFIX}
    changed_20 = RANGE_FILTERS | {Param.FILL_PARAMETERS}


@dataclass(frozen=True, slots=True)
class Publish(_OfTrack):
    """PUBLISH."""

    track_alias: int
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    allowed = _TOKEN | {Param.EXPIRES, Param.LARGEST_OBJECT, Param.FORWARD}
    changed_20 = (_OF_SUBSCRIPTIONS | {Param.GROUP_ORDER}) - {Param.NEW_GROUP_REQUEST, Param.FORWARD}


@dataclass(frozen=True, slots=True)
class PublishDone(Message):
    """PUBLISH_DONE."""

    code: int
    streams: int
    """Number of streams that the subscription had; `UNCOUNTED` or more if its publisher has not counted them."""
    reason: str


UNCOUNTED = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class PublishStateNotify(Message):
    """PUBLISH_STATE_NOTIFY (20): something about a subscription has changed at its publisher."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = frozenset({Param.LARGEST_OBJECT, Param.FORWARD, Param.LOCATION_FILTER})


@dataclass(frozen=True, slots=True)
class Fetch(_OfTrack):
    """Standalone FETCH: a range of published objects."""

    start: Location
    end: Location
    """End Location: the last location plus one; object 0 stands for the whole group. Draft 20 sends the last location
    itself; `OPEN_END` stands for the largest object there."""
    parameters: Parameters = field(default_factory=Parameters)
    """A filter is kept here if it depends on the largest object; `start` and `end` then mean nothing."""
    allowed = _TOKEN | {Param.FILL_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.GROUP_ORDER}
    changed_20 = _OF_OBJECTS_20 | {Param.LOCATION_FILTER, Param.INCLUDE_PROPERTIES}

    def within(self, largest: Location) -> tuple[Location, Location]:
        """Return the start and the End Location, given the largest object of the track."""
        if self.parameters.filter is None:
            return self.start, self.end
        return self.parameters.filter.within(largest)[0], OPEN_END


OPEN_END = Location(MAX_INTEGER, 0)


def fetched_range(found: Filter) -> tuple[Location, Location]:
    """Return the start and the End Location of a FETCH whose filter has an absolute start."""
    start = found.start or Location(0, 0)
    if found.end_group is None:
        return start, OPEN_END
    last = MAX_INTEGER if found.end_object is None else found.end_object
    return start, end_after(Location(found.end_group, last))


def end_after(last: Location) -> Location:
    """Return the End Location after the last location; the largest object ID stands for the whole group."""
    return Location(last.group, 0 if last.object == MAX_INTEGER else last.object + 1)


def last_before(end: Location) -> Location:
    """Return the last location before an End Location."""
    return Location(end.group, end.object - 1 if end.object else MAX_INTEGER)


def fetch_filter(start: Location, end: Location) -> Filter:
    """Return the filter for a start and an End Location."""
    if end.group == MAX_INTEGER:
        return Filter(start)
    return Filter(start, None, end.group, end.object - 1 if end.object else None)


@dataclass(frozen=True, slots=True)
class JoiningFetch(_Numbered):
    """Joining FETCH (before draft 20): the objects before those of a subscription."""

    joining_request_id: int
    joining_start: int
    relative: bool
    parameters: Parameters = field(default_factory=Parameters)
    allowed = Fetch.allowed


@dataclass(frozen=True, slots=True)
class FetchOk(Message):
    """FETCH_OK."""

    end_of_track: bool
    end: Location
    """As in `Fetch`: draft 20 sends the last location itself."""
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishNamespace(_Numbered):
    """PUBLISH_NAMESPACE."""

    namespace: tuple[bytes, ...]
    parameters: Parameters = field(default_factory=Parameters)
    allowed = _TOKEN


@dataclass(frozen=True, slots=True)
class Namespace(Message):
    """NAMESPACE: a namespace that matches a SUBSCRIBE_NAMESPACE."""

    suffix: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SubscribeNamespace(_Numbered):
    """SUBSCRIBE_NAMESPACE."""

    prefix: tuple[bytes, ...]
    parameters: Parameters = field(default_factory=Parameters)
    allowed = _TOKEN


@dataclass(frozen=True, slots=True)
class SubscribeTracks(_Numbered):
    """SUBSCRIBE_TRACKS."""

    prefix: tuple[bytes, ...]
    parameters: Parameters = field(default_factory=Parameters)
    allowed = _TOKEN | {Param.FORWARD}


Request = (
    Subscribe | TrackStatus | Publish | Fetch | JoiningFetch | PublishNamespace | SubscribeNamespace | SubscribeTracks
)
"""The messages that open a request."""
