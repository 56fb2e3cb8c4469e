"""Caches that an engine names by its own keys instead of tokens: published, found and played by key.

LMCache's chunks and SGLang's pages have keys that hash all tokens up to the end of the chunk or page; group digests are
derived from these keys. The AC tracks undo the rotary embedding by position, so they are published only if the position
is known, and readers at another position get no cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import repeat, takewhile
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field

from kvabr.client.lookup import Found
from kvabr.client.memory import keep
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.codec.base import codec
from kvabr.codec.block_slots import CacheTensor, Place
from kvabr.codec.profile import ClassProfile, Profile
from kvabr.data import default_catalog
from kvabr.data.profiles import shipped_profiles
from kvabr.engines.clients import EngineClient, open_client
from kvabr.engines.keyed_tails import KeyedTails
from kvabr.engines.origin_pause import OriginPause, answers
from kvabr.engines.settings import Count, EngineSettings, Seconds, TroubleLog
from kvabr.engines.weights import weights_digest
from kvabr.player.session_types import TIME_PRICE
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot, read_profile
from kvabr.store.lru import ByteLru
from kvabr.types.catalog import Catalog
from kvabr.types.errors import (
    BusyError,
    ForeignError,
    FormatError,
    KvabrError,
    NotFoundError,
    TransportError,
    UsageError,
)
from kvabr.types.kv import DTYPES, KVSpec, LayerClass
from kvabr.types.naming import DIGITS, LAYERS, MARK, TrackNamespace, safe_name, with_facts

LOG = logging.getLogger("kvabr.engines.chunk_store")

_MAX_FOUND_BYTES = 64 << 20
_MAX_PROFILES = 8
_PROFILE_S = 300.0
_PAUSED_SHARE = 0.1
"""Fraction of the deadline for playing locally cached groups while the origin does not answer."""

_USUAL_DIMS = (128, 64)

STEP_TOKENS = 2048
"""Default step size of engines in tokens: the smallest of common engines."""


class KeyedSettings(EngineSettings):
    """Keys of LMCache's and SGLang's adapters."""

    patience: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Deadlines after which an incomplete cache counts as missing, and the engine computes it."""
    lookup_s: Seconds = 1.0
    """Seconds that a lookup may take; then the cache counts as missing."""
    step_tokens: Count | None = None
    """Maximum number of tokens per step of the engine. None: SGLang's ``--chunked-prefill-size``, otherwise 2,048."""

    @classmethod
    def read(cls, given: Mapping[str, object], where: str) -> Self:
        """As `EngineSettings.read`; also raise `UsageError` without both ``url`` and ``publish``."""
        settings = super().read(given, where)
        if settings.url is None and settings.publish is None:
            raise UsageError(f"{where}: set url to fetch caches, publish to publish them, or both")
        return settings


def spec_of(
    model: str, engine: str, layers: int, heads: int, dim: int, dtype: torch.dtype, *, latent: bool = False
) -> KVSpec:
    """Return the spec of an engine's caches; raise `FormatError` if the engine quantises them.

    ``model`` is a result of `named`; ``engine`` takes the place of the tokenizer; ``heads`` is the number in one rank.
    ``latent`` is True for one vector of ``dim`` per token, without heads (MLA).
    """
    if (kind := str(dtype).removeprefix("torch.")) not in DTYPES:
        raise FormatError(f"the engine quantises its cache to {dtype}; kvabr's tracks need 16 or 32 bits")
    if latent:
        return KVSpec(model, engine, (LayerClass("latent", tuple(range(layers)), 1, dim, 0, kind),))
    return KVSpec.uniform(model, engine, layers, heads, dim, kind)


def named(
    settings: KeyedSettings,
    given: str,
    facts: Mapping[str, object],
    *,
    folder: Path | None = None,
) -> str:
    """Return the model's name for its caches, from the settings or the engine's name ``given``; raise `ModelError`.

    ``facts`` are further facts that change KV, see `with_facts`; ``folder`` is that of the weights, if known.
    """
    raw = settings.model or given
    if settings.model is None and folder is not None:
        return with_facts(f"{safe_name(raw)}-{weights_digest(folder)[:DIGITS]}", facts)
    return with_facts(safe_name(raw), facts)


