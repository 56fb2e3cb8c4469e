"""The wire format of control messages in drafts 18 and 16 (draft 18, section 10).

A message is a type, a length of 16 bits, and fields. What differs between the drafts: answers carry the ID of their
request only where all requests share a stream (16), and a few messages exist in one draft alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from kvabr.moqt.codes import Param, RequestCode, SessionFault
from kvabr.moqt.messages import (
    Fetch,
    FetchCancel,
    FetchOk,
    Goaway,
    JoiningFetch,
    MaxRequestId,
    Message,
    Namespace,
    NamespaceDone,
    Publish,
    PublishBlocked,
    PublishDone,
    PublishNamespace,
    PublishNamespaceCancel,
    PublishNamespaceDone,
    PublishOk,
    Redirect,
    RequestError,
    RequestOk,
    RequestsBlocked,
    RequestUpdate,
    Setup,
    Subscribe,
    SubscribeNamespace,
    SubscribeOk,
    SubscribeTracks,
    TrackStatus,
    Unsubscribe,
)
from kvabr.moqt.parameters import (
    Parameters,
    present,
    read_parameters,
    setup_options,
    setup_pairs,
    write_parameters,
)
from kvabr.moqt.properties import check_track
from kvabr.moqt.wire import (
    MAX_NAME_BYTES,
    MAX_REASON_BYTES,
    MAX_URI_BYTES,
    Draft,
    KeyValue,
    Location,
    Reader,
    read_pairs,
    write_location,
    write_namespace,
    write_pairs,
    write_text,
)

MAX_MESSAGE_BYTES = 0xFFFF

_TYPES: dict[int, dict[int, type[Message]]] = {
    18: {
        0x2F00: Setup, 0x10: Goaway, 0x3: Subscribe, 0x4: SubscribeOk, 0x1D: Publish, 0x1E: RequestOk,
        0xB: PublishDone, 0x16: Fetch, 0x18: FetchOk, 0xD: TrackStatus, 0x6: PublishNamespace,
        0x50: SubscribeNamespace, 0x51: SubscribeTracks, 0x8: Namespace, 0xE: NamespaceDone, 0xF: PublishBlocked,
        0x2: RequestUpdate, 0x7: RequestOk, 0x5: RequestError,
    },
    16: {
        0x20: Setup, 0x21: Setup, 0x10: Goaway, 0x15: MaxRequestId, 0x1A: RequestsBlocked, 0x7: RequestOk,
        0x5: RequestError, 0x3: Subscribe, 0x4: SubscribeOk, 0x2: RequestUpdate, 0xA: Unsubscribe, 0x1D: Publish,
        0x1E: PublishOk, 0xB: PublishDone, 0x16: Fetch, 0x18: FetchOk, 0x17: FetchCancel, 0xD: TrackStatus,
        0x6: PublishNamespace, 0x8: Namespace, 0x9: PublishNamespaceDone, 0xE: NamespaceDone,
        0xC: PublishNamespaceCancel, 0x11: SubscribeNamespace,
    },
}  # fmt: skip
"""Message types; draft 18 lists PUBLISH_OK as a name of REQUEST_OK with a type of its own, which is read, not sent."""

CLIENT_SETUP_16, SERVER_SETUP_16 = 0x20, 0x21
_SETUP_18 = 0x2F00


def type_of(message: Message, draft: Draft, *, client: bool = True) -> int:
    """The type of a message.

    Raises:
        ValueError: the draft has no such message.
    """
    if isinstance(message, JoiningFetch):
        return 0x16
    if isinstance(message, Setup):
        return _SETUP_18 if draft.number >= 17 else (CLIENT_SETUP_16 if client else SERVER_SETUP_16)
    # The last one: draft 18 has REQUEST_OK twice, and 0x7 is the one to send.
    kinds = [kind for kind, cls in _TYPES[draft.number].items() if cls is type(message)]
    if not kinds:
        raise ValueError(f"draft {draft.number} has no {type(message).__name__}")
    return kinds[-1]


def encode(message: Message, draft: Draft, *, client: bool = True) -> bytes:
    """A message with its type and length.

    Raises:
        ValueError: the draft has no such message, it cannot have those parameters, or it does not fit.
    """
    given: Parameters | None = getattr(message, "parameters", None)
    if given is not None and (extra := present(given) - allowed_parameters(type(message), draft)):
        raise ValueError(f"a {type(message).__name__} cannot have {', '.join(sorted(param.name for param in extra))}")
    payload = _payload(message, draft)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes; {MAX_MESSAGE_BYTES} are allowed")
    return draft.varint.encode(type_of(message, draft, client=client)) + len(payload).to_bytes(2, "big") + payload


def decode(kind: int, payload: bytes, draft: Draft, *, control: bool = True) -> Message:
    """Read a message's payload.

    Args:
        kind: its type.
        payload: its fields.
        draft: the draft.
        control: whether it came on the control stream: a GOAWAY on a request's stream has fewer fields.

    Raises:
        SessionFault: an unknown type, or fields that are not those of the type.
    """
    cls = _TYPES[draft.number].get(kind)
    if cls is None:
        raise SessionFault(f"an unknown message of type 0x{kind:x}")
    reader = Reader(payload, draft.varint)
    if cls is Setup:
        pairs = read_pairs(reader, reader.varint() if draft.number < 17 else None)
        message: Message = Setup(setup_options(pairs, draft))
    elif cls is Goaway:
        message = _read_goaway(reader, draft, control=control)
    elif cls is Fetch:
        message = _read_fetch(reader, draft)
    else:
        message = cls(**{name: _read(each, reader, draft, cls) for name, each in _layout(cls, draft)})
        if isinstance(message, RequestError) and _redirects(message, draft):
            redirect = Redirect(reader.text(MAX_URI_BYTES, "a URI"), *reader.full_name())
            message = RequestError(None, message.code, message.retry_interval, message.reason, redirect)
        _check_full_name(message)
    reader.end()
    return message


def _redirects(message: RequestError, draft: Draft) -> bool:
    return draft.number >= 17 and message.code == RequestCode.REDIRECT


def allowed_parameters(cls: type[Message], draft: Draft) -> frozenset[Param]:
    """The parameters that a message may have."""
    return cls.allowed - {Param.FORWARD} if cls is SubscribeNamespace and draft.number >= 17 else cls.allowed


def _check_full_name(message: Message) -> None:
    """The limit on namespace and track name together; a suffix is only a part, and is checked alone."""
    if isinstance(message, Subscribe | TrackStatus | Publish):
        size = sum(map(len, message.namespace)) + len(message.track)
        if size > MAX_NAME_BYTES:
            raise SessionFault(f"a full track name of {size} bytes, more than {MAX_NAME_BYTES}")


def _read_goaway(reader: Reader, draft: Draft, *, control: bool) -> Goaway:
    uri = reader.text(MAX_URI_BYTES, "a URI")
    if draft.number < 17:
        return Goaway(uri)
    return Goaway(uri, reader.varint(), reader.varint() if control else None)


def _read_fetch(reader: Reader, draft: Draft) -> Fetch | JoiningFetch:
    request_id, kind = reader.varint(), reader.varint()
    if kind == 1:
        namespace, track = reader.full_name(least=_least_fields(draft))
        start, end = reader.location(), reader.location()
        if ends_before(end, start):
            raise SessionFault(f"a FETCH from {tuple(start)} to {tuple(end)}")
        return Fetch(request_id, namespace, track, start, end, read_parameters(reader, draft, Fetch.allowed))
    if kind in (2, 3):
        joining, begin = reader.varint(), reader.varint()
        parameters = read_parameters(reader, draft, Fetch.allowed)
        return JoiningFetch(request_id, joining, begin, kind == 2, parameters)
    raise SessionFault(f"a FETCH of type {kind}")


def ends_before(end: Location, start: Location) -> bool:
    """Whether an End Location (the last one plus one; object 0 means all of its group) is smaller than a start."""
    return end.group < start.group or (end.group == start.group and 0 < end.object < start.object)


def _least_fields(draft: Draft) -> int:
    """How many fields a namespace has at least."""
    return 0 if draft.number >= 17 else 1


def _payload(message: Message, draft: Draft) -> bytes:
    varint = draft.varint
    _check_sizes(message, draft)
    if isinstance(message, Setup):
        pairs = setup_pairs(message.options, draft)
        count = varint.encode(len(pairs)) if draft.number < 17 else b""
        return count + write_pairs(varint, pairs)
    if isinstance(message, Goaway):
        out = write_text(varint, message.uri)
        if draft.number >= 17:
            out += varint.encode(message.timeout_ms)
            out += b"" if message.request_id is None else varint.encode(message.request_id)
        return out
    if isinstance(message, Fetch):
        return b"".join((
            varint.encode(message.request_id), varint.encode(1), write_namespace(varint, message.namespace),
            write_text(varint, message.track), write_location(varint, message.start),
            write_location(varint, message.end), write_parameters(message.parameters, draft),
        ))  # fmt: skip
    if isinstance(message, JoiningFetch):
        return b"".join((
            varint.encode(message.request_id), varint.encode(2 if message.relative else 3),
            varint.encode(message.joining_request_id), varint.encode(message.joining_start),
            write_parameters(message.parameters, draft),
        ))  # fmt: skip
    out = b"".join(_write(each, getattr(message, name), draft) for name, each in _layout(type(message), draft))
    if isinstance(message, RequestError) and _redirects(message, draft):
        to = message.redirect
        if to is None:
            raise ValueError("a REQUEST_ERROR of REDIRECT says where to")
        out += write_text(varint, to.uri) + write_namespace(varint, to.namespace) + write_text(varint, to.track)
    return out


def _check_sizes(message: Message, draft: Draft) -> None:
    """What the peer would end the session for must not be sent."""
    track: bytes = getattr(message, "track", b"")
    if getattr(message, "namespace", None) == () and _least_fields(draft):
        raise ValueError(f"in draft {draft.number} a namespace has a field at least")
    if sum(map(len, getattr(message, "namespace", ()))) + len(track) > MAX_NAME_BYTES:
        raise ValueError(f"a full track name has {MAX_NAME_BYTES} bytes at most")
    if isinstance(message, Goaway) and len(message.uri) > MAX_URI_BYTES:
        raise ValueError(f"a URI has {MAX_URI_BYTES} bytes at most")


_KIND_OF = {
    "request_id": "int", "existing": "int", "track_alias": "int", "code": "int", "retry_interval": "int",
    "streams": "int", "options": "int", "reason": "reason", "namespace": "namespace", "prefix": "part",
    "suffix": "part", "track": "text", "end_of_track": "flag", "end": "location", "parameters": "parameters",
    "properties": "properties",
}  # fmt: skip
_ANSWERS = (RequestOk, RequestError, SubscribeOk, PublishDone, FetchOk)
"""Messages whose request ID the stream tells in draft 18."""


def _layout(cls: type[Message], draft: Draft) -> list[tuple[str, str]]:
    """Fields in their order on the wire, with how each is written; ``none`` is one that is not."""
    out = []
    for each in fields(cls):
        name = each.name
        absent = (
            (name == "request_id" and draft.streams and cls in _ANSWERS)
            or (name == "existing" and draft.streams)
            or (name == "options" and draft.number >= 17)
            or (name == "properties" and cls is RequestOk and draft.number < 17)
        )
        if name != "redirect" and (not absent or name == "request_id"):
            out.append((name, "none" if absent else _KIND_OF[name]))
    return out


def _read(kind: str, reader: Reader, draft: Draft, cls: type[Message]) -> Any:
    match kind:
        case "int":
            return reader.varint()
        case "reason":
            return reader.reason()
        case "namespace":
            return reader.namespace(least=_least_fields(draft))
        case "part":
            return reader.namespace()
        case "text":
            return reader.text(MAX_NAME_BYTES, "a track name")
        case "location":
            return reader.location()
        case "parameters":
            return read_parameters(reader, draft, allowed_parameters(cls, draft))
        case "properties":
            return _read_properties(reader, draft)
        case "flag":
            return _read_flag(reader)
    return None


def _read_properties(reader: Reader, draft: Draft) -> tuple[KeyValue, ...]:
    properties = read_pairs(reader)
    check_track(properties, draft)
    return properties


def _read_flag(reader: Reader) -> bool:
    if (value := reader.u8()) > 1:
        raise SessionFault(f"a flag of {value}")
    return bool(value)


def _write(kind: str, value: Any, draft: Draft) -> bytes:
    varint = draft.varint
    match kind:
        case "int":
            return varint.encode(value)
        case "reason":
            return write_text(varint, value.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode())
        case "namespace" | "part":
            return write_namespace(varint, value)
        case "text":
            return write_text(varint, value)
        case "location":
            return write_location(varint, value)
        case "parameters":
            return write_parameters(value, draft)
        case "properties":
            return write_pairs(varint, value)
        case "flag":
            return bytes([value])
    return b""


class MessageParser:
    """Cuts a stream into control messages; holds at most one of them."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._buffer = bytearray()
        self.count = 0
        """Messages that `feed` has handed out, the last one included."""

    @property
    def buffered(self) -> int:
        """Bytes of a message that has not come whole."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take bytes in, and hand out type and payload of every message that is complete."""
        self._buffer += data
        at = 0
        while (found := self._draft.varint.peek(self._buffer, at)) is not None:
            kind, body = found
            if len(self._buffer) < body + 2:
                break
            end = body + 2 + int.from_bytes(self._buffer[body : body + 2], "big")
            if len(self._buffer) < end:
                break
            at = end
            self.count += 1
            yield kind, bytes(self._buffer[body + 2 : end])
        del self._buffer[:at]
