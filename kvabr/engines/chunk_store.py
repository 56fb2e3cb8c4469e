"""Caches that an engine knows by keys of its own, and not by their tokens: published, found and played by key.

LMCache's chunks and SGLang's pages are of this kind: a hash that covers all tokens up to their end. So the digests of
their groups are made of the key. Where in a prompt such a cache stands nobody says, which leaves out the AC tracks:
they undo the rotary embedding by position. The levels that quantise need no position.
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
"""Memory for catalogs: an engine soon fetches what it has asked about."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._/-]")
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class KeyedSettings(EngineSettings):
    """Keys of LMCache's and SGLang's adapters."""

    patience: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Deadlines after which a cache that is not there counts as lost."""
    lookup_s: Seconds = 1.0
    """Seconds that a lookup may take; then the cache counts as not there."""

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
    """What an engine's caches are.

    Args:
        model: the model's name as the engine has it; a folder's path will do.
        engine: its name, which stands where a tokenizer's belongs: keys tell of none.
        layers: of the cache.
        heads: KV heads of one rank.
        dim: of a head.
        dtype: of the cache.

    Raises:
        FormatError: a cache that the engine quantises itself.
    """
    if dtype not in _DTYPES:
        raise FormatError(f"a cache of {dtype}: the engine quantises it itself; kvabr's tracks need 16 or 32 bits")
    name = _UNSAFE.sub("-", model).strip("/") or "model"
    return KVSpec(name[-256:], engine, layers, heads, dim, _DTYPES[dtype])


def _memory_of(found: Found) -> int:
    """Estimate the memory of a catalog: a group of a track has a digest of 64 characters and two numbers."""
    return 1024 + 256 * found.catalog.groups * (1 + len(found.catalog.tracks))


def key_digests(spec: KVSpec, key: str, tokens: int) -> list[str]:
    """A digest for each group of a cache; the last one names the asset."""
    groups = spec.groups(tokens)
    return [_digest(spec, key, None if index == groups - 1 else index) for index in range(groups)]


def namespace(spec: KVSpec, key: str) -> TrackNamespace:
    """Where a cache is published, however many tokens it has."""
    return TrackNamespace(spec.model, _digest(spec, key, None))


def _digest(spec: KVSpec, key: str, index: int | None) -> str:
    # The last group's does not tell how many there are: who asks does not know.
    place = "last" if index is None else str(index)
    return hashlib.sha256(f"kvabr.{spec.tokenizer}/1\0{place}\0{key}".encode()).hexdigest()


class Trouble:
    """Warns once for each kind of trouble: what is logged a thousand times is read by nobody."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, what: str, why: object) -> None:
        """Something went wrong; the engine computes what it does not get."""
        level = logging.DEBUG if what in self._told else logging.WARNING
        self._told.add(what)
        LOG.log(level, "%s: %s", what, str(why) or repr(why))


class KeyedCaches:
    """Caches by key, by way of a client; for its event loop."""

    def __init__(
        self, client: AsyncClient, spec: KVSpec, settings: KeyedSettings, trouble: Trouble, *, max_tokens: int,
        min_tokens: int = 1,
    ) -> None:  # fmt: skip
        """Begin; nothing is dialled.

        Args:
            client: plays them.
            spec: of the caches.
            settings: what the user set.
            trouble: told of what goes wrong.
            max_tokens: of one cache: what claims to be longer is none of the engine's.
            min_tokens: of one cache: an engine that reads as many as its key stands for must not be given fewer.

        Raises:
            UsageError: an option makes no sense.
        """
        self._client, self._spec, self._settings, self._trouble = client, spec, settings, trouble
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._found: ByteLru[str, Found] = ByteLru(_MAX_FOUND_BYTES, _memory_of)

    async def leading(self, keys: Sequence[str]) -> int:
        """How many caches, from the first on, can be fetched; in one round trip."""
        found = await asyncio.gather(*(self.find(key) for key in keys))
        return next((place for place, one in enumerate(found) if one is None), len(found))

    async def find(self, key: str) -> Found | None:
        """The catalog of a cache; None if it cannot be had, or is of another kind of cache."""
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
        """A cache, [layer, K/V, head, token, dim]; None if it is not there, or not in time."""
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
                self._found.pop(key, None)  # it may be gone, or be there again, but not as it was
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

    def __init__(self, spec: KVSpec, settings: KeyedSettings, trouble: Trouble, source: str) -> None:
        """Make the folder; without one, nothing is published.

        Raises:
            UsageError: the folder cannot be made, or a track is not known.
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
            key: of the cache.
            kv: [layer, K/V, head, token, dim]; not to be changed before ``done``.
            done: told whether it is published, now or before; on the publishing thread, or at once.
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
        """Publish what waits, and end."""
        if self.publisher is not None:
            self.publisher.close()
