"""The options of a SETUP message (draft 18, section 10.3.1), and their checks; unknown options are ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvabr.moqt.codes import SessionCode, SessionFault, SetupOption
from kvabr.moqt.wire import KeyValue, Token, with_token


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """The options of a SETUP (draft 18, section 10.3.1)."""

    path: bytes | None = None
    """PATH; sent only by clients."""
    authority: bytes | None = None
    """AUTHORITY; sent only by clients."""
    tokens: tuple[Token, ...] = ()
    max_auth_token_cache_size: int = 0
    """Bytes for token aliases. This end has no cache for aliases, so it does not send the option."""
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
            found[name] = with_token(found.get(name, ()), Token.decode(value))
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
