"""The connector's half in vLLM's scheduler: looks up prompts at the origin, and selects caches to publish.

It never blocks: vLLM must ask again while a lookup or play (`Promises`) runs. While a play is decoded into blocks,
requests with the same prefix wait in order to share these blocks. A request gets a hit only once: if a promised load
fails, a second hit could cause an endless loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

from kvabr.client.blocking import Background, Handle
from kvabr.client.lookup import Found
from kvabr.client.memory import UNKNOWN
from kvabr.client.options import PlayOptions
from kvabr.client.prefill_timings import guess
from kvabr.engines.clients import EngineClient
from kvabr.engines.layouts import whole_blocks
from kvabr.engines.origin_pause import OriginPause
from kvabr.engines.settings import TroubleLog
from kvabr.engines.vllm.announced_blocks import AnnouncedBlocks
from kvabr.engines.vllm.block_losses import BlockLosses
from kvabr.engines.vllm.config import WHERE, ServedModel, VllmSettings
from kvabr.engines.vllm.growing import Growth, Names
from kvabr.engines.vllm.hints import RequestHints
from kvabr.engines.vllm.loras import Adapters
from kvabr.engines.vllm.pictures import Pictures
from kvabr.engines.vllm.plays import (
    CopyRequest,
    LoadRequest,
    PlacedPlay,
    PublishRequest,
    Step,
    cut,
    find_cache,
    sizes,
    usable,
    within,
)
from kvabr.engines.vllm.promises import Promises, Terms
from kvabr.engines.vllm.requests import allows, faults, params, requested_max_loss, salt_of, unfit
from kvabr.engines.vllm.snapshots import Boundaries
from kvabr.engines.vllm.stats import ConnectorCounts
from kvabr.engines.vllm.step_times import prefill_of
from kvabr.engines.vllm.windows import Completed, Tables
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, KvabrError, ModelError, TransportError
from kvabr.types.naming import chain

_log = logging.getLogger("vllm.kvabr")

_MIN_PLAY_SHARE = 0.25
_MIN_LOOKUP_SHARE = 0.25
_MIN_LEFT_S = 1e-3
_ROUNDING = 1e-12
"""Tolerance for rounding in sums of losses, nats per token."""
_LINK_S = 0.05
"""Seconds between queries of the link's speed."""
_LOOK_S = 1.0
"""Time limit of a round trip measurement, and pause after it, in seconds."""
_MAX_DEADLINE_S = 60.0
"""Maximum deadline of a request, in seconds, unless the setting is longer."""


@dataclass(frozen=True, slots=True)
class _Named:
    tokens: Sequence[int] = ()
    """Token ids of the prompt, with digests of media."""
    adapter: str | None = None
    unfit: str | None = None


@dataclass(slots=True)
class _Lookup:
    deadline_s: float
    began_s: float
    within_s: float = 0.0
    tokens: Sequence[int] = ()
    salt: bytes = b""
    adapter: str | None = None
    handle: Handle[Found | None] | None = None
    found: Found | None = None
    computed: int = -1
    terms: dict[int, Terms] = field(default_factory=dict)
    lacks: int = 0
    last: int = 0
    """Token after the last token to load; 0: no further hit."""
    tail: int = 0
    due_s: float = 0.0
    loss: float = 0.0
    worst: float = 0.0
    max_loss: float = math.inf
    before: float = 0.0
    held: int | None = None

    def over(self) -> None:
        self.found, self.last, self.tail, self.tokens = None, 0, 0, ()


