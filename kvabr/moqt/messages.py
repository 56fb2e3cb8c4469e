"""Control messages as dataclasses, and their wire format (draft 18, sections 10.3 to 10.20).

A message is a type, a 16-bit length, and the fields of its dataclass in order, encoded by `_CODECS`. Only messages that
this end sends or may receive are included. Start and end of a FETCH are encoded as a filter among its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from kvabr.moqt.codes import RANGE_FILTERS, Param, RequestCode, SessionFault
from kvabr.moqt.objects import check_track
from kvabr.moqt.setup_options import SetupOptions, setup_options, setup_pairs
from kvabr.moqt.wire import (
    EVERYTHING,
    MAX_INTEGER,
    MAX_NAME_BYTES,
    MAX_REASON_BYTES,
    MAX_URI_BYTES,
    Draft,
    Filter,
    KeyValue,
    Location,
    Parameters,
    Reader,
    peek_varint,
    present,
    read_pairs,
    read_parameters,
    write_location,
    write_namespace,
    write_pairs,
    write_parameters,
    write_text,
    write_varint,
)

_TOKEN = frozenset({Param.AUTHORIZATION_TOKEN})
_OF_SUBSCRIPTIONS = frozenset({
    Param.OBJECT_DELIVERY_TIMEOUT, Param.SUBGROUP_DELIVERY_TIMEOUT, Param.SUBSCRIBER_PRIORITY,
    Param.LOCATION_FILTER, Param.FORWARD, Param.NEW_GROUP_REQUEST,
})  # fmt: skip
_OF_OBJECTS = RANGE_FILTERS - {Param.TRACK_PROPERTY_FILTER}


@dataclass(frozen=True, slots=True)
class Message:
    """One control message."""

    allowed: ClassVar[frozenset[Param]] = frozenset()


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


@dataclass(frozen=True, slots=True)
class RequestOk(Message):
    """REQUEST_OK. Its stream identifies the request."""

    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    """Properties of the track, if this answers a TRACK_STATUS."""
    allowed = frozenset({Param.EXPIRES, Param.MAX_OBJECT})
    """Parameters allowed in any REQUEST_OK; the session checks further ones."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Other URI or track for a request."""

    uri: bytes
    namespace: tuple[bytes, ...]
    track: bytes


@dataclass(frozen=True, slots=True)
class RequestErrorMessage(Message):
    """REQUEST_ERROR."""

    code: int
    retry_interval: int
    """Milliseconds before a retry, plus one; 0 if a retry cannot succeed."""
    reason: str
    redirect: Redirect | None = None


@dataclass(frozen=True, slots=True)
class Subscribe(_OfTrack):
    """SUBSCRIBE."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = _OF_SUBSCRIPTIONS | _TOKEN | _OF_OBJECTS | {
        Param.RENDEZVOUS_TIMEOUT, Param.GROUP_ORDER, Param.FILL_PARAMETERS, Param.INCLUDE_PROPERTIES,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrackStatus(_OfTrack):
    """TRACK_STATUS: requests the state of a track without subscribing."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = _TOKEN | {Param.INCLUDE_PROPERTIES}


@dataclass(frozen=True, slots=True)
class SubscribeOk(Message):
    """SUBSCRIBE_OK."""

    track_alias: int
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    allowed = frozenset({Param.EXPIRES, Param.MAX_OBJECT})


@dataclass(frozen=True, slots=True)
class RequestUpdate(_Numbered):
    """REQUEST_UPDATE."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = _OF_SUBSCRIPTIONS | _TOKEN | RANGE_FILTERS | {Param.TRACK_NAMESPACE_PREFIX, Param.FILL_PARAMETERS}


@dataclass(frozen=True, slots=True)
class Publish(_OfTrack):
    """PUBLISH."""

    track_alias: int
    parameters: Parameters = field(default_factory=Parameters)
    properties: tuple[KeyValue, ...] = ()
    allowed = (_OF_SUBSCRIPTIONS - {Param.NEW_GROUP_REQUEST}) | _TOKEN | {
        Param.GROUP_ORDER, Param.EXPIRES, Param.MAX_OBJECT,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishDone(Message):
    """PUBLISH_DONE."""

    code: int
    streams: int
    """Number of streams of the subscription; `UNCOUNTED` or more if unknown."""
    reason: str


UNCOUNTED = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class PublishStateNotify(Message):
    """PUBLISH_STATE_NOTIFY: the state of a subscription at the publisher has changed."""

    parameters: Parameters = field(default_factory=Parameters)
    allowed = frozenset({Param.MAX_OBJECT, Param.FORWARD, Param.LOCATION_FILTER})


@dataclass(frozen=True, slots=True)
class Fetch(_OfTrack):
    """Standalone FETCH: a range of published objects."""

    start: Location
    end: Location
    """End Location: the last location plus one. Object 0 stands for the whole group, `OPEN_END` for the track's largest
    object. On the wire, it is the last location itself.
    """
    parameters: Parameters = field(default_factory=Parameters)
    """Parameters. If the range depends on the track's largest object, they include its filter; `start` and `end` are
    unused.
    """
    allowed = _TOKEN | _OF_OBJECTS | {
        Param.FILL_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.GROUP_ORDER, Param.LOCATION_FILTER,
        Param.INCLUDE_PROPERTIES,
    }  # fmt: skip

    def within(self, largest: Location) -> tuple[Location, Location]:
        """Return start and End Location, given the track's largest object."""
        if self.parameters.filter is None:
            return self.start, self.end
        return self.parameters.filter.within(largest)[0], OPEN_END


