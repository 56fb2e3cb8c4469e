"""Values of the wire format: integers, byte strings, namespaces, locations, key-value pairs, and message parameters.

Message parameters (draft 18, section 10.2) have values of all these kinds, authorization tokens, and location filters.
A location filter selects a part of a track (section 5.1.2); `Draft.sized` selects one of its two encodings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar

from kvabr.moqt.codes import RANGE_FILTERS, Param, SessionCode, SessionFault

MAX_NAMESPACE_FIELDS = 32
MAX_NAME_BYTES = 4096
"""Maximum bytes of a namespace, and of namespace and track name together (draft 18, section 2.4.1)."""
MAX_REASON_BYTES = 1024
MAX_URI_BYTES = 8192
MAX_VALUE_BYTES = 0xFFFF
MAX_INTEGER = (1 << 64) - 1


class Location(NamedTuple):
    """A position in a track, ordered by group, then object."""

    group: int
    object: int


def write_varint(value: int) -> bytes:
    """Encode an integer in the fewest bytes; the leading one bits give the length (draft 18, section 1.4.1)."""
    if 0 <= value < 0x80:  # the most frequent case
        return bytes((value,))
    if not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"integer {value} is outside 0 to {MAX_INTEGER}")
    for size in range(1, 9):
        if value < 1 << (7 * size):
            lead = (0xFF00 >> (size - 1)) & 0xFF
            return (value | lead << (8 * (size - 1))).to_bytes(size, "big")
    return b"\xff" + value.to_bytes(8, "big")


def peek_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int] | None:
    """Return the integer at offset `at`, and the next offset; None if it is incomplete."""
    if at >= len(data):
        return None
    first = data[at]
    if first < 0x80:
        return first, at + 1
    size = 9 - (0xFF - first).bit_length()
    end = at + size
    if end > len(data):
        return None
    bits = 64 if size == 9 else 7 * size
    return int.from_bytes(data[at:end], "big") & ((1 << bits) - 1), end


@dataclass(frozen=True, slots=True)
class Draft:
    """Properties of one draft of moq-transport, see `docs/reference/wire-format.md`."""

    number: int
    sized: bool
    """True if location filters and namespace prefixes begin with their length in bytes; otherwise filters begin with
    the number of one of six forms.
    """

    @property
    def alpn(self) -> str:
        """The ALPN identifier."""
        return f"moqt-{self.number}"


DRAFT_22 = Draft(22, sized=False)
DRAFT_20 = Draft(20, sized=True)
DRAFTS = (DRAFT_22, DRAFT_20)


def by_alpn(alpn: str) -> Draft | None:
    """Return the draft of an ALPN identifier, or None."""
    return next((draft for draft in DRAFTS if draft.alpn == alpn), None)


class Incomplete(Exception):  # noqa: N818  # not an error: the rest is still on its way
    """Raised when a `Reader` reaches the end of partial data."""


class Reader:
    """Parses values. Every method raises SessionFault for malformed bytes."""

    def __init__(self, data: bytes | bytearray | memoryview, *, at: int = 0, partial: bool = False) -> None:
        """``partial``: raise Incomplete, instead of SessionFault, at the end of the data."""
        self._data, self.at, self._partial = data, at, partial

    @property
    def left(self) -> int:
        """Number of unread bytes."""
        return len(self._data) - self.at

    def varint(self) -> int:
        """Read an integer."""
        found = peek_varint(self._data, self.at)
        if found is None:
            raise self._short("message ends inside an integer")
        self.at = found[1]
        return found[0]

    def u8(self) -> int:
        """Read an integer of one byte."""
        return self.take(1)[0]

    def take(self, size: int) -> bytes:
        """Read `size` bytes; return a copy."""
        if size > self.left:
            raise self._short(f"message has {self.left} bytes left but announces {size}")
        self.at += size
        return bytes(self._data[self.at - size : self.at])

    def _short(self, what: str) -> Exception:
        return Incomplete() if self._partial else SessionFault(what)

    def rest(self) -> bytes:
        """Read all remaining bytes."""
        return self.take(self.left)

    def text(self, limit: int, what: str) -> bytes:
        """Read bytes with a length prefix of at most `limit`."""
        size = self.varint()
        if size > limit:
            raise SessionFault(f"{what} of {size} bytes; the limit is {limit}")
        return self.take(size)

    def reason(self) -> str:
        """Read a reason phrase; replace invalid UTF-8."""
        return self.text(MAX_REASON_BYTES, "reason phrase").decode("utf-8", "replace")

    def location(self) -> Location:
        """Read a location."""
        return Location(self.varint(), self.varint())

    def namespace(self) -> tuple[bytes, ...]:
        """Read a track namespace of up to 32 non-empty fields."""
        count = self.varint()
        if count > MAX_NAMESPACE_FIELDS:
            raise SessionFault(f"namespace of {count} fields; the limit is {MAX_NAMESPACE_FIELDS}")
        fields: list[bytes] = []
        for _ in range(count):
            field = self.text(MAX_NAME_BYTES, "namespace field")
            if not field:
                raise SessionFault("namespace with an empty field")
            fields.append(field)
        if sum(map(len, fields)) > MAX_NAME_BYTES:
            raise SessionFault(f"namespace of more than {MAX_NAME_BYTES} bytes")
        return tuple(fields)

    def end(self) -> None:
        """Raise SessionFault if there are unread bytes."""
        if self.left:
            raise SessionFault(f"message is {self.left} bytes longer than its fields")


def write_text(value: bytes) -> bytes:
    """Encode bytes with a length prefix."""
    return write_varint(len(value)) + value


def write_location(value: Location) -> bytes:
    """Encode a location."""
    return write_varint(value.group) + write_varint(value.object)


def write_namespace(fields: Sequence[bytes]) -> bytes:
    """Encode a namespace."""
    if len(fields) > MAX_NAMESPACE_FIELDS or not all(fields) or sum(map(len, fields)) > MAX_NAME_BYTES:
        most = f"{MAX_NAMESPACE_FIELDS} fields, none empty, of {MAX_NAME_BYTES} bytes together"
        raise ValueError(f"a namespace has at most {most}")
    return write_varint(len(fields)) + b"".join(write_text(field) for field in fields)


KeyValue = tuple[int, int | bytes]
"""A type and its value: an integer if the type is even, bytes if it is odd."""


def read_pairs(reader: Reader) -> tuple[KeyValue, ...]:
    """Read all remaining key-value pairs (draft 18, section 1.4.3)."""
    pairs: list[KeyValue] = []
    kind = 0
    while reader.left:
        kind += reader.varint()
        if kind > MAX_INTEGER:
            raise SessionFault("type of a key-value pair exceeds 64 bits")
        pairs.append((kind, reader.text(MAX_VALUE_BYTES, "value of a key-value pair") if kind % 2 else reader.varint()))
    return tuple(pairs)


def write_pairs(pairs: Iterable[KeyValue]) -> bytes:
    """Encode key-value pairs in ascending order of type; pairs of one type keep their order."""
    out, before = bytearray(), 0
    for kind, value in sorted(pairs, key=lambda pair: pair[0]):
        out += write_varint(kind - before)
        before = kind
        if isinstance(value, int):
            if kind % 2:
                raise ValueError(f"type 0x{kind:x} is odd, so its value must be bytes")
            out += write_varint(value)
        else:
            if kind % 2 == 0 or len(value) > MAX_VALUE_BYTES:
                raise ValueError(f"type 0x{kind:x} cannot have a value of {len(value)} bytes")
            out += write_text(value)
    return bytes(out)


def malformed(what: str) -> SessionFault:
    """Return the fault for a malformed value."""
    return SessionFault(what, SessionCode.KEY_VALUE_FORMATTING_ERROR)


_NO_FILTER, _RELATIVE, _START, _TO_GROUP, _TO_OBJECT, _NEXT_OBJECT = range(6)
"""Forms of a filter in draft 22. Each number is the number of following fields, except the last form, which has none.
"""


@dataclass(frozen=True, slots=True)
class Filter:
    """A range of locations. Without fields, it starts after the largest object and has no end."""

    start: Location | None = None
    """First location; None if it depends on the largest object."""
    groups_back: int | None = None
    """Without a start: distance in groups before the next group; 0 is the next group, 1 the current group."""
    end_group: int | None = None
    """Last group, only with a start."""
    end_object: int | None = None
    """Last object of the last group; None: all objects."""

    def within(self, largest: Location | None) -> tuple[Location, Location | None]:
        """Return the first and last location (None: no end), given the track's largest location (None: empty track)."""
        if self.start is not None:
            if self.end_group is None:
                return self.start, None
            last = MAX_INTEGER if self.end_object is None else self.end_object
            return self.start, Location(self.end_group, last)
        if largest is None:
            return Location(0, 0), None
        if self.groups_back is None:
            return Location(largest.group, largest.object + 1), None
        return Location(max(0, largest.group + 1 - self.groups_back), 0), None

    @property
    def _fields(self) -> list[int]:
        if self.start is None:
            return [] if self.groups_back is None else [self.groups_back]
        fields = [*self.start]
        if self.end_group is not None:
            fields.append(self.end_group - self.start.group)
            if self.end_object is not None:
                fields.append(self.end_object)
        return fields


