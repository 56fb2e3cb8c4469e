"""Message parameters, setup options, authorization tokens and subscription filters.

Draft 18 gives each message parameter its own encoding (section 10.2); draft 16 encodes them as key-value pairs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvabr.moqt.codes import Param, SessionCode, SessionFault, SetupOption
from kvabr.moqt.wire import (
    Draft,
    KeyValue,
    Location,
    Reader,
    Varint,
    malformed,
    read_pairs,
    write_location,
    write_namespace,
    write_pairs,
    write_text,
)

DELETE, REGISTER, USE_ALIAS, USE_VALUE = range(4)
"""Alias types of a token (draft 18, section 10.2.2)."""


@dataclass(frozen=True, slots=True)
class Token:
    """An authorization token, or a reference to one (draft 18, section 10.2.2)."""

    value: bytes = b""
    alias_type: int = USE_VALUE
    alias: int | None = None
    token_type: int = 0
    """0 stands for a type agreed on out of band."""

    def encode(self, varint: Varint) -> bytes:
        """Encode the Token structure."""
        out = varint.encode(self.alias_type)
        if self.alias_type != USE_VALUE:
            out += varint.encode(self.alias or 0)
        if self.alias_type in (REGISTER, USE_VALUE):
            out += varint.encode(self.token_type) + self.value
        return out

    @classmethod
    def decode(cls, data: bytes, varint: Varint) -> Token:
        """Parse the Token structure.

        Raises:
            SessionFault: The bytes are not a valid Token.
        """
        reader = Reader(data, varint)
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


_OVERHEAD = 16
"""Bytes that an entry counts in addition to its value."""


class TokenCache:
    """The token aliases of one peer."""

    def __init__(self, limit: int = 0) -> None:
        """Create an empty cache.

        Args:
            limit: Capacity in bytes, as announced in MAX_AUTH_TOKEN_CACHE_SIZE; 0 allows no aliases.
        """
        self._limit, self._size = limit, 0
        self._values: dict[int, bytes] = {}

    def resolve(self, tokens: tuple[Token, ...], *, setup: bool = False) -> tuple[bytes, ...]:
        """Return the values of the tokens of one message, and apply its registrations and deletions.

        Raises:
            SessionFault: An alias is unknown or repeated, the cache overflows, or a SETUP refers to an alias.
        """
        return tuple(value for token in tokens if (value := self._one(token, setup=setup)) is not None)

    def _one(self, token: Token, *, setup: bool) -> bytes | None:
        if token.alias_type == USE_VALUE or token.alias is None:
            return token.value
        alias = token.alias
        if token.alias_type == REGISTER:
            if alias in self._values:
                code = SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS
                raise SessionFault(f"token alias {alias} is already registered", code)
            size = _OVERHEAD + len(token.value)
            if self._size + size <= self._limit:
                self._values[alias] = token.value
                self._size += size
            elif not setup:
                code = SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
                raise SessionFault(f"registered tokens exceed the limit of {self._limit} bytes", code)
            return token.value
        if setup:
            raise SessionFault("SETUP refers to a token alias")
        if alias not in self._values:
            raise SessionFault(f"unknown token alias {alias}", SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS)
        if token.alias_type == DELETE:
            self._size -= _OVERHEAD + len(self._values.pop(alias))
            return None
        return self._values[alias]


NEXT_GROUP, LARGEST_OBJECT, ABSOLUTE_START, ABSOLUTE_RANGE = 1, 2, 3, 4
"""Filter types (draft 18, section 5.1.2)."""


@dataclass(frozen=True, slots=True)
class Filter:
    """The objects that a subscription requests."""

    kind: int
    start: Location | None = None
    end_group: int | None = None
    """The last requested group."""

    def encode(self, draft: Draft) -> bytes:
        """Encode the Subscription Filter structure."""
        varint = draft.varint
        out = varint.encode(self.kind)
        if self.kind in (ABSOLUTE_START, ABSOLUTE_RANGE):
            start = self.start or Location(0, 0)
            out += write_location(varint, start)
            if self.kind == ABSOLUTE_RANGE:
                end = start.group if self.end_group is None else self.end_group
                out += varint.encode(end - start.group if draft.number >= 18 else end)
        return out

    @classmethod
    def decode(cls, data: bytes, draft: Draft) -> Filter:
        """Parse the Subscription Filter structure.

        Raises:
            SessionFault: The bytes are not a valid filter.
        """
        reader = Reader(data, draft.varint)
        kind = reader.varint()
        if kind not in (NEXT_GROUP, LARGEST_OBJECT, ABSOLUTE_START, ABSOLUTE_RANGE):
            raise SessionFault(f"unknown subscription filter type {kind}")
        start = reader.location() if kind in (ABSOLUTE_START, ABSOLUTE_RANGE) else None
        end: int | None = None
        if kind == ABSOLUTE_RANGE and start is not None:
            end = reader.varint() + (start.group if draft.number >= 18 else 0)
            if not start.group <= end < 1 << 64:
                raise SessionFault(f"subscription filter from group {start.group} to {end}")
        reader.end()
        return cls(kind, start, end)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of one message; None for absent ones."""

    object_delivery_timeout: int | None = None
    """Milliseconds; draft 16: DELIVERY_TIMEOUT."""
    tokens: tuple[Token, ...] = ()
    rendezvous_timeout: int | None = None
    subgroup_delivery_timeout: int | None = None
    expires: int | None = None
    largest: Location | None = None
    fill_timeout: int | None = None
    forward: int | None = None
    priority: int | None = None
    """0 (most urgent) to 255."""
    filter: Filter | None = None
    group_order: int | None = None
    """1 ascending, 2 descending."""
    new_group: int | None = None
    namespace_prefix: tuple[bytes, ...] | None = None


