"""Settings, spec, layout and positions of LMCache's chunks. Needs no LMCache."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from cachetools import LRUCache

from kvabr.engines import chunk_store as keyed
from kvabr.engines.chunk_store import KeyedSettings
from kvabr.engines.weights import local_folder
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

_OWN_KEYS = ("module_path", "class_name")
_DCP = "##lmcache-dcp-layout"
"""Start of a suffix that a daemon adds to the model's name if ranks of decode context parallelism hold parts of a
chunk.
"""
_MAX_PLACES = 1 << 16
_AMBIGUOUS = -1
ChunkHash = int | bytes
"""Hash of a prompt's tokens up to the end of a chunk: a number in an engine, bytes in a daemon."""


def read_settings(extra_config: Mapping[str, Any] | None, plugin: str = "kvabr") -> KeyedSettings:
    """Return the settings of a plug-in, listed as ``plugin``; see `KeyedSettings.read`."""
    prefix = f"remote_storage_plugin.{plugin}."
    given = {key.removeprefix(prefix): value for key, value in (extra_config or {}).items() if key.startswith(prefix)}
    for key in _OWN_KEYS:
        given.pop(key, None)
    return KeyedSettings.read(given, f"extra_config, {prefix}*")


def spec_of(model: str, shape: Sequence[int], dtype: torch.dtype) -> KVSpec:
    """Return the spec of chunks with shape (layers, 2, tokens, heads of one rank, dim), or 1 instead of 2 for MLA.

    MLA has 1 in place of the heads, too. FP8 is not supported.
    """
    layers, halves, _, heads, dim = shape
    if halves == 1 and heads == 1:
        return keyed.spec_of(model, "lmcache", layers, 1, dim, dtype, latent=True)
    if halves != 2:
        raise FormatError(
            f"a cache must have keys and values, or one vector per token (MLA), got the shape {tuple(shape)}"
        )
    return keyed.spec_of(model, "lmcache", layers, heads, dim, dtype)


def name_of(settings: KeyedSettings, metadata: Any) -> str:
    """Return the model's name for its chunks, given an ``LMCacheMetadata``; errors as `chunk_store.named`.

    With several workers the name includes the shape, since LMCache does not report whether they split layers or heads.
    For MLA it always does, since one rank publishes for all.
    """
    given = str(metadata.model_name)
    layers, halves, _, heads, dim = metadata.kv_shape
    facts = {"shape": [layers, heads, dim] if metadata.world_size > 1 or halves == 1 else None}
    return keyed.named(settings, given, facts, folder=local_folder(given))