EVERYTHING = Filter(Location(0, 0))


def write_filter(value: Filter, draft: Draft) -> bytes:
    """Encode a filter as a parameter's value."""
    fields = value._fields  # this module is the filter's own
    everything = value == EVERYTHING
    if draft.sized:  # two zeros stand for the next object
        return write_text(_integers([] if everything else fields or [0, 0]))
    form = _NO_FILTER if everything else len(fields) or _NEXT_OBJECT
    return _integers([form, *([] if everything else fields)])


def read_filter(reader: Reader, draft: Draft) -> Filter:
    """Parse a filter; raise SessionFault if it is malformed."""
    if draft.sized:
        return _whole(reader, _read_counted)
    form = reader.varint()
    if form > _NEXT_OBJECT:
        raise SessionFault(f"unknown form {form} of a location filter")
    if form in (_NO_FILTER, _NEXT_OBJECT):
        return EVERYTHING if form == _NO_FILTER else Filter()
    return _filter([reader.varint() for _ in range(form)])


def _read_counted(inner: Reader) -> Filter:
    fields: list[int] = []
    while inner.left:
        if len(fields) == _TO_OBJECT:
            raise SessionFault("location filter with more than four fields")
        fields.append(inner.varint())
    if not fields:
        return EVERYTHING
    return Filter() if fields == [0, 0] else _filter(fields)