OPEN_END = Location(MAX_INTEGER, 0)


def fetched_range(found: Filter) -> tuple[Location, Location]:
    """Return start and End Location of a filter that has an absolute start."""
    start = found.start or Location(0, 0)
    if found.end_group is None:
        return start, OPEN_END
    last = MAX_INTEGER if found.end_object is None else found.end_object
    return start, end_after(Location(found.end_group, last))


def end_after(last: Location) -> Location:
    """Return the End Location of a range that ends with ``last``; the largest object ID means the whole group."""
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
class FetchOk(Message):
    """FETCH_OK."""

    end_of_track: bool
    end: Location
    """End Location, see `Fetch.end`."""
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
    allowed = Subscribe.allowed | {Param.TRACK_PROPERTY_FILTER}


Request = Subscribe | TrackStatus | Publish | Fetch | PublishNamespace | SubscribeNamespace | SubscribeTracks


MAX_MESSAGES = 1024
"""Limit of messages per stream, set by kvabr. The shortest messages have 5 bytes and take about 40 us each."""
MAX_MESSAGE_BYTES = 0xFFFF

_TYPES: dict[int, type[Message]] = {
    0x2F00: Setup, 0x10: Goaway, 0x3: Subscribe, 0x4: SubscribeOk, 0x1D: Publish, 0xB: PublishDone, 0x16: Fetch,
    0x18: FetchOk, 0xD: TrackStatus, 0x6: PublishNamespace, 0x50: SubscribeNamespace, 0x51: SubscribeTracks,
    0x8: Namespace, 0x2: RequestUpdate, 0x7: RequestOk, 0x5: RequestErrorMessage, 0x22: PublishStateNotify,
}  # fmt: skip
"""Classes of messages by type. Answers to requests that this end never makes are not included: like unknown types, they
are invalid.
"""
_TYPE_OF = {cls: kind for kind, cls in _TYPES.items()}


def encode(message: Message, draft: Draft) -> bytes:
    """Encode a message; raise ValueError if MoQT does not allow it."""
    kind = _TYPE_OF[type(message)]
    payload = _payload(message, draft)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(payload)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return write_varint(kind) + len(payload).to_bytes(2, "big") + payload


def decode(kind: int, payload: bytes, draft: Draft) -> Message:
    """Decode a message's payload; raise SessionFault if unknown or malformed."""
    cls = _TYPES.get(kind)
    if cls is None:
        raise SessionFault(f"unknown message type 0x{kind:x}")
    reader = Reader(payload)
    values: dict[str, Any] = {}
    for name in _FIELDS[cls]:
        if name == "parameters":
            values[name] = read_parameters(reader, draft, cls.allowed)
        else:
            values[name] = _CODECS[name][0](reader, draft)
    if cls is RequestErrorMessage and values["code"] == RequestCode.REDIRECT:
        to = reader.text(MAX_URI_BYTES, "URI"), reader.namespace(), reader.text(MAX_NAME_BYTES, "track name")
        values["redirect"] = Redirect(*to)
    message = cls(**values | _ends_of(cls, values))
    if (size := _name_bytes(message)) > MAX_NAME_BYTES:
        raise SessionFault(f"full track name of {size} bytes; the limit is {MAX_NAME_BYTES}")
    reader.end()
    return message


def _ends_of(cls: type[Message], values: dict[str, Any]) -> dict[str, Any]:
    if cls is FetchOk:
        return {"end": end_after(values["end"])}
    if cls is not Fetch:
        return {}
    parameters: Parameters = values["parameters"]
    found = parameters.filter or EVERYTHING
    if found.start is None:
        return {"start": Location(0, 0), "end": OPEN_END}
    start, end = fetched_range(found)
    return {"start": start, "end": end, "parameters": replace(parameters, filter=None)}


def ends_before(end: Location, start: Location) -> bool:
    """Return True if the End Location of a FETCH (see `Fetch.end`) is before its start."""
    return end.group < start.group or (end.group == start.group and 0 < end.object < start.object)


