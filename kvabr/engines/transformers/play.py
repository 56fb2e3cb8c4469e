"""A prompt in, a cache for ``generate()`` out: played, with its gaps computed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from kvabr.client.blocking_connection import Origin
from kvabr.client.play import play
from kvabr.client.result import How, Played
from kvabr.engines.adapters import require
from kvabr.engines.transformers import ADAPTER
from kvabr.engines.transformers.cache import dynamic_cache, remember_loss
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.quic.interface import Connection
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, LookupFailed, PlayEvent

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
    played: Played
    """What the play brought: coverage, expected loss, times."""
    problem: str | None
    """Why nothing of what the origin has could be played; None if nothing was wrong."""

    @property
    def exact(self) -> bool:
        """Whether every group came on an exact track, or was computed behind such."""
        return all(track in EXACT_TRACKS for track in self.played.coverage)


def play_cache(
    origin: Origin,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    deadline: float,
    **how: Unpack[How],
) -> Ready:
    """Get the cache of a prompt from an origin, blocking.

    Args:
        origin: from `kvabr.sync.connect`.
        engine: the model.
        tokens: the prompt: ids, or ``input_ids`` of a batch of one.
        deadline: seconds from this call in which the first token is wanted; the model's time for what no cache
            covers comes out of it.
        how: as for `kvabr.play`. The engine computes what would be late, unless ``recompute=None``: then what an
            origin has and cannot be played is an error.

    Raises:
        UsageError: more than one prompt, or arguments that make no sense.
        ModelError: the tokens do not fit the model.
        PlayError: the cache can neither be fetched nor computed; the message says why.
        PolicyError: from the policy or the estimator.
    """
    ids = prompt_ids(engine, tokens)
    problems: list[str] = []
    return _ready(engine, ids, origin.play(ids, deadline=deadline, **_options(engine, how, problems)), problems)


async def play_cache_async(
    origin: Connection,
    engine: TransformersEngine,
    tokens: Sequence[int] | torch.Tensor,
    *,
    deadline: float,
    **how: Unpack[How],
) -> Ready:
    """As `play_cache`, for asyncio, on a connection of `kvabr.connect`. Cancelling it cancels its downloads."""
    ids = prompt_ids(engine, tokens)
    problems: list[str] = []
    played = await play(origin, ids, deadline=deadline, **_options(engine, how, problems))
    return _ready(engine, ids, played, problems)


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


def _options(engine: TransformersEngine, how: How, problems: list[str]) -> dict[str, Any]:
    ADAPTER.check(require("transformers").__version__)
    options: dict[str, Any] = {"recompute": engine, "dtype": engine.dtype, "spec": engine.spec, **how}
    told: Log | None = how.get("log")

    def log(event: PlayEvent) -> None:
        if isinstance(event, LookupFailed):
            problems.append(event.reason)
        if told is not None:
            told(event)

    options["log"] = log
    return options


def _ready(engine: TransformersEngine, ids: Sequence[int], played: Played, problems: Sequence[str]) -> Ready:
    problem = problems[0] if problems else None
    if problem is not None:
        _log.warning("nothing was played: %s; the model computed the prompt itself", problem)
    covered = min(played.tokens, len(ids) - 1)
    cache = dynamic_cache(played.kv[:, :, :, :covered], engine.dtype, engine.device)
    ready = Ready(cache, covered, played, problem)
    if not ready.exact:
        remember_loss(cache, max(played.loss, 1e-30))
    return ready
