"""Message parameters (draft 18, section 10.2), setup options and authorization tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar

from kvabr.moqt.codes import RANGE_FILTERS, Param, SessionCode, SessionFault, SetupOption
from kvabr.moqt.filters import Filter, read_filter, write_filter
from kvabr.moqt.wire import (
    MAX_VALUE_BYTES,
    Draft,
    KeyValue,
    Location,
    Reader,
    malformed,
    write_location,
    write_namespace,
    write_text,
    write_varint,
)

DELETE, REGISTER, USE_ALIAS, USE_VALUE = range(4)
"""Alias types of a token (draft 18, section 10.2.2)."""
MAX_TOKENS = 16
"""Tokens of one message; a limit of this implementation, as the draft sets none, and one decides."""


@dataclass(frozen=True, slots=True)
class Token:
    """An authorization token, or a reference to one (draft 18, section 10.2.2)."""

    value: bytes = b""
    alias_type: int = USE_VALUE
    alias: int | None = None
    token_type: int = 0
    """0 stands for a type agreed on out of band."""

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
        """Parse the Token structure, or raise SessionFault."""
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
    """Return the values of the tokens of one message, or raise SessionFault.

    This end announces no cache for token aliases, so a peer can refer to none, and register one only in its SETUP,
    where the registration is ignored.
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
    """The parameters of one message; None for absent ones."""

    object_delivery_timeout: int | None = None
    """Milliseconds."""
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
    """Draft 18: SUBSCRIPTION_FILTER."""
    group_order: int | None = None
    """1 ascending, 2 descending."""
    fill: Parameters | None = None
    """Draft 20: asks for the objects before those of a subscription as well, on a stream like that of a FETCH."""
    range_filters: tuple[tuple[Param, bytes], ...] = ()
    """Draft 20. This end allows none (option MAX_FILTER_RANGES) and refuses requests with them."""
    new_group: int | None = None
    namespace_prefix: tuple[bytes, ...] | None = None
    include_properties: int | None = None
    """Draft 20: 0 asks for an answer without properties of the track; this end sends none anyway."""


_NONE = Parameters()
T = TypeVar("T")
_Encoding = Literal["varint", "u8", "location", "filter", "token", "namespace", "fill", "range"]
_KINDS: dict[Param, tuple[str, _Encoding, int]] = {
    Param.OBJECT_DELIVERY_TIMEOUT: ("object_delivery_timeout", "varint", 18),
    Param.AUTHORIZATION_TOKEN: ("tokens", "token", 18),
    Param.RENDEZVOUS_TIMEOUT: ("rendezvous_timeout", "varint", 18),
    Param.SUBGROUP_DELIVERY_TIMEOUT: ("subgroup_delivery_timeout", "varint", 18),
    Param.EXPIRES: ("expires", "varint", 18),
    Param.LARGEST_OBJECT: ("largest", "location", 18),
    Param.FILL_TIMEOUT: ("fill_timeout", "varint", 18),
    Param.FORWARD: ("forward", "u8", 18),
    Param.SUBSCRIBER_PRIORITY: ("priority", "u8", 18),
    Param.LOCATION_FILTER: ("filter", "filter", 18),
    Param.GROUP_ORDER: ("group_order", "u8", 18),
    Param.FILL_PARAMETERS: ("fill", "fill", 20),
    Param.SUBGROUP_FILTER: ("range_filters", "range", 20),
    Param.OBJECTID_FILTER: ("range_filters", "range", 20),
    Param.PRIORITY_FILTER: ("range_filters", "range", 20),
    Param.OBJECT_PROPERTY_FILTER: ("range_filters", "range", 20),
    Param.TRACK_PROPERTY_FILTER: ("range_filters", "range", 20),
    Param.NEW_GROUP_REQUEST: ("new_group", "varint", 18),
    Param.TRACK_NAMESPACE_PREFIX: ("namespace_prefix", "namespace", 18),
    Param.INCLUDE_PROPERTIES: ("include_properties", "u8", 20),
}
"""By parameter: the field in `Parameters`, the encoding, and the first draft that has it."""
IN_FILL = frozenset({
    Param.FILL_TIMEOUT, Param.SUBSCRIBER_PRIORITY, Param.LOCATION_FILTER, Param.GROUP_ORDER,
    *(RANGE_FILTERS - {Param.TRACK_PROPERTY_FILTER}),
})  # fmt: skip
"""Parameters inside FILL_PARAMETERS."""
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
        for param, (name, kind, _) in _KINDS.items()
        if kind != "range" and getattr(parameters, name) != getattr(_NONE, name)
    }
    return frozenset(one | {param for param, _ in parameters.range_filters})


@cache
def known_parameters(draft: Draft) -> frozenset[Param]:
    """Return the message parameters that a draft defines."""
    return frozenset(param for param, (_, _, since) in _KINDS.items() if draft.number >= since)


