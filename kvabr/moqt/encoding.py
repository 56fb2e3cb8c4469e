"""The wire format of control messages in drafts 18 and 16 (draft 18, section 10).

A message is a type, a 16-bit length, and fields. The fields on the wire are those of the dataclass, in the same order;
`_CODECS` says how each one is encoded, and `_layout` which ones a draft leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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
    Publish,
    PublishDone,
    PublishNamespace,
    PublishNamespaceDone,
    Redirect,
    RequestErrorMessage,
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
    SetupOptions,
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
        0x50: SubscribeNamespace, 0x51: SubscribeTracks, 0x8: Namespace, 0x2: RequestUpdate, 0x7: RequestOk,
        0x5: RequestErrorMessage,
    },
    16: {
        0x20: Setup, 0x21: Setup, 0x10: Goaway, 0x15: MaxRequestId, 0x1A: RequestsBlocked, 0x7: RequestOk,
        0x5: RequestErrorMessage, 0x3: Subscribe, 0x4: SubscribeOk, 0x2: RequestUpdate, 0xA: Unsubscribe, 0x1D: Publish,
        0xB: PublishDone, 0x16: Fetch, 0x18: FetchOk, 0x17: FetchCancel, 0xD: TrackStatus, 0x6: PublishNamespace,
        0x8: Namespace, 0x9: PublishNamespaceDone, 0x11: SubscribeNamespace,
    },
}  # fmt: skip
"""Messages by draft and type, without the answers to requests that this end never makes: they are as invalid as unknown
types. Draft 18 gives REQUEST_OK a second type, 0x1E, as the answer to PUBLISH; it is read, but never sent."""
_TYPE_OF = {draft: {cls: kind for kind, cls in types.items()} for draft, types in _TYPES.items()}

CLIENT_SETUP_16, SERVER_SETUP_16 = 0x20, 0x21
_ANSWERS = (RequestOk, RequestErrorMessage, SubscribeOk, PublishDone, FetchOk)
"""Messages without a request ID in draft 18, where their stream identifies the request."""
_FETCH_TYPES: dict[int, tuple[type[Message], dict[str, bool]]] = {
    1: (Fetch, {}),
    2: (JoiningFetch, {"relative": True}),
    3: (JoiningFetch, {"relative": False}),
}
"""Message and fixed fields by Fetch Type (draft 18, section 10.12)."""


def type_of(message: Message, draft: Draft, *, client: bool = True) -> int:
    """Return the type of a message.

    Raises:
        ValueError: The draft has no such message.
    """
    cls = Fetch if isinstance(message, JoiningFetch) else type(message)
    kind = _TYPE_OF[draft.number].get(cls)
    if kind is None:
        raise ValueError(f"draft {draft.number} has no {cls.__name__}")
    return CLIENT_SETUP_16 if kind == SERVER_SETUP_16 and client and not draft.streams else kind


def encode(message: Message, draft: Draft, *, client: bool = True) -> bytes:
    """Encode a message with its type and length.

    Raises:
        ValueError: The draft has no such message, the message cannot carry its parameters, or a limit is exceeded.
    """
    kind = type_of(message, draft, client=client)
    payload = _payload(message, draft)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(payload)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return draft.varint.encode(kind) + len(payload).to_bytes(2, "big") + payload


def decode(kind: int, payload: bytes, draft: Draft, *, control: bool = True) -> Message:
    """Decode the payload of a message.

    Args:
        kind: The message type.
        payload: The encoded fields.
        draft: The draft.
        control: Whether the message came on the control stream; a GOAWAY on a request stream has no request ID.

    Raises:
        SessionFault: The type is unknown, or the fields do not fit it.
    """
    cls = _TYPES[draft.number].get(kind)
    if cls is None:
        raise SessionFault(f"unknown message type 0x{kind:x}")
    reader = Reader(payload, draft.varint)
    layout = _layout(cls, draft, control=control)
    values: dict[str, Any] = {"request_id": None} if cls in (*_ANSWERS, Goaway) else {}
    if cls is Fetch:
        request_id, fetch_type = reader.varint(), reader.varint()
        if fetch_type not in _FETCH_TYPES:
            raise SessionFault(f"unknown FETCH type {fetch_type}")
        cls, fixed = _FETCH_TYPES[fetch_type]
        values = {"request_id": request_id, **fixed}
        layout = _layout(cls, draft)[1:]
    values |= {name: codec.read(reader, draft, cls) for name, codec in layout}
    if cls is RequestErrorMessage and _redirects(values["code"], draft):
        to = reader.text(MAX_URI_BYTES, "URI"), reader.namespace(), reader.text(MAX_NAME_BYTES, "track name")
        values["redirect"] = Redirect(*to)
    message = cls(**values)
    if (size := _name_bytes(message)) > MAX_NAME_BYTES:
        raise SessionFault(f"full track name of {size} bytes; the limit is {MAX_NAME_BYTES}")
    if isinstance(message, Fetch) and ends_before(message.end, message.start):
        raise SessionFault(f"FETCH ends at {tuple(message.end)}, before its start {tuple(message.start)}")
    reader.end()
    return message


def allowed_parameters(cls: type[Message], draft: Draft) -> frozenset[Param]:
    """Return the parameters that a message may carry."""
    return cls.allowed - {Param.FORWARD} if cls is SubscribeNamespace and draft.streams else cls.allowed


def ends_before(end: Location, start: Location) -> bool:
    """Return whether a FETCH's End Location lies before its start.

    An End Location is the last location plus one; object 0 stands for the whole group (draft 18, section 10.12.3).
    """
    return end.group < start.group or (end.group == start.group and 0 < end.object < start.object)


def _payload(message: Message, draft: Draft) -> bytes:
    _check_sendable(message, draft)
    control = not isinstance(message, Goaway) or message.request_id is not None
    layout = _layout(type(message), draft, control=control)
    parts = [codec.write(getattr(message, name), draft) for name, codec in layout]
    varint = draft.varint
    if isinstance(message, Fetch):
        parts.insert(1, varint.encode(1))
    elif isinstance(message, JoiningFetch):
        parts.insert(1, varint.encode(2 if message.relative else 3))
    elif isinstance(message, RequestErrorMessage) and _redirects(message.code, draft):
        to = message.redirect
        if to is None:
            raise ValueError("a REQUEST_ERROR with code REDIRECT needs a redirect")
        parts += [write_text(varint, to.uri), write_namespace(varint, to.namespace), write_text(varint, to.track)]
    return b"".join(parts)


def _check_sendable(message: Message, draft: Draft) -> None:
    """Raise ValueError for a message that would make the peer close the session."""
    if extra := present(getattr(message, "parameters", None)) - allowed_parameters(type(message), draft):
        raise ValueError(f"a {type(message).__name__} cannot have {', '.join(sorted(param.name for param in extra))}")
    if getattr(message, "namespace", None) == () and _least_fields(draft):
        raise ValueError(f"a namespace needs at least one field in draft {draft.number}")
    if _name_bytes(message) > MAX_NAME_BYTES:
        raise ValueError(f"a full track name is limited to {MAX_NAME_BYTES} bytes")
    if isinstance(message, Goaway) and len(message.uri) > MAX_URI_BYTES:
        raise ValueError(f"a URI is limited to {MAX_URI_BYTES} bytes")


def _redirects(code: int, draft: Draft) -> bool:
    return draft.streams and code == RequestCode.REDIRECT


def _name_bytes(message: Message) -> int:
    """Return the size of a full track name: namespace and track together (draft 18, section 2.4.1)."""
    named = getattr(message, "redirect", None) or message
    return sum(map(len, getattr(named, "namespace", ()))) + len(getattr(named, "track", b""))


def _least_fields(draft: Draft) -> int:
    """Return the minimum number of fields in a namespace."""
    return 0 if draft.streams else 1


@dataclass(frozen=True, slots=True)
class _Codec:
    """How a field is encoded."""

    read: Callable[[Reader, Draft, type[Message]], Any]
    write: Callable[[Any, Draft], bytes]


def _read_flag(reader: Reader, _draft: Draft, _cls: type[Message]) -> bool:
    if (value := reader.u8()) > 1:
        raise SessionFault(f"flag of {value}; it must be 0 or 1")
    return bool(value)


def _write_reason(value: str, draft: Draft) -> bytes:
    """Cut a reason phrase to its limit, between characters."""
    return write_text(draft.varint, value.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode())


def _read_options(reader: Reader, draft: Draft, _cls: type[Message]) -> SetupOptions:
    return setup_options(read_pairs(reader, None if draft.streams else reader.varint()), draft)


def _write_options(value: SetupOptions, draft: Draft) -> bytes:
    pairs = setup_pairs(value, draft)
    return (b"" if draft.streams else draft.varint.encode(len(pairs))) + write_pairs(draft.varint, pairs)


def _read_properties(reader: Reader, draft: Draft, _cls: type[Message]) -> tuple[KeyValue, ...]:
    properties = read_pairs(reader)
    check_track(properties, draft)
    return properties


def _write_namespace(value: tuple[bytes, ...], draft: Draft) -> bytes:
    return write_namespace(draft.varint, value)


def _text(limit: int, what: str) -> _Codec:
    return _Codec(
        lambda reader, _draft, _cls: reader.text(limit, what), lambda text, draft: write_text(draft.varint, text)
    )


_INTEGER = _Codec(lambda reader, _draft, _cls: reader.varint(), lambda value, draft: draft.varint.encode(value))
_PART = _Codec(lambda reader, _draft, _cls: reader.namespace(), _write_namespace)
_LOCATION = _Codec(
    lambda reader, _draft, _cls: reader.location(), lambda value, draft: write_location(draft.varint, value)
)
_CODECS = {
    **dict.fromkeys(
        (
            "request_id", "existing", "joining_request_id", "joining_start", "track_alias", "code", "retry_interval",
            "streams", "subscribe_options", "timeout_ms",
        ),
        _INTEGER,
    ),
    "namespace": _Codec(lambda reader, draft, _cls: reader.namespace(least=_least_fields(draft)), _write_namespace),
    "prefix": _PART,
    "suffix": _PART,
    "track": _text(MAX_NAME_BYTES, "track name"),
    "uri": _text(MAX_URI_BYTES, "URI"),
    "reason": _Codec(lambda reader, _draft, _cls: reader.reason(), _write_reason),
    "start": _LOCATION,
    "end": _LOCATION,
    "end_of_track": _Codec(_read_flag, lambda value, _draft: bytes([value])),
    "options": _Codec(_read_options, _write_options),
    "parameters": _Codec(
        lambda reader, draft, cls: read_parameters(reader, draft, allowed_parameters(cls, draft)), write_parameters
    ),
    "properties": _Codec(_read_properties, lambda value, draft: write_pairs(draft.varint, value)),
}  # fmt: skip
"""Codecs by the name of a message's field."""


def _layout(cls: type[Message], draft: Draft, *, control: bool = True) -> tuple[tuple[str, _Codec], ...]:
    """Return the fields of a message that a draft has, in wire order, with their codecs."""
    absent = {
        "request_id": (draft.streams and cls in _ANSWERS) or (cls is Goaway and not (draft.streams and control)),
        "existing": draft.streams,
        "subscribe_options": draft.streams,
        "timeout_ms": not draft.streams,
        "properties": cls is RequestOk and not draft.streams,
    }
    names = [each.name for each in fields(cls) if each.name in _CODECS and not absent.get(each.name)]
    return tuple((name, _CODECS[name]) for name in names)


class MessageParser:
    """Split a stream into control messages, holding at most one incomplete message."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._buffer = bytearray()
        self.count = 0
        """Messages yielded by `feed` so far."""

    @property
    def buffered(self) -> int:
        """Bytes held of an incomplete message."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take in bytes and yield the type and payload of each complete message."""
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