_NONE = Parameters()
_Encoding = Literal["varint", "u8", "location", "filter", "token", "namespace"]
_KINDS: dict[Param, tuple[str, _Encoding, int]] = {
    Param.OBJECT_DELIVERY_TIMEOUT: ("object_delivery_timeout", "varint", 16),
    Param.AUTHORIZATION_TOKEN: ("tokens", "token", 16),
    Param.RENDEZVOUS_TIMEOUT: ("rendezvous_timeout", "varint", 18),
    Param.SUBGROUP_DELIVERY_TIMEOUT: ("subgroup_delivery_timeout", "varint", 18),
    Param.EXPIRES: ("expires", "varint", 16),
    Param.LARGEST_OBJECT: ("largest", "location", 16),
    Param.FILL_TIMEOUT: ("fill_timeout", "varint", 18),
    Param.FORWARD: ("forward", "u8", 16),
    Param.SUBSCRIBER_PRIORITY: ("priority", "u8", 16),
    Param.SUBSCRIPTION_FILTER: ("filter", "filter", 16),
    Param.GROUP_ORDER: ("group_order", "u8", 16),
    Param.NEW_GROUP_REQUEST: ("new_group", "varint", 16),
    Param.TRACK_NAMESPACE_PREFIX: ("namespace_prefix", "namespace", 18),
}
"""By parameter: the field in `Parameters`, the encoding in draft 18, and the first draft that has it."""
_RANGES = {Param.FORWARD: (0, 1), Param.GROUP_ORDER: (1, 2), Param.SUBSCRIBER_PRIORITY: (0, 255)}


def _in_range(param: Param, value: Any, draft: Draft) -> bool:
    if param == Param.OBJECT_DELIVERY_TIMEOUT and draft.number < 17:
        return bool(value > 0)  # draft 16 expresses "none" by leaving it out
    limits = _RANGES.get(param)
    return limits is None or bool(limits[0] <= value <= limits[1])


def present(parameters: Parameters | None) -> frozenset[Param]:
    """Return the parameters that are set."""
    return frozenset(param for param, (name, _, _) in _KINDS.items() if parameters and _is_set(parameters, name))