@dataclass(frozen=True)
class ObjectLayout:
    """Shapes and element types of the parts of a daemon's object, usually one."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> ObjectLayout:
        """Return the layout for LMCache's lists of shapes and types."""
        return cls(tuple(map(tuple, shapes)), tuple(dtypes))

    @property
    def tokens(self) -> int:
        """Number of tokens of an object with one kind of layers."""
        return self.shapes[0][-2]

    @property
    def nbytes(self) -> int:
        """Bytes of an object."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def object_spec(model: str, layout: ObjectLayout, heads: Callable[[int], int]) -> KVSpec:
    """Return the spec of a daemon's objects, which have the shapes of `as_kv`.

    ``heads`` maps the total width to the dimensions of a head. Raise `FormatError` for several kinds of layers, and
    like `spec_of`.
    """
    if len(layout.shapes) != 1:
        raise FormatError(f"an object must have one kind of layers, got {len(layout.shapes)}")
    shape = layout.shapes[0] if len(layout.shapes[0]) != 3 else (1, *layout.shapes[0])
    if len(shape) != 4 or not all(shape):
        raise FormatError(f"an object must be [K/V, layer, token, head x dim], got {shape}")
    halves, layers, tokens, width = shape
    dim = heads(width) if halves == 2 else width
    if not dim or width % dim:
        raise FormatError(f"the size of a token must be a multiple of the head size {dim}, got {width}")
    return spec_of(model, (layers, halves, tokens, width // dim, dim), layout.dtypes[0])


def object_name(settings: KeyedSettings, model: str, spec: KVSpec, workers: int) -> str:
    """Return the model's name for a daemon's objects; see `name_of`."""
    only = spec.only
    latent = only.kind == "latent"
    facts = {"shape": [spec.layers, only.heads * only.k_dim] if workers > 1 or latent else None}
    return keyed.named(settings, model, facts, folder=local_folder(model.partition(_DCP)[0]))


def object_key(key: Any, dtype: torch.dtype) -> str:
    """Return a daemon's ``ObjectKey`` as text, without the model's name."""
    rank, group, kind = f"{key.kv_rank:x}", key.object_group_id, str(dtype).removeprefix("torch.")
    return f"@daemon@{rank}@{group}@{kind}@{key.chunk_hash.hex()}@{key.cache_salt}"


def chunk_key(key: Any) -> str:
    """Return LMCache's key of a chunk as text, without the model's name."""
    text: str = key.to_string()
    return text.removeprefix(key.model_name)


def as_kv(chunk: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Return a view of LMCache's chunk in kvabr's layout, [layer, K/V, head, token, dim].

    LMCache's layout is [K/V, layer, token, head x dim] (KV_2LTD), for MLA [1, layer, token, dim], and in daemons also
    [layer, token, dim]. Raise `FormatError` for another shape.
    """
    only = spec.only
    sides, width = (1, sum(only.split)) if only.kind == "latent" else (2, spec.kv_heads * spec.head_dim)
    if chunk.dim() == 3 and sides == 1:
        chunk = chunk[None]
    halves, layers, tokens, held = chunk.shape if chunk.dim() == 4 else (0, 0, 0, 0)
    if (halves, layers, held) != (sides, spec.layers, width):
        wanted = f"[{sides}, {spec.layers}, tokens, {width}]"
        raise FormatError(f"a chunk must have the shape {wanted}, got {tuple(chunk.shape)}")
    return chunk.view(sides, layers, tokens, only.heads, width // only.heads).permute(1, 0, 3, 2, 4)


class Places:
    """Positions of chunks in their prompts, by hash, from LMCache's token database (`watch`). Thread-safe."""

    def __init__(self) -> None:
        self._first: LRUCache[ChunkHash, int] = LRUCache(_MAX_PLACES)
        self._lock = threading.Lock()

    def note(self, chunk_hash: ChunkHash, first: int) -> None:
        """Record where a chunk begins. A hash recorded at two positions becomes ambiguous."""
        with self._lock:
            known = self._first.get(chunk_hash, first)
            self._first[chunk_hash] = first if known == first else _AMBIGUOUS

    def at(self, chunk_hash: ChunkHash) -> int | None:
        """Return the position of a chunk's first token; None if unknown or ambiguous."""
        with self._lock:
            first: int = self._first.get(chunk_hash, _AMBIGUOUS)
        return None if first == _AMBIGUOUS else first

    def possible(self, chunk_hash: ChunkHash) -> range | None:
        """Return a chunk's possible positions for `ChunkStore.find`: one; empty if ambiguous; None if unknown."""
        with self._lock:
            first = self._first.get(chunk_hash)
        if first is None:
            return None
        return range(0) if first == _AMBIGUOUS else range(first, first + 1)

    def watch(self, database: type[Any]) -> None:
        """From now on, record all chunks cut by objects of this class, such as LMCache's `ChunkedTokenDatabase`."""
        made: Callable[..., Iterable[Any]] = database.process_tokens
        if getattr(made, "kvabr_places", None) is self:
            return

        @functools.wraps(made)
        def process_tokens(database: object, tokens: object = None, *args: object, **kwargs: object) -> Iterable[Any]:
            chunks = made(database, tokens, *args, **kwargs)
            return chunks if tokens is None else self._noting(chunks)

        process_tokens.kvabr_places = self  # type: ignore[attr-defined]
        database.process_tokens = process_tokens

    def watch_hasher(self, hasher: type[Any]) -> None:
        """From now on, record all chunks hashed by objects of this class, which is like the daemon's `TokenHasher`.

        ``hash_tokens(tokens, prefix_hash)`` hashes a chunk that follows another chunk, or ``none_hash`` for the first.
        """
        made: Callable[..., Any] = hasher.hash_tokens
        if getattr(made, "kvabr_places", None) is self:
            return

        @functools.wraps(made)
        def hash_tokens(self_: Any, tokens: Any, prefix_hash: Any = None) -> Any:
            hashed = made(self_, tokens, prefix_hash)
            if prefix_hash is None or prefix_hash == self_.none_hash:
                self.note(self_.hash_to_bytes(hashed), 0)
            elif (before := self.at(self_.hash_to_bytes(prefix_hash))) is not None:
                self.note(self_.hash_to_bytes(hashed), before + self_.chunk_size)
            return hashed

        hash_tokens.kvabr_places = self  # type: ignore[attr-defined]
        hasher.hash_tokens = hash_tokens

    def _noting(self, chunks: Iterable[Any]) -> Iterator[Any]:
        for chunk in chunks:
            first, _, key = chunk
            self.note(getattr(key, "chunk_hash", key), first)
            yield chunk


PLACES = Places()
"""Positions shared by all engines in this process."""
