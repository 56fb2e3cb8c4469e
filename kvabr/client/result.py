"""What goes into a play and what comes out of it."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.policies import DEFAULT
from kvabr.client.snapshot import Watch
from kvabr.player.session_types import GPU_PRICE, PlayerConfig, PlayRecord
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine, EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, PlayEvent
from kvabr.types.kv import KVSpec

if TYPE_CHECKING:
    from kvabr.client.upgrades import Late
    from kvabr.telemetry.hub import Telemetry

_GUARD_SHARE, _MOST_GUARD_S = 0.02, 0.05


class How(TypedDict, total=False):
    """The options that `kvabr.play` and `kvabr.play_asset` share, by keyword."""

    policy: str
    """ABR policy, see `kvabr policies`; without it, the one that is best for most."""
    estimator: str | None
    """Bandwidth estimator; None: the policy's own."""
    recompute: Engine | None
    """An engine that computes what would be late, or, if nothing is cached, everything."""
    cost: PrefillCost | None
    """What its prefill costs; None: it is timed at its first play, before the deadline begins to count, see
    `kvabr.prefill_cost`."""
    mode: EngineMode | None
    """What the engine can recompute; None: what it says itself."""
    gpu_price: float
    """Nats per token that a second of the engine's time is worth: 0 where it is idle, infinite where it is to compute
    only what would be late."""
    salt: bytes
    """The tenant's secret, see `kvabr.types.naming.chain`."""
    out: torch.Tensor | None
    """Where to put the cache, [layer, K/V, head, token, dim] with room for all tokens; None: a new tensor."""
    dtype: torch.dtype | None
    """Element type of the new tensor; None: that of the cache."""
    profiles: Path | None
    """Folder where codec profiles are kept from one process to the next; None: nowhere."""
    patience: float
    """Deadlines after which a play that cannot be completed ends, beside what the engine needs; 10 if not given."""
    log: Log | None
    """Takes every event of the play, see `kvabr.types.events`."""
    telemetry: Telemetry | None
    """Hears of the play, beside others; see `kvabr.telemetry`."""
    watch: Watch | None
    """Called with a snapshot some fifty times per deadline, on the event loop's thread."""
    after: float | None
    """Seconds that upgrades go on after the cache was handed over, see `kvabr.client.upgrades`; `math.inf`: until
    there is nothing to upgrade; None: not at all."""
    priors: str | os.PathLike[str] | None
    """File where what is known of peers is kept from one process to the next, see `kvabr.client.peer_history`; None:
    this process's memory alone."""


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How to play, whatever is played; `How` says what each means."""

    deadline_s: float
    policy: str = DEFAULT
    estimator: str | None = None
    recompute: Engine | None = None
    cost: PrefillCost | None = None
    mode: EngineMode | None = None
    gpu_price: float = GPU_PRICE
    salt: bytes = b""
    out: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    profiles: Path | None = None
    patience: float = 10.0
    log: Log | None = None
    telemetry: Telemetry | None = None
    watch: Watch | None = None
    after: float | None = None
    priors: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.after is not None and not self.after > 0:
            raise UsageError(f"upgrades for {self.after:g} s after the deadline; give a positive number of seconds")
        if not 0 < self.deadline_s < math.inf:
            raise UsageError(f"the deadline is {self.deadline_s:g} s; it must be a positive number of seconds")
        PlayerConfig(gpu_price=self.gpu_price)
        if not 1 <= self.patience < math.inf:
            raise UsageError(f"patience is {self.patience} deadlines; it must be at least 1")
        # That they are there is known before anything is asked of the network.
        load_policy(self.policy)
        if self.estimator is not None:
            load_estimator(self.estimator)

    @property
    def guard_s(self) -> float:
        """How much earlier than the deadline a play aims to end.

        An event loop is late now and then, and what is late by a millisecond is late.
        """
        return min(_MOST_GUARD_S, _GUARD_SHARE * self.deadline_s)

    def note(self, event: PlayEvent) -> None:
        """Log an event that does not come from the session."""
        if self.log is not None:
            self.log(event)


@dataclass(frozen=True, slots=True)
class Played:
    """What a play brought."""

    kv: torch.Tensor
    """The cache of the first `tokens` tokens, [layer, K/V, head, token, dim]."""
    tokens: int
    """How many tokens it covers; the engine computes the rest of the prompt as it would without kvabr. 0: nothing was
    cached, and there was no engine."""
    coverage: tuple[str, ...]
    """Per group, the track it came on, or ``recomputed``."""
    ttft_s: float
    """Seconds from the call until the cache was in place."""
    lookup_s: float
    """Of these, the seconds until the catalog and the profile were at hand."""
    met: bool
    """Whether that left the engine, within the deadline, the time it needs for the rest of the prompt."""
    loss: float
    """Expected loss against the exact cache, nats per generated token."""
    record: PlayRecord
    """What happened to every group; times count from the end of the lookup."""
    spec: KVSpec
    catalog: Catalog | None = None
    """What was played; None if nothing was cached."""
    catalog_sha256: str | None = None
    """Of the catalog as the origin has it, hex."""
    late: Late | None = None
    """The upgrades that go on after the cache was handed over; None if none were asked for, or none are to be had."""


class Clock:
    """Seconds since a play was called for, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_s, self._deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Seconds to the deadline; negative once it has passed."""
        return self._deadline_s - self.now()