def write_parameters(parameters: Parameters, draft: Draft) -> bytes:
    """Encode the count and the parameters in ascending order of type; ValueError if the draft cannot have one."""
    out, count, before = b"", 0, 0
    for param in sorted(present(parameters)):
        name, kind, since = _KINDS[param]
        value: Any = getattr(parameters, name)
        if draft.number < since:
            raise ValueError(f"draft {draft.number} has no parameter {param.name}")
        if not _in_range(param, value):
            raise ValueError(f"{param.name} cannot be {value}")
        for one in _instances(param, kind, value):
            out += write_varint(param - before) + _write_value(one, kind, draft)
            before = param
            count += 1
    return write_varint(count) + out


def _instances(param: Param, kind: _Encoding, value: Any) -> tuple[Any, ...]:
    """Return the values of a parameter, of which most can have only one."""
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
            return write_text(prefix) if draft.number == 20 else prefix
        case "u8":
            return bytes([value])
    return write_varint(value)


def read_parameters(reader: Reader, draft: Draft, allowed: frozenset[Param]) -> Parameters:
    """Parse the parameters of a message, or raise SessionFault, also for those that it is not `allowed` to carry."""
    found: dict[str, Any] = {}
    known, number = known_parameters(draft), 0
    for _ in range(reader.varint()):
        number += reader.varint()
        if number not in known:
            raise SessionFault(f"unknown message parameter 0x{number:x}")
        param = Param(number)
        name, kind, _since = _KINDS[param]
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
            return _whole(reader, Reader.namespace) if draft.number == 20 else reader.namespace()
        case "u8":
            return reader.u8()
    return reader.varint()


def _whole(reader: Reader, read: Callable[[Reader], T]) -> T:
    """Read a length, and what must fill as many bytes."""
    inner = Reader(reader.text(MAX_VALUE_BYTES, "parameter"))
    value = read(inner)
    inner.end()
    return value


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """The options of a SETUP (draft 18, section 10.3.1)."""

    path: bytes | None = None
    """Clients only."""
    authority: bytes | None = None
    """Clients only."""
    tokens: tuple[Token, ...] = ()
    max_auth_token_cache_size: int = 0
    """For token aliases; this end has no cache for them, and sends none."""
    implementation: bytes | None = None
    max_request_updates: int = 0
    """Draft 20: unanswered REQUEST_UPDATEs that each request may have; 0 for any number."""


_SETUP = {
    SetupOption.PATH: "path",
    SetupOption.AUTHORIZATION_TOKEN: "tokens",
    SetupOption.MAX_AUTH_TOKEN_CACHE_SIZE: "max_auth_token_cache_size",
    SetupOption.AUTHORITY: "authority",
    SetupOption.MOQT_IMPLEMENTATION: "implementation",
    SetupOption.MAX_REQUEST_UPDATES: "max_request_updates",
}
"""The field by option; others are ignored."""


def _has_option(option: SetupOption, draft: Draft) -> bool:
    return option != SetupOption.MAX_REQUEST_UPDATES or draft.number >= 19


def setup_pairs(options: SetupOptions, draft: Draft) -> list[KeyValue]:
    """Return the options as key-value pairs, leaving out defaults."""
    pairs: list[KeyValue] = [(SetupOption.AUTHORIZATION_TOKEN, token.encode()) for token in options.tokens]
    for kind, name in _SETUP.items():
        value: Any = getattr(options, name)
        if name != "tokens" and value not in (None, 0) and _has_option(kind, draft):
            pairs.append((kind, value))
    return pairs


def setup_options(pairs: tuple[KeyValue, ...], draft: Draft) -> SetupOptions:
    """Return the options from key-value pairs, ignoring unknown ones, or raise SessionFault."""
    found: dict[str, Any] = {}
    for kind, value in pairs:
        name = _SETUP.get(kind)  # type: ignore[call-overload]  # an IntEnum equals its number
        if name is None or not _has_option(SetupOption(kind), draft):
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
    """Raise SessionFault for a wrong PATH or AUTHORITY in a SETUP; only a `client` may send them.

    They are a `path-abempty` with an optional query, and a non-empty host with an optional port (RFC 3986).
    """
    for name, value, pattern, foreign, wrong in (
        ("PATH", options.path, _PATH, SessionCode.INVALID_PATH, SessionCode.MALFORMED_PATH),
        ("AUTHORITY", options.authority, _AUTHORITY, SessionCode.INVALID_AUTHORITY, SessionCode.MALFORMED_AUTHORITY),
    ):
        if value is not None and not client:
            raise SessionFault(f"SETUP from a server carries {name}", foreign)
        if value is not None and not pattern.fullmatch(value):
            raise SessionFault(f"{name} does not fit into a URI", wrong)


assert {field.name for field in fields(Parameters)} == {name for name, _, _ in _KINDS.values()}  # noqa: S101
