"""Caches that an engine names by keys of its own instead of tokens: published, found and played by key.

The keys of LMCache's chunks and SGLang's pages are hashes of all tokens up to their end, so the digests of their groups
are derived from the key. A key does not tell the position of the cache in its prompt. That excludes the AC tracks,
which undo the rotary embedding by position; the tracks that quantise need no position.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Self

import torch
from pydantic import Field

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.data import default_catalog
from kvabr.engines.settings import EngineSettings, Seconds, TroubleLog, open_client
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot
from kvabr.store.lru import ByteLru
from kvabr.types.errors import BusyError, FormatError, KvabrError, NotFoundError, UsageError
from kvabr.types.kv import DTYPES, KVSpec
from kvabr.types.naming import TrackNamespace

LOG = logging.getLogger("kvabr.engines.chunk_store")

_MAX_FOUND_BYTES = 64 << 20
"""Memory for catalogs that were looked up: engines look up a cache before they fetch it."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._/-]")


class KeyedSettings(EngineSettings):
    """Keys of LMCache's and SGLang's adapters."""

    patience: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Deadlines after which an incomplete cache counts as lost, and the engine computes it."""
    lookup_s: Seconds = 1.0
    """Seconds that a lookup may take; then the cache counts as missing."""

    @classmethod
    def read(cls, given: Mapping[str, object], where: str) -> Self:
        """As `EngineSettings.read`; neither ``url`` nor ``publish`` is a `UsageError` too."""
        settings = super().read(given, where)
        if settings.url is None and settings.publish is None:
            raise UsageError(f"{where}: set url to fetch caches, publish to publish them, or both")
        return settings


def spec_of(model: str, engine: str, layers: int, heads: int, dim: int, dtype: torch.dtype) -> KVSpec:
    """Return the spec of an engine's caches; `FormatError` if the engine quantises them.

    ``model`` is the engine's name of the model, possibly a path; ``engine`` stands in for the tokenizer, which keys do
    not tell; ``heads`` are those of one rank.
    """
    if (kind := str(dtype).removeprefix("torch.")) not in DTYPES:
        raise FormatError(f"a cache of {dtype}: the engine quantises it itself; kvabr's tracks need 16 or 32 bits")
    name = _UNSAFE.sub("-", model).strip("/") or "model"
    return KVSpec.uniform(name[-256:], engine, layers, heads, dim, kind)


def _memory_of(found: Found) -> int:
    """Estimate the memory of a catalog: a group of a track has a digest of 64 characters and two numbers."""
    return 1024 + 256 * found.catalog.groups * (1 + len(found.catalog.tracks))


def key_digests(spec: KVSpec, key: str, tokens: int) -> list[str]:
    """Return a digest for each group of a cache; the last one names the asset."""
    groups = spec.groups(tokens)
    return [_digest(spec, key, None if index == groups - 1 else index) for index in range(groups)]


def namespace(spec: KVSpec, key: str) -> TrackNamespace:
    """Return the namespace of a cache, which does not depend on its length."""
    return TrackNamespace(spec.model, _digest(spec, key, None))


def _digest(spec: KVSpec, key: str, index: int | None) -> str:
    # The digest of the last group must not depend on the number of groups, which a reader does not know.
    place = "last" if index is None else str(index)
    return hashlib.sha256(f"kvabr.{spec.tokenizer}/1\0{place}\0{key}".encode()).hexdigest()


class ChunkStore:
    """Looks up, plays and publishes caches by key. Its coroutines are for one event loop."""

    def __init__(
        self, spec: KVSpec, settings: KeyedSettings, source: str, *, max_tokens: int, min_tokens: int = 1
    ) -> None:
        """Open the store that the settings name for publishing, if any; nothing is dialled.

        Args:
            spec: spec of the caches; the settings may change its group size.
            settings: the user's.
            source: what the caches are, in words, for the catalogs.
            max_tokens: maximum length of a cache; a longer one is not the engine's.
            min_tokens: minimum length of a cache; an engine that copies a fixed number of tokens must not get fewer.

        Raises:
            UsageError: the store cannot be opened, a track is unknown, or a setting of the connection is wrong.
        """
        self.spec, self._settings = settings.grouped(spec), settings
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self.trouble = TroubleLog(LOG)
        self._found: ByteLru[str, Found] = ByteLru(_MAX_FOUND_BYTES, _memory_of)
        self.publisher: Publisher | None = None
        if settings.publish is not None:
            exact = "BF16" if spec.dtype == "bfloat16" else "FP16"
            self.publisher = Publisher(
                settings.publish,
                self.spec,
                prior=default_catalog(),
                tracks=settings.tracks or (exact, "Int8", "Int4"),
                queue=settings.queue,
                max_bytes=settings.publish_bytes,
                source=source,
            )
        self.client = open_client(AsyncClient, settings)

    async def leading(self, keys: Sequence[str]) -> int:
        """Return how many caches, from the first on, can be fetched; takes one round trip."""
        found = await asyncio.gather(*map(self.find, keys))
        return next((place for place, one in enumerate(found) if one is None), len(found))

    async def find(self, key: str) -> Found | None:
        """Return the catalog of a cache; None if it is missing or describes another kind of cache."""
        settings, spec = self._settings, self.spec
        if settings.url is None:
            return None
        if (known := self._found.get(key)) is not None:
            return known
        try:
            found = await self.client.find_asset(namespace(spec, key), within_s=settings.lookup_s)
        except NotFoundError:
            return None
        except KvabrError as error:
            self.trouble.tell("the origin cannot be asked", error)
            return None
        catalog = found.catalog
        if catalog.spec.digest() != spec.digest():
            why = f"{catalog.spec}; this engine's {spec}"
        elif not self._min_tokens <= catalog.tokens <= self._max_tokens:
            why = f"{catalog.tokens} tokens, where one has {self._min_tokens} to {self._max_tokens}"
        else:
            self._found.add(key, found)
            return found
        self.trouble.tell("the origin's caches are of another kind", why)
        return None

    async def play(self, key: str) -> torch.Tensor | None:
        """Return a cache, [layer, K/V, head, token, dim]; None if it is missing or does not come in time."""
        loop, settings = asyncio.get_running_loop(), self._settings
        due_s = loop.time() + settings.deadline_s
        found = await self.find(key)
        if found is None:
            return None
        try:
            played = await self.client.play_asset(
                found,
                deadline=max(due_s - loop.time(), 1e-3),
                options=PlayOptions(policy=settings.policy, time_price=settings.time_price, patience=settings.patience),
            )
        except KvabrError as error:
            if not isinstance(error, BusyError):
                self._found.pop(key, None)  # it may be gone or replaced
            self.trouble.tell("a cache did not come", error)
            return None
        return played.kv

    async def answers(self) -> bool:
        """Return whether the origin answers now."""
        if self._settings.url is None:
            return False
        try:
            async with asyncio.timeout(self._settings.lookup_s):
                connection = await self.client.connect()
                return await connection.answers(self._settings.lookup_s)
        except (KvabrError, TimeoutError):
            return False

    def put(self, key: str, kv: torch.Tensor) -> Future[bool]:
        """Publish a cache in the background, from any thread; return whether it is published, now or before.

        ``kv``, [layer, K/V, head, token, dim], must not change before the future is done.
        """
        done: Future[bool] = Future()
        if self.publisher is None:
            done.set_result(False)
            return done
        tokens = kv.shape[3]
        slot = self.publisher.reserve_named(key_digests(self.spec, key, tokens), tokens)
        if isinstance(slot, Slot):

            def over(outcome: PublishOutcome) -> None:
                if outcome.verdict == "failed":
                    self.trouble.tell("a cache was not published", outcome.why)
                done.set_result(outcome.verdict == "published")

            slot.fill(kv, over)
            return done
        if slot == "full":
            self.trouble.tell("caches were not published", "they came faster than they can be encoded")
        done.set_result(slot == "known")
        return done

    async def close(self) -> None:
        """End all plays, and publish what waits."""
        await self.client.close()
        if self.publisher is not None:
            await asyncio.to_thread(self.publisher.close)