def _payload(message: Message, draft: Draft) -> bytes:
    _check_sendable(message)
    if isinstance(message, Fetch) and message.parameters.filter is None:
        parameters = replace(message.parameters, filter=fetch_filter(message.start, message.end))
        message = replace(message, parameters=parameters)
    elif isinstance(message, FetchOk):
        message = replace(message, end=last_before(message.end))
    parts = [_CODECS[name][1](getattr(message, name), draft) for name in _FIELDS[type(message)]]
    if isinstance(message, RequestErrorMessage) and message.code == RequestCode.REDIRECT:
        to = message.redirect
        if to is None:
            raise ValueError("a REQUEST_ERROR with code REDIRECT needs a redirect")
        parts += [write_text(to.uri), write_namespace(to.namespace), write_text(to.track)]
    return b"".join(parts)


def _check_sendable(message: Message) -> None:
    """Raise ValueError for a message that would cause the peer to close the session."""
    if extra := present(getattr(message, "parameters", None)) - message.allowed:
        raise ValueError(f"a {type(message).__name__} cannot have {', '.join(sorted(param.name for param in extra))}")
    if _name_bytes(message) > MAX_NAME_BYTES:
        raise ValueError(f"a full track name is limited to {MAX_NAME_BYTES} bytes")
    if isinstance(message, Goaway) and len(message.uri) > MAX_URI_BYTES:
        raise ValueError(f"a URI is limited to {MAX_URI_BYTES} bytes")


def _name_bytes(message: Message) -> int:
    """Return the total size of namespace and track name, bytes (draft 18, section 2.4.1)."""
    named = getattr(message, "redirect", None) or message
    return sum(map(len, getattr(named, "namespace", ()))) + len(getattr(named, "track", b""))


def _read_flag(reader: Reader, _draft: Draft) -> bool:
    if (value := reader.u8()) > 1:
        raise SessionFault(f"flag must be 0 or 1, got {value}")
    return bool(value)


def _write_reason(value: str, _draft: Draft) -> bytes:
    return write_text(value.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore").encode())


def _read_properties(reader: Reader, _draft: Draft) -> tuple[KeyValue, ...]:
    properties = read_pairs(reader)
    check_track(properties)
    return properties


_Codec = tuple[Callable[[Reader, Draft], Any], Callable[[Any, Draft], bytes]]
_INTEGER: _Codec = (lambda reader, _: reader.varint(), lambda value, _: write_varint(value))
_NAMESPACE: _Codec = (lambda reader, _: reader.namespace(), lambda value, _: write_namespace(value))
_CODECS: dict[str, _Codec] = {
    **dict.fromkeys(("request_id", "track_alias", "code", "retry_interval", "streams", "timeout_ms"), _INTEGER),
    "namespace": _NAMESPACE,
    "prefix": _NAMESPACE,
    "suffix": _NAMESPACE,
    "track": (lambda reader, _: reader.text(MAX_NAME_BYTES, "track name"), lambda value, _: write_text(value)),
    "uri": (lambda reader, _: reader.text(MAX_URI_BYTES, "URI"), lambda value, _: write_text(value)),
    "reason": (lambda reader, _: reader.reason(), _write_reason),
    "end": (lambda reader, _: reader.location(), lambda value, _: write_location(value)),
    "end_of_track": (_read_flag, lambda value, _: bytes([value])),
    "options": (lambda reader, _: setup_options(read_pairs(reader)), lambda value, _: write_pairs(setup_pairs(value))),
    "parameters": (lambda reader, draft: read_parameters(reader, draft, frozenset(Param)), write_parameters),
    "properties": (_read_properties, lambda value, _: write_pairs(value)),
}  # fmt: skip


_FIELDS = {
    cls: tuple(each.name for each in fields(cls) if each.name in _CODECS and (cls, each.name) != (Fetch, "end"))
    for cls in _TYPE_OF
}


class MessageParser:
    """Splits a stream into control messages, buffering at most one incomplete message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.count = 0

    @property
    def buffered(self) -> int:
        """Number of buffered bytes of an incomplete message."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
        """Yield the type and payload of each complete message."""
        self._buffer += data
        at = 0
        while (found := peek_varint(self._buffer, at)) is not None:
            kind, body = found
            if len(self._buffer) < body + 2:
                break
            end = body + 2 + int.from_bytes(self._buffer[body : body + 2], "big")
            if len(self._buffer) < end:
                break
            at = end
            self.count += 1
            if self.count > MAX_MESSAGES:
                raise SessionFault(f"more than {MAX_MESSAGES} messages on one stream")
            yield kind, bytes(self._buffer[body + 2 : end])
        del self._buffer[:at]