def _filter(fields: list[int]) -> Filter:
    if len(fields) == 1:
        return Filter(groups_back=fields[0])
    end = fields[0] + fields[2] if len(fields) > 2 else None
    if end is not None and not fields[0] <= end <= MAX_INTEGER:
        raise SessionFault(f"location filter from group {fields[0]} to {end}")
    return Filter(Location(*fields[:2]), None, end, fields[3] if len(fields) > 3 else None)


def _integers(values: list[int]) -> bytes:
    return b"".join(map(write_varint, values))


DELETE, REGISTER, USE_ALIAS, USE_VALUE = range(4)
"""Alias types of a token (draft 18, section 10.2.2)."""
MAX_TOKENS = 16
"""Maximum number of tokens per message, set by kvabr."""


@dataclass(frozen=True, slots=True)
class Token:
    """An authorization token, or a reference to one (draft 18, section 10.2.2)."""

    value: bytes = b""
    alias_type: int = USE_VALUE
    alias: int | None = None
    token_type: int = 0
    """Type of the token; 0 for a type agreed on out of band."""

    def encode(self) -> bytes:
        """Encode the Token structure."""
        out = write_varint(self.alias_type)
        if self.alias_type != USE_VALUE:
            out += write_varint(self.alias or 0)
        if self.alias_type in (REGISTER, USE_VALUE):
            out += write_varint(self.token_type) + self.value
        return out

    @classmethod
    def decode(cls, data: bytes) -> Token:
        """Parse the Token structure; raise SessionFault if it is malformed."""
        reader = Reader(data)
        try:
            kind = reader.varint()
            if kind > USE_VALUE:
                raise malformed(f"unknown alias type {kind}")
            alias = None if kind == USE_VALUE else reader.varint()
            token_type, value = 0, b""
            if kind in (REGISTER, USE_VALUE):
                token_type, value = reader.varint(), reader.rest()
            reader.end()
        except SessionFault as fault:
            raise malformed(f"malformed authorization token: {fault}") from fault
        return cls(value, kind, alias, token_type)


