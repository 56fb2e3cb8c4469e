"""A prompt in, a cache for ``generate()`` out: played, with its gaps computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.blocking import Client
from kvabr.client.options import PlayOptions
from kvabr.client.result import NothingCached, Played
from kvabr.client.upgrades import Upgrades
from kvabr.engines.adapters import require
from kvabr.engines.transformers import ADAPTER
from kvabr.engines.transformers.cache import dynamic_cache, remember_loss
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError
from kvabr.types.events import LookupFailed, PlayEvent

_log = logging.getLogger("kvabr.transformers")

EXACT_TRACKS = ("FP16", "BF16", RECOMPUTED)
"""What a group of an exact cache may have come on."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A cache to go on from."""

    cache: Any
    """A `transformers.DynamicCache` for one prompt: give it to ``generate()`` as ``past_key_values``, with all
    ``input_ids``. It grows with the text, so it serves once."""
    tokens: int
    """Tokens that it covers: never the whole prompt, since ``generate()`` must take in one token at least."""
    played: Played | NothingCached
    """What the play brought: coverage, expected loss, times."""
    problem: str | None
    """Why nothing of what the origin has could be played; None if nothing was wrong."""

    @property
    def upgrades(self) -> Upgrades | None:
        """Upgrades that continue while the cache is in use, see `Steps`; None if there are none."""
        return None if isinstance(self.played, NothingCached) else self.played.upgrades

    @property
    def exact(self) -> bool:
        """Whether every group came on an exact track, or was computed behind such."""
        played = self.played
        return isinstance(played, NothingCached) or all(track in EXACT_TRACKS for track in played.coverage)


def play_cache(
    client: Client,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    deadline: float,
    options: PlayOptions | None = None,
) -> Ready:
    """Get the cache of a prompt, blocking.

    Args:
        client: finds and plays it. If its own engine is another one, call `Client.measure_prefill` for this one first.
        engine: the model.
        tokens: the prompt: ids, or ``input_ids`` of a batch of one.
        deadline: seconds from this call in which the first token is wanted; the model's time for what no cache
            covers comes out of it.
        options: how to play; None: the client's. Without ``recompute``, what cannot be played is an error.

    Raises:
        UsageError: more than one prompt, or arguments that make no sense.
        ModelError: the tokens do not fit the model.
        PlayError: the cache can neither be fetched nor computed; the message says why.
        PolicyError: from the policy or the estimator.
    """
    ids, problems = prompt_ids(engine, tokens), list[str]()
    how = _options(engine, options or client.options, problems)
    return _ready(engine, ids, client.play(ids, deadline=deadline, options=how, engine=engine), problems)


async def play_cache_async(
    client: AsyncClient,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    deadline: float,
    options: PlayOptions | None = None,
) -> Ready:
    """As `play_cache`, for asyncio. Cancelling it cancels its downloads."""
    ids, problems = prompt_ids(engine, tokens), list[str]()
    how = _options(engine, options or client.options, problems)
    return _ready(engine, ids, await client.play(ids, deadline=deadline, options=how, engine=engine), problems)


def prompt_ids(engine: TransformersEngine, tokens: Sequence[int] | torch.Tensor) -> list[int]:
    """The ids of one prompt, checked against the model.

    Raises:
        UsageError: more than one prompt.
        ModelError: none, too many, or none of the model's.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() == 2 and tokens.shape[0] != 1:
            raise UsageError(f"input_ids of {tokens.shape[0]} prompts: play them one at a time")
        tokens = tokens.flatten().tolist()
    ids = list(tokens)
    engine.check(ids)
    return ids


def _options(engine: TransformersEngine, options: PlayOptions, problems: list[str]) -> PlayOptions:
    ADAPTER.check(require("transformers").__version__)

    def log(event: PlayEvent) -> None:
        if isinstance(event, LookupFailed):
            problems.append(event.reason)
        options.note(event)

    return replace(options, dtype=options.dtype or engine.dtype, log=log)


def _ready(
    engine: TransformersEngine, ids: Sequence[int], played: Played | NothingCached, problems: Sequence[str]
) -> Ready:
    if isinstance(played, NothingCached):
        nothing = torch.zeros(engine.spec.shape(0), dtype=engine.dtype)
        return Ready(dynamic_cache(nothing, engine.dtype, engine.device), 0, played, None)
    problem = problems[0] if problems else None
    if problem is not None:
        _log.warning("nothing was played: %s; the model computed the prompt itself", problem)
    covered = min(played.tokens, len(ids) - 1)
    cache = dynamic_cache(played.kv[:, :, :, :covered], engine.dtype, engine.device)
    ready = Ready(cache, covered, played, problem)
    if not ready.exact:
        remember_loss(cache, max(played.loss, 1e-30))
    return ready
