"""The wire format of control messages (draft 18, section 10).

A message is a type, a 16-bit length, and fields. The fields on the wire are those of the dataclass, in the same order;
`_CODECS` says how each one is encoded, and `_field_names` which ones a draft leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

from kvabr.moqt import messages as m
from kvabr.moqt.codes import Param, RequestCode, SessionFault
from kvabr.moqt.parameters import (
    EVERYTHING,
    Parameters,
    SetupOptions,
    check_track,
    present,
    read_parameters,
    setup_options,
    setup_pairs,
    write_parameters,
)
from kvabr.moqt.wire import (
    MAX_NAME_BYTES,
    MAX_REASON_BYTES,
    MAX_URI_BYTES,
    Draft,
    KeyValue,
    Location,
    Reader,
    peek_varint,
    read_pairs,
    write_location,
    write_namespace,
    write_pairs,
    write_text,
    write_varint,
)

MAX_MESSAGE_BYTES = 0xFFFF

_TYPES_18: dict[int, type[m.Message]] = {
    0x2F00: m.Setup, 0x10: m.Goaway, 0x3: m.Subscribe, 0x4: m.SubscribeOk, 0x1D: m.Publish, 0x1E: m.RequestOk,
    0xB: m.PublishDone, 0x16: m.Fetch, 0x18: m.FetchOk, 0xD: m.TrackStatus, 0x6: m.PublishNamespace,
    0x50: m.SubscribeNamespace, 0x51: m.SubscribeTracks, 0x8: m.Namespace, 0x2: m.RequestUpdate, 0x7: m.RequestOk,
    0x5: m.RequestErrorMessage,
}  # fmt: skip
_TYPES_20 = {kind: cls for kind, cls in _TYPES_18.items() if kind != 0x1E} | {0x22: m.PublishStateNotify}
_TYPES = {22: _TYPES_20, 20: _TYPES_20, 18: _TYPES_18}
"""Messages by draft and type, without the answers to requests that this end never makes: they are as invalid as unknown
types. Draft 18 gives REQUEST_OK a second type, 0x1E, as the answer to PUBLISH; it is read, but never sent. Joining
FETCHes, which draft 20 no longer has, share a type with the others."""
_TYPE_OF = {draft: {cls: kind for kind, cls in types.items()} for draft, types in _TYPES.items()}


def encode(message: m.Message, draft: Draft) -> bytes:
    """Encode a message with its type and length, or raise ValueError if the draft does not allow it."""
    if isinstance(message, m.JoiningFetch) and draft.fetch_by_filter:
        raise ValueError(f"draft {draft.number} has no JoiningFetch")
    cls = m.Fetch if isinstance(message, m.JoiningFetch) else type(message)
    kind = _TYPE_OF[draft.number].get(cls)
    if kind is None:
        raise ValueError(f"draft {draft.number} has no {cls.__name__}")
    payload = _payload(message, draft)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(payload)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return write_varint(kind) + len(payload).to_bytes(2, "big") + payload


def decode(kind: int, payload: bytes, draft: Draft, *, control: bool = True) -> m.Message:
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
    reader = Reader(payload)
    values: dict[str, Any] = {}
    names = _field_names(cls, draft, control=control)
    if cls is m.Fetch and not draft.fetch_by_filter:
        cls, values = _fetch_type(reader)
        names = _field_names(cls, draft)[1:]
    for name in names:
        if name == "parameters":
            values[name] = read_parameters(reader, draft, allowed_parameters(cls, draft))
        else:
            values[name] = _CODECS[name][0](reader, draft)
    if cls is m.RequestErrorMessage and values["code"] == RequestCode.REDIRECT:
        to = reader.text(MAX_URI_BYTES, "URI"), reader.namespace(), reader.text(MAX_NAME_BYTES, "track name")
        values["redirect"] = m.Redirect(*to)
    if draft.fetch_by_filter:
        values |= _ends_of(cls, values)
    message = cls(**values)
    if (size := _name_bytes(message)) > MAX_NAME_BYTES:
        raise SessionFault(f"full track name of {size} bytes; the limit is {MAX_NAME_BYTES}")
    if isinstance(message, m.Fetch) and not draft.fetch_by_filter and ends_before(message.end, message.start):
        raise SessionFault(f"FETCH ends at {tuple(message.end)}, before its start {tuple(message.start)}")
    reader.end()
    return message


def _fetch_type(reader: Reader) -> tuple[type[m.Message], dict[str, Any]]:
    """Read the first fields of a FETCH before draft 20; return its class, and their values."""
    values: dict[str, Any] = {"request_id": reader.varint()}
    fetch_type = reader.varint()
    if fetch_type not in (1, 2, 3):
        raise SessionFault(f"unknown FETCH type {fetch_type}")
    if fetch_type == 1:
        return m.Fetch, values
    return m.JoiningFetch, values | {"relative": fetch_type == 2}


def _ends_of(cls: type[m.Message], values: dict[str, Any]) -> dict[str, Any]:
    """Draft 20: return the fields of a FETCH or FETCH_OK that differ from those on the wire.

    The range of a FETCH is a filter, which stays a parameter if it has no absolute start.
    """
    if cls is m.FetchOk:
        return {"end": m.end_after(values["end"])}
    if cls is not m.Fetch:
        return {}
    parameters: Parameters = values["parameters"]
    found = parameters.filter or EVERYTHING
    if found.start is None:
        return {"start": Location(0, 0), "end": m.OPEN_END}
    start, end = m.fetched_range(found)
    return {"start": start, "end": end, "parameters": replace(parameters, filter=None)}


def allowed_parameters(cls: type[m.Message], draft: Draft) -> frozenset[Param]:
    """Return the parameters that a message may carry."""
    if cls is m.SubscribeTracks and draft.number >= 20:
        return m.Subscribe.allowed | m.Subscribe.changed_20 | {Param.TRACK_PROPERTY_FILTER}
    return cls.allowed ^ cls.changed_20 if draft.number >= 20 else cls.allowed


def ends_before(end: Location, start: Location) -> bool:
    """Return whether a FETCH's End Location lies before its start.

    An End Location is the last location plus one; object 0 stands for the whole group (draft 18, section 10.12.3).
    """
    return end.group < start.group or (end.group == start.group and 0 < end.object < start.object)


def _payload(message: m.Message, draft: Draft) -> bytes:
    _check_sendable(message, draft)
    control = not isinstance(message, m.Goaway) or message.request_id is not None
    if isinstance(message, m.Fetch) and draft.fetch_by_filter and message.parameters.filter is None:
        parameters = replace(message.parameters, filter=m.fetch_filter(message.start, message.end))
        message = replace(message, parameters=parameters)
    elif isinstance(message, m.FetchOk) and draft.fetch_by_filter:
        message = replace(message, end=m.last_before(message.end))
    names = _field_names(type(message), draft, control=control)
    parts = [_CODECS[name][1](getattr(message, name), draft) for name in names]
    if isinstance(message, m.Fetch | m.JoiningFetch) and not draft.fetch_by_filter:
        parts.insert(1, write_varint(1 if isinstance(message, m.Fetch) else 2 if message.relative else 3))
    elif isinstance(message, m.RequestErrorMessage) and message.code == RequestCode.REDIRECT:
        to = message.redirect
        if to is None:
            raise ValueError("a REQUEST_ERROR with code REDIRECT needs a redirect")
        parts += [write_text(to.uri), write_namespace(to.namespace), write_text(to.track)]
    return b"".join(parts)


def _check_sendable(message: m.Message, draft: Draft) -> None:
    """Raise ValueError for a message that would make the peer close the session."""
    if extra := present(getattr(message, "parameters", None)) - allowed_parameters(type(message), draft):
        raise ValueError(f"a {type(message).__name__} cannot have {', '.join(sorted(param.name for param in extra))}")
    if _name_bytes(message) > MAX_NAME_BYTES:
        raise ValueError(f"a full track name is limited to {MAX_NAME_BYTES} bytes")
    if isinstance(message, m.Goaway) and len(message.uri) > MAX_URI_BYTES:
        raise ValueError(f"a URI is limited to {MAX_URI_BYTES} bytes")


def _name_bytes(message: m.Message) -> int:
    """Return the size of a full track name: namespace and track together (draft 18, section 2.4.1)."""
    named = getattr(message, "redirect", None) or message
    return sum(map(len, getattr(named, "namespace", ()))) + len(getattr(named, "track", b""))


def _read_flag(reader: Reader, _draft: Draft) -> bool:
    if (value := reader.u8()) > 1:
        raise SessionFault(f"flag of {value}; it must be 0 or 1")
    return bool(value)


def _write_reason(value: str, _draft: Draft) -> bytes:
    """Cut a reason phrase to its limit, between characters."""
    return write_text(value.encode()[:MAX_REASON_BYTES].decode(errors="ignore").encode())


def _read_options(reader: Reader, draft: Draft) -> SetupOptions:
    return setup_options(read_pairs(reader), draft)


def _write_options(value: SetupOptions, draft: Draft) -> bytes:
    return write_pairs(setup_pairs(value, draft))


def _read_properties(reader: Reader, _draft: Draft) -> tuple[KeyValue, ...]:
    properties = read_pairs(reader)
    check_track(properties)
    return properties


_Codec = tuple[Callable[[Reader, Draft], Any], Callable[[Any, Draft], bytes]]
_INTEGER: _Codec = (lambda reader, _: reader.varint(), lambda value, _: write_varint(value))
_NAMESPACE: _Codec = (lambda reader, _: reader.namespace(), lambda value, _: write_namespace(value))
_LOCATION: _Codec = (lambda reader, _: reader.location(), lambda value, _: write_location(value))
_CODECS: dict[str, _Codec] = {
    **dict.fromkeys(
        (
            "request_id", "joining_request_id", "joining_start", "track_alias", "code", "retry_interval",
            "streams", "timeout_ms",
        ),
        _INTEGER,
    ),
    "namespace": _NAMESPACE,
    "prefix": _NAMESPACE,
    "suffix": _NAMESPACE,
    "track": (lambda reader, _: reader.text(MAX_NAME_BYTES, "track name"), lambda value, _: write_text(value)),
    "uri": (lambda reader, _: reader.text(MAX_URI_BYTES, "URI"), lambda value, _: write_text(value)),
    "reason": (lambda reader, _: reader.reason(), _write_reason),
    "start": _LOCATION,
    "end": _LOCATION,
    "end_of_track": (_read_flag, lambda value, _: bytes([value])),
    "options": (_read_options, _write_options),
    "parameters": (lambda reader, draft: read_parameters(reader, draft, frozenset(Param)), write_parameters),
    "properties": (_read_properties, lambda value, _: write_pairs(value)),
}  # fmt: skip
"""How to read and write the fields of messages, by name; `decode` knows which parameters a message may carry."""


def _wire_order(cls: type[m.Message], draft: Draft, *, control: bool = True) -> tuple[str, ...]:
    """Return the fields of a message that a draft has, in wire order."""
    absent = {
        "request_id": cls is m.Goaway and not (draft.goaway_names_request and control),
        "start": draft.fetch_by_filter,
        "end": cls is m.Fetch and draft.fetch_by_filter,
    }
    return tuple(each.name for each in fields(cls) if each.name in _CODECS and not absent.get(each.name))


_field_names: Callable[..., tuple[str, ...]] = cache(_wire_order)
"""`_wire_order`, worked out once for each message and draft."""


class MessageParser:
    """Split a stream into control messages, holding at most one incomplete message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.count = 0
        """Messages yielded by `feed` so far."""

    @property
    def buffered(self) -> int:
        """Bytes held of an incomplete message."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Handle bytes and yield the type and payload of each complete message."""
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
            yield kind, bytes(self._buffer[body + 2 : end])
        del self._buffer[:at]
