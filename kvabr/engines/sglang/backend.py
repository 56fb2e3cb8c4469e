"""The backend for SGLang: `KvabrStorage`.

SGLang may have further pools, such as that of a draft model, with separate pages under the same keys. The pages of a
call share a deadline. HiCache's prefix ends before the first late page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvabr.client.blocking import LoopThread
from kvabr.client.result import PlayedPrefix, expand_here
from kvabr.engines.chunk_store import ChunkStore, KeyedOrigin, KeyedSettings, places
from kvabr.engines.sglang import ADAPTER
from kvabr.engines.sglang.names import name_of, page_key, step_tokens, weight_version
from kvabr.engines.sglang.pages import HostPages, read_settings
from kvabr.types.errors import FormatError, UsageError

_MAX_POSITION = 1 << 32
_MIN_TOKENS = 256
"""SGLang's default minimum number of found tokens for a fetch."""


@dataclass(frozen=True)
class PagePool:
    """One host pool, and the store for its pages."""

    pages: HostPages
    store: ChunkStore
    name: Callable[[str], str]
    """Returns the key of a page without the model's name."""

    def named(self, keys: Sequence[str]) -> list[str]:
        """Return the names of all keys, see `name`."""
        return [self.name(key) for key in keys]

    def positions(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> list[range | None]:
        """Return the possible positions of requested pages in a prompt.

        SGLang's prefix keys do not include those of the last matching node of its tree, so pages may be at later
        positions than the number of keys implies.
        """
        before, size = self.pages_before(extra_info), self.pages.tokens
        if before is None:
            return [None] * len(keys)
        return [range((before + page) * size, _MAX_POSITION, size) for page in range(len(keys))]

    async def there(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> list[bool]:
        """Return for each page True if it can be fetched."""
        found = await asyncio.gather(*map(self.store.find, self.named(keys), self.positions(keys, extra_info)))
        return [one is not None for one in found]

    def pages_before(self, extra_info: HiCacheStorageExtraInfo | None) -> int | None:
        """Return the number of pages before the first page of a call; None if unknown, or if ranks share a page."""
        if extra_info is None or extra_info.prefix_keys is None or self.pages.shards > 1:
            return None
        return len(extra_info.prefix_keys)


class KvabrStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Plays and publishes pages of HiCache."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Raise `UsageError` for a wrong configuration."""
        del kwargs
        ADAPTER.check()
        self._config, self._settings = storage_config, read_settings(storage_config.extra_config)
        self._started: tuple[KeyedOrigin, LoopThread] | None = None
        self._pools: dict[str, PagePool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Set the host pool and start; raise `FormatError` if kvabr does not support it."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Add a further pool; errors as for `register_mem_pool_host`, and end SGLang's start."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._register(host_pool_name, host_pool)

    def _register(self, name: PoolName, host_pool: Any) -> None:
        try:
            pages = HostPages(host_pool)
            spec = pages.spec(name_of(self._config, self._settings, host_pool.dtype))
        except FormatError as error:
            raise FormatError(f"kvabr: SGLang's host pool {str(name)!r}: {error}") from error
        if self._started is None:
            loop = LoopThread()
            self._started = loop.call(_opened(self._settings)), loop
        origin, _ = self._started
        size = pages.tokens
        store = ChunkStore(
            spec,
            self._settings,
            "a page of SGLang's HiCache",
            max_tokens=size,
            min_tokens=size,
            unplaced="the position of a page is not known: set interface_v1 and hicache_storage_pass_prefix_keys in "
            "hicache-storage-backend-extra-config (with decode context parallelism it stays unknown, because ranks "
            "share a page)",
            version=weight_version,
            step_tokens=step_tokens(),
            least=_MIN_TOKENS,
            origin=origin,
        )
        self.metrics = origin.client.metrics
        suffix = "" if name == PoolName.KV else f".{name}"
        self._pools[str(name)] = PagePool(
            pages, store, lambda key: page_key(self._config, key + suffix, latent=pages.latent)
        )

    def exists(self, key: str) -> bool:
        """Return True if a page can be fetched."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of leading pages to fetch, see `ChunkStore.leading`."""
        pool, goes_on = self._pool(), len(keys) >= STORAGE_BATCH_SIZE
        leading = pool.store.leading(pool.named(keys), pool.positions(keys, extra_info), goes_on=goes_on)
        return self._loop().call(leading)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Like `batch_exists`, with the pages of further pools: all pages, or the last pages of the prefix."""
        kept = self.batch_exists(keys, extra_info)
        hits, restorable = {str(PoolName.KV): kept}, list(range(1, kept + 1))
        for transfer in pool_transfers or ():
            there = self._loop().call(self._pool(transfer.name).there(keys[:kept], extra_info))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                trailing = kept
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing = max(1, len(transfer.keys or ()))
            else:
                raise UsageError(
                    f"kvabr: SGLang requests the host pool {str(transfer.name)!r} with the unknown hit policy "
                    f"{transfer.hit_policy}"
                )
            fit = [size for size in range(1, kept + 1) if all(there[max(0, size - trailing) : size])]
            hits[str(transfer.name)] = max(fit, default=0)
            restorable = [size for size in restorable if size in set(fit)]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Play pages into the host pool, at the indices of all their tokens; return for each True if it succeeded."""
        pool = self._pool()
        return self._play(pool, keys, pool.pages.at(host_indices, len(keys)), pool.positions(keys, extra_info))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Like `batch_get_v1`, for any pools."""
        got = {}
        for transfer in transfers:
            pool, keys = self._pool(transfer.name), transfer.keys or []
            into = pool.pages.at(transfer.host_indices, len(keys))
            got[transfer.name] = self._play(pool, keys, into, pool.positions(keys, extra_info))
        return got

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Play one page as a flat tensor, as in the host pool; None if it is missing or late."""
        del target_sizes
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Like `get`, for many pages."""
        del target_sizes
        pool = self._pool()
        flats = target_locations or [pool.pages.empty() for _ in keys]
        came = self._play(pool, keys, [pool.pages.flat(flat) for flat in flats], [None] * len(keys))
        return [flat if one else None for flat, one in zip(flats, came, strict=True)]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Publish pages of the host pool and wait until they are encoded; return for each True if it succeeded."""
        pool = self._pool()
        return self._publish(pool, keys, pool.pages.at(host_indices, len(keys)), extra_info)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Like `batch_set_v1`, for any pools."""
        done = {}
        for transfer in transfers:
            pool, keys = self._pool(transfer.name), transfer.keys or []
            held = pool.pages.at(transfer.host_indices, len(keys))
            done[transfer.name] = self._publish(pool, keys, held, extra_info)
        return done

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Publish one page, a flat tensor as in the host pool; return True if it is published."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Like `set`, for many pages; return True if all are published."""
        del target_locations, target_sizes
        pool = self._pool()
        return all(self._publish(pool, keys, [pool.pages.flat(value) for value in values]))

    def clear(self) -> bool:
        """Stop using the current cache names, since SGLang's weights have changed.

        Old caches remain; ``publish_mib`` and `kvabr store` remove them. Engines with the same ``weight_version`` share
        new caches.
        """
        for pool in self._pools.values():
            pool.store.generation.changed()
        return True

    def close(self) -> None:
        """End all plays and publish the waiting pages."""
        if self._started is not None:
            origin, loop = self._started
            for pool in self._pools.values():
                loop.call(pool.store.close())
            loop.call(origin.close())
            loop.close()

    def _pool(self, name: PoolName = PoolName.KV) -> PagePool:
        if (pool := self._pools.get(str(name))) is None:
            raise UsageError(f"kvabr: SGLang has registered no host pool {str(name)!r} yet")
        return pool

    def _loop(self) -> LoopThread:
        if self._started is None:
            raise UsageError("kvabr: SGLang has registered no host pool yet")
        return self._started[1]

    def _play(
        self, pool: PagePool, keys: Sequence[str], pages: Sequence[torch.Tensor], positions: Sequence[range | None]
    ) -> list[bool]:
        async def play() -> list[PlayedPrefix | None]:
            return await asyncio.gather(*map(pool.store.play, pool.named(keys), positions))

        got = self._loop().call(play())
        came = [(page, played, where) for page, (played, where) in enumerate(zip(got, pages, strict=True)) if played]
        groups = [(page, group) for page, played, _ in came for group in played.groups]
        into = [place for _, played, where in came for place in places(played, where)]
        lost = set()
        for (page, _), wrong in zip(groups, expand_here([group for _, group in groups], into), strict=True):
            if wrong is not None:
                lost.add(page)
                pool.store.trouble.warn("a page cannot be decoded", wrong)
        return [played is not None and page not in lost for page, played in enumerate(got)]

    def _publish(
        self,
        pool: PagePool,
        keys: Sequence[str],
        pages: Sequence[torch.Tensor],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        at_once, before = self._settings.queue, pool.pages_before(extra_info)
        results: list[bool] = []
        for first in range(0, len(keys), at_once):  # SGLang may write more pages than fit in the queue
            over = []
            for page in range(first, min(first + at_once, len(keys))):
                position = None if before is None else (before + page) * pool.pages.tokens
                over.append(pool.store.put(pool.name(keys[page]), pages[page], position))
            results += [one.result() is not None for one in over]
        return results


async def _opened(settings: KeyedSettings) -> KeyedOrigin:
    return KeyedOrigin(settings)
