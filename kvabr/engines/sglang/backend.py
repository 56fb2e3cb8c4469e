"""The backend that SGLang loads: `KvabrStorage`.

SGLang calls it from its prefetch thread and its backup thread, which block. The pages of a call are played
concurrently, with one deadline, over one connection. For HiCache, a page that does not come in time ends the prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from kvabr.client.blocking import LoopThread
from kvabr.client.result import PlayedPrefix, expand_here
from kvabr.engines.chunk_store import ChunkStore, places, spec_of
from kvabr.engines.sglang import ADAPTER
from kvabr.engines.sglang.names import names_of, page_key, step_tokens, weight_version
from kvabr.engines.sglang.pages import page_view, read_settings
from kvabr.types.errors import FormatError, UsageError

_MAX_POSITION = 1 << 32
_LEAST_TOKENS = 256
"""SGLang fetches nothing of a prompt of which fewer tokens are found, unless it is told another threshold."""


class KvabrStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Plays and publishes pages of HiCache."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Read the configuration, and raise if it is wrong; `register_mem_pool_host` tells the layout of the pages."""
        del kwargs
        ADAPTER.check()
        if storage_config.is_mla_model:
            raise FormatError("kvabr has tracks for keys and values, not for MLA")
        self._config, self._settings = storage_config, read_settings(storage_config.extra_config)
        self._started: tuple[ChunkStore, LoopThread] | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Set the host pool and start; raise `FormatError` if kvabr does not support it, or the engine quantises it."""
        super().register_mem_pool_host(mem_pool_host)
        pool = mem_pool_host
        if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
            raise FormatError("keys and values of different widths; kvabr has tracks for equal ones")
        page_view(pool.kv_buffer, pool.layout, 0, pool.page_size)
        names = names_of(self._config, self._settings, pool.dtype)
        spec = spec_of(names.name, "sglang", pool.layer_num, pool.head_num, pool.head_dim, pool.dtype)
        size = pool.page_size
        store = ChunkStore(
            spec,
            self._settings,
            "a page of SGLang's HiCache",
            max_tokens=size,
            min_tokens=size,
            unplaced="the position of a page is not known: set interface_v1 and hicache_storage_pass_prefix_keys in "
            "hicache-storage-backend-extra-config",
            former=names.former,
            told=weight_version,
            step_tokens=step_tokens(),
            least=_LEAST_TOKENS,
        )
        self.metrics = store.client.metrics
        self._started = store, LoopThread()

    def exists(self, key: str) -> bool:
        """Return whether a page can be fetched."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages, from the first on, SGLang is to fetch: see `ChunkStore.leading`."""
        store, loop = self._ready()
        named, goes_on = [self._name(key) for key in keys], len(keys) >= STORAGE_BATCH_SIZE
        return loop.call(store.leading(named, self._positions(keys, extra_info), goes_on=goes_on))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Play pages into the host pool, at the indices of all their tokens; return for each whether it came."""
        return self._play(keys, self._places(keys, host_indices), self._positions(keys, extra_info))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Play one page, flat as in the host pool; None if it is missing or does not come in time."""
        del target_sizes
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """As `get`, for many pages."""
        del target_sizes
        flats = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        came = self._play(keys, [self._flat_view(flat) for flat in flats], [None] * len(keys))
        return [flat if one else None for flat, one in zip(flats, came, strict=True)]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Publish pages of the host pool and wait until they are encoded; return for each whether it is published."""
        return self._publish(keys, self._places(keys, host_indices), extra_info)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Publish one page, flat as in the host pool."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """As `set`, for many pages; return whether all are published."""
        del target_locations, target_sizes
        return all(self._publish(keys, [self._flat_view(value) for value in values]))

    def clear(self) -> bool:
        """Play and publish nothing under the names from before: SGLang calls this when its weights have changed.

        What engines with the old weights have published stays theirs; ``publish_mib`` and `kvabr store` remove it. If
        the update came with a ``weight_version``, engines with that version share what they publish from now on.
        """
        if self._started is not None:
            self._started[0].generation.changed()
        return True

    def close(self) -> None:
        """End all plays, and publish what waits."""
        if self._started is not None:
            store, loop = self._started
            loop.call(store.close())
            loop.close()

    def _ready(self) -> tuple[ChunkStore, LoopThread]:
        if self._started is None:
            raise UsageError("kvabr: SGLang has registered no host pool yet")
        return self._started

    def _name(self, key: str) -> str:
        """Return the key of a page without the model's name, which `ChunkStore` adds."""
        return page_key(self._config, key)

    def _places(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[torch.Tensor]:
        pool = self.mem_pool_host
        firsts = host_indices[:: pool.page_size].tolist()[: len(keys)]
        return [page_view(pool.kv_buffer, pool.layout, first, pool.page_size) for first in firsts]

    def _flat_view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of a flat page in kvabr's layout."""
        pool = self.mem_pool_host
        shape = list(pool.kv_buffer.shape)
        by_token = pool.layout in {"layer_first", "page_first"}
        shape[2 if pool.layout == "layer_first" else 1] = pool.page_size if by_token else 1
        return page_view(flat.view(shape), pool.layout, 0, pool.page_size)

    def _positions(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> list[range | None]:
        """Return the positions in a prompt that pages which are asked for can have.

        When SGLang asks, the keys before lack those of the last node of its tree that the prompt matches. So a page may
        be behind what they say, but not before.
        """
        size, before = self.mem_pool_host.page_size, _pages_before(extra_info)
        if before is None:
            return [None] * len(keys)
        return [range((before + page) * size, _MAX_POSITION, size) for page in range(len(keys))]

    def _play(
        self, keys: Sequence[str], pages: Sequence[torch.Tensor], positions: Sequence[range | None]
    ) -> list[bool]:
        """Play pages, and decode all of them together into their places; return for each whether it came."""
        store, loop = self._ready()

        async def play() -> list[PlayedPrefix | None]:
            return await asyncio.gather(*map(store.play, map(self._name, keys), positions))

        got = loop.call(play())
        came = [(page, played, where) for page, (played, where) in enumerate(zip(got, pages, strict=True)) if played]
        groups = [(page, group) for page, played, _ in came for group in played.groups]
        into = [place for _, played, where in came for place in places(played, where)]
        lost = set()
        for (page, _), wrong in zip(groups, expand_here([group for _, group in groups], into), strict=True):
            if wrong is not None:
                lost.add(page)
                store.trouble.tell("a page cannot be decoded", wrong)
        return [played is not None and page not in lost for page, played in enumerate(got)]

    def _publish(
        self, keys: Sequence[str], pages: Sequence[torch.Tensor], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Publish pages; return for each whether it is published once they need not keep their memory any more."""
        (store, _), at_once = self._ready(), self._settings.queue
        before, size = _pages_before(extra_info), self.mem_pool_host.page_size
        results: list[bool] = []
        for first in range(0, len(keys), at_once):  # SGLang writes more pages at once than may wait
            over = []
            for page in range(first, min(first + at_once, len(keys))):
                position = None if before is None else (before + page) * size
                over.append(store.put(self._name(keys[page]), pages[page], position))
            results += [one.result() is not None for one in over]
        return results


def _pages_before(extra_info: HiCacheStorageExtraInfo | None) -> int | None:
    """Return the number of pages from the prompt's start to a call's first one; None if SGLang does not say."""
    return None if extra_info is None or extra_info.prefix_keys is None else len(extra_info.prefix_keys)
