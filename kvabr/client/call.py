"""One play of a client: its sources, clock, options, engine and prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from kvabr.abr.estimator import Estimator
from kvabr.client.decode_speeds import DecodeSpeeds
from kvabr.client.engine_work import EngineCosts
from kvabr.client.options import PlayOptions, check_deadline, guard_s
from kvabr.client.profiles import ProfileCache
from kvabr.client.result import NothingCached, Played, PlayedPrefix
from kvabr.client.shared_bandwidth import KnownLink, PeerHistory
from kvabr.client.sources import PlaySources
from kvabr.codec.threads import decoder_threads
from kvabr.player.builder import new_estimator
from kvabr.transfer.work import decoders
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine
from kvabr.types.errors import PlayError
from kvabr.types.events import SourceLeftOut

R = TypeVar("R", bound=Played | NothingCached | PlayedPrefix)
T = TypeVar("T")

_FIRST_CALL_S, _FIRST_CALL_TIMES = 60.0, 20.0
"""Longest wait for an engine without timings, in seconds and multiples of its estimate: it may load and compile."""


@dataclass(frozen=True, slots=True)
class Memory:
    """State that a client keeps between plays."""

    profiles: ProfileCache
    history: PeerHistory
    speeds: DecodeSpeeds
    costs: EngineCosts


class Clock:
    """Seconds since a play's call, and to its deadline."""

    def __init__(self, deadline_s: float) -> None:
        """Start on the running event loop; raise `UsageError` unless the deadline is positive and finite."""
        check_deadline(deadline_s)
        self._loop = asyncio.get_running_loop()
        self._start_s, self.deadline_s = self._loop.time(), deadline_s

    def now(self) -> float:
        """Return the seconds since the call."""
        return self._loop.time() - self._start_s

    def left(self) -> float:
        """Return the seconds to the deadline; negative once it has passed."""
        return self._start_s + self.deadline_s - self._loop.time()


@dataclass(slots=True)
class PlayCall:
    """One play, from its turn on."""

    connection: PlaySources
    clock: Clock
    options: PlayOptions
    memory: Memory
    plays: Callable[[], int]
    """Number of current plays, including this one; they share link, decoders and engine."""
    engine: Engine | None
    cost: PrefillCost | None
    """Required for a prefix play."""
    tokens: Sequence[int]
    result: Played | NothingCached | PlayedPrefix | None = None
    device: torch.device | None = field(init=False)
    """None: the processor."""
    decoders: int = field(init=False)
    """Groups decoded in parallel; a GPU takes one batch at a time."""

    def __post_init__(self) -> None:
        # A bound method would make the connection keep the play's data in memory.
        self.connection.left_out = partial(_left_out, self.options, self.clock)
        out, device = self.options.out, self.options.device
        self.device = device if out is None else out.device
        batches = self.options.decode_share is not None or (self.device is not None and self.device.type == "cuda")
        self.decoders = 1 if batches else decoder_threads()

    def over(self, result: R) -> R:
        """Record and return the result."""
        self.result = result
        return result

    @property
    def link(self) -> KnownLink:
        """Estimate of the links to all sources together."""
        return self.memory.history.links((peer.names, peer.announced) for peer in self.connection.peers)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, less a reserve."""
        return self.clock.left() - guard_s(self.clock.deadline_s)

    @property
    def patience_s(self) -> float:
        """Time limit without an engine, seconds since the call."""
        return self.options.patience * self.clock.deadline_s

    @property
    def doubt_s(self) -> float:
        """Seconds to wait for an engine beyond its estimate: many for its first call."""
        engine = self.engine
        if engine is None or self.options.prefill_cost is not None or not self.memory.costs.of(engine).empty:
            return 0.0
        return max(_FIRST_CALL_S, _FIRST_CALL_TIMES * self.engine_s(0, len(self.tokens)))

    def engine_s(self, before: int, tokens: int) -> float:
        """Return the engine's seconds for ``tokens`` after ``before`` others; 0.0 without an engine."""
        return 0.0 if self.cost is None else self.cost.seconds(before, tokens)

    def estimator(self) -> Estimator:
        """Return a fresh estimator of the link."""
        return new_estimator(self.options.policy, self.options.estimator)

    def save_costs(self) -> None:
        """Save the engine's prefill timings."""
        if self.engine is not None:
            asyncio.get_running_loop().run_in_executor(None, self.memory.costs.save_engine, self.engine)

    def with_trouble(self, message: str) -> str:
        """Return a message with the connection's error."""
        trouble = self.connection.trouble
        return message if trouble is None or trouble in message else f"{message}; {trouble}"

    async def in_time(self, read: Callable[[], T]) -> T:
        """Read a catalog in a thread; raise `PlayError` if late."""
        end_s = None if self.engine is not None else max(0.0, self.patience_s - self.clock.now())
        try:
            async with asyncio.timeout(end_s):
                return await asyncio.get_running_loop().run_in_executor(decoders(), read)
        except TimeoutError as error:
            late = f"the deadline of {self.clock.deadline_s:g} s came before its catalog was read; allow more"
            raise PlayError(f"no cache after {self.clock.now():.2g} s: {late}") from error


def _left_out(options: PlayOptions, clock: Clock, source: int, why: str) -> None:
    options.note(SourceLeftOut(clock.now(), source, why))
