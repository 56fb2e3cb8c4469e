"""Who may read what: tokens, and the assets that each opens.

The file of ``kvabr serve --grants``::

    {"schema": "kvabr.grants/1",
     "grants": [{"name": "team-a", "id": "team-a.2", "token_sha256": "<64 hex digits>", "assets": ["team-a/*"],
                 "models": ["*"], "expires": "2027-01-31T12:00:00Z"}]}

``models``, ``id`` and ``expires`` may be left out. ``id`` stands for the token in logs and metrics, by default the name
does; two tokens of one holder, of which one replaces the other, have the same name and different IDs. ``expires`` is a
time with its zone (RFC 3339) or seconds since 1970.

One round of SHA-256 suffices because `new_token` makes tokens of 256 random bits; words of a person would be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kvabr.store.files import read_bytes
from kvabr.types.errors import FormatError

SCHEMA = "kvabr.grants/1"

_MAX_FILE_BYTES = 16 << 20
_MAX_GRANTS = 10_000
_MAX_PATTERNS = 1000
_MAX_PATTERN = 1024
_MAX_EXPIRES_S = 253_402_300_799.0
"""The end of the year 9999, seconds since 1970."""
_HEX = re.compile(r"[0-9a-f]{64}")
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Grant:
    """What the holder of one token may read."""

    name: str
    """For logs."""
    assets: tuple[str, ...] = ("*",)
    """Patterns, as of a shell, of asset names: ``STORE/DIGEST``, or ``DIGEST`` alone; ``*`` also matches slashes."""
    models: tuple[str, ...] = ("*",)
    """Patterns of the model's name. An asset must match one of each."""
    token_sha256: str = field(default="", repr=False)
    """Hex. It is what makes two grants the same: a grant whose patterns change opens something else at once."""
    token_id: str = ""
    """Stands for the token in logs and metrics; empty: the name does."""
    expires_s: float | None = None
    """When the token expires, seconds since 1970; None: never."""

    @property
    def id(self) -> str:
        """What stands for the token in logs and metrics."""
        return self.token_id or self.name

    def expired(self, now_s: float) -> bool:
        """Return whether the token has expired at a time, seconds since 1970."""
        return self.expires_s is not None and now_s >= self.expires_s

    def may_read(self, folder: str, model: str) -> bool:
        """Whether it opens the asset in ``folder`` of ``model``."""
        return any(fnmatchcase(folder, pattern) for pattern in self.assets) and any(
            fnmatchcase(model, pattern) for pattern in self.models
        )


EVERYTHING = Grant("everyone")
"""What everyone may read where no tokens are configured."""


class Grants:
    """All tokens of an origin."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        """Take them over; `FormatError` if an ID or a token is there twice, or a token is missing."""
        self._grants = tuple(grants)
        taken: set[str] = set()
        for grant in self._grants:
            mine = {f"id {grant.id}", grant.token_sha256}
            if not taken.isdisjoint(mine):
                raise FormatError(
                    f"grants: {grant.id!r}: an ID or a token that another grant has already; tokens of one name need "
                    'an "id" each'
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
        """The grant of a token, which may have expired; None if it has none.

        Every entry is compared, each in constant time, so the time taken says nothing of the tokens there are.
        """
        digest = hashlib.sha256(token or b"").digest()
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return self._grants[same.index(True)] if any(same) else None

    def renewed(self, grant: Grant) -> Grant | None:
        """Return what the token of an earlier grant opens now; None if it was withdrawn."""
        return self._by_digest.get(grant.token_sha256)

    @classmethod
    def from_file(cls, path: Path) -> Grants:
        """Read a file of grants; `AssetError` if it cannot be read, `FormatError` says what is wrong with it."""
        try:
            return cls.loads(read_bytes(path, _MAX_FILE_BYTES, unfit=FormatError))
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error

    @classmethod
    def loads(cls, text: str | bytes) -> Grants:
        """Read the JSON of the file; raise `FormatError` if it is not such JSON."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"grants: not JSON ({error})") from error
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise FormatError(f'grants: the file must be an object with "schema": "{SCHEMA}"')
        if unknown := value.keys() - {"schema", "grants"}:
            raise FormatError(f"grants: the file has unknown fields: {', '.join(sorted(unknown))}")
        entries = value.get("grants")
        if not isinstance(entries, list) or len(entries) > _MAX_GRANTS:
            raise FormatError(f'grants: "grants" must be a list of at most {_MAX_GRANTS}')
        return cls(_grant(entry, index) for index, entry in enumerate(entries))


def new_token(name: str = "name-me", days: float | None = None) -> tuple[str, dict[str, object]]:
    """A fresh random token, and the entry for the file of grants that lets it read everything.

    Args:
        name: who gets it.
        days: when it expires, days from now; None: never.
    """
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    entry: dict[str, object] = {"name": name, "id": f"{name}.{secrets.token_hex(4)}", "token_sha256": digest}
    entry |= {"assets": ["*"], "models": ["*"]}
    if days is not None:
        expires = datetime.now(UTC) + timedelta(days=days)
        entry["expires"] = expires.isoformat(timespec="seconds").replace("+00:00", "Z")
    return token, entry


def token_in_path(path: bytes | None) -> bytes | None:
    """Return the token in a URL's path and query, ``?token=...``, for peers without another place; None without one."""
    try:
        found = parse_qs(urlsplit((path or b"").decode()).query, max_num_fields=64).get("token")
    except ValueError:  # too many fields, no Unicode, or no URL
        return None
    return found[0].encode() if found else None


def _grant(entry: object, index: int) -> Grant:
    where = f"grants: entry {index}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where} is not an object")
    unknown = set(entry) - {"name", "id", "token_sha256", "assets", "models", "expires"}
    if unknown:
        # A misspelt "assets" must not quietly open everything.
        raise FormatError(f"{where} has unknown fields: {', '.join(sorted(map(str, unknown)))}")
    name, token_id, digest = entry.get("name"), entry.get("id"), entry.get("token_sha256")
    if not isinstance(name, str) or not 0 < len(name) <= 256 or not name.isprintable():
        raise FormatError(f'{where} needs a "name" of 1 to 256 printable characters')
    if "id" in entry and not (isinstance(token_id, str) and 0 < len(token_id) <= 64 and token_id.isprintable()):
        raise FormatError(f'{where} ({name}): "id" must have 1 to 64 printable characters')
    if not isinstance(digest, str):
        raise FormatError(f'{where} ({name}) needs a "token_sha256"; make a token with: kvabr serve --new-token')
    if "assets" not in entry:
        raise FormatError(f'{where} ({name}) needs "assets", a list of patterns; ["*"] opens everything')
    return Grant(
        name,
        _patterns(entry["assets"], f"{where} ({name}): assets"),
        _patterns(entry.get("models", ["*"]), f"{where} ({name}): models"),
        digest.lower(),
        token_id or "",
        _expires(entry.get("expires"), f"{where} ({name}): expires"),
    )


def _expires(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.tzinfo is not None:
            return moment.timestamp()
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_EXPIRES_S:
        return float(value)
    raise FormatError(f'{where} must be a time with its zone, as "2027-01-31T12:00:00Z", or seconds since 1970')


def _patterns(value: object, where: str) -> tuple[str, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_PATTERNS
        or not all(isinstance(item, str) and 0 < len(item) <= _MAX_PATTERN for item in value)
    ):
        raise FormatError(f"{where} must be a list of at most {_MAX_PATTERNS} patterns")
    return tuple(value)
