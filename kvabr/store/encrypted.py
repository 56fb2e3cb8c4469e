"""Encryption at rest: a store that encrypts the objects of another store. See `docs/design/store.md`.

An object is a header, then segments of 64 KiB with a tag each, so that ranges can be read:

    "KVEN" | version (1 byte) | key id (4 bytes) | nonce prefix (7 bytes) | segments

Segment ``n`` is encrypted with AES-256-GCM and the nonce ``prefix | n (4 bytes) | last (1 byte)``, the STREAM
construction (Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO 2015), so segments cannot be moved, dropped or truncated.
Each segment also authenticates the object's name.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvabr.store.buffers import GROUPS
from kvabr.store.files import read_bytes
from kvabr.store.store import PART_BYTES, Store, StoredObject
from kvabr.types.errors import RequestError, UsageError

KEY_BYTES = 32
SEGMENT_BYTES = 64 << 10
_MAGIC = b"KVEN\x01"
_ID_BYTES, _PREFIX_BYTES, _TAG_BYTES = 4, 7, 16
_HEADER_BYTES = len(_MAGIC) + _ID_BYTES + _PREFIX_BYTES
_SEALED_BYTES = SEGMENT_BYTES + _TAG_BYTES
_HINT = "give the key that the store was written with (KVABR_STORE_KEY_FILE)"


class WrongKeyError(RequestError):
    """An object was encrypted with another key, was changed, or is not encrypted."""


class EncryptedStore(Store):
    """Encrypts and decrypts the objects of a store."""

    def __init__(self, store: Store, key: bytes, previous: bytes | None = None) -> None:
        """Encrypt with a 32-byte ``key`` (`read_key`), else raise `UsageError`; ``previous`` is for decryption only."""
        self.store, self.url, self.immediate = store, store.url, store.immediate
        self._keys: dict[bytes, AESGCM] = {}
        for each in (key, *(() if previous is None else (previous,))):
            if len(each) != KEY_BYTES:
                raise UsageError(f"the key of a store must have {KEY_BYTES} bytes, got {len(each)}; {_HINT}")
            self._keys[_id_of(each)] = AESGCM(each)
        self._id = _id_of(key)

    async def get(
        self, name: str, first: int = 0, last: int | None = None, *, limit: int, wait_s: float | None = None
    ) -> memoryview:
        """Like `Store.get`; raise `WrongKeyError` for a segment that was not written under this name and key."""
        begin = first // SEGMENT_BYTES
        if last is None:
            most = _sealed_size(first + limit + 1)
            data = await self.store.get(name, limit=most, wait_s=wait_s)
            plain = self._opened(name, data[:_HEADER_BYTES], data[_HEADER_BYTES:], 0, ends=True)[first:]
            self.check_size(name, len(plain), limit)
            return plain
        if last <= first:
            return memoryview(b"")
        # Also read one byte of the next segment, which shows if the last requested segment ends the object.
        end = -(-last // SEGMENT_BYTES)
        where = _HEADER_BYTES + begin * _SEALED_BYTES, _HEADER_BYTES + end * _SEALED_BYTES + 1
        if begin:
            head = await self.store.get(name, 0, _HEADER_BYTES, limit=_HEADER_BYTES, wait_s=wait_s)
            data = await self.store.get(name, *where, limit=where[1] - where[0], wait_s=wait_s)
            if not data:  # beyond the end
                return data
        else:
            data = await self.store.get(name, 0, where[1], limit=where[1], wait_s=wait_s)
            head, data = data[:_HEADER_BYTES], data[_HEADER_BYTES:]
        whole = (end - begin) * _SEALED_BYTES
        plain = self._opened(name, head, data[:whole], begin, ends=len(data) <= whole)
        return plain[first - begin * SEGMENT_BYTES : last - begin * SEGMENT_BYTES]

    async def stream(
        self, name: str, first: int, last: int, *, part_bytes: int = PART_BYTES
    ) -> AsyncGenerator[memoryview, None]:
        step = max(1, part_bytes // SEGMENT_BYTES) * SEGMENT_BYTES * 16
        while first < last:
            end = min(last, first - first % SEGMENT_BYTES + step)
            yield await self.get(name, first, end, limit=end - first)
            first = end

    async def put_new(self, name: str, data: bytes | memoryview) -> bool:
        prefix, view = os.urandom(_PREFIX_BYTES), memoryview(data)
        key, sealed = self._keys[self._id], [_MAGIC + self._id + prefix]
        count = max(1, -(-len(view) // SEGMENT_BYTES))
        for number in range(count):
            part = view[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES]
            sealed.append(key.encrypt(_nonce(prefix, number, last=number == count - 1), part, name.encode()))
        return await self.store.put_new(name, b"".join(sealed))

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Like `Store.list`; sizes are those of the decrypted objects."""
        async for found in self.store.list(prefix):
            yield StoredObject(found.name, _plain_size(found.size), found.modified_s)

    async def delete(self, names: Collection[str]) -> None:
        await self.store.delete(names)

    async def check_writable(self) -> None:
        await self.store.check_writable()

    def close(self) -> None:
        self.store.close()

    def where(self, name: str) -> str:
        return self.store.where(name)

    def _opened(self, name: str, head: memoryview, data: memoryview, begin: int, *, ends: bool) -> memoryview:
        if len(head) < _HEADER_BYTES or bytes(head[: len(_MAGIC)]) != _MAGIC:
            raise WrongKeyError(f"{self.where(name)}: is not encrypted, or is damaged; open the store without a key")
        key_id = bytes(head[len(_MAGIC) : len(_MAGIC) + _ID_BYTES])
        key, prefix = self._keys.get(key_id), bytes(head[len(_MAGIC) + _ID_BYTES :])
        if key is None:
            raise WrongKeyError(f"{self.where(name)}: was encrypted with another key; {_HINT}")
        count = max(1, -(-len(data) // _SEALED_BYTES))
        plain, end = GROUPS.take(max(0, len(data) - count * _TAG_BYTES)), 0
        for number in range(count):
            last, segment = ends and number == count - 1, data[number * _SEALED_BYTES : (number + 1) * _SEALED_BYTES]
            target = plain[end : end + max(0, len(segment) - _TAG_BYTES)]
            try:
                key.decrypt_into(_nonce(prefix, begin + number, last=last), segment, name.encode(), target)
            except InvalidTag as error:
                what = "is damaged or truncated, or belongs under another name"
                raise WrongKeyError(f"{self.where(name)}: {what}") from error
            end += len(target)
        return plain.toreadonly()


def read_key(path: Path) -> bytes:
    """Return the key in a file: 32 bytes, or these in base64 or hex digits; raise `UsageError` for other contents."""
    data = read_bytes(path, 1024, unreadable=UsageError)
    text = data.strip()
    if len(data) == KEY_BYTES:
        return data
    for decode in (bytes.fromhex, lambda written: base64.b64decode(written, validate=True)):
        try:
            key: bytes = decode(text.decode("ascii"))
        except ValueError:
            continue
        if len(key) == KEY_BYTES:
            return key
    raise UsageError(
        f"key file {path}: must have {KEY_BYTES} bytes, or their hex digits; "
        f"make one with: openssl rand -hex 32 > {path}"
    )


def _id_of(key: bytes) -> bytes:
    return hashlib.sha256(b"kvabr.store-key/1\0" + key).digest()[:_ID_BYTES]


def _nonce(prefix: bytes, number: int, *, last: bool) -> bytes:
    return prefix + number.to_bytes(4, "big") + bytes([last])


def _sealed_size(size: int) -> int:
    return _HEADER_BYTES + size + max(1, -(-size // SEGMENT_BYTES)) * _TAG_BYTES


def _plain_size(size: int) -> int:
    body = size - _HEADER_BYTES
    return max(0, body - max(1, -(-body // _SEALED_BYTES)) * _TAG_BYTES)
