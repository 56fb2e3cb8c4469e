"""The plug-in that LMCache loads: `KvabrAdapter`, which creates a `ChunkConnector`.

The client runs on LMCache's event loop. Late chunks are misses.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvabr.client.result import expand_here
from kvabr.engines.chunk_store import ChunkStore, KeyedSettings, places
from kvabr.engines.lmcache import ADAPTER
from kvabr.engines.lmcache.chunks import PLACES, as_kv, chunk_key, name_of, read_settings, spec_of
from kvabr.types.errors import KvabrError

_WAIT_S = 30.0
"""Seconds that an LMCache thread waits for the event loop, in addition to the lookup."""
_MAX_LISTED = 1 << 16


class KvabrAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache is not there when types are checked
    """The ``class_name`` for LMCache's configuration."""

    def __init__(self) -> None:
        super().__init__("kvabr://")
        ADAPTER.check()

    def can_parse(self, url: str) -> bool:
        """Return True for ``kvabr://HOST:PORT/``, or the URL of a plug-in named ``kvabr`` or ``kvabr.NAME``."""
        plugin = url.removeprefix("plugin://")
        return url.startswith(self.schema) or (plugin != url and extract_plugin_type(plugin) == "kvabr")

    def create_connector(self, context: ConnectorContext) -> ChunkConnector:
        """Create the connector; raise `IrrecoverableException`, which LMCache handles, for a wrong configuration."""
        config, metadata = context.config, context.metadata
        if config is None or metadata is None:
            raise IrrecoverableException("kvabr: LMCache passed no configuration, or no metadata")
        try:
            extra = dict(config.extra_config or {})
            if context.plugin_name is None:
                extra.setdefault("remote_storage_plugin.kvabr.url", context.url.replace(self.schema, "moqt://", 1))
            settings = read_settings(extra, context.plugin_name or "kvabr")
            return ChunkConnector(settings, context.loop, context.local_cpu_backend, config, metadata)
        except KvabrError as error:
            raise IrrecoverableException(f"kvabr: {error}") from error