def _is_set(parameters: Parameters, name: str) -> bool:
    return bool(getattr(parameters, name) != getattr(_NONE, name))


def known_parameters(draft: Draft) -> frozenset[Param]:
    """Return the message parameters that a draft defines."""
    return frozenset(param for param, (_, _, since) in _KINDS.items() if draft.number >= since)


def write_parameters(parameters: Parameters, draft: Draft) -> bytes:
    """Encode the count and the parameters in ascending order of type.

    Raises:
        ValueError: The draft does not have a parameter, or a value is out of range.
    """
    varint = draft.varint
    pairs: list[tuple[Param, bytes | int]] = []
    for param, (name, kind, since) in _KINDS.items():
        value: Any = getattr(parameters, name)
        if not _is_set(parameters, name):
            continue
        if draft.number < since:
            raise ValueError(f"draft {draft.number} has no parameter {param.name}")
        if not _in_range(param, value, draft):
            raise ValueError(f"{param.name} cannot be {value}")
        every = value if kind == "token" else (value,)
        pairs += [(param, _write_value(one, draft)) for one in every]
    if draft.number < 18:
        return varint.encode(len(pairs)) + write_pairs(varint, pairs)
    out, before = bytearray(varint.encode(len(pairs))), 0
    for param, value in pairs:
        out += varint.encode(param - before)
        before = param
        kind = _KINDS[param][1]
        if isinstance(value, int):
            out += bytes([value]) if kind == "u8" else varint.encode(value)
        else:
            out += write_text(varint, value) if kind in ("filter", "token") else value
    return bytes(out)


def _write_value(value: Any, draft: Draft) -> bytes | int:
    match value:
        case Location():  # before tuple: a location is one, too
            return write_location(draft.varint, value)
        case Filter():
            return value.encode(draft)
        case Token():
            return value.encode(draft.varint)
        case tuple():
            return write_namespace(draft.varint, value)
    return int(value)


def read_parameters(reader: Reader, draft: Draft, allowed: frozenset[Param]) -> Parameters:
    """Parse the parameters of a message.

    Args:
        reader: The reader, at the count of parameters.
        draft: The draft.
        allowed: Parameters that the message may carry. Others are a fault in draft 18 and ignored in draft 16.

    Raises:
        SessionFault: A parameter is unknown, repeated or misplaced, or a value is out of range.
    """
    found: dict[str, Any] = {}
    count, before = reader.varint(), 0
    pairs = read_pairs(reader, count) if draft.number < 18 else None
    for index in range(count):
        if pairs is None:
            before += reader.varint()
            number = before
        else:
            number = pairs[index][0]
        if number not in known_parameters(draft):
            raise SessionFault(f"unknown message parameter 0x{number:x}")
        param = Param(number)
        name, kind, _ = _KINDS[param]
        value = _read_value(reader, kind, draft) if pairs is None else _convert(pairs[index][1], kind, draft)
        if param not in allowed:
            if draft.number >= 18:
                raise SessionFault(f"parameter {param.name} in a message that cannot have it")
            continue
        if not _in_range(param, value, draft):
            raise SessionFault(f"parameter {param.name} has the invalid value {value}")
        if kind == "token":
            found[name] = (*found.get(name, ()), value)
        elif name in found:
            raise SessionFault(f"repeated parameter {param.name}")
        else:
            found[name] = value
    return Parameters(**found)


def _read_value(reader: Reader, kind: _Encoding, draft: Draft) -> Any:
    if kind == "varint":
        return reader.varint()
    if kind == "u8":
        return reader.u8()
    if kind == "location":
        return reader.location()
    if kind == "namespace":
        return reader.namespace()
    return _convert(reader.text(0xFFFF, "parameter"), kind, draft)