class SchedulerHalf:
    """The connector's half in the scheduler; requests are vLLM's objects."""

    def __init__(
        self,
        settings: VllmSettings,
        model: ServedModel,
        client: Background[EngineClient] | None,
        *,
        produces: bool,
        evict: Callable[[set[int]], None],
        announced: AnnouncedBlocks | None = None,
        hashed: int | None = None,
    ) -> None:
        """Start; without a client, nothing is looked up.

        ``evict`` removes blocks from vLLM's prefix cache; ``announced`` collects KV events; ``hashed`` is the number of
        tokens per hash.
        """
        self.announced = announced
        self._settings, self._model, self._client, self._produces = settings, model, client, produces
        self._salt, self._generation = settings.salt, settings.generation()
        self._adapters = Adapters(settings.deadline_s)
        self._pictures = Pictures(settings.deadline_s)
        self._named: dict[str, _Named] = {}
        self._digesting: set[str] = set()
        self._lookups: dict[str, _Lookup] = {}
        self._pending = Step()
        self._unshared: list[Any] = []
        """Requests that must not use vLLM's prefix cache from the next step on."""
        self._loading: dict[str, frozenset[str]] = {}
        """Loads in progress, with the digests of their groups."""
        self._promises = Promises(
            ranks=model.ranks,
            block=model.block,
            max_bytes=settings.host_mib << 20,
            max_plays=settings.plays,
            same_ends=bool(model.caches.passing or model.caches.states),
            numbers=count(1),
        )
        self._completed = Completed(model.caches, model.spec.group_tokens, self._chain_of)
        self._boundaries = Boundaries(model.block, model.spec.group_tokens, self._chain_of)
        self._growth: Growth | None = None
        if produces and settings.publish_live and not model.caches.states:
            self._growth = Growth(model.caches, model.spec.group_tokens, self._name_of)
        self._old: set[str] = set()
        """Requests that may have KV of old weights, which must not be published."""
        self._arrived: set[str] = set()
        self.counts = ConnectorCounts()
        self.publishing = False
        limit = settings.keep_loss if model.prefix_caching else math.inf  # no block is reused without prefix caching
        self._kept = BlockLosses(limit, model.caches.blocks, evict, self.counts, hashed)
        self._cost: PrefillCost | None = None
        self._pause: OriginPause | None = None if client is None else OriginPause(client.begin)
        self._rtt_s = 0.0
        self._link = UNKNOWN
        self._link_s = -math.inf
        self._looking = False
        self._trouble = TroubleLog(_log)
        self._hints = RequestHints(settings, model, client, self.counts, self._trouble)

    def arrived(self, request: Any) -> None:
        """Start the lookup of a new request once its adapter's digest is known."""
        if self._waits(request):
            return
        if request.request_id not in self._lookups and request.request_id not in self._arrived:
            for what, why in faults(request):
                self.counts.add("params_ignored")
                self._trouble.warn(f"kv_transfer_params: {what}", why)
        if self._client is not None and request.request_id not in self._lookups:
            self._lookups[request.request_id] = self._start_lookup(request)
        if self._produces and request.request_id not in self._old:
            self._arrived.add(request.request_id)
            self._completed.arrived(request)
            if self._model.caches.states:
                self._boundaries.arrived(request)
            if self._growth is not None and self._published(request) and allows(request, "live"):
                self._growth.arrived(request)
                self._announce_later(request)

    def reset(self) -> bool:
        """Forget all caches, since weights may have changed; running requests will not be published.

        Return False while loads into blocks are running; they cannot be cancelled.
        """
        self._generation.changed()
        if self.announced is not None:
            self.announced.reset()
        for name, lookup in list(self._lookups.items()):
            if lookup.handle is not None or lookup.last:
                self._forget_lookup(name, lookup)  # looked up again under its new name
            else:
                self._promises.drop(name)
                lookup.over()
        self._old |= self._arrived
        for name in sorted(self._arrived):
            self._completed.over(name)
            self._boundaries.over(name)
            if self._growth is not None and self._growth.over(name):
                self._pending.publications.append(PublishRequest(name, (), (), b"", alive=True))
        self._arrived.clear()
        return not self._loading

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return the tokens to load after the first ``computed`` (None: ask again), and True if vLLM must wait."""
        if self._waits(request):
            self._digesting.add(request.request_id)
            return None, False
        self._digesting.discard(request.request_id)
        self.arrived(request)
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            return 0, False
        if not self._may_share(request, lookup, computed):
            return None, False
        if lookup.handle is not None and not self._settle(request, lookup, lookup.handle):
            return None, False
        lookup.computed = computed
        if computed % self._model.block or lookup.found is None:
            return 0, False
        if self._model.prefix_caching and time.monotonic() < lookup.due_s and self._will_arrive(lookup.found, computed):
            return None, False
        promised = self._promised(request.request_id, lookup, lookup.found, computed)
        return promised, bool(promised)

    def _may_share(self, request: Any, lookup: _Lookup, computed: int) -> bool:
        """Return True if a request may use vLLM's first ``computed`` tokens; otherwise vLLM must ask again.

        This also applies to 0 tokens, since some may have been shared a step ago.
        """
        deadline_s, limit = lookup.deadline_s if allows(request, "play") else math.inf, lookup.max_loss - lookup.loss
        if not self._kept.may_share(request, computed, deadline_s, limit):
            return False
        if math.isinf(limit):
            return True
        lookup.before = self._kept.loss_before(request, computed)
        if lookup.before <= limit + _ROUNDING or getattr(request, "skip_reading_prefix_cache", False):
            return True
        self._unshared.append(request)
        self.counts.add("requests_spared")
        self._forget_lookup(request.request_id, lookup)
        return False

    def _forget_lookup(self, name: str, lookup: _Lookup) -> None:
        if lookup.handle is not None:
            lookup.handle.cancel()
        self._promises.drop(name)
        del self._lookups[name]

    def _will_arrive(self, found: Found, computed: int) -> bool:
        catalog = found.catalog
        at = 0 if computed < catalog.first_token else catalog.group_at(computed)
        return at < len(catalog.chunks) and any(catalog.chunks[at] in chunks for chunks in self._loading.values())

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external: int) -> None:
        """Copy a play into allocated blocks, given for each block table."""
        name, caches = request.request_id, self._model.caches
        lookup = self._lookups.get(name)
        if lookup is None:
            return
        chunks = frozenset(lookup.found.catalog.chunks) if lookup.found is not None else frozenset()
        used = self._promises.use(name, external, time.monotonic())
        if used is not None:
            play, first = used
            last = first + external
            taken = caches.runs(blocks, first, last)
            if lookup.found is not None:
                self._kept.begin(request, lookup.deadline_s, first, external, blocks)
            self._kept.lost(name, lookup.loss, lookup.worst)
            self._pending.copies.append(CopyRequest(play, name, first, last, taken))
            self._loading[name] = chunks
        lookup.over()

    def step(
        self,
        scheduled: Mapping[str, int],
        tables: Tables,
        *,
        before: Mapping[str, int] = MappingProxyType({}),
        preempted: bool = False,
    ) -> Step:
        """Return the workers' messages for a step of ``scheduled`` tokens; it is timed if ``before`` is complete."""
        step, self._pending = self._pending, Step()
        while self._unshared:
            self._unshared.pop().skip_reading_prefix_cache = True  # if set earlier, vLLM would use its blocks once more
        step.preempted = preempted
        step.scheduled, step.prefill = sum(scheduled.values()), prefill_of(scheduled, before)
        self._kept.step(scheduled, tables)
        step.kept = self._completed.step(scheduled, tables)
        step.snapshots = self._boundaries.step(scheduled, tables, self._model.caches.states)
        if self._growth is not None:
            step.grown = self._growth.step(scheduled, tables)
        step.polling = bool(self._digesting) or any(each.handle is not None for each in self._lookups.values())
        now = time.monotonic()
        self._look_at_link(now)
        self._promises.link(self._link.rate, self._link.ttfb_s)
        if step.scheduled <= len(scheduled):  # the step has no prompt
            self._promises.idle(now)
        begun, step.dropped, *without = self._promises.take(now)
        for what, n in zip(("lookups_unplayed", "lookups_crowded"), without, strict=True):
            if n:
                self.counts.add(what, n)
        for play in begun:
            lookup, left_s = self._lookups[play.request], max(_MIN_LEFT_S, play.due_s - now)
            load = self._load(play.play, play.request, lookup, play.first, play.last, left_s)
            skip = load.found.catalog.group_at(play.first)
            found = within(load.found, skip, play.bytes)
            step.loads.append(replace(load, found=found, engine_price=play.engine_price))
        return step

    def placed(self, play: PlacedPlay) -> None:
        """Record one worker's ended play."""
        lookup = self._lookups.get(play.request)
        if self._promises.report(play.play, play.end, play.nbytes) and lookup is not None:
            lookup.loss, lookup.worst = max(play.loss, lookup.loss), max(play.worst, lookup.worst)

    def published(self, request: str, tokens: int) -> None:
        """Record how many tokens of a request a worker has published."""
        self._hints.published(request, tokens)
        if self.announced is not None:
            self.announced.published(request, tokens)

    def measured(self, cost: PrefillCost | None) -> None:
        self._cost = cost or self._cost

    def received(self, requests: set[str]) -> None:
        for name in requests:
            self._loading.pop(name, None)

    def served(self, request: Any, blocks: Sequence[Sequence[int]]) -> dict[str, float] | None:
        """Return the losses that an ending request was served with; None without a play."""
        served = self._kept.over(request.request_id, blocks)
        if served is not None and served["loss"] > self._settings.keep_loss:
            _log.info(
                "kvabr: %s: served with an expected loss of %.2g nats per token (keep_loss is %g)",
                request.request_id,
                served["loss"],
                self._settings.keep_loss,
            )
        return served

    def finished(self, request: Any, blocks: Sequence[Sequence[int]]) -> bool:
        """End a request, given its block tables; return True if its blocks must be kept for publishing."""
        try:
            lookup = self._lookups.get(request.request_id)
            publishing = self._finish(request, blocks)
            if self._name(request).unfit is None:
                if lookup is not None and lookup.worst > self._settings.keep_loss:
                    self._hints.refine(self._name_of(request))
                self._hints.ended(request, self._name_of(request), publishing=publishing)
            return publishing
        finally:
            self._named.pop(request.request_id, None)
            self._digesting.discard(request.request_id)
            self._pictures.over(request.request_id)

    def _finish(self, request: Any, blocks: Sequence[Sequence[int]]) -> bool:
        name, size = request.request_id, self._model.spec.group_tokens
        old = name in self._old
        self._old.discard(name)
        self._arrived.discard(name)
        chunks, states = self._completed.over(name), self._model.caches.states
        self._boundaries.over(name)
        if not chunks and self._produces and (self._model.caches.passing or states):
            chunks = self._chain_of(request)  # vLLM had all tokens of the prompt
        lookup = self._lookups.pop(name, None)
        if lookup is not None and lookup.handle is not None:
            lookup.handle.cancel()
        self._promises.drop(name)
        if self._growth is not None and self._growth.over(name):
            self._pending.publications.append(PublishRequest(name, (), (), b""))
            return True
        # vLLM itself frees the blocks of a load that never reached the worker.
        if name in self._loading or not self._produces or not allows(request, "publish"):
            return False
        if old:
            self.counts.add("publish_skipped_old")
            return False
        tokens = min(int(request.num_computed_tokens), int(request.num_prompt_tokens))
        # A streaming session may have grown beyond its prompt.
        tokens = whole_blocks(min(tokens, len(self._name(request).tokens) or tokens), math.lcm(self._model.block, size))
        if states:
            tokens = min(tokens, self._boundaries.end(request))
        if not tokens or not self._adapter_unchanged(request):
            self.counts.add("publish_skipped_short" if not tokens else "publish_skipped_unfit")
            return False
        ids, salt, adapter = self._name_of(request)
        self._pending.publications.append(
            PublishRequest(
                request=name,
                tokens=ids[:tokens],
                blocks=self._model.caches.runs(blocks, 0, tokens),
                salt=salt,
                adapter=adapter,
                chunks=tuple(chunks[: tokens // size]),
            )
        )
        self._announce_later(request)
        return True

    def _announce_found(self, request: Any, lookup: _Lookup) -> None:
        if self.announced is not None and lookup.held is not None:
            self.announced.found(request, lookup.held)

    def _announce_later(self, request: Any) -> None:
        if self.announced is not None:
            self.announced.publishing(request)

    def _promised(self, request: str, lookup: _Lookup, found: Found, computed: int) -> int | None:
        def terms(first: int) -> Terms:
            skip = found.catalog.group_at(first)
            if skip not in lookup.terms:
                lookup.terms[skip] = self._terms(lookup, found.catalog, first, skip)
            return lookup.terms[skip]

        return self._promises.promised_tokens(
            request, computed, lookup.last, terms=terms, due_s=lookup.due_s, now=time.monotonic()
        )

    def _prefill_of(self, catalog: Catalog | None = None) -> PrefillCost:
        """Return the cost of a prefill: configured, measured, from the catalog, or guessed."""
        prior = None if catalog is None else catalog.prefill
        return self._settings.prefill_cost or self._cost or prior or guess(self._model.spec)

    def _terms(self, lookup: _Lookup, catalog: Catalog, first: int, skip: int) -> Terms:
        left, prompt, last = catalog.suffix(skip), len(lookup.tokens), lookup.last
        cost = self._prefill_of(catalog)
        tracks = usable(left, self._settings.only_track, lookup.max_loss - lookup.before)
        largest_first = sizes(left, tracks)
        base = min(track.total_bytes for track in catalog.tracks if track.refines is None)
        return Terms(
            sizes=largest_first,
            link_bytes=round(lookup.lacks * largest_first[-1] / base) if base else 0,
            # Steps compute several prompts, so the fixed cost of a call is not counted.
            played_s=cost.added_s(last, prompt - last),
            computed_s=cost.added_s(first, prompt - first),
            loss=max(track.total_loss for track in tracks),
            chunks=left.chunks,
        )

    def _look_at_link(self, now: float) -> None:
        if self._client is not None and self._promises.waiting and now >= self._link_s + _LINK_S:
            self._link_s = now
            self._client.begin(self._fetch_link)

    async def _fetch_link(self, client: EngineClient) -> None:
        self._link, _ = await client.known_link()

    def _load(
        self,
        play: int,
        request: str,
        lookup: _Lookup,
        first: int,
        last: int,
        left_s: float,
    ) -> LoadRequest:
        found = lookup.found
        assert found is not None  # noqa: S101  # only found caches are loaded
        return LoadRequest(
            play=play,
            request=request,
            found=found,
            first=first,
            last=last,
            uncached=len(lookup.tokens) - last,
            tail=self._tail(len(lookup.tokens) - last),
            deadline_s=left_s,
            tokens=lookup.tokens[: found.catalog.tokens] if self._model.apart or self._produces else (),
            salt=lookup.salt,
            adapter=lookup.adapter,
            max_loss=max(0.0, lookup.max_loss - lookup.before),
        )

    def _tail(self, uncached: int) -> int:
        """Return how many tokens of a play may be computed instead, in a step with ``uncached`` other tokens.

        Return 0 for several ranks: they must leave out the same tokens, so `_shortened` decides.
        """
        if self._model.ranks > 1:
            return 0
        waiting = sum(lookup.found is not None for lookup in self._lookups.values())
        return min(self._settings.tail, max(0, self._model.step_tokens - uncached) // max(1, waiting))

    async def _shortened(self, client: EngineClient, lookup: _Lookup, found: Found) -> Found:
        """Return the part of a cache to load, without the tail; the tails of all waiting requests fit into a step."""
        settings, last = self._settings, self._usable(found, len(lookup.tokens) - 1)
        if not last:
            return found
        uncached, whole = len(lookup.tokens) - last, cut(found, last)
        free = self._model.step_tokens - uncached - sum(each.tail for each in list(self._lookups.values()))
        lookup.tail = max(0, min(settings.tail, free))
        cost = self._prefill_of(whole.catalog)
        tail = await client.tail_of(
            whole.catalog,
            deadline=max(_MIN_LEFT_S, lookup.deadline_s - (time.monotonic() - lookup.began_s)),
            cost=cost,
            uncached=uncached,
            block=self._model.block,
            options=PlayOptions(policy=settings.policy, tail=lookup.tail),
        )
        end = last if not tail else whole.catalog.tokens - tail
        lookup.tail = last - end
        return cut(found, end)

    def _start_lookup(self, request: Any) -> _Lookup:
        lookup = _Lookup(self._deadline_of(request), time.monotonic(), max_loss=self._max_loss_of(request))
        # vLLM ignores the cache for requests with prompt log-probabilities.
        unread = getattr(request, "skip_reading_prefix_cache", False)
        if not allows(request, "play") or unread:
            return lookup
        if (why := self._name(request).unfit) is not None:
            self.counts.add("lookups_unfit")
            self._trouble.warn("a request is neither played nor published", f"its cache depends on {why}")
            return lookup
        if len(request.prompt_token_ids) <= self._model.spec.group_tokens:
            self.counts.add("lookups_short")
            return lookup
        assert self._client is not None and self._pause is not None  # noqa: S101, PT018  # a producer has no lookups
        if self._pause.active:
            self.counts.add("lookups_paused")
            return lookup
        lookup.tokens, lookup.salt, lookup.adapter = self._name_of(request)
        lookup.within_s = self._lookup_s(lookup)
        if lookup.within_s < self._rtt_s:
            self.counts.add("lookups_hopeless")
            self._trouble.warn("a deadline is too short for a lookup", f"a round trip takes {self._rtt_s:.3g} s")
            if not self._looking:  # the round trip may have been slow only once
                self._looking = True
                self._client.begin(self._look)
            return lookup
        lookup.handle = self._client.begin(partial(self._find, lookup))
        return lookup

    def _lookup_s(self, lookup: _Lookup) -> float:
        """Return the time limit of a lookup that leaves time to compute the prompt afterwards, or else to play it."""
        deadline_s = lookup.deadline_s
        left_s = abs(deadline_s - self._prefill_of().seconds(0, len(lookup.tokens)))
        return min(max(left_s, _MIN_LOOKUP_SHARE * deadline_s), (1 - _MIN_PLAY_SHARE) * deadline_s)

    async def _find(self, lookup: _Lookup, client: EngineClient) -> Found | None:
        within_s, model = lookup.within_s, self._model.adapted(lookup.adapter)
        found = await find_cache(client, lookup.tokens, model.specs, lookup.salt, within_s)
        lookup.held = 0 if found is None else found.catalog.tokens
        self._rtt_s = await client.round_trip() or 0.0
        if found is None:
            return None
        self._link, lookup.lacks = await client.known_link(found.catalog)
        if self._model.ranks == 1:
            return found
        return await self._shortened(client, lookup, found)

    async def _look(self, client: EngineClient) -> None:
        try:
            with contextlib.suppress(KvabrError):
                if (rtt_s := await client.round_trip(probe_s=_LOOK_S)) is not None:
                    self._rtt_s = min(self._rtt_s, rtt_s)
            await asyncio.sleep(_LOOK_S)
        finally:
            self._looking = False

    def _settle(self, request: Any, lookup: _Lookup, handle: Handle[Found | None]) -> bool:
        # The deadline matters only if the event loop hangs.
        if not handle.done() and time.monotonic() - lookup.began_s < lookup.deadline_s:
            return False
        lookup.handle = None
        try:
            found = handle.result(0.0)
        except (TransportError, TimeoutError) as error:
            self.counts.add("lookups_failed")
            self._failed(lookup, str(error) or f"no answer within {lookup.within_s:.3g} s")
        except FormatError as error:
            self.counts.add("lookups_refused")
            self._trouble.warn("the origin's cache is not played", error)
        except Exception:  # noqa: BLE001  # the request must continue
            self.counts.add("lookups_failed")
            _log.exception("kvabr: a lookup failed; the request is computed")
        else:
            if self._pause is not None:
                self._pause.answered()
            self.counts.add("lookups_miss" if found is None else "lookups_hit")
            self._announce_found(request, lookup)
            if lookup.tail:
                self.counts.add("tokens_tail", lookup.tail)
            if found is not None:
                # vLLM must compute at least one token.
                lookup.last = self._usable(found, len(lookup.tokens) - 1)
                lookup.found = cut(found, lookup.last) if lookup.last else None
                least_s = time.monotonic() + _MIN_PLAY_SHARE * lookup.deadline_s
                lookup.due_s = max(lookup.began_s + lookup.deadline_s, least_s)
        return True

    def _usable(self, found: Found, limit: int) -> int:
        """Return how many tokens, at most ``limit``, vLLM can start with: whole blocks, at a snapshot of all states."""
        catalog, block = found.catalog, self._model.block
        last = whole_blocks(min(catalog.tokens - self._model.ahead, limit), block)
        if not self._model.caches.states:
            return last
        size = catalog.spec.group_tokens
        end = catalog.playable(last // size)[0] * size
        return 0 if end % block else end

    def _failed(self, lookup: _Lookup, why: str) -> None:
        if self._pause is None:
            return
        pause_s = self._pause.failed(lookup.began_s, within_s=lookup.within_s, rtt_s=self._rtt_s)
        if pause_s is not None:
            self._trouble.warn(
                "a lookup failed",
                f"{why}; requests are computed until the origin answers, for at least {pause_s:.1f} s",
            )

    def _salt_of(self, request: Any) -> bytes:
        return salt_of(request, self._generation.salt(self._salt))

    def _name_of(self, request: Any) -> Names:
        named = self._name(request)
        return named.tokens, self._salt_of(request), named.adapter

    def _name(self, request: Any) -> _Named:
        name, why = request.request_id, unfit(request)
        if name not in self._named and why is None:
            try:
                why = "a LoRA adapter"
                adapter = self._adapters.digest(request)
                why = "pictures, sound or films"
                self._named[name] = _Named(self._pictures.tokens(request), adapter)
            except ModelError as error:
                why = f"{why} ({error})"
        return self._named.setdefault(name, _Named(unfit=why))

    def _adapter_unchanged(self, request: Any) -> bool:
        named = self._name(request)
        try:
            return named.unfit is None and self._adapters.digest(request) == named.adapter
        except ModelError as error:
            self._trouble.warn("a request is not published: its LoRA adapter", error)
            return False

    def _waits(self, request: Any) -> bool:
        played = self._client is not None and allows(request, "play")
        if not played and not (self._produces and allows(request, "publish")):
            return False
        return any([self._adapters.waits(request), self._pictures.waits(request)])  # a list, so that both start

    def _chain_of(self, request: Any) -> Sequence[str]:
        named, size = self._name(request), self._model.spec.group_tokens
        tokens = whole_blocks(min(int(request.num_prompt_tokens), len(named.tokens)), size)
        if not tokens or not self._published(request):
            return ()
        spec = self._model.adapted(named.adapter).spec
        return chain(
            named.tokens[:tokens],
            model=spec.model,
            tokenizer=spec.tokenizer,
            group_tokens=spec.group_tokens,
            salt=self._salt_of(request),
        )

    def _published(self, request: Any) -> bool:
        return allows(request, "publish") and self._name(request).unfit is None

    def _deadline_of(self, request: Any) -> float:
        given = params(request).get("deadline_s")
        if given is None:
            return self._settings.deadline_s
        limit_s = max(_MAX_DEADLINE_S, self._settings.deadline_s)
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= limit_s:
            self.counts.add("params_ignored")
            self._trouble.warn(
                f"kv_transfer_params: deadline_s must be more than 0 and at most {limit_s:g}",
                f"the value of {WHERE} applies",
            )
            return self._settings.deadline_s
        return float(given)

    def _max_loss_of(self, request: Any) -> float:
        if (given := requested_max_loss(request)) is not None:
            return given
        self.counts.add("params_ignored")
        self._trouble.warn("kv_transfer_params: max_loss must be a number of 0 or more", "it counts as 0")
        return 0.0
