"""Settings, spec, layout and positions of LMCache's chunks. LMCache is not needed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from cachetools import LRUCache

from kvabr.engines import chunk_store as keyed
from kvabr.engines.chunk_store import KeyedSettings, ModelNames
from kvabr.engines.weights import local_folder
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec

_OWN_KEYS = ("module_path", "class_name")
"""Keys that LMCache reads itself."""
_MAX_PLACES = 1 << 16
_UNSURE = -1


def read_settings(extra_config: Mapping[str, Any] | None, plugin: str = "kvabr") -> KeyedSettings:
    """Return the settings of a plug-in, which the user lists under the name ``plugin``; see `KeyedSettings.read`."""
    prefix = f"remote_storage_plugin.{plugin}."
    given = {key.removeprefix(prefix): value for key, value in (extra_config or {}).items() if key.startswith(prefix)}
    for key in _OWN_KEYS:
        given.pop(key, None)
    return KeyedSettings.read(given, f"extra_config, {prefix}*")


def spec_of(model: str, shape: Sequence[int], dtype: torch.dtype) -> KVSpec:
    """Return the spec of chunks of LMCache's shape (layers, 2, tokens, heads of one rank, dim); not of MLA or FP8."""
    layers, both, _, heads, dim = shape
    if both != 2:
        raise FormatError(f"a cache of shape {tuple(shape)}: kvabr has tracks for keys and values, not for MLA")
    return keyed.spec_of(model, "lmcache", layers, heads, dim, dtype)


def names_of(settings: KeyedSettings, metadata: Any) -> ModelNames:
    """Return what the model is called in the names of its chunks; errors as `kvabr.engines.chunk_store.named`.

    LMCache tells no more of a model than its name, and the shape of a worker's caches. Of several workers, these are
    in the name: their numbers do not tell whether they share layers or heads.

    Args:
        settings: the user's.
        metadata: an ``LMCacheMetadata``.
    """
    given = str(metadata.model_name)
    layers, _, _, heads, dim = metadata.kv_shape
    facts = {"shape": [layers, heads, dim] if metadata.world_size > 1 else None}
    return keyed.named(settings, given, facts, folder=local_folder(given), kept="shape", raw_keys=True)


def chunk_key(key: Any) -> str:
    """Return LMCache's key of a chunk as text, without the model's name: worker, tokens, element type and tags."""
    text: str = key.to_string()
    return text.removeprefix(key.model_name)


def as_kv(chunk: torch.Tensor, spec: KVSpec) -> torch.Tensor:
    """Return a view in kvabr's layout, [layer, K/V, head, token, dim], of a chunk in LMCache's KV_2LTD.

    That is [K/V, layer, token, head x dim]; another shape is a `FormatError`.
    """
    both, layers, tokens, width = chunk.shape if chunk.dim() == 4 else (0, 0, 0, 0)
    if (both, layers, width) != (2, spec.layers, spec.kv_heads * spec.head_dim):
        wanted = f"[2, {spec.layers}, tokens, {spec.kv_heads * spec.head_dim}]"
        raise FormatError(f"a chunk has the shape {tuple(chunk.shape)}, not {wanted}")
    return chunk.view(2, layers, tokens, spec.kv_heads, spec.head_dim).permute(1, 0, 3, 2, 4)


class Places:
    """Positions of chunks in their prompts, by the hashes that are their keys. For several threads.

    LMCache gives its storages hashes alone. Its token database makes them from the tokens of a whole prompt, and yields
    each with the chunk's first token: see `watch`.
    """

    def __init__(self) -> None:
        self._first: LRUCache[int, int] = LRUCache(_MAX_PLACES)
        self._lock = threading.Lock()

    def note(self, chunk_hash: int, first: int) -> None:
        """Note where a chunk begins. A hash that is seen at two places has none."""
        with self._lock:
            known = self._first.get(chunk_hash, first)
            self._first[chunk_hash] = first if known == first else _UNSURE

    def at(self, chunk_hash: int) -> int | None:
        """Return the position of a chunk's first token; None if it is not known."""
        with self._lock:
            first: int = self._first.get(chunk_hash, _UNSURE)
        return None if first == _UNSURE else first

    def possible(self, chunk_hash: int) -> range | None:
        """Return the positions that a chunk can have, as `ChunkStore.find` takes them.

        That is one; none of a hash that was seen at two places; None if nothing is known.
        """
        with self._lock:
            first = self._first.get(chunk_hash)
        if first is None:
            return None
        return range(0) if first == _UNSURE else range(first, first + 1)

    def watch(self, database: type[Any]) -> None:
        """Note all chunks that objects of a class like LMCache's `ChunkedTokenDatabase` cut from now on.

        Its method ``process_tokens(tokens, ...)`` yields (first token, end, key or hash). Chunks that it is given as
        hashes are not noted: they need not be those of a whole prompt.
        """
        made: Callable[..., Iterable[Any]] = database.process_tokens
        if getattr(made, "kvabr_places", None) is self:
            return

        @functools.wraps(made)
        def process_tokens(database: object, tokens: object = None, *args: object, **kwargs: object) -> Iterable[Any]:
            chunks = made(database, tokens, *args, **kwargs)
            return chunks if tokens is None else self._noting(chunks)

        process_tokens.kvabr_places = self  # type: ignore[attr-defined]
        database.process_tokens = process_tokens

    def _noting(self, chunks: Iterable[Any]) -> Iterator[Any]:
        for chunk in chunks:
            first, _, key = chunk
            self.note(getattr(key, "chunk_hash", key), first)
            yield chunk


PLACES = Places()
"""Of all engines in this process."""
