"""Sealed assets: their groups and the losses in their catalogs can be read by who has a key, not by stores and relays.

The *asset key* encrypts the payload of each frame, and what of a catalog is no business of a store. It is wrapped with
each key of the publisher's ring, so that each reader needs only its own (`KeyRing`). Assets that begin with the same
group have the same asset key, and what is sealed twice is the same both times: equal prefixes share their groups
(`kvabr.types.naming`). So a store can tell that two groups are equal, as it can by their digests.

Everything is sealed by AES-256-GCM with a nonce made from what is sealed, as synthetic IVs are (RFC 5297): nonce 12 |
ciphertext | tag 16. Keys are wrapped as in RFC 3394.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvabr.types.errors import FormatError, SealedError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_log = logging.getLogger(__name__)

KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
"""Bytes that sealing adds."""
MAX_KEYS = 64
"""Keys in a ring."""
_MAX_RING_BYTES = 64 << 10
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WARNED: set[str] = set()
"""Key rings that others may read, which is said once."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


KeyId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""See `RingKey.id`."""
Mac = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""See `AssetKey.mac`."""
Box = Annotated[str, Meta(max_length=24 << 20)]
"""What is sealed, base64."""
MAX_RUNS = 1 << 16


@dataclass(frozen=True, slots=True)
class Wrap:
    """An asset key, wrapped with a key of a ring."""

    key: KeyId
    """Identifies the key."""
    wrapped: Annotated[str, Meta(pattern=r"^[0-9a-f]{80}\Z")]


