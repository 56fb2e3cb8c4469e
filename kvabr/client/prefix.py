"""A play for an engine that computes by itself whatever it is not given: what is in place before the first miss counts.

Such an engine takes a prefix of the cache, and computes everything behind it: vLLM, SGLang. So a play of this kind
never waits for an engine and never fails for a group that did not come: it ends when all is in place, when the engine
should begin to compute the rest so that the deadline is met, or at the deadline, and hands over the groups before the
first that is missing. The player protects the front (mode ``suffix``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from kvabr.abr.ladder import Ladder
from kvabr.client import allocator as room
from kvabr.client.driver import LIVE, Driver
from kvabr.client.executors import decoders
from kvabr.client.lookup import Found
from kvabr.client.orchestrator import prepare
from kvabr.client.peer_history import priors_at
from kvabr.client.result import Clock, PlayOptions
from kvabr.client.shared_bandwidth import estimating
from kvabr.player.assembler import Assembler
from kvabr.player.builder import new_estimator, new_session
from kvabr.player.session_types import PrefixGoal
from kvabr.quic.interface import Connection
from kvabr.types.catalog import Catalog
from kvabr.types.errors import PlayError, UsageError

_LEAST_SHARE = 0.05
"""Share of the deadline that a play is given even after a lookup that took longer: it gets what comes at once."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a play brought before its first miss."""

    kv: torch.Tensor
    """Cache of `tokens` tokens from token `first` on, [layer, K/V, head, token, dim]."""
    first: int
    """The first token of the first group that was played: the engine had everything before it, or nothing was."""
    tokens: int
    """Tokens in place, 0 if not even the first group is."""
    wanted: int
    """Tokens that were asked for, from `first` on."""
    coverage: tuple[str, ...]
    """Track of each group in place."""
    loss: float
    """Expected loss of these groups, nats per generated token."""
    bytes_fetched: int
    bytes_wasted: int
    seconds: float
    """From the call to the end of the play."""
    cut: str | None
    """Why it is not all that was asked for; None if it is."""


async def play_prefix(
    origin: Connection,
    found: Found,
    options: PlayOptions,
    *,
    skip: int = 0,
    behind: int = 0,
) -> Prefix:
    """Play what was found, and hand over what is in place when the time is up.

    Args:
        origin: where to fetch; any number of plays may run on one connection. Cancelling this cancels its downloads.
        found: from a lookup.
        options: how to play. ``deadline_s`` counts from this call; ``cost`` must be there, since the player protects
            the front by it; ``recompute``, ``mode``, ``out`` and ``watch`` are not looked at.
        skip: leading groups that the engine has already.
        behind: tokens of the prompt that no cache covers, which the engine computes after the play: their time comes
            out of the deadline.

    Raises:
        UsageError: arguments that make no sense.
        FormatError: none of the asset's tracks can be decoded here.
        PlayError: there is no memory for the cache.
        PolicyError: from the policy or the estimator.
    """
    clock = Clock(options.deadline_s)
    if options.cost is None:
        raise UsageError("to play a prefix, say what a prefill costs the engine")
    prepared = await prepare(origin, found, options, clock)
    whole, ladder = prepared.ladder.catalog, prepared.ladder
    catalog = whole.suffix(skip)
    if skip:
        ladder = await asyncio.get_running_loop().run_in_executor(decoders(), Ladder, catalog)
    assembler = Assembler(catalog, prepared.profile, out=_room(catalog, options.dtype))
    rest_s = min(options.deadline_s / 2, options.cost.seconds(whole.tokens, behind))
    wanted_s = max(_LEAST_SHARE * options.deadline_s, clock.left() - options.guard_s - rest_s)
    with estimating(origin, new_estimator(options.policy, options.estimator), priors_at(options.priors)) as estimator:
        session = new_session(
            ladder,
            wanted_s,
            options.policy,
            estimator,
            goal=PrefixGoal(),
            cost=options.cost,
            config=LIVE,
            at_hand=origin.at_hand,
            log=options.log,
        )
        try:
            record = await Driver(session, origin, catalog, assembler).run()
        finally:
            kv, coverage = assembler.take_prefix()
    if options.priors is not None:
        asyncio.get_running_loop().run_in_executor(decoders(), priors_at(options.priors).save)
    cut = None
    if len(coverage) < catalog.groups:
        cut = record.cut or record.gave_up or "the play ended"
    loss = sum(catalog.track(track).loss[group] for group, track in enumerate(coverage))
    return Prefix(
        kv=kv,
        first=catalog.first_token,
        tokens=kv.shape[3],
        wanted=catalog.tokens,
        coverage=coverage,
        loss=loss,
        bytes_fetched=record.bytes_fetched,
        bytes_wasted=record.bytes_wasted,
        seconds=clock.now(),
        cut=cut,
    )


def _room(catalog: Catalog, dtype: torch.dtype | None) -> torch.Tensor:
    try:
        return room.empty(catalog.spec.shape(catalog.tokens), dtype or catalog.spec.torch_dtype)
    except RuntimeError as error:
        raise PlayError(f"no memory for a cache of {catalog.fp16_bytes:,} bytes: {error}") from error
