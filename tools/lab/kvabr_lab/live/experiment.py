"""One real play: connects through the link, plays like `kvabr fetch`, and records transport statistics.

A decode node has connected and looked up the prompt before it plays. So clock and trace start after handshake, catalog
and codec profile, except with ``cold``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kvabr.client.driver import LIVE, Driver
from kvabr.client.lookup import fetch_catalog
from kvabr.link.moqt.connect import connect
from kvabr.player.assembler import Assembler
from kvabr.player.session import Session
from kvabr.replay.experiment import Experiment
from kvabr.replay.outcome import PlayOutcome
from kvabr.replay.trace import Trace
from kvabr.replay.verify import load_profile
from kvabr.store.asset import Asset
from kvabr.transfer.interface import Connection, read_all
from kvabr.transfer.peer import Peer
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.errors import TransportError
from kvabr.types.events import PlayEvent
from kvabr.types.kv import KVSpec
from kvabr.types.peer import PeerOptions
from kvabr.types.units import computed_shape
from kvabr_lab.live.child import Usage
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.live.packet_schedule import MIN_QUEUE_BYTES, Conditions
from kvabr_lab.live.shaper import Shaper

if TYPE_CHECKING:
    import torch

Quic = Literal["aioquic", "qh3"]

_BUSY, _STARVED = 0.85, 0.3
"""Fractions of time above which a process, not the network, was the limit: running or waiting, and waiting alone. Late
acknowledgements look like a queue to the sender.
"""
_WARM_ROUND_TRIPS = 4
"""Number of round trips at the trace's mean rate until the window fills the link and its queue."""
_WARM_REQUESTS = 1000
_DIAL_S = 15.0
"""Seconds for handshake, catalog and warm-up before clock and trace start."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options that only live replays have."""

    quic: Quic = "aioquic"
    loss: float = 0.0
    """Fraction of packets lost at random, in each direction."""
    queue_bytes: int | None = None
    """Queue limit at the bottleneck in bytes; None: see `Conditions`."""
    cold: bool = False
    """True if the deadline includes handshake and catalog."""
    warm: bool = False
    """True to open the congestion window before the play."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.conditions(0.0, 0)  # raises on values out of range

    def conditions(self, rtt_s: float, play: int) -> Conditions:
        """Return the link conditions of one play; random losses differ between plays."""
        return Conditions(rtt_s, self.loss, self.loss, self.queue_bytes, self.seed + play)


class LiveExperiment:
    """Plays policies live. It is the counterpart of `Experiment`, which it uses for the common parts."""

    def __init__(
        self, experiment: Experiment, asset: Asset, origin: LiveOrigin, shaper: Shaper, options: LiveOptions
    ) -> None:
        config = replace(
            experiment.options.config,
            chunked=LIVE.chunked,
            stalled_after=LIVE.stalled_after,
            silent_after=LIVE.silent_after,
            decode_ahead_s=LIVE.decode_ahead_s,
        )
        self.experiment = Experiment(experiment.catalog, replace(experiment.options, config=config))
        self._options = options
        self._origin, self._shaper = origin, shaper
        self._profile = load_profile(asset)
        self._plays = 0

    async def play(self, trace: Trace, start_s: float, policy: str, *, log: bool) -> PlayOutcome:
        """Play once.

        Raises:
            TransportError: Origin or shaper died, or the origin cannot be reached through the link.
            PolicyError: From the policy.
        """
        experiment, options = self.experiment, self._options
        capacity, rtt_s, bound = experiment.prepare(trace, start_s)
        self._plays += 1
        conditions = options.conditions(rtt_s, self._plays)
        played = experiment.played(trace)
        self._shaper.load(played)
        self._shaper.open(conditions)
        lines: list[PlayEvent] | None = [] if log else None
        lookup_s, began, began_s = 0.0, self._usage(), time.monotonic()
        if options.cold:
            self._shaper.begin(played, start_s, conditions, at_s=began_s)
        connection, failure = None, ""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._patience_s()):
                    connection = await stack.enter_async_context(self._connect())
                    await fetch_catalog(connection, experiment.catalog.namespace)
                    if options.warm:
                        await self._warm_up(connection, played, start_s, conditions)
            except (TransportError, TimeoutError) as error:
                connection, failure = None, str(error) or "the catalog was not received in time"
                if not options.cold:
                    raise TransportError(f"the origin cannot be reached through the link: {failure}") from error
            if options.cold:
                lookup_s = time.monotonic() - began_s
            session = experiment.session(trace, start_s, policy, capacity, rtt_s, lines, lookup_s=lookup_s)
            if connection is None:
                session.record.gave_up = failure
            else:
                driver = self._driver(session, connection)
                if not options.cold:
                    # Start the trace directly before the play.
                    began = self._usage()
                    self._shaper.begin(played, start_s, conditions)
                await driver.run()
            seen = self._transport(began, connection, session.record.bytes_held_up)
        outcome = experiment.outcome(trace, start_s, policy, session, capacity, bound, lines, lookup_s=lookup_s)
        outcome.run["live"] = True
        outcome.run["lookup_s"] = float(f"{lookup_s:.6g}")
        outcome.run["transport"] = seen
        return outcome

    def _patience_s(self) -> float:
        """Return the time limit for reaching the origin in seconds; a cold start includes the trace's outages."""
        options = self.experiment.options
        return options.config.give_up_after * options.deadline_s if self._options.cold else _DIAL_S

    def _connect(self) -> Peer:
        host, port = self._shaper.address
        return connect(
            f"moqt://{host}:{port}/",
            PeerOptions(fingerprint=self._origin.fingerprint, quic=self._options.quic, timeout_s=self._patience_s()),
        )

    def _driver(self, session: Session, connection: Connection) -> Driver:
        catalog, options = self.experiment.catalog, self.experiment.options
        engine = None if options.cost is None else StandInEngine(catalog.spec, options.cost, options.mode)
        tokens = () if engine is None else (0,) * catalog.tokens
        return Driver(session, connection, Assembler(catalog, self._profile), engine=engine, tokens=tokens)

    async def _warm_up(self, connection: Connection, trace: Trace, start_s: float, conditions: Conditions) -> None:
        """Open the congestion window, like an earlier play over the same trace and asset."""
        catalog = self.experiment.catalog
        track = min(catalog.tracks, key=lambda track: track.total_bytes)
        left = _WARM_ROUND_TRIPS * max(MIN_QUEUE_BYTES, conditions.rtt_s * trace.mean_rate)
        self._shaper.begin(trace, start_s, conditions)
        fetches = []
        for group in itertools.islice(itertools.cycle(range(catalog.groups)), _WARM_REQUESTS):
            if left > 0:
                size = track.bytes[group]
                name, number = catalog.address(group, track.name)
                fetches.append(read_all(connection.fetch(catalog.namespace, name, number, limit=size)))
                left -= size
        await asyncio.gather(*fetches)

    def _usage(self) -> tuple[Usage, Usage]:
        return self._origin.usage(), Usage.now()

    def _transport(
        self, began: tuple[Usage, Usage], connection: Connection | None, held_up: dict[str, int]
    ) -> dict[str, Any]:
        stats = self._shaper.stats()
        origin, player = (now.since(before) for now, before in zip(self._usage(), began, strict=True))
        uses = {"origin": origin, "shaper": stats.usage, "player": player}
        busiest = max(uses, key=lambda name: uses[name].busy + uses[name].waited)
        waited = uses[busiest].waited
        held_up_by = busiest if uses[busiest].busy + waited > _BUSY or waited > _STARVED else "network"
        return {
            "backend": self._options.quic,
            "protocol": None if connection is None else connection.protocol,
            "rtt_s": None if connection is None else connection.stats().rtt_s,
            "wire_bytes": stats.bytes_down,
            "packets": stats.forwarded_down,
            "packets_up": stats.forwarded_up,
            "dropped_by_queue": stats.overflowed,
            "lost": stats.lost_down,
            "lost_up": stats.lost_up,
            "missed_by_shaper": stats.missed,
            "most_queued_bytes": stats.most_queued_bytes,
            "shaper_late_p99_s": stats.late_p99_s,
            "cpu": {name: round(use.busy, 3) for name, use in uses.items()},
            "cpu_waited": {name: round(use.waited, 3) for name, use in uses.items()},
            "bytes_held_up": dict(held_up),
            "limit": held_up_by,
        }


class StandInEngine:
    """Returns zeros after the time that a prefill would take, for plays that only measure time."""

    def __init__(self, spec: KVSpec, cost: PrefillCost, mode: EngineMode) -> None:
        self._spec, self._cost, self._mode = spec, cost, mode

    @property
    def spec(self) -> KVSpec:
        """Spec of the played cache."""
        return self._spec

    @property
    def mode(self) -> EngineMode:
        """Mode that the engine pretends to have."""
        return self._mode

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Like `prefill_classes`, for one layer class."""
        _ = self._spec.only
        return self.prefill_classes(tokens, None if before is None else (before,))[0]

    def prefill_classes(
        self, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Wait as long as a prefill takes, and return zeros."""
        import torch  # noqa: PLC0415  # the caller has loaded it

        kinds = (only.kind for only in self._spec.classes)
        held = zip(before or (), kinds, strict=False)
        time.sleep(
            self._cost.seconds(max((kv.shape[3] for kv, kind in held if kind != "state"), default=0), len(tokens))
        )
        parts = self._spec.parts
        return tuple(torch.zeros(computed_shape(part, len(tokens)), dtype=part.torch_dtype) for part in parts)
