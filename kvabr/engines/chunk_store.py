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
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Self

import torch
from pydantic import Field

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.data import default_catalog
from kvabr.engines.settings import EngineSettings, Seconds
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot
from kvabr.store.lru import ByteLru
from kvabr.types.errors import BusyError, FormatError, KvabrError, NotFoundError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

LOG = logging.getLogger("kvabr.engines.chunk_store")

_MAX_FOUND_BYTES = 64 << 20
"""Memory for catalogs that were looked up: engines look up a cache before they fetch it."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._/-]")
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class KeyedSettings(EngineSettings):
    """Keys of LMCache's and SGLang's adapters."""

    patience: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Deadlines after which an incomplete cache counts as lost."""
    lookup_s: Seconds = 1.0
    """Seconds that a lookup may take; then the cache counts as missing."""

    @classmethod
    def read(cls, given: Mapping[str, object], where: str) -> Self:
        """Return the settings that a user gave; see `EngineSettings.read`.

        Raises:
            UsageError: as there, or neither ``url`` nor ``publish`` is given.
        """
        settings = super().read(given, where)
        if settings.url is None and settings.publish is None:
            raise UsageError(f"{where}: set url to fetch caches, publish to publish them, or both")
        return settings


def spec_of(model: str, engine: str, layers: int, heads: int, dim: int, dtype: torch.dtype) -> KVSpec:
    """Return the spec of an engine's caches.

    Args:
        model: the engine's name of the model, possibly a path.
        engine: name of the engine, in place of a tokenizer's, which keys do not tell.
        layers: number of layers.
        heads: KV heads of one rank.
        dim: numbers per head.
        dtype: element type of the cache.

    Raises:
        FormatError: the engine quantises its cache.
    """
    if dtype not in _DTYPES:
        raise FormatError(f"a cache of {dtype}: the engine quantises it itself; kvabr's tracks need 16 or 32 bits")
    name = _UNSAFE.sub("-", model).strip("/") or "model"
    return KVSpec(name[-256:], engine, layers, heads, dim, _DTYPES[dtype])


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


class TroubleLog:
    """Logs a warning for the first trouble of each kind, and debug messages for the others."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, what: str, why: object) -> None:
        """Log that something went wrong; the engine computes what it does not get."""
        level = logging.DEBUG if what in self._told else logging.WARNING
        self._told.add(what)
        LOG.log(level, "%s: %s", what, str(why) or repr(why))


class KeyedCaches:
    """Looks up and plays caches by key; for the event loop of a client."""

    def __init__(
        self, client: AsyncClient, spec: KVSpec, settings: KeyedSettings, trouble: TroubleLog, *, max_tokens: int,
        min_tokens: int = 1,
    ) -> None:  # fmt: skip
        """Prepare; nothing is dialled.

        Args:
            client: plays caches.
            spec: spec of the caches.
            settings: the user's.
            trouble: logs errors.
            max_tokens: maximum length of a cache; a longer one is not the engine's.
            min_tokens: minimum length of a cache; an engine that copies a fixed number of tokens must not get fewer.
        """
        self._client, self._spec, self._settings, self._trouble = client, spec, settings, trouble
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._found: ByteLru[str, Found] = ByteLru(_MAX_FOUND_BYTES, _memory_of)

    async def leading(self, keys: Sequence[str]) -> int:
        """Return how many caches, from the first on, can be fetched; takes one round trip."""
        found = await asyncio.gather(*(self.find(key) for key in keys))
        return next((place for place, one in enumerate(found) if one is None), len(found))

    async def find(self, key: str) -> Found | None:
        """Return the catalog of a cache; None if it is missing or describes another kind of cache."""
        if self._settings.url is None:
            return None
        if (known := self._found.get(key)) is not None:
            return known
        within_s = self._settings.lookup_s
        try:
            found = await self._client.find_asset(namespace(self._spec, key), within_s=within_s)
        except NotFoundError:
            return None
        except KvabrError as error:
            self._trouble.tell("the origin cannot be asked", error)
            return None
        if found.catalog.spec.digest() != self._spec.digest():
            self._trouble.tell(
                "the origin's caches are of another kind", f"{found.catalog.spec}; this engine's {self._spec}"
            )
            return None
        if not self._min_tokens <= found.catalog.tokens <= self._max_tokens:
            what = f"{found.catalog.tokens} tokens, where one has {self._min_tokens} to {self._max_tokens}"
            self._trouble.tell("the origin's caches are of another kind", what)
            return None
        self._found.add(key, found)
        return found

    async def play(self, key: str, deadline_s: float) -> torch.Tensor | None:
        """Return a cache, [layer, K/V, head, token, dim]; None if it is missing or does not come in time."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + deadline_s
        found = await self.find(key)
        if found is None:
            return None
        settings = self._settings
        try:
            played = await self._client.play_asset(
                found,
                deadline=max(due_s - loop.time(), 1e-3),
                options=PlayOptions(policy=settings.policy, patience=settings.patience),
            )
        except KvabrError as error:
            if not isinstance(error, BusyError):
                self._found.pop(key, None)  # it may be gone or replaced
            self._trouble.tell("a cache did not come", error)
            return None
        return played.kv

    async def answers(self) -> bool:
        """Return whether the origin answers now."""
        if self._settings.url is None:
            return False
        try:
            async with asyncio.timeout(self._settings.lookup_s):
                connection = await self._client.connect()
                return await connection.answers(self._settings.lookup_s)
        except (KvabrError, TimeoutError):
            return False


class KeyedPublisher:
    """Publishes caches by key, in a thread of its own."""

    def __init__(self, spec: KVSpec, settings: KeyedSettings, trouble: TroubleLog, source: str) -> None:
        """Open the store that the settings name; if they name none, nothing is published.

        Raises:
            UsageError: the store cannot be opened, or a track is unknown.
        """
        self._spec, self._trouble = spec, trouble
        self.publisher: Publisher | None = None
        if settings.publish is not None:
            exact = "BF16" if spec.dtype == "bfloat16" else "FP16"
            self.publisher = Publisher(
                settings.publish,
                spec,
                prior=default_catalog(),
                tracks=settings.tracks or (exact, "Int8", "Int4"),
                queue=settings.queue,
                max_bytes=settings.publish_bytes,
                source=source,
            )

    def put(self, key: str, kv: torch.Tensor, done: Callable[[bool], None]) -> None:
        """Publish a cache.

        Args:
            key: key of the cache.
            kv: [layer, K/V, head, token, dim]; must not change before ``done`` is called.
            done: called with whether the cache is published, now or before; on the publishing thread, or at once.
        """
        tokens = kv.shape[3]
        if self.publisher is None:
            done(False)
            return
        slot = self.publisher.reserve_named(key_digests(self._spec, key, tokens), tokens)
        if isinstance(slot, Slot):

            def over(outcome: PublishOutcome) -> None:
                if outcome.verdict == "failed":
                    self._trouble.tell("a cache was not published", outcome.why)
                done(outcome.verdict == "published")

            slot.fill(kv, over)
        else:
            if slot == "full":
                self._trouble.tell("caches were not published", "they came faster than they can be encoded")
            done(slot == "known")

    def close(self) -> None:
        """Publish what waits, then end."""
        if self.publisher is not None:
            self.publisher.close()
