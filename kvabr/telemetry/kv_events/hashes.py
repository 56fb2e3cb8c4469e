"""Names that vLLM gives to blocks: hashes of their tokens, chained (``vllm.v1.core.kv_cache_utils``).

A block's hash covers that of the block before it, its tokens, and extra keys, which blocks of text alone do not have.
The first block follows the hash of a seed: PYTHONHASHSEED if it is set, as in vLLM. With ``sha256``, vLLM's default,
what is hashed is a pickle of Python's; with ``sha256_cbor`` it is canonical CBOR (RFC 8949), which other languages can
make.
"""

from __future__ import annotations

import hashlib
import os
import pickle  # vLLM hashes pickles; nothing is unpickled
import struct
from collections.abc import Callable, Sequence

from kvabr.types.errors import UsageError

DEFAULT_SEED = "vllm-none-hash"
_HASH_BYTES = 8
_SHORT, _BYTE, _WORD, _LONG = 24, 1 << 8, 1 << 16, 1 << 32
_TEXT, _BYTES, _INTEGER, _ARRAY, _NULL = 0x60, 0x40, 0x00, 0x80, b"\xf6"
"""Major types of CBOR."""


class BlockHashes:
    """Computes the hashes of a prompt's blocks."""

    def __init__(self, block: int = 16, algorithm: str = "sha256", seed: str | None = None) -> None:
        """Prepare.

        Args:
            block: tokens of a block; `UsageError` unless it is 1 to 65,536.
            algorithm: ``sha256`` or ``sha256_cbor``, else a `UsageError`.
            seed: of the first block's hash; None: PYTHONHASHSEED, or vLLM's own default.
        """
        if algorithm not in ALGORITHMS:
            raise UsageError(f"block hashes: there is no {algorithm!r}; there are {', '.join(ALGORITHMS)}")
        if not 1 <= block <= 1 << 16:
            raise UsageError(f"blocks of {block} tokens: give 1 to 65536, as your engines have it (vLLM: --block-size)")
        self.block = block
        self._serialise = ALGORITHMS[algorithm]
        text = os.environ.get("PYTHONHASHSEED", DEFAULT_SEED) if seed is None else seed
        self._none = self._hash(text)

    def full(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the hash of each whole block, 32 bytes."""
        found, parent, block = [], self._none, self.block
        for first in range(0, len(tokens) - block + 1, block):
            parent = self._hash((parent, tuple(tokens[first : first + block]), None))
            found.append(parent)
        return found

    def numbers(self, tokens: Sequence[int]) -> list[int]:
        """Return the hashes as events have them by default (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES): the last 64 bits."""
        return [int.from_bytes(one[-_HASH_BYTES:], "big") for one in self.full(tokens)]

    def _hash(self, value: object) -> bytes:
        return hashlib.sha256(self._serialise(value)).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    """Return text, bytes, natural numbers, tuples of these, and None in canonical CBOR."""
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
    if number < _SHORT:
        return bytes((major | number,))
    for bound, extra, form in ((_BYTE, 24, ">BB"), (_WORD, 25, ">BH"), (_LONG, 26, ">BI")):
        if number < bound:
            return struct.pack(form, major | extra, number)
    return struct.pack(">BQ", major | 27, number)


ALGORITHMS: dict[str, Callable[[object], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
"""Of vLLM's ``--prefix-caching-hash-algo``, those that are reproducible in another process."""
