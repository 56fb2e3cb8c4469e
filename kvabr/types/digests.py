"""Digests of groups: SHA-256, or BLAKE3 at less than half the CPU time.

A SHA-256 is written as 64 hex digits, a BLAKE3 as ``b3-`` and 64 hex digits. All groups of an asset have the same kind.
Names of prompts, specs, profiles and catalogs are always SHA-256. BLAKE3 needs the package ``blake3`` (extra ``fast``);
without it, catalogs with BLAKE3 are rejected.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache

from kvabr.types.errors import FormatError, UsageError, did_you_mean
from kvabr.types.installing import WHERE, extra

SHA256 = "sha256"
BLAKE3 = "blake3"
KINDS = (SHA256, BLAKE3)
RAW_BYTES = 32
TITLES = {SHA256: "SHA-256", BLAKE3: "BLAKE3"}
_MARKS = {SHA256: "", BLAKE3: "b3-"}
DIGEST = r"(?:b3-)?[0-9a-f]{64}"
_DIGEST = re.compile(DIGEST)

Buffer = bytes | bytearray | memoryview


def is_digest(text: object) -> bool:
    """Return True if ``text`` is a digest of any kind."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def kind_of(digest: str) -> str:
    """Return the kind of a digest; other text counts as SHA-256."""
    return BLAKE3 if digest.startswith(_MARKS[BLAKE3]) else SHA256


def digest_of(data: Buffer, kind: str = SHA256) -> str:
    """Return the digest of a contiguous buffer; raise `FormatError` if this kind cannot be computed here."""
    return _MARKS[kind] + _hasher(kind)(data)


def has_digest(digest: str, data: Buffer) -> bool:
    """Return True if ``digest``, which may be any text, is that of ``data``; errors as for `digest_of`."""
    return digest_of(data, kind_of(digest)) == digest


def raw(digest: str) -> bytes:
    """Return a digest's 32 bytes; raise `FormatError` for other text."""
    if not is_digest(digest):
        raise FormatError(f"a group's digest must have 64 hex digits, optionally after b3-, got {str(digest)[:80]!r}")
    return bytes.fromhex(digest[-2 * RAW_BYTES :])


def from_raw(data: bytes, kind: str = SHA256) -> str:
    """Return the digest of a kind with these 32 bytes."""
    return _MARKS[kind] + data.hex()


def unknown(kind: str = SHA256) -> str:
    """Return the placeholder for an unknown digest of a kind."""
    return from_raw(bytes(RAW_BYTES), kind)


def require(kind: str) -> None:
    """Raise `FormatError` with the installation command if this kind cannot be computed here."""
    _hasher(kind)


def check_kind(kind: str) -> str:
    """Return ``kind`` for a publisher; raise `UsageError` if it does not exist or its package is not installed."""
    if kind not in KINDS:
        raise UsageError(
            f"unknown kind of digest {kind!r}{did_you_mean(kind, KINDS)}; choose from {' and '.join(KINDS)}"
        )
    try:
        require(kind)
    except FormatError as error:
        raise UsageError(str(error)) from error
    return kind


@cache
def _hasher(kind: str) -> Callable[[Buffer], str]:
    if kind == SHA256:
        return _sha256
    try:
        from blake3 import blake3  # noqa: PLC0415  # optional
    except ImportError as error:
        raise FormatError(
            f"BLAKE3 digests need the package blake3, which is not installed: {extra('fast')} ({WHERE})"
        ) from error

    def hashed(data: Buffer) -> str:
        return str(blake3(data).hexdigest())

    return hashed


def _sha256(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()