def token_values(tokens: tuple[Token, ...], *, setup: bool = False) -> tuple[bytes, ...]:
    """Return the token values of one message; raise SessionFault for an invalid token.

    This end has no cache for token aliases. A peer may only register an alias in its SETUP, which has no effect.
    """
    for token in tokens:
        if token.alias_type == REGISTER and not setup:
            raise SessionFault("there is no cache for token aliases", SessionCode.AUTH_TOKEN_CACHE_OVERFLOW)
        if token.alias_type in (DELETE, USE_ALIAS):
            if setup:
                raise SessionFault("SETUP refers to a token alias")
            raise SessionFault(f"unknown token alias {token.alias}", SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS)
    return tuple(token.value for token in tokens)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a message. Absent parameters are None."""

    object_delivery_timeout: int | None = None
    """Timeout in milliseconds."""
    tokens: tuple[Token, ...] = ()
    rendezvous_timeout: int | None = None
    subgroup_delivery_timeout: int | None = None
    expires: int | None = None
    largest: Location | None = None
    fill_timeout: int | None = None
    forward: int | None = None
    priority: int | None = None
    """Priority, 0 (most urgent) to 255."""
    filter: Filter | None = None
    group_order: int | None = None
    """1: ascending, 2: descending."""
    fill: Parameters | None = None
    """For subscriptions: earlier objects to deliver on a stream like that of a FETCH."""
    range_filters: tuple[tuple[Param, bytes], ...] = ()
    """Range filters, which this end refuses, since it allows none (option MAX_FILTER_RANGES)."""
    new_group: int | None = None
    namespace_prefix: tuple[bytes, ...] | None = None
    include_properties: int | None = None
    """0 requests an answer without track properties; this end never sends any."""


_NONE = Parameters()
T = TypeVar("T")
_Encoding = Literal["varint", "u8", "location", "filter", "token", "namespace", "fill", "range"]
_KINDS: dict[Param, tuple[str, _Encoding]] = {
    Param.OBJECT_DELIVERY_TIMEOUT: ("object_delivery_timeout", "varint"),
    Param.AUTHORIZATION_TOKEN: ("tokens", "token"),
    Param.RENDEZVOUS_TIMEOUT: ("rendezvous_timeout", "varint"),
    Param.SUBGROUP_DELIVERY_TIMEOUT: ("subgroup_delivery_timeout", "varint"),
    Param.EXPIRES: ("expires", "varint"),
    Param.MAX_OBJECT: ("largest", "location"),
    Param.FILL_TIMEOUT: ("fill_timeout", "varint"),
    Param.FORWARD: ("forward", "u8"),
    Param.SUBSCRIBER_PRIORITY: ("priority", "u8"),
    Param.LOCATION_FILTER: ("filter", "filter"),
    Param.GROUP_ORDER: ("group_order", "u8"),
    Param.FILL_PARAMETERS: ("fill", "fill"),
    Param.SUBGROUP_FILTER: ("range_filters", "range"),
    Param.OBJECTID_FILTER: ("range_filters", "range"),
    Param.PRIORITY_FILTER: ("range_filters", "range"),
    Param.OBJECT_PROPERTY_FILTER: ("range_filters", "range"),
    Param.TRACK_PROPERTY_FILTER: ("range_filters", "range"),
    Param.NEW_GROUP_REQUEST: ("new_group", "varint"),
    Param.TRACK_NAMESPACE_PREFIX: ("namespace_prefix", "namespace"),
    Param.INCLUDE_PROPERTIES: ("include_properties", "u8"),
}
IN_FILL = frozenset({
    Param.FILL_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.LOCATION_FILTER, Param.GROUP_ORDER,
    *(RANGE_FILTERS - {Param.TRACK_PROPERTY_FILTER}),
})  # fmt: skip
_RANGES = {
    Param.FORWARD: (0, 1),
    Param.GROUP_ORDER: (1, 2),
    Param.SUBSCRIBER_PRIORITY: (0, 255),
    Param.INCLUDE_PROPERTIES: (0, 1),
}


def _in_range(param: Param, value: Any) -> bool:
    limits = _RANGES.get(param)
    return limits is None or bool(limits[0] <= value <= limits[1])


def present(parameters: Parameters | None) -> frozenset[Param]:
    """Return the parameters that are set."""
    if parameters is None:
        return frozenset()
    one = {
        param
        for param, (name, kind) in _KINDS.items()
        if kind != "range" and getattr(parameters, name) != getattr(_NONE, name)
    }
    return frozenset(one | {param for param, _ in parameters.range_filters})


def write_parameters(parameters: Parameters, draft: Draft) -> bytes:
    """Encode the count and the parameters in ascending order; raise ValueError for a value out of range."""
    out, count, before = b"", 0, 0
    for param in sorted(present(parameters)):
        name, kind = _KINDS[param]
        value: Any = getattr(parameters, name)
        if not _in_range(param, value):
            raise ValueError(f"{param.name} cannot be {value}")
        for one in _instances(param, kind, value):
            out += write_varint(param - before) + _write_value(one, kind, draft)
            before = param
            count += 1
    return write_varint(count) + out


def _instances(param: Param, kind: _Encoding, value: Any) -> tuple[Any, ...]:
    if kind == "range":
        return tuple(each for which, each in value if which == param)
    return value if kind == "token" else (value,)


def _write_value(value: Any, kind: _Encoding, draft: Draft) -> bytes:
    match kind:
        case "token":
            return write_text(value.encode())
        case "filter":
            return write_filter(value, draft)
        case "fill":
            return write_text(write_parameters(value, draft))
        case "range":
            return write_text(value)
        case "location":
            return write_location(value)
        case "namespace":
            prefix = write_namespace(value)
            return write_text(prefix) if draft.sized else prefix
        case "u8":
            return bytes([value])
    return write_varint(value)


def read_parameters(reader: Reader, draft: Draft, allowed: frozenset[Param]) -> Parameters:
    """Parse a message's parameters; raise SessionFault if they are malformed or not in `allowed`."""
    found: dict[str, Any] = {}
    number = 0
    for _ in range(reader.varint()):
        number += reader.varint()
        if number not in _KINDS:
            raise SessionFault(f"unknown message parameter 0x{number:x}")
        param = Param(number)
        name, kind = _KINDS[param]
        value = _read_value(reader, kind, draft)
        if param not in allowed:
            raise SessionFault(f"parameter {param.name} in a message that cannot have it")
        if not _in_range(param, value):
            raise SessionFault(f"parameter {param.name} has the invalid value {value}")
        if kind == "token":
            found[name] = with_token(found.get(name, ()), value)
        elif kind == "range":
            found[name] = (*found.get(name, ()), (param, value))
        elif name in found:
            raise SessionFault(f"repeated parameter {param.name}")
        else:
            found[name] = value
    return Parameters(**found)