class ChunkConnector(RemoteConnector):  # type: ignore[misc]
    """Plays and publishes chunks."""

    def __init__(
        self,
        settings: KeyedSettings,
        loop: asyncio.AbstractEventLoop,
        memory: LocalCPUBackend,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
    ) -> None:
        """Prepare without connecting; LMCache allocates chunks in ``memory``."""
        super().__init__(config, metadata)
        if len(self.meta_shapes) != 1 or config.use_layerwise:
            raise IrrecoverableException(
                "kvabr: needs one kind of layer, and chunks of all layers: set use_layerwise: false"
            )
        if getattr(config, "enable_blending", False):
            raise IrrecoverableException(
                "kvabr: set enable_blending: false. With it LMCache would use chunks at other positions than those "
                "they were computed for. Passages are played with transformers models, and with vLLM "
                "through kvabr's own connector (docs/guides/passages.md)"
            )
        PLACES.watch(ChunkedTokenDatabase)
        self._settings, self._loop, self._memory = settings, loop, memory
        chunk_tokens = self.meta_shapes[0][2]
        self._store = ChunkStore(
            spec_of(name_of(settings, metadata), metadata.kv_shape, metadata.kv_dtype),
            settings,
            "a chunk of LMCache",
            max_tokens=chunk_tokens,
            # LMCache always copies a full chunk.
            min_tokens=1 if config.save_unfull_chunk else chunk_tokens,
            unplaced="the position of a chunk is not known: LMCache did not cut it from a prompt's tokens here",
        )
        if self._store.publisher is not None:
            # LMCache frees the chunks' memory before it closes this connector, which may still be encoding them.
            memory.close = partial(_close_both, self._store.publisher.close, memory.close)
        self.metrics = self._store.client.metrics
        self._put: dict[str, None] = {}

    async def exists(self, key: CacheEngineKey) -> bool:
        """Return True if a chunk can be fetched."""
        return await self._store.find(chunk_key(key), PLACES.possible(key.chunk_hash)) is not None

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Return `exists`; call it from any thread but the event loop's."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Return True."""
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        """Return the number of leading chunks to fetch; do not call it on the event loop's thread."""
        leading = self._store.leading(
            [chunk_key(key) for key in keys], [PLACES.possible(key.chunk_hash) for key in keys]
        )
        asked = asyncio.run_coroutine_threadsafe(leading, self._loop)
        try:
            return asked.result(self._settings.lookup_s + _WAIT_S)
        except TimeoutError:
            asked.cancel()
            return 0

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Play one chunk; None if it is missing or late."""
        played = await self._store.play(chunk_key(key), PLACES.possible(key.chunk_hash))
        if played is None:
            return None
        shape = list(self.meta_shapes[0])
        shape[2] = played.tokens
        chunk: MemoryObj | None = self._memory.allocate(torch.Size(shape), self.meta_dtypes[0], self.meta_fmt)
        if chunk is None or chunk.tensor is None:
            self._store.trouble.warn("LMCache has no memory for a chunk", "see max_local_cpu_size")
            return None
        try:
            there = places(played, as_kv(chunk.tensor, self._store.spec))
        except BaseException:
            chunk.ref_count_down()
            raise
        decoding = asyncio.get_running_loop().run_in_executor(None, expand_here, played.groups, there)
        try:
            errors = await asyncio.shield(decoding)
        except BaseException:
            # LMCache has cancelled the call; threads still write to its memory.
            decoding.add_done_callback(lambda _: chunk.ref_count_down())
            raise
        if (wrong := next(filter(None, errors), None)) is not None:
            chunk.ref_count_down()
            self._store.trouble.warn("a chunk cannot be decoded", wrong)
            return None
        return chunk

    def support_batched_get(self) -> bool:
        """Return True: the chunks of a request share the link and one deadline."""
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Play many chunks; None for each missing or late one."""
        loop = asyncio.get_running_loop()
        getting = [loop.create_task(self.get(key)) for key in keys]
        try:
            return list(await asyncio.gather(*getting))
        except BaseException:
            for task in getting:
                task.cancel()
            for chunk in await asyncio.gather(*getting, return_exceptions=True):
                if isinstance(chunk, MemoryObj):
                    chunk.ref_count_down()
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:
        """Play many chunks; return those before the first missing chunk."""
        del lookup_id
        chunks = await self.batched_get(keys)
        came = list(itertools.takewhile(lambda chunk: chunk is not None, chunks))
        for chunk in chunks[len(came) :]:
            if chunk is not None:
                chunk.ref_count_down()
        return came

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Publish a chunk and wait for it; skip it if it exists already or the queue is full."""
        chunk = memory_obj.tensor
        if chunk is None:
            return
        kv = as_kv(chunk, self._store.spec)
        # The chunk must keep its memory until it is encoded, even if LMCache cancels this call.
        memory_obj.ref_count_up()
        over = self._store.put(chunk_key(key), kv, PLACES.at(key.chunk_hash))
        over.add_done_callback(lambda _: memory_obj.ref_count_down())
        if await asyncio.shield(asyncio.wrap_future(over)) is not None:
            self._put[key.to_string()] = None
            while len(self._put) > _MAX_LISTED:
                del self._put[next(iter(self._put))]

    async def list(self) -> list[str]:
        """Return the keys of the last 65,536 chunks published by this process."""
        return [*self._put]

    def support_ping(self) -> bool:
        """Return True if there is an origin to ping."""
        return self._settings.url is not None

    async def ping(self) -> int:
        """Return 0 if the origin answers, 1 if not."""
        return 0 if await self._store.answers() else 1

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Return False; chunks are never removed here: ``publish_mib`` limits published caches."""
        del key
        return False

    async def close(self) -> None:
        """End all plays and publish the waiting chunks."""
        await self._store.close()


def _close_both(first: Callable[[], object], then: Callable[[], object]) -> None:
    try:
        first()
    finally:
        then()