def _convert(value: int | bytes, kind: _Encoding, draft: Draft) -> Any:
    """Return the value of a length-prefixed parameter, or of a key-value pair in draft 16."""
    if isinstance(value, int):
        return value
    if kind == "token":
        return Token.decode(value, draft.varint)
    if kind == "filter":
        return Filter.decode(value, draft)
    reader = Reader(value, draft.varint)
    try:
        location = reader.location()
        reader.end()
    except SessionFault as fault:
        raise malformed(f"malformed location: {fault}") from fault
    return location


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """The options of a SETUP (draft 18, section 10.3.1)."""

    path: bytes | None = None
    """Clients only."""
    authority: bytes | None = None
    """Clients only."""
    tokens: tuple[Token, ...] = ()
    max_auth_token_cache_size: int = 0
    implementation: bytes | None = None
    max_request_id: int = 0
    """Draft 16 only."""


_SETUP = {
    SetupOption.PATH: "path",
    SetupOption.MAX_REQUEST_ID: "max_request_id",
    SetupOption.AUTHORIZATION_TOKEN: "tokens",
    SetupOption.MAX_AUTH_TOKEN_CACHE_SIZE: "max_auth_token_cache_size",
    SetupOption.AUTHORITY: "authority",
    SetupOption.MOQT_IMPLEMENTATION: "implementation",
}


def setup_pairs(options: SetupOptions, draft: Draft) -> list[KeyValue]:
    """Return the options as key-value pairs, leaving out defaults."""
    defaults = SetupOptions()
    pairs: list[KeyValue] = []
    for kind, name in _SETUP.items():
        value: Any = getattr(options, name)
        if kind == SetupOption.AUTHORIZATION_TOKEN:
            pairs += [(kind, token.encode(draft.varint)) for token in value]
        elif value != getattr(defaults, name) and (kind != SetupOption.MAX_REQUEST_ID or draft.number < 17):
            pairs.append((kind, value))
    return pairs


def setup_options(pairs: tuple[KeyValue, ...], draft: Draft) -> SetupOptions:
    """Return the options from key-value pairs, ignoring unknown ones.

    Raises:
        SessionFault: An option is repeated, or a token is malformed.
    """
    found: dict[str, Any] = {}
    for kind, value in pairs:
        name = _SETUP.get(kind)  # type: ignore[call-overload]  # an IntEnum equals its number
        if name is None or (kind == SetupOption.MAX_REQUEST_ID and draft.number >= 17):
            continue
        if name == "tokens":
            assert isinstance(value, bytes)  # noqa: S101  # odd types have bytes
            found[name] = (*found.get(name, ()), Token.decode(value, draft.varint))
        elif name in found:
            raise SessionFault(f"repeated setup option {SetupOption(kind).name}")
        else:
            found[name] = value
    return SetupOptions(**found)


_PLAIN = rb"[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_PATH = re.compile(rb"(?:/(?:" + _PLAIN + rb"|[:@])*)*(?:\?(?:" + _PLAIN + rb"|[:@/?])*)?")
_AUTHORITY = re.compile(rb"(?:(?:" + _PLAIN + rb"|:)*@)?(?:\[[0-9A-Za-z:.%_~-]+\]|(?:" + _PLAIN + rb")+)(?::[0-9]*)?")


def check_path(path: bytes) -> None:
    """Raise SessionFault unless a PATH is a `path-abempty` with an optional query (RFC 3986)."""
    if not _PATH.fullmatch(path):
        raise SessionFault("PATH is not a valid URI path", SessionCode.MALFORMED_PATH)


def check_authority(authority: bytes) -> None:
    """Raise SessionFault unless an AUTHORITY is a non-empty host with an optional port (RFC 3986)."""
    if not _AUTHORITY.fullmatch(authority):
        raise SessionFault("AUTHORITY is not a valid URI authority", SessionCode.MALFORMED_AUTHORITY)


assert {field.name for field in fields(Parameters)} == {name for name, _, _ in _KINDS.values()}  # noqa: S101
