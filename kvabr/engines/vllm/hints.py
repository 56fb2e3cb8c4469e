"""Hints in requests to keep a cache in this node's store for the next turn of a conversation.

``{"keep_s": 600}`` in ``kv_transfer_params`` protects the cached groups of a prompt from eviction for ten minutes;
``{"back": true}`` for an hour, the maximum. Missing groups are fetched after the request, at a lower priority than
plays. Groups played with a loss are fetched again in better quality, but not protected. Hints may protect at most half
of the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvabr.client.blocking import Background, Handle
from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.engines.clients import EngineClient
from kvabr.engines.settings import TroubleLog
from kvabr.engines.vllm.config import ServedModel, VllmSettings
from kvabr.engines.vllm.growing import Names
from kvabr.engines.vllm.plays import find_cache
from kvabr.engines.vllm.requests import expects_return, params
from kvabr.engines.vllm.stats import ConnectorCounts
from kvabr.player.session_types import TIME_PRICE
from kvabr.types.errors import KvabrError
from kvabr.types.kv import KVSpec

_log = logging.getLogger("vllm.kvabr")
_MAX_KEEP_S = 3600.0
_MAX_HINTS = 64
"""Maximum number of concurrent hints; further hints are dropped and counted."""
_TIMEOUT_S = 60.0
_MAX_REFINED = 4
"""Maximum number of prompts fetched again at once."""
_LOOK_S = 1.0
"""Seconds between lookups for a cache that is being published."""
_LOOKS = 8


@dataclass(frozen=True, slots=True)
class _Hint:
    names: Names
    until_s: float
    tokens: int = 0


class RequestHints:
    """Executes the hints of requests that have ended."""

    def __init__(
        self,
        settings: VllmSettings,
        model: ServedModel,
        client: Background[EngineClient] | None,
        counts: ConnectorCounts,
        trouble: TroubleLog,
    ) -> None:
        """Start without hints; if there is no client, hints are ignored."""
        self._settings, self._model, self._client = settings, model, client
        self._counts, self._trouble = counts, trouble
        self._publishing: OrderedDict[str, tuple[_Hint, int]] = OrderedDict()
        self._running: set[Handle[None]] = set()
        self._refining: dict[Handle[None], Names] = {}

    def seconds(self, request: Any) -> float:
        """Return how long to keep a request's cache, in seconds; 0 without a valid hint."""
        given = params(request).get("keep_s")
        if given is None and not expects_return(request):
            return 0.0
        what = f"keep_s must be a positive number of seconds; more than {_MAX_KEEP_S:g} count as {_MAX_KEEP_S:g}"
        if given is None:
            given = _MAX_KEEP_S
        wrong = isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf")
        if self._client is None:
            wrong, what = True, "keep_s has no effect: this engine does not play"
        if wrong:
            self._counts.add("params_ignored")
            self._trouble.warn(f"kv_transfer_params: {what}", "the hint is ignored")
            return 0.0
        return float(min(given, _MAX_KEEP_S))

    def ended(self, request: Any, names: Names, *, publishing: bool) -> None:
        """Execute the hint of an ending request now, or once its cache is published."""
        if not (seconds := self.seconds(request)):
            return
        self._counts.add("hints")
        hint = _Hint(names, time.monotonic() + seconds)
        if publishing:
            self._publishing[request.request_id] = hint, 0
            if len(self._publishing) > _MAX_HINTS:
                self._follow(self._publishing.popitem(last=False)[1][0])
        else:
            self._follow(hint)

    def refine(self, names: Names) -> None:
        """Fetch a cache again in better quality after it was played with a loss."""
        if self._client is None or not (self._settings.store_mib or self._settings.disk):
            return
        self._refining = {each: names for each, names in self._refining.items() if not each.done()}
        if len(self._refining) < _MAX_REFINED and names not in self._refining.values():
            self._refining[self._client.begin(partial(self._refine, names))] = names

    async def _refine(self, names: Names, client: EngineClient) -> None:
        tokens, salt, adapter = names
        try:
            found = await find_cache(client, tokens, self._model.adapted(adapter).specs, salt, _TIMEOUT_S)
            if found is not None:
                options = self._options(salt)
                hinted = await client.hint_asset(found, within_s=_TIMEOUT_S, options=options)
                self._counts.add("tokens_refined", hinted.tokens)
        except (KvabrError, TimeoutError) as error:  # keep the cache as played
            self._trouble.warn("a cache played with a loss could not be improved", error)

    def _options(self, salt: bytes) -> PlayOptions:
        return PlayOptions(policy=self._settings.policy, salt=salt)

    def published(self, request: str, tokens: int) -> None:
        """Record how many tokens of a request a worker has published."""
        if request not in self._publishing:
            return
        hint, ranks = self._publishing.pop(request)
        hint = replace(hint, tokens=max(hint.tokens, tokens))
        if ranks + 1 < self._model.ranks:
            self._publishing[request] = hint, ranks + 1
        else:
            self._follow(hint)

    def _follow(self, hint: _Hint) -> None:
        self._running = {one for one in self._running if not one.done()}
        if len(self._running) >= _MAX_HINTS:
            self._counts.add("hints_dropped")
            return
        assert self._client is not None  # noqa: S101  # without a client, hints are ignored
        self._running.add(self._client.begin(partial(self._keep, hint)))

    async def _keep(self, hint: _Hint, client: EngineClient) -> None:
        model, tokens = self._model.adapted(hint.names[2]), 0
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                for spec in model.shards:
                    tokens = max(tokens, await self._keep_of(client, hint, (spec,)))
                if not tokens:
                    tokens = await self._keep_of(client, replace(hint, tokens=0), model.specs)
        except (KvabrError, TimeoutError) as error:
            self._counts.add("hints_failed")
            self._trouble.warn("a request's cache could not be kept", error)
        except Exception:  # noqa: BLE001  # no caller waits for the result
            self._counts.add("hints_failed")
            _log.exception("kvabr: a request's cache could not be kept")
        else:
            self._counts.add("tokens_kept", tokens)

    async def _keep_of(self, client: EngineClient, hint: _Hint, specs: Sequence[KVSpec]) -> int:
        """Keep the cache of the first spec that has one; return the number of stored tokens."""
        ids, salt, _ = hint.names
        found: Found | None = None
        for spec in specs:
            for _ in range(_LOOKS):
                found = await client.find(ids, model=spec, salt=salt, within_s=_TIMEOUT_S, any_dtype=True, live=False)
                if (found is not None and found.catalog.tokens >= hint.tokens) or not hint.tokens:
                    break
                await asyncio.sleep(_LOOK_S)
            if found is not None:
                break
        left_s = hint.until_s - time.monotonic()
        if found is None or left_s <= 0:
            return 0
        hinted = await client.hint_asset(
            found,
            within_s=_TIMEOUT_S,
            keep_s=left_s,
            time_price=TIME_PRICE,
            options=self._options(salt),
        )
        return hinted.tokens
