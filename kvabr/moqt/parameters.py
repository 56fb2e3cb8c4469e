"""Message parameters (draft 18, section 10.2), setup options, authorization tokens, and checks of properties.

Location filters select a part of a track (section 5.1.2); `Draft.sized` selects one of their two encodings. Unknown
properties (sections 2.5 and 12) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from kvabr.moqt.codes import (
    MANDATORY_TRACK_PROPERTIES,
    RANGE_FILTERS,
    Param,
    Property,
    RequestCode,
    SessionCode,
    SessionFault,
    SetupOption,
)
from kvabr.moqt.wire import (
    MAX_INTEGER,
    MAX_VALUE_BYTES,
    Draft,
    KeyValue,
    Location,
    Reader,
    malformed,
    read_pairs,
    write_location,
    write_namespace,
    write_text,
    write_varint,
)

_NO_FILTER, _RELATIVE, _START, _TO_GROUP, _TO_OBJECT, _NEXT_OBJECT = range(6)
"""Forms of a filter in draft 22, by number of following fields; the last form has none."""


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
"""Maximum tokens per message, set by kvabr."""


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
    """Range filters, which this end refuses (option MAX_FILTER_RANGES)."""
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
            found[name] = _with_token(found.get(name, ()), value)
        elif kind == "range":
            found[name] = (*found.get(name, ()), (param, value))
        elif name in found:
            raise SessionFault(f"repeated parameter {param.name}")
        else:
            found[name] = value
    return Parameters(**found)


def _with_token(tokens: tuple[Token, ...], token: Token) -> tuple[Token, ...]:
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


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """The options of a SETUP (draft 18, section 10.3.1)."""

    path: bytes | None = None
    """PATH; sent only by clients."""
    authority: bytes | None = None
    """AUTHORITY; sent only by clients."""
    tokens: tuple[Token, ...] = ()
    max_auth_token_cache_size: int = 0
    """Bytes for token aliases; 0 for this end, which has no cache for them."""
    implementation: bytes | None = None
    max_request_updates: int = 0
    """Number of unanswered REQUEST_UPDATEs allowed per request; 0: any number."""


_SETUP = {
    SetupOption.PATH: "path",
    SetupOption.AUTHORIZATION_TOKEN: "tokens",
    SetupOption.MAX_AUTH_TOKEN_CACHE_SIZE: "max_auth_token_cache_size",
    SetupOption.AUTHORITY: "authority",
    SetupOption.MOQT_IMPLEMENTATION: "implementation",
    SetupOption.MAX_REQUEST_UPDATES: "max_request_updates",
}
"""Names of fields by option. Other options are ignored."""


def setup_pairs(options: SetupOptions) -> list[KeyValue]:
    """Return the options as key-value pairs; skip default values."""
    pairs: list[KeyValue] = [(SetupOption.AUTHORIZATION_TOKEN, token.encode()) for token in options.tokens]
    for kind, name in _SETUP.items():
        value: Any = getattr(options, name)
        if name != "tokens" and value not in (None, 0):
            pairs.append((kind, value))
    return pairs


def setup_options(pairs: tuple[KeyValue, ...]) -> SetupOptions:
    """Parse options from key-value pairs; ignore unknown options; raise SessionFault for invalid ones."""
    found: dict[str, Any] = {}
    for kind, value in pairs:
        name = _SETUP.get(kind)  # type: ignore[call-overload]  # an IntEnum equals its number
        if name is None:
            continue
        if name == "tokens":
            assert isinstance(value, bytes)  # noqa: S101  # odd types have bytes
            found[name] = _with_token(found.get(name, ()), Token.decode(value))
        elif name in found:
            raise SessionFault(f"repeated setup option {SetupOption(kind).name}")
        else:
            found[name] = value
    return SetupOptions(**found)


_PLAIN = rb"[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_PATH = re.compile(rb"(?:/(?:" + _PLAIN + rb"|[:@])*)*(?:\?(?:" + _PLAIN + rb"|[:@/?])*)?")
_AUTHORITY = re.compile(rb"(?:(?:" + _PLAIN + rb"|:)*@)?(?:\[[0-9A-Za-z:.%_~-]+\]|(?:" + _PLAIN + rb")+)(?::[0-9]*)?")


def check_target(options: SetupOptions, *, client: bool) -> None:
    """Raise SessionFault for a malformed PATH or AUTHORITY in a SETUP; only a `client` may send them.

    PATH must be a `path-abempty` with an optional query, AUTHORITY a non-empty host with an optional port (RFC 3986).
    """
    for name, value, pattern, foreign, wrong in (
        ("PATH", options.path, _PATH, SessionCode.INVALID_PATH, SessionCode.MALFORMED_PATH),
        ("AUTHORITY", options.authority, _AUTHORITY, SessionCode.INVALID_AUTHORITY, SessionCode.MALFORMED_AUTHORITY),
    ):
        if value is not None and not client:
            raise SessionFault(f"SETUP from a server carries {name}", foreign)
        if value is not None and not pattern.fullmatch(value):
            raise SessionFault(f"{name} does not fit into a URI", wrong)


assert {field.name for field in fields(Parameters)} == {name for name, _ in _KINDS.values()}  # noqa: S101


class MalformedTrack(Exception):  # noqa: N818  # the track's fault; the session continues
    """A track violates the data model. Cancel requests for this track (draft 18, section 2.4.2)."""


def unfold(properties: tuple[KeyValue, ...]) -> tuple[KeyValue, ...]:
    """Return the properties, including those inside IMMUTABLE_PROPERTIES; raise MalformedTrack if malformed."""
    out = list(properties)
    for kind, value in properties:
        if kind == Property.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            try:
                inner = read_pairs(Reader(value))
            except SessionFault as fault:
                raise MalformedTrack(f"cannot parse the immutable properties: {fault}") from fault
            if any(each == Property.IMMUTABLE_PROPERTIES for each, _ in inner):
                raise MalformedTrack("nested immutable properties")
            out += inner
    return tuple(out)


def check_track(properties: tuple[KeyValue, ...]) -> None:
    """Raise SessionFault for track properties that require closing the session."""
    try:
        every = unfold(properties)
    except MalformedTrack:
        every = properties  # `unusable` refuses the track later; the session continues
    for kind, value in every:
        wrong = isinstance(value, int) and (
            (kind == Property.DEFAULT_PUBLISHER_PRIORITY and value > 0xFF)
            or (kind == Property.DEFAULT_PUBLISHER_GROUP_ORDER and value not in (1, 2))
            or (kind == Property.DYNAMIC_GROUPS and value > 1)
        )
        if wrong:
            raise SessionFault(f"track property {Property(kind).name} has the invalid value {value!r}")


def unusable(properties: tuple[KeyValue, ...]) -> tuple[RequestCode, str] | None:
    """Return an error code and a reason if a track must not be used, e.g. for unknown mandatory properties.

    See draft 18, section 2.5.1.
    """
    try:
        every = unfold(properties)
    except MalformedTrack as error:
        return RequestCode.MALFORMED_TRACK, f"malformed track: {error}"
    for kind, _ in every:
        if kind in MANDATORY_TRACK_PROPERTIES:
            return RequestCode.UNSUPPORTED_EXTENSION, f"the track has the unknown mandatory property 0x{kind:x}"
    return None


def check_object(properties: tuple[KeyValue, ...], group: int, number: int) -> None:
    """Raise MalformedTrack for invalid object properties."""
    if not properties:
        return
    if sum(kind == Property.IMMUTABLE_PROPERTIES for kind, _ in properties) > 1:
        raise MalformedTrack("object with two IMMUTABLE_PROPERTIES")
    seen: set[int] = set()
    for kind, value in unfold(properties):
        if kind in MANDATORY_TRACK_PROPERTIES:
            raise MalformedTrack(f"object with property 0x{kind:x}, which only tracks may have")
        if kind in (Property.PRIOR_GROUP_ID_GAP, Property.PRIOR_OBJECT_ID_GAP):
            largest = group if kind == Property.PRIOR_GROUP_ID_GAP else number
            if kind in seen or not isinstance(value, int) or value > largest:
                raise MalformedTrack(f"object with a repeated or impossible {Property(kind).name}")
            seen.add(kind)
