"""vLLM's block hashes (``vllm.v1.core.kv_cache_utils``).

A block's hash covers the previous block's hash, its tokens, and extra keys (absent for plain text). For the first
block, the previous hash is that of a seed: PYTHONHASHSEED, or a default. ``sha256`` hashes a Python pickle;
``sha256_cbor`` hashes canonical CBOR (RFC 8949).
"""

from __future__ import annotations

import hashlib
import os
import pickle  # vLLM hashes pickles; kvabr never loads one
import struct
from collections.abc import Callable, Sequence

from kvabr.types.errors import UsageError

DEFAULT_SEED = "vllm-none-hash"
_HASH_BYTES = 8
_INLINE_LIMIT, _BYTE, _WORD, _LONG = 24, 1 << 8, 1 << 16, 1 << 32
_TEXT, _BYTES, _INTEGER, _ARRAY, _NULL = 0x60, 0x40, 0x00, 0x80, b"\xf6"
"""Major types and null of CBOR."""


class BlockHashes:
    """Computes the hashes of a prompt's blocks."""

    def __init__(self, block: int = 16, algorithm: str = "sha256", seed: str | None = None) -> None:
        """Raise `UsageError` if ``block``, in tokens, is not 1 to 65,536.

        The default ``seed`` is PYTHONHASHSEED if set, else vLLM's default.
        """
        if algorithm not in ALGORITHMS:
            raise UsageError(f"block hashes: algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        if not 1 <= block <= 1 << 16:
            raise UsageError(
                f"block size must be 1 to 65536 tokens, got {block}; use your engines' value (vLLM: --block-size)"
            )
        self.block = block
        self._serialise = ALGORITHMS[algorithm]
        text = os.environ.get("PYTHONHASHSEED", DEFAULT_SEED) if seed is None else seed
        self._none = self._hash(text)

    def full(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the 32-byte hash of each whole block."""
        found, parent, block = [], self._none, self.block
        for first in range(0, len(tokens) - block + 1, block):
            parent = self._hash((parent, tuple(tokens[first : first + block]), None))
            found.append(parent)
        return found

    def numbers(self, tokens: Sequence[int]) -> list[int]:
        """Return the last 64 bits of each hash, as in events by default (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)."""
        return [int.from_bytes(one[-_HASH_BYTES:], "big") for one in self.full(tokens)]

    def _hash(self, value: object) -> bytes:
        return hashlib.sha256(self._serialise(value)).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    """Return the canonical CBOR of text, bytes, a natural number, None, or a tuple of these."""
    if isinstance(value, int):
        return _head(_INTEGER, value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, tuple):
        return _head(_ARRAY, len(value)) + b"".join(map(_cbor, value))
    if isinstance(value, str):
        data = value.encode()
        return _head(_TEXT, len(data)) + data
    return _NULL


def _head(major: int, number: int) -> bytes:
    if number < _INLINE_LIMIT:
        return bytes((major | number,))
    for bound, extra, form in ((_BYTE, 24, ">BB"), (_WORD, 25, ">BH"), (_LONG, 26, ">BI")):
        if number < bound:
            return struct.pack(form, major | extra, number)
    return struct.pack(">BQ", major | 27, number)


ALGORITHMS: dict[str, Callable[[object], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
"""Values of vLLM's ``--prefix-caching-hash-algo`` that other processes can reproduce."""
