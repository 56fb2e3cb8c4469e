"""Tokens, and the assets that each may read.

The file of ``kvabr serve --grants``::

    {"schema": "kvabr.grants/1",
     "grants": [{"name": "team-a", "id": "team-a.2", "token_sha256": "<64 hex digits>", "assets": ["team-a/*"],
                 "models": ["*"], "expires": "2027-01-31T12:00:00Z"}]}

``models``, ``id`` and ``expires`` are optional. ``id`` identifies the token in logs and metrics (default: the name);
successive tokens of one holder have the same name and different IDs. ``expires`` is a time with its zone (RFC 3339) or
seconds since 1970.

One round of SHA-256 is enough, since tokens of `new_token` have 256 random bits; a password could be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec import Meta

from kvabr.store.files import read_bytes
from kvabr.types.errors import FormatError
from kvabr.types.records import decode, read_schema

SCHEMA = "kvabr.grants/1"

_MAX_FILE_BYTES = 16 << 20
_MAX_GRANTS = 10_000
_MAX_PATTERNS = 1000
_MAX_PATTERN = 1024
_MAX_EXPIRES_S = 253_402_300_799.0
_Patterns = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=_MAX_PATTERN)], ...], Meta(max_length=_MAX_PATTERNS)
]
_HEX = re.compile(r"[0-9a-f]{64}")
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Grant:
    """The assets that one token may read."""

    name: str
    assets: tuple[str, ...] = ("*",)
    """Shell patterns of asset names: ``STORE/DIGEST``, or ``DIGEST`` alone; ``*`` also matches slashes."""
    models: tuple[str, ...] = ("*",)
    """Shell patterns of model names. An asset must match one pattern of each kind."""
    token_sha256: str = field(default="", repr=False)
    """SHA-256 of the token, in hex. Identifies the grant: if its patterns change, they apply to open connections."""
    token_id: str = ""
    """ID of the token; empty: the name."""
    expires_s: float | None = None
    """Expiry in seconds since 1970; None: never."""

    @property
    def id(self) -> str:
        """The token's ID in logs and metrics."""
        return self.token_id or self.name

    def expired(self, now_s: float) -> bool:
        """Return True if the token has expired at ``now_s`` (seconds since 1970)."""
        return self.expires_s is not None and now_s >= self.expires_s

    def may_read(self, folder: str, model: str) -> bool:
        """Return True if the token may read an asset named ``folder`` of ``model``."""
        return any(fnmatchcase(folder, pattern) for pattern in self.assets) and any(
            fnmatchcase(model, pattern) for pattern in self.models
        )


EVERYTHING = Grant("everyone")
"""The grant of every client on a server without tokens."""


class Grants:
    """All tokens of an origin."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        """Raise `FormatError` for a duplicate ID or token, or a missing token."""
        self._grants = tuple(grants)
        taken: set[str] = set()
        for grant in self._grants:
            mine = {f"id {grant.id}", grant.token_sha256}
            if not taken.isdisjoint(mine):
                raise FormatError(
                    f"grants: {grant.id!r}: another grant already has this ID or token; give tokens of the same name "
                    "different ids"
                )
            if not _HEX.fullmatch(grant.token_sha256) or grant.token_sha256 == _EMPTY:
                raise FormatError(
                    f"grants: {grant.name!r}: token_sha256 must be the 64 hex digits of a token's SHA-256; "
                    "make a token with: kvabr serve --new-token"
                )
            taken |= mine
        self._digests = tuple(bytes.fromhex(grant.token_sha256) for grant in self._grants)
        self._by_digest = {grant.token_sha256: grant for grant in self._grants}

    def __iter__(self) -> Iterator[Grant]:
        return iter(self._grants)

    def __len__(self) -> int:
        return len(self._grants)

    def check(self, token: bytes | None) -> Grant | None:
        """Return a token's grant, which may have expired, or None.

        Compares every entry in constant time, so that timing reveals nothing.
        """
        digest = hashlib.sha256(token or b"").digest()
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return self._grants[same.index(True)] if any(same) else None

    def renewed(self, grant: Grant) -> Grant | None:
        """Return the current grant of the same token; None if withdrawn."""
        return self._by_digest.get(grant.token_sha256)

    @classmethod
    def from_file(cls, path: Path) -> Grants:
        """Read a file of grants; raise `AssetError` if unreadable, `FormatError` if invalid."""
        try:
            return cls.loads(read_bytes(path, _MAX_FILE_BYTES, unfit=FormatError))
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error

    @classmethod
    def loads(cls, text: str | bytes) -> Grants:
        """Parse the file's JSON; raise `FormatError` if invalid."""
        data = text.encode() if isinstance(text, str) else text
        read_schema(data, "grants file", SCHEMA)
        return cls(map(_grant, decode(data, _File, "grants file").grants))


def new_token(name: str = "name-me", days: float | None = None) -> tuple[str, dict[str, object]]:
    """Return a new random token, valid for ``days`` (None: forever), and its entry for the file of grants."""
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    entry: dict[str, object] = {"name": name, "id": f"{name}.{secrets.token_hex(4)}", "token_sha256": digest}
    entry |= {"assets": ["*"], "models": ["*"]}
    if days is not None:
        expires = datetime.now(UTC) + timedelta(days=days)
        entry["expires"] = expires.isoformat(timespec="seconds").replace("+00:00", "Z")
    return token, entry


def token_in_path(path: bytes | None) -> bytes | None:
    """Return the token in a URL's query, ``?token=...``, or None; for clients that cannot send it otherwise."""
    try:
        found = parse_qs(urlsplit((path or b"").decode()).query, max_num_fields=64).get("token")
    except ValueError:  # too many fields, not Unicode, or not a URL
        return None
    return found[0].encode() if found else None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file. Unknown fields are refused: a misspelt "assets" must not allow everything."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    token_sha256: str
    assets: _Patterns
    models: _Patterns = ("*",)
    id: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    expires: Annotated[datetime, Meta(tz=True)] | Annotated[float, Meta(ge=0, le=_MAX_EXPIRES_S)] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    grants: Annotated[list[_Entry], Meta(max_length=_MAX_GRANTS)]


def _grant(entry: _Entry) -> Grant:
    expires, token_id = entry.expires, entry.id or ""
    if not (entry.name + token_id).isprintable():
        raise FormatError(f"grants: {entry.name!r} {token_id!r}: a name or an ID must have only printable characters")
    expires_s = expires.timestamp() if isinstance(expires, datetime) else expires
    return Grant(entry.name, entry.assets, entry.models, entry.token_sha256.lower(), token_id, expires_s)
