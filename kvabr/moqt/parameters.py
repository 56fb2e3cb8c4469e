"""Message parameters, setup options, authorization tokens and subscription filters.

Draft 18 gives each message parameter its own encoding (section 10.2); draft 16 encodes them as key-value pairs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvabr.moqt.codes import Param, SessionCode, SessionFault, SetupOption
from kvabr.moqt.wire import (
    MAX_VALUE_BYTES,
    Draft,
    KeyValue,
    Location,
    Reader,
    Varint,
    malformed,
    write_location,
    write_namespace,
    write_text,
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
        """Parse the Token structure, or raise SessionFault."""
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


NEXT_GROUP, LARGEST_OBJECT, ABSOLUTE_START, ABSOLUTE_RANGE = 1, 2, 3, 4
"""Filter types (draft 18, section 5.1.2)."""


def _check_filter(data: bytes, draft: Draft) -> None:
    """Raise SessionFault unless the bytes are a Subscription Filter structure; nothing depends on its content."""
    reader = Reader(data, draft.varint)
    kind = reader.varint()
    if kind not in (NEXT_GROUP, LARGEST_OBJECT, ABSOLUTE_START, ABSOLUTE_RANGE):
        raise SessionFault(f"unknown subscription filter type {kind}")
    if kind in (ABSOLUTE_START, ABSOLUTE_RANGE):
        start = reader.location()
        if kind == ABSOLUTE_RANGE:
            end = reader.varint() + (start.group if draft.number >= 18 else 0)
            if not start.group <= end < 1 << 64:
                raise SessionFault(f"subscription filter from group {start.group} to {end}")
    reader.end()


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
    filter: bytes | None = None
    """A Subscription Filter structure."""
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
    return frozenset(
        param
        for param, (name, _, _) in _KINDS.items()
        if parameters and getattr(parameters, name) != getattr(_NONE, name)
    )


def known_parameters(draft: Draft) -> frozenset[Param]:
    """Return the message parameters that a draft defines."""
    return frozenset(param for param, (_, _, since) in _KINDS.items() if draft.number >= since)


def write_parameters(parameters: Parameters, draft: Draft) -> bytes:
    """Encode the count and the parameters in ascending order of type; ValueError if the draft cannot have one."""
    varint = draft.varint
    out, count, before = b"", 0, 0
    for param in sorted(present(parameters)):
        name, kind, since = _KINDS[param]
        value: Any = getattr(parameters, name)
        if draft.number < since:
            raise ValueError(f"draft {draft.number} has no parameter {param.name}")
        if not _in_range(param, value, draft):
            raise ValueError(f"{param.name} cannot be {value}")
        for one in value if kind == "token" else (value,):
            out += varint.encode(param - before) + _write_value(one, kind, draft)
            before = param
            count += 1
    return varint.encode(count) + out


def _write_value(value: Any, kind: _Encoding, draft: Draft) -> bytes:
    varint = draft.varint
    match kind:
        case "token":
            return write_text(varint, value.encode(varint))
        case "filter":
            return write_text(varint, value)
        case "location":
            location = write_location(varint, value)
            return location if draft.number >= 18 else write_text(varint, location)
        case "namespace":
            return write_namespace(varint, value)
        case "u8" if draft.number >= 18:
            return bytes([value])
    return varint.encode(value)


def read_parameters(reader: Reader, draft: Draft, allowed: frozenset[Param]) -> Parameters:
    """Parse the parameters of a message, or raise SessionFault.

    Those that the message is not `allowed` to carry are a fault in draft 18, and ignored in draft 16.
    """
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
            if draft.number >= 18:
                raise SessionFault(f"parameter {param.name} in a message that cannot have it")
            continue
        if not _in_range(param, value, draft):
            raise SessionFault(f"parameter {param.name} has the invalid value {value}")
        if kind == "token":
            found[name] = _with_token(found.get(name, ()), value)
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
            return Token.decode(reader.text(MAX_VALUE_BYTES, "parameter"), draft.varint)
        case "filter":
            value = reader.text(MAX_VALUE_BYTES, "parameter")
            _check_filter(value, draft)
            return value
        case "location" if draft.number < 18:
            inner = Reader(reader.text(MAX_VALUE_BYTES, "parameter"), draft.varint)
            try:
                location = inner.location()
                inner.end()
            except SessionFault as fault:
                raise malformed(f"malformed location: {fault}") from fault
            return location
        case "location":
            return reader.location()
        case "namespace":
            return reader.namespace()
        case "u8" if draft.number >= 18:
            return reader.u8()
    return reader.varint()


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
"""The field by option; others are ignored."""


def setup_pairs(options: SetupOptions, draft: Draft) -> list[KeyValue]:
    """Return the options as key-value pairs, leaving out defaults."""
    pairs: list[KeyValue] = [(SetupOption.AUTHORIZATION_TOKEN, token.encode(draft.varint)) for token in options.tokens]
    for kind, name in _SETUP.items():
        value: Any = getattr(options, name)
        if name != "tokens" and value not in (None, 0) and (kind != SetupOption.MAX_REQUEST_ID or draft.number < 17):
            pairs.append((kind, value))
    return pairs


def setup_options(pairs: tuple[KeyValue, ...], draft: Draft) -> SetupOptions:
    """Return the options from key-value pairs, ignoring unknown ones, or raise SessionFault."""
    found: dict[str, Any] = {}
    for kind, value in pairs:
        name = _SETUP.get(kind)  # type: ignore[call-overload]  # an IntEnum equals its number
        if name is None or (kind == SetupOption.MAX_REQUEST_ID and draft.number >= 17):
            continue
        if name == "tokens":
            assert isinstance(value, bytes)  # noqa: S101  # odd types have bytes
            found[name] = _with_token(found.get(name, ()), Token.decode(value, draft.varint))
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