def profile_for(spec: KVSpec, settings: EngineSettings) -> Profile | None:
    """Return the codec profile for an engine's caches: the configured one, or a shipped one of the same name, if any.

    Raises:
        AssetError, FormatError: the file cannot be read, or has no profile.
        ForeignError: the profile is for another shape, such as all heads instead of one rank's heads.
    """
    chosen = settings.profile is not None
    profile = _profile_of(spec.model, settings)
    if profile is None:
        return None
    theirs = profile.spec
    mine = replace(spec, classes=tuple(replace(one, rope=theirs.rope) for one in spec.classes))
    if not isinstance(profile, ClassProfile) or theirs.changed(dtype=mine.dtype).classes != mine.classes:
        if not chosen:
            return None
        raise ForeignError(f"{settings.profile}: calibrated for {theirs.summary}, but the cache has {spec.summary}")
    structure = replace(profile.transform.structure, spec=mine)
    return replace(profile, spec=mine, transform=replace(profile.transform, structure=structure))


def head_dim_of(model: str, width: int, settings: EngineSettings) -> int:
    """Return the dimensions of a head, given the total over all heads.

    They are the profile's if these fit, else 128 or 64. A wrong guess matters little, as plain tracks scale each token
    and head.
    """
    profile = _profile_of(model, settings)
    if profile is not None and profile.spec.only.halves == 2:
        only = profile.spec.only
        if only.heads * only.k_dim == width:
            return only.k_dim
    return next((dim for dim in _USUAL_DIMS if width % dim == 0), width)


def _profile_of(model: str, settings: EngineSettings) -> Profile | None:
    if settings.profile is not None:
        return read_profile(settings.profile)
    found = next((each for each in shipped_profiles() if each.spec.model == model), None)
    return None if found is None else Profile.from_bytes(found.read())


def _alike(one: KVSpec, other: KVSpec, *, any_heads: bool) -> bool:
    """Return True if specs describe the same caches (``any_heads``: the same width), ignoring unknown ropes."""
    ropes = {each.rope for spec in (one, other) for each in spec.classes} - {None}
    bare = [replace(spec, classes=tuple(replace(each, rope=None) for each in spec.classes)) for spec in (one, other)]
    if any_heads and [each.heads * each.k_dim for each in one.classes] == [
        each.heads * each.k_dim for each in other.classes
    ]:
        bare = [
            replace(
                spec, classes=tuple(replace(each, heads=1, k_dim=1, v_dim=min(each.v_dim, 1)) for each in spec.classes)
            )
            for spec in bare
        ]
    return len(ropes) <= 1 and bare[0].digest() == bare[1].digest()


def _memory_of(found: Found) -> int:
    """Estimate the memory of a catalog in bytes: per group and track a digest of 64 characters and two numbers."""
    return 1024 + 256 * found.catalog.groups * (1 + len(found.catalog.tracks))


def key_digests(spec: KVSpec, key: str, tokens: int) -> list[str]:
    """Return a digest for each group of a cache; the last digest is the asset's name."""
    groups = spec.groups(tokens)
    return [_digest(spec, key, None if index == groups - 1 else index) for index in range(groups)]


def namespace(spec: KVSpec, key: str) -> TrackNamespace:
    """Return the namespace of a cache, which does not depend on its length."""
    return TrackNamespace(spec.model, _digest(spec, key, None))


def _digest(spec: KVSpec, key: str, index: int | None) -> str:
    # Readers do not know the number of groups, so the last group's digest must not depend on it.
    place = "last" if index is None else str(index)
    return hashlib.sha256(f"kvabr.{spec.tokenizer}/1\0{place}\0{key}".encode()).hexdigest()