Wraps = Annotated[tuple[Wrap, ...], Meta(min_length=1, max_length=MAX_KEYS)]


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed catalog says instead of what is sealed."""

    wraps: Wraps
    box: Box = ""
    """The sealed fields, see `kvabr.types.catalog.Catalog.opened`; empty in a catalog that was put together from the
    spans of a bucket."""
    maker: KeyId | None = None
    """Identifies the key that the asset key was made from. None: of an older asset."""
    runs: Annotated[tuple[Box, ...], Meta(max_length=MAX_RUNS)] = ()
    """What each run of 16 groups loses (`kvabr.types.sealed_runs`); empty: of an older asset."""

    @property
    def made_by(self) -> str:
        """The key that the asset key was made from; of an older asset the first that it was wrapped with."""
        return self.maker or self.wraps[0].key


@dataclass(frozen=True)
class AssetKey:
    """The key of an asset, and how readers get it."""

    secret: bytes = field(repr=False)
    wraps: tuple[Wrap, ...] = field(compare=False)
    maker: str | None = field(default=None, compare=False)
    """See `Seal.maker`."""

    def seal(self, data: bytes | memoryview, bound: bytes) -> bytes:
        """Encrypt; ``bound`` must be the same when it is opened. Equal arguments give equal bytes."""
        mac = hmac.new(self._nonce_key, struct.pack("<Q", len(bound)) + bound, hashlib.sha256)
        mac.update(data)
        nonce = mac.digest()[:_NONCE_BYTES]
        return nonce + self._cipher.encrypt(nonce, data, bound)

    def open(self, sealed: bytes | memoryview, bound: bytes) -> memoryview:
        """Decrypt what `seal` returned; raise a `SealedError` if it was sealed by another key, or changed."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415  # slow to load

        view = memoryview(sealed)
        try:
            return memoryview(self._cipher.decrypt(bytes(view[:_NONCE_BYTES]), view[_NONCE_BYTES:], bound))
        except (InvalidTag, ValueError) as error:
            raise SealedError("it was sealed with another key, or changed since; fetch it again") from error

    def mac(self, data: bytes) -> str:
        """Return what only who has the key can make of some bytes, 32 hex digits: the news of live assets carry it."""
        return hmac.digest(self._news_key, data, "sha256")[:16].hex()

    def check_mac(self, mac: str | None, data: bytes, what: str) -> None:
        """Raise a `SealedError`, about ``what``, unless a `mac` is that of some bytes."""
        if mac is None or not hmac.compare_digest(mac, self.mac(data)):
            raise SealedError(f"{what}: it is not from who sealed this asset; a store or relay has changed it")

    @cached_property
    def _cipher(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  # slow to load

        return AESGCM(self.secret)

    @cached_property
    def _nonce_key(self) -> bytes:
        return hmac.digest(self.secret, b"kvabr.nonce/1", "sha256")

    @cached_property
    def _news_key(self) -> bytes:
        return hmac.digest(self.secret, b"kvabr.news/1", "sha256")

    def __getstate__(self) -> dict[str, object]:
        return {"secret": self.secret, "wraps": self.wraps, "maker": self.maker}  # ciphers cannot be pickled


@dataclass(frozen=True, slots=True)
class RingKey:
    """One key of a ring."""

    name: str
    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """16 hex digits that identify it, and tell nothing about it."""
        return hashlib.sha256(b"kvabr.key/1\0" + self.secret).hexdigest()[:16]

    def line(self) -> str:
        """Return its line in a file."""
        return f"{self.name} {base64.b64encode(self.secret).decode()}"


@dataclass(frozen=True)
class KeyRing:
    """Keys of publishers and readers.

    A publisher makes asset keys from the first, and wraps them with all. A reader opens what any of its keys can.
    """

    keys: tuple[RingKey, ...]

    def __post_init__(self) -> None:
        if not self.keys:
            raise UsageError("a key ring without a key; `kvabr keys new NAME` makes one")
        if len(self.keys) > MAX_KEYS:
            raise UsageError(f"a key ring of {len(self.keys)} keys; at most {MAX_KEYS} are allowed")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> KeyRing:
        """Read a file: a name and 32 bytes in base64 on each line; empty lines and those that begin with # are skipped.

        A file that others on the machine may read is warned of, once.

        Raises:
            UsageError: it cannot be read, or is no key ring; the message says which line is wrong, and shows no key.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                data, found = file.read(_MAX_RING_BYTES + 1), os.fstat(file.fileno())
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            raise UsageError(f"{path}: cannot read the key ring ({getattr(error, 'strerror', error)})") from error
        if len(data) > _MAX_RING_BYTES:
            raise UsageError(f"{path}: more than {_MAX_RING_BYTES} bytes; is this a key ring?")
        keys = []
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, _, text = line.strip().partition(" ")
            try:
                secret = base64.b64decode(text.strip(), validate=True)
            except ValueError:
                secret = b""
            if not _NAME.fullmatch(name) or len(secret) != KEY_BYTES:
                raise UsageError(
                    f"{path}:{number}: not a name and {KEY_BYTES} bytes in base64; `kvabr keys new NAME` makes a line"
                )
            keys.append(RingKey(name, secret))
        try:
            ring = cls(tuple(keys))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        if stat.S_ISREG(found.st_mode) and found.st_mode & _OTHERS and str(path) not in _WARNED:
            _WARNED.add(str(path))
            _log.warning("kvabr: %s: others on this machine may read this key ring; run: chmod go= %s", path, path)
        return ring

    @property
    def ring(self) -> KeyRing:
        """Itself; see `KeyFile.ring`."""
        return self

    def asset_key(self, first_chunk: str, profile: str = "") -> AssetKey:
        """Return the key of the assets that begin with a group, whose chained prompt digest is given.

        ``profile`` is the digest of their codec profile, if they have one: with another, frames are other numbers.
        """
        what = b"kvabr.asset/1\0" + first_chunk.encode() + b"\0" + profile.encode()
        secret = hmac.digest(self.keys[0].secret, what, "sha256")
        return self.wrapped(AssetKey(secret, (), self.keys[0].id))

    def wrapped(self, asset: AssetKey) -> AssetKey:
        """Return an asset key for the readers who have a key of this ring, and for no others."""
        from cryptography.hazmat.primitives.keywrap import aes_key_wrap  # noqa: PLC0415  # slow to load

        wraps = tuple(Wrap(key.id, aes_key_wrap(key.secret, asset.secret).hex()) for key in self.keys)
        return replace(asset, wraps=wraps)

    def unwrap(self, wraps: Sequence[Wrap], maker: str | None = None) -> AssetKey:
        """Return an asset key; raise a `SealedError` if it is wrapped with none of these keys."""
        from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap  # noqa: PLC0415  # as above

        ours = {key.id: key for key in self.keys}
        for wrap in wraps:
            if (key := ours.get(wrap.key)) is not None:
                try:
                    return AssetKey(aes_key_unwrap(key.secret, bytes.fromhex(wrap.wrapped)), tuple(wraps), maker)
                except InvalidUnwrap as error:
                    raise SealedError(f"its key is damaged where it is wrapped for {key.name}") from error
        raise SealedError(f"it is sealed for the keys {ids(wraps)}, and this ring has {ids(self.keys)}")


class KeyFile:
    """The key ring in a file, which is read again when it has changed: keys are rotated under running processes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the file; raises as `KeyRing.read`."""
        self._path = Path(path)
        self._seen, self._ring = self._version(), KeyRing.read(path)

    @property
    def ring(self) -> KeyRing:
        """The ring as it is now, or as it was before the file became unreadable."""
        if (version := self._version()) != self._seen:
            try:
                self._seen, self._ring = version, KeyRing.read(self._path)
            except UsageError as error:
                self._seen = version
                _log.warning("kvabr: %s; the keys that were read before stay in use", error)
        return self._ring

    def _version(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except (OSError, ValueError):
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


Keys = KeyRing | KeyFile


def read_keys(keys: str | os.PathLike[str] | Keys | None) -> Keys | None:
    """Return keys that are given as such, or as the file that has them; raises as `KeyRing.read`."""
    return keys if keys is None or isinstance(keys, KeyRing | KeyFile) else KeyFile(keys)


def new_key(name: str) -> RingKey:
    """Return a new random key; raise a `UsageError` unless its name is one."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"key {name[:80]!r}: a name has 1 to 64 letters, digits, dots, dashes and underscores")
    return RingKey(name, secrets.token_bytes(KEY_BYTES))


def ids(keys: Sequence[Wrap | RingKey]) -> str:
    """Return which keys these are, for a message."""
    named = [each.key if isinstance(each, Wrap) else f"{each.id} ({each.name})" for each in keys]
    return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")


def boxed(key: AssetKey, text: str, bound: bytes) -> str:
    """Return text, packed and sealed, as a `Seal` has it; see `AssetKey.seal`."""
    return base64.b64encode(key.seal(zlib.compress(text.encode()), bound)).decode()


def unboxed(key: AssetKey, box: str, bound: bytes, limit: int) -> bytes:
    """Return the text in a box, at most its first ``limit`` bytes.

    Raises:
        SealedError: see `AssetKey.open`.
        FormatError: it is no box.
    """
    try:
        return zlib.decompressobj().decompress(key.open(base64.b64decode(box, validate=True), bound), limit)
    except (zlib.error, ValueError) as error:
        raise FormatError(f"what is sealed is damaged ({error})") from error
