"""Plays the cache of a prompt into a `DynamicCache` for ``generate()``, and upgrades it during generation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import Client
from kvabr.client.options import PlayOptions
from kvabr.client.result import NothingCached, Played
from kvabr.client.upgrades import Upgrades
from kvabr.codec import gpu
from kvabr.codec.payload import keys_and_values
from kvabr.engines.adapters import require
from kvabr.engines.transformers import ADAPTER
from kvabr.engines.transformers.cache import (
    INDEXER,
    dynamic_cache,
    has_states,
    held_layers,
    is_plain,
    new_cache,
    windowed_cache,
)
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError
from kvabr.types.events import LookupFailed, PlayEvent
from kvabr.types.media import MediaTokens

_log = logging.getLogger("kvabr.transformers")

EXACT_TRACKS = ("Raw", "FP16", "BF16", RECOMPUTED)
"""Exact tracks; for a float32 state, only the first and the last of these are exact."""


@dataclass(frozen=True, slots=True)
class ReadyCache:
    """A cache for ``generate()``."""

    cache: Any
    """A `transformers.DynamicCache` (or the model's own kind) for one prompt: pass it to ``generate()`` as
    ``past_key_values``, with all ``input_ids``. It grows with the text, so use it once.
    """
    tokens: int
    """Number of cached tokens, less than the whole prompt: ``generate()`` needs at least one token."""
    played: Played | NothingCached
    problem: str | None
    """Why the origin's cache could not be played; None if it was played."""

    @property
    def upgrades(self) -> Upgrades | None:
        """Upgrades that continue while the cache is in use, see `Steps`; None without upgrades."""
        return None if isinstance(self.played, NothingCached) else self.played.upgrades

    @property
    def exact(self) -> bool:
        """True if every group arrived on an exact track, or was computed after exact groups only."""
        played = self.played
        if isinstance(played, NothingCached):
            return True
        catalog = played.catalog
        wide = [part.only.kind == "state" and part.dtype == "float32" for part in played.spec.parts]
        return all(
            track in ((EXACT_TRACKS[0], RECOMPUTED) if catalog and wide[catalog.unit(group).part] else EXACT_TRACKS)
            for group, track in enumerate(played.coverage)
        )


def play_cache(
    client: Client,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    deadline: float,
    options: PlayOptions | None = None,
) -> ReadyCache:
    """Return the cache of a prompt, blocking.

    Args:
        client: finds and plays the cache; its own engine may be another one.
        engine: the model. With states, all but the last token of the prompt are played, as states cannot be truncated.
        tokens: the prompt: ids, or ``input_ids`` of a batch of one.
        deadline: TTFT deadline in seconds from this call, including the model's time for uncached tokens.
            ``generate()`` also computes the last cached tokens if that reduces the loss enough (`PlayOptions.tail`).
        options: options of the play (default: the client's). Without ``recompute``, groups that cannot be played are an
            error.

    Raises:
        UsageError: there is more than one prompt, or an argument is wrong.
        ModelError: the tokens do not fit the model.
        PlayError: the cache can neither be fetched nor computed.
        PolicyError: the policy or the estimator raised it.
    """
    ids, how, problems = _prepare(engine, tokens, options or client.options)
    if not (wanted := _wanted(engine, ids)):
        return _ready(engine, ids, NothingCached(engine.spec, 0.0), problems)
    return _ready(engine, ids, client.play(wanted, deadline=deadline, options=how, engine=engine), problems)


async def play_cache_async(
    client: AsyncClient,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    deadline: float,
    options: PlayOptions | None = None,
) -> ReadyCache:
    """Like `play_cache`, for asyncio. Cancelling the coroutine cancels its downloads."""
    ids, how, problems = _prepare(engine, tokens, options or client.options)
    if not (wanted := _wanted(engine, ids)):
        return _ready(engine, ids, NothingCached(engine.spec, 0.0), problems)
    return _ready(engine, ids, await client.play(wanted, deadline=deadline, options=how, engine=engine), problems)


def prompt_ids(engine: TransformersEngine, tokens: Sequence[int] | torch.Tensor) -> list[int]:
    """Return the ids of one prompt, checked to fit the unchanged model; raise `UsageError` for more than one prompt."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() == 2 and tokens.shape[0] != 1:
            raise UsageError(f"input_ids has {tokens.shape[0]} prompts: play them one at a time")
        tokens = tokens.flatten().tolist()
    if isinstance(tokens, MediaTokens):
        raise UsageError("the transformers engine computes from token ids alone, but some of these stand for media")
    ids = list(tokens)
    engine.check(ids)
    engine.check_unchanged()
    return ids


def _prepare(
    engine: TransformersEngine, tokens: Sequence[int] | torch.Tensor, options: PlayOptions
) -> tuple[list[int], PlayOptions, list[str]]:
    """Return the prompt's ids, the options of its play, and a list that gets the reason if the lookup fails."""
    ADAPTER.check(require("transformers").__version__)
    problems: list[str] = []

    def log(event: PlayEvent) -> None:
        if isinstance(event, LookupFailed):
            problems.append(event.reason)
        options.note(event)

    # A state keeps its own element type, which may be wider than the model's.
    dtype = options.dtype or (None if has_states(engine.spec) else engine.dtype)
    ids, out = prompt_ids(engine, tokens), options.out
    if out is None and is_plain(engine.spec) and len(engine.spec.parts) == 1 and gpu.runs_on(engine.device):
        out = torch.empty(engine.spec.shape(len(ids)), dtype=dtype, device=engine.device)
    question = max(1, options.question_tokens)
    return ids, replace(options, dtype=dtype, out=out, log=log, question_tokens=question), problems


def _wanted(engine: TransformersEngine, ids: list[int]) -> list[int]:
    return ids[:-1] if has_states(engine.spec) else ids


def _ready(
    engine: TransformersEngine, ids: Sequence[int], played: Played | NothingCached, problems: Sequence[str]
) -> ReadyCache:
    if isinstance(played, NothingCached):
        return ReadyCache(new_cache(engine.model), 0, played, None)
    problem = problems[0] if problems else None
    if problem is not None:
        _log.warning("no cache was played: %s; the model computed the prompt", problem)
    covered = min(played.tokens, len(ids) - 1)
    if is_plain(engine.spec):
        shown = [part[:, :, :, :covered] for part in played.parts]
        cache = dynamic_cache(shown, engine.spec, engine.dtype, engine.device)
    else:
        cache = windowed_cache(played.parts, played.spans, engine.spec, covered, engine.model)
    ready = ReadyCache(cache, covered, played, problem)
    if not ready.exact:
        cache.kvabr_loss = max(played.loss, 1e-30)  # `publish_cache` refuses it
    return ready


class Steps:
    """Allows upgrades of a cache between two steps of ``generate()``; a context manager.

    Pass it to `kvabr.client.upgrades.Upgrades.into`::

        ready = play_cache(client, engine, input_ids, deadline=2.0, options=PlayOptions(after=math.inf))
        with Steps(engine, ready) as steps:
            if ready.upgrades is not None:
                ready.upgrades.into(steps)
            output = model.generate(input_ids, past_key_values=ready.cache)

    An upgrade does not change text generated before it, nor the cache of that text.
    """

    def __init__(self, engine: TransformersEngine, ready: ReadyCache) -> None:
        self._model, self._cache = engine.model, ready.cache
        if not isinstance(ready.played, Played):
            raise UsageError("no cache was played, so no cache can be upgraded")
        self._played, self._tokens = ready.played, ready.tokens
        self._lock = threading.Lock()
        self._hooks: list[Any] = []
        self.rewritten = 0
        """Number of upgrades written."""

    def __enter__(self) -> Self:
        def begin(*_: object) -> None:
            self._lock.acquire()

        def end(*_: object) -> None:
            self._lock.release()

        self._hooks = [
            self._model.register_forward_pre_hook(begin),
            self._model.register_forward_hook(end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def __call__(self, first: int, last: int, write: Callable[[], None]) -> bool:
        """Call ``write`` between two steps; see `kvabr.client.engine_hook.Rewrite`."""
        with self._lock, torch.no_grad():
            if not self._hooks:
                return False
            write()
            self._copy(first, min(last, self._tokens))
            self.rewritten += 1
        return True

    def _copy(self, first: int, last: int) -> None:
        spec, places = self._played.spec, held_layers(self._cache)
        for kv, span, part in zip(self._played.parts, self._played.spans, spec.parts, strict=True):
            only = part.only
            if only.kind == "state":
                continue
            keys, values = keys_and_values(kv, part)
            for place, layer in enumerate(only.layers):
                state = self._cache.layers[places[layer]]
                if only.role == INDEXER:
                    state.indexer_keys[0, first:last] = keys[place, 0, first:last].to(state.indexer_keys)
                    continue
                # A window layer counts old tokens that it has dropped.
                held = state.keys.shape[2]
                gone = getattr(state, "cumulative_length", held) - held
                begin = max(first, span.first, gone)
                pairs = ((state.keys, keys[place]), (state.values, (values if only.v_dim else keys)[place]))
                for kept, played in pairs if begin < last else ():
                    shown = played[:, begin - span.first : last - span.first]
                    kept[0, :, begin - gone : last - gone] = shown.to(device=kept.device, dtype=kept.dtype)