def with_token(tokens: tuple[Token, ...], token: Token) -> tuple[Token, ...]:
    """Add an authorization token of a message; raise SessionFault if it has too many."""
    if len(tokens) == MAX_TOKENS:
        raise SessionFault(f"message with more than {MAX_TOKENS} authorization tokens")
    return (*tokens, token)


def _read_value(reader: Reader, kind: _Encoding, draft: Draft) -> Any:
    match kind:
        case "token":
            return Token.decode(reader.text(MAX_VALUE_BYTES, "parameter"))
        case "filter":
            return read_filter(reader, draft)
        case "fill":
            return _whole(reader, lambda inner: read_parameters(inner, draft, IN_FILL))
        case "range":
            return reader.text(MAX_VALUE_BYTES, "parameter")
        case "location":
            return reader.location()
        case "namespace":
            return _whole(reader, Reader.namespace) if draft.sized else reader.namespace()
        case "u8":
            return reader.u8()
    return reader.varint()


def _whole(reader: Reader, read: Callable[[Reader], T]) -> T:
    inner = Reader(reader.text(MAX_VALUE_BYTES, "parameter"))
    value = read(inner)
    inner.end()
    return value


assert {field.name for field in fields(Parameters)} == {name for name, _ in _KINDS.values()}  # noqa: S101
