"""Tails for caches named by keys: the last tokens, which the engine computes with the question (`kvabr.abr.tail`).

To leave a tail to the engine, fewer cached keys are reported to it. Repeated requests get the same answer. The tails of
all current requests fit into a step of the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cachetools import TTLCache

from kvabr.abr.tail import MAX_TAIL
from kvabr.client.options import PlayOptions
from kvabr.engines.clients import EngineClient
from kvabr.engines.settings import EngineSettings
from kvabr.types.catalog import Catalog, Track

_MAX_PROMISED, _PROMISED_S = 1 << 16, 60.0
"""Maximum number of promises to remember, and their lifetime in seconds."""


class PromisedPlace(NamedTuple):
    """Position of a promised cache in its prompt."""

    following: int
    """Number of tokens after the cache."""
    concurrent: int
    """Number of caches fetched at once; they share one deadline."""


class KeyedTails:
    """Chooses tails for the requests of one engine, on one event loop."""

    def __init__(self, settings: EngineSettings, step_tokens: int, least: int) -> None:
        """Create without tails. An engine computes up to ``step_tokens`` per step, and fetches at least ``least``."""
        self._settings, self._step_tokens, self._least = settings, step_tokens, least
        self._recent: deque[tuple[float, int]] = deque()
        """Current tails, each with the latest time of its computation and its tokens."""
        self._promised: TTLCache[str, PromisedPlace] = TTLCache(_MAX_PROMISED, _PROMISED_S)

    def place(self, key: str) -> PromisedPlace:
        """Return the last promised position of a cache; by default, one without following tokens."""
        return self._promised.get(key, PromisedPlace(0, 1))

    async def leading(
        self, client: EngineClient, keys: Sequence[str], found: Sequence[Catalog], *, following: int
    ) -> int:
        """Return how many of the found caches, in the prompt's order, the engine should fetch.

        ``found`` has the catalogs of the first ``keys``; ``following`` is the number of tokens after all keys. Raise as
        `AsyncClient.tail_of`.
        """
        kept = len(found)
        again = kept == len(keys) and kept > 0 and keys[-1] in self._promised
        if not again and kept > 1 and (whole := as_one(found[:kept])) is not None:
            tail = await self._tail(client, whole, following)
            left = (whole.tokens - tail) // whole.spec.group_tokens if tail else kept
            if left * whole.spec.group_tokens >= self._least and left < kept:
                self._recent.append((time.monotonic() + self._settings.deadline_s, tail))
                kept = left
        if not again:
            following += sum(one.tokens for one in found[kept:])
            for key, one in zip(reversed(keys[:kept]), reversed(found[:kept]), strict=True):
                self._promised[key] = PromisedPlace(min(MAX_TAIL, following), kept)
                following += one.tokens
        return kept

    async def _tail(self, client: EngineClient, whole: Catalog, following: int) -> int:
        settings, now = self._settings, time.monotonic()
        while self._recent and self._recent[0][0] <= now:
            self._recent.popleft()
        room = self._step_tokens - following - sum(tokens for _, tokens in self._recent)
        cost = whole.prefill
        if settings.prefill_cost is not None:
            cost = settings.prefill_cost.scaled(1 + len(self._recent))
        if cost is None or room <= 0:
            return 0
        options = PlayOptions(policy=settings.policy, tail=min(settings.tail, room))
        return await client.tail_of(whole, deadline=settings.deadline_s, cost=cost, uncached=following, options=options)


def as_one(found: Sequence[Catalog]) -> Catalog | None:
    """Merge catalogs of consecutive caches into one, with one group per cache; None if they are incompatible.

    All caches but the last must have the same length.
    """
    first, last, size = found[0], found[-1], found[0].tokens
    if any(each.tokens != size for each in found[:-1]) or last.tokens > size or not first.even:
        return None
    tracks: list[Track] = []
    for track in last.tracks:
        own = [each.by_name.get(track.name) for each in found]
        if None in own or (track.refines is not None and all(track.refines != one.name for one in tracks)):
            continue
        tracks.append(
            replace(
                track,
                bytes=tuple(one.total_bytes for one in own if one is not None),
                loss=(track.total_loss / len(found),) * len(found),
                digests=tuple(one.digests[-1] for one in own if one is not None),
                decode_s=track.decode_s * sum(first.shares),
                measured=None,
            )
        )
    if not tracks or all(track.refines is not None for track in tracks):
        return None
    return replace(
        first,
        spec=replace(first.spec, group_tokens=size),
        tokens=sum(each.tokens for each in found),
        chunks=tuple(each.chunks[-1] for each in found),
        tracks=tuple(tracks),
        mixes=(),
        asked=(),
    )
