"""Settings, and the layouts of pages in HiCache's host pools. Pure functions over tensors, without SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvabr.engines.chunk_store import KeyedSettings, spec_of
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Layouts of `MHATokenToKVPoolHost`, by SGLang's names."""
LATENT_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")
"""Layouts of `MLATokenToKVPoolHost`."""


def read_settings(extra_config: Mapping[str, Any] | None) -> KeyedSettings:
    """Return the settings under ``kvabr`` in the backend's extra configuration; see `KeyedSettings.read`."""
    given = (extra_config or {}).get("kvabr")
    if not isinstance(given, Mapping):
        raise UsageError('hicache-storage-backend-extra-config: a table "kvabr" is missing, with "url" or "publish"')
    return KeyedSettings.read(given, 'hicache-storage-backend-extra-config, "kvabr"')


def page_view(pool: torch.Tensor, layout: str, first: int, page_size: int, *, latent: bool = False) -> torch.Tensor:
    """Return a view of the page at token ``first`` of a host pool, in kvabr's layout [layer, K/V, head, token, dim].

    Pass ``latent`` for MLA pools, which have no axis K/V and one head. Raise `FormatError` for an unknown layout, or if
    no page begins at ``first``.
    """
    if first % page_size:
        raise FormatError(f"no page of {page_size} tokens begins at token {first} of the host pool")
    known = LATENT_LAYOUTS if latent else LAYOUTS
    if layout not in known:
        raise FormatError(f"the host pool has the layout {layout!r}; kvabr supports {', '.join(known)}")
    page = first // page_size
    if layout == "page_unified":  # page, layer, token, dim
        pool, layout = pool[:, :, :, None], "page_first_direct"
    if latent:
        pool = pool[None]
    if layout == "layer_first":  # K/V, layer, token, head, dim
        return pool[:, :, first : first + page_size].permute(1, 0, 3, 2, 4)
    if layout == "page_first":  # K/V, token, layer, head, dim
        return pool[:, first : first + page_size].permute(2, 0, 3, 1, 4)
    if layout == "page_first_direct":  # K/V, page, layer, token, head, dim
        return pool[:, page].permute(1, 0, 3, 2, 4)
    return pool[:, page].permute(3, 0, 1, 2, 4)  # page_head: K/V, page, head, token, layer, dim


class HostPages:
    """The pages of a host pool, such as ``MHATokenToKVPoolHost`` or, for MLA, ``MLATokenToKVPoolHost``."""

    def __init__(self, pool: Any) -> None:
        """Raise `FormatError` for an unsupported pool."""
        buffer = getattr(pool, "kv_buffer", None)
        if not isinstance(buffer, torch.Tensor):
            raise FormatError(f"the host pool {type(pool).__name__} has no keys and values, and kvabr has no tracks")
        self._pool, self._buffer = pool, buffer
        self.latent = hasattr(pool, "kv_cache_dim")
        dim = None if self.latent else pool.head_dim
        if getattr(pool, "v_head_dim", dim) != dim:
            raise FormatError("keys and values must have the same width")
        self.tokens: int = pool.page_size
        self.shards = int(getattr(pool, "dcp_size", 1) or 1)
        """Number of ranks of decode context parallelism; each has an equal part of a page's tokens."""
        page_view(buffer, pool.layout, 0, self.tokens, latent=self.latent)

    def spec(self, model: str) -> KVSpec:
        """Return the spec of pages; raise `FormatError` if SGLang quantises them."""
        pool = self._pool
        if self.latent:
            return spec_of(model, "sglang", pool.layer_num, 1, pool.kv_cache_dim, pool.dtype, latent=True)
        return spec_of(model, "sglang", pool.layer_num, pool.head_num, pool.head_dim, pool.dtype)

    def at(self, indices: torch.Tensor, pages: int) -> list[torch.Tensor]:
        """Return views of ``pages`` pages, see `page_view`; ``indices`` has the indices of all ranks' tokens."""
        size = self.tokens * self.shards
        firsts = indices[::size].tolist()[:pages]
        if len(firsts) != pages:
            raise FormatError(f"{pages} pages of {size} tokens do not match {len(indices)} places in the host pool")
        if any(first % self.shards for first in firsts):
            raise FormatError(f"no page of {size} tokens begins at {firsts} of the host pool")
        return [self._view(self._buffer, first // self.shards) for first in firsts]

    def flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of a flat page in kvabr's layout, see `page_view`."""
        shape = list(self._buffer.shape)
        by_token = self._pool.layout in {"layer_first", "page_first"}
        axis = int(self._pool.layout == "layer_first") + int(not self.latent)
        shape[axis] = self.tokens if by_token else 1
        return self._view(flat.view(shape), 0)

    def empty(self) -> torch.Tensor:
        """Return a flat page with undefined contents."""
        made: torch.Tensor = self._pool.get_dummy_flat_data_page()
        return made

    def _view(self, buffer: torch.Tensor, first: int) -> torch.Tensor:
        return page_view(buffer, self._pool.layout, first, self.tokens, latent=self.latent)