def places(played: PlayedPrefix, kv: torch.Tensor) -> list[Place]:
    """Return the places of a cache's groups in a tensor [layer, K/V, head, token, dim], for `expand_here`."""
    firsts = [unit.first - played.spans[unit.part].first for unit in played.units]
    room, pairs = CacheTensor(kv), zip(played.units, firsts, strict=True)
    return [room.place(first, unit.tokens) for unit, first in pairs]


class KeyedOrigin:
    """A client that several stores with the same settings share, and its pauses after failures. For one event loop."""

    def __init__(self, settings: KeyedSettings) -> None:
        """Create a client without connecting; raise `UsageError` for a wrong setting."""
        self.client = open_client(settings)
        self._watching: asyncio.Task[None] | None = None
        self.pause = OriginPause(self._watch)

    def _watch(self, probe: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        self._watching = asyncio.get_running_loop().create_task(probe(self.client))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self.client.close()


class ChunkStore:
    """Looks up, plays and publishes caches by key. For one event loop."""

    def __init__(
        self,
        spec: KVSpec,
        settings: KeyedSettings,
        source: str,
        *,
        max_tokens: int,
        min_tokens: int = 1,
        unplaced: str = "",
        version: Callable[[], str | None] = lambda: None,
        step_tokens: int = STEP_TOKENS,
        least: int = 0,
        origin: KeyedOrigin | None = None,
        any_heads: bool = False,
    ) -> None:
        """Open the store to publish to, if any; do not connect to the origin yet.

        Args:
            spec: spec of the caches; the settings may change its group size.
            settings: the user's.
            source: description of the caches for the catalogs.
            max_tokens: maximum length of the engine's caches.
            min_tokens: minimum length; some engines copy a fixed number of tokens.
            unplaced: why positions are unknown, for the log.
            version: returns the engine's declared version of its weights, or None; called often.
            step_tokens: tokens per step of the engine; a setting overrides it.
            least: minimum length of a prefix that the engine fetches.
            origin: a shared client, closed by its owner; None: this store opens one.
            any_heads: accept caches of the same total width, see `head_dim_of`.

        Raises:
            UsageError: the store cannot be opened, a track is unknown, or a setting is wrong.
            AssetError, FormatError: the codec profile or the prior catalog is unusable.
        """
        self.spec, self._settings, self._unplaced = settings.grouped(spec), settings, unplaced
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self.trouble = TroubleLog(LOG)
        self.generation = settings.generation(version)
        self._tails = KeyedTails(settings, settings.step_tokens or step_tokens, least)
        self._found: ByteLru[str, Found] = ByteLru(_MAX_FOUND_BYTES, _memory_of)
        self._profiles: dict[str, asyncio.Task[None]] = {}
        self.publisher: Publisher | None = None
        profile = profile_for(self.spec, settings)
        if profile is not None:
            keep(profile)
        if settings.publish is not None:
            if profile is not None:
                self.spec = profile.spec
            exact = "BF16" if spec.dtype == "bfloat16" else "FP16"
            layers = () if profile is None else tuple(track for track in LAYERS if track in profile.tracks)
            tracks = settings.tracks or (exact, "Int8", "Int4", *layers)
            self._placed = [track for track in tracks if codec(track).needs_profile]
            self._only_placed = len(self._placed) == len(tracks)
            self.publisher = Publisher(
                settings.publish,
                self.spec,
                prior=default_catalog() if settings.prior is None else Catalog.read(settings.prior),
                tracks=tracks,
                profile=profile,
                queue=settings.queue,
                max_bytes=settings.publish_bytes,
                source=source,
            )
        self._any_heads = any_heads
        self._origin = origin or KeyedOrigin(settings)
        self._own_origin = self._origin if origin is None else None
        self.client = self._origin.client

    @property
    def _pause(self) -> OriginPause:
        return self._origin.pause

    def _text(self, key: str) -> str:
        """Return the full key of a cache: the model's name, the generation of its weights, and the engine's key."""
        generation = self.generation.name
        return f"{self.spec.model}{generation and MARK}{generation}{key}"

    async def leading(
        self, keys: Sequence[str], positions: Sequence[range | None] | None = None, *, goes_on: bool = False
    ) -> int:
        """Return the number of leading caches to fetch, in one round trip; the tail is not counted. See `find`.

        ``goes_on`` is True if the prompt may have more keys.
        """
        return sum(takewhile(bool, await self.offered(keys, positions, goes_on=goes_on)))

    async def offered(
        self, keys: Sequence[str], positions: Sequence[range | None] | None = None, *, goes_on: bool = False
    ) -> list[bool]:
        """Return for each cache of a prompt whether to fetch it; like `leading`, but also for caches after gaps."""
        found = await asyncio.gather(*map(self.find, keys, positions or repeat(None)))
        there = [one is not None for one in found]
        catalogs = [one.catalog for one in takewhile(lambda one: one is not None, found) if one is not None]
        kept = await self._kept(keys, catalogs, goes_on=goes_on)
        return [one and not kept <= place < len(catalogs) for place, one in enumerate(there)]

    async def _kept(self, keys: Sequence[str], catalogs: Sequence[Catalog], *, goes_on: bool) -> int:
        if not catalogs or (goes_on and len(catalogs) == len(keys)):
            return len(catalogs)
        # An unknown number of tokens follows the last key; they are too few for a cache.
        size = catalogs[0].tokens
        rest = max(1, size // 2) if self._min_tokens == self._max_tokens else 1
        texts, following = [self._text(key) for key in keys], (len(keys) - len(catalogs)) * size + rest
        try:
            return await self._tails.leading(self.client, texts, catalogs, following=following)
        except KvabrError as error:
            self.trouble.warn("no tail is chosen", error)
            return len(catalogs)

    async def find(self, key: str, positions: range | None = None) -> Found | None:
        """Return the catalog of a cache; None if it is missing, of another kind, or for other ``positions``.

        An empty range means that the key is ambiguous.
        """
        text = self._text(key)
        found = self._found.get(text) or await self._request(text)
        if found is None or text != self._text(key):
            return None
        # An asset without a profile does not depend on its position.
        at = None if found.catalog.profile is None else found.catalog.position
        if positions is None or (positions and at is None) or at in positions:
            return found
        if not positions:
            self.trouble.warn("a cache is not used", "its key occurs at several positions of prompts")
            return None
        wanted = positions[0] if len(positions) == 1 else f"one of {positions[0]}, {positions[0] + positions.step}, ..."
        self.trouble.warn("the origin's cache has another position", f"token {at} of a prompt, expected {wanted}")
        return None

    async def _request(self, text: str) -> Found | None:
        if self._settings.url is None or self._pause.active:
            return None
        began_s = time.monotonic()
        try:
            wanted = namespace(self.spec, text)
            found = await self.client.find_asset(wanted, within_s=self._settings.lookup_s)
        except NotFoundError:
            self._pause.answered()
            return None
        except TransportError as error:
            self._failed(began_s, "the origin does not answer lookups", error)
            return None
        except KvabrError as error:
            self.trouble.warn("the origin's answer cannot be used", error)
            return None
        self._pause.answered()
        if not self._fits(found.catalog):
            return None
        self._found.add(text, found)
        self._begin_profile(found.catalog)
        return found

    def _fits(self, catalog: Catalog) -> bool:
        if not _alike(catalog.spec, self.spec, any_heads=self._any_heads):
            why = f"{catalog.spec}; this engine's {self.spec}"
        elif not self._min_tokens <= catalog.tokens <= self._max_tokens:
            why = f"{catalog.tokens} tokens, expected {self._min_tokens} to {self._max_tokens}"
        else:
            return True
        self.trouble.warn("the origin's caches are of another kind", why)
        return False

    def _failed(self, began_s: float, what: str, error: KvabrError) -> None:
        pause_s = self._pause.failed(began_s)
        more = "" if pause_s is None else f"; no further requests until it answers, for at least {pause_s:.1f} s"
        self.trouble.warn(what, f"{error}{more}")

    def _begin_profile(self, catalog: Catalog) -> None:
        """Start to fetch a codec profile, once for all caches; it is too large to fetch during a play."""
        name = catalog.profile
        if name is not None and name not in self._profiles and len(self._profiles) < _MAX_PROFILES:
            self._profiles[name] = asyncio.get_running_loop().create_task(self._fetch_profile(name, catalog))

    async def _fetch_profile(self, name: str, catalog: Catalog) -> None:
        try:
            await self.client.fetch_profile(catalog, within_s=_PROFILE_S)
        except KvabrError as error:
            if isinstance(error, TransportError):
                del self._profiles[name]  # the next lookup tries again
            self.trouble.warn("the codec profile could not be fetched", error)

    async def play(self, key: str, positions: range | None = None) -> PlayedPrefix | None:
        """Return a compressed cache, see `places`; None if it is missing or late. For ``positions`` see `find`."""
        loop, settings, text = asyncio.get_running_loop(), self._settings, self._text(key)
        due_s = loop.time() + settings.deadline_s
        found = await self.find(key, positions)
        if found is None:
            return None
        began_s, left_s, place = time.monotonic(), due_s - loop.time(), self._tails.place(text)
        if self._pause.active:
            left_s = min(left_s, _PAUSED_SHARE * settings.deadline_s)
        try:
            played = await self.client.play_coded(
                found,
                deadline=max(left_s, 1e-3),
                options=PlayOptions(
                    policy=settings.policy,
                    time_price=TIME_PRICE / place.concurrent,
                    patience=settings.patience,
                    question_tokens=place.following,
                ),
            )
        except KvabrError as error:
            if not isinstance(error, BusyError):
                self._found.pop(text, None)
            if isinstance(error, TransportError):
                self._failed(began_s, "a cache could not be fetched", error)
            else:
                self.trouble.warn("a cache could not be fetched", error)
            return None
        if played.loss > settings.keep_loss:
            why = f"its expected loss is {played.loss:.3g} nats per token, more than keep_loss"
            self.trouble.warn("a cache is not used", why)
            return None
        return played if text == self._text(key) else None

    async def answers(self) -> bool:
        """Return True if the origin answers."""
        return self._settings.url is not None and await answers(self.client, self._settings.lookup_s)

    def put(self, key: str, kv: torch.Tensor, position: int | None = None) -> Future[int | None]:
        """Publish a cache in the background; the result is its bytes, 0 if it was published before, None if it failed.

        Thread-safe. Do not change ``kv``, [layer, K/V, head, token, dim], before the future is done. AC tracks need the
        ``position`` of the first token.
        """
        done: Future[int | None] = Future()
        if self.publisher is None:
            done.set_result(None)
            return done
        if position is None and self._placed:
            self.trouble.warn(f"caches are published without {', '.join(self._placed)}", self._unplaced)
            if self._only_placed:
                done.set_result(None)
                return done
        tokens = kv.shape[3]
        slot = self.publisher.reserve_named(key_digests(self.spec, self._text(key), tokens), tokens, position)
        if isinstance(slot, Slot):

            def over(outcome: PublishOutcome) -> None:
                if outcome.verdict == "failed" and not outcome.not_finite:
                    self.trouble.warn("a cache was not published", outcome.why)
                done.set_result(outcome.bytes if outcome.verdict == "published" else None)

            slot.fill(kv, over)
            return done
        if slot == "full":
            self.trouble.warn("caches were not published", "they are computed faster than they can be encoded")
        done.set_result(0 if slot == "known" else None)
        return done

    async def close(self) -> None:
        """End all plays and publish the waiting caches."""
        for task in self._profiles.values():
            task.cancel()
        if self._own_origin is not None:
            await self._own_origin.close()
        if self.publisher is not None:
            await asyncio.to_thread(self.publisher.close)
