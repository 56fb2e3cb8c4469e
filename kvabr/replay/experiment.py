"""One simulated play, from options to its line in the replay report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

from kvabr.abr.estimators import Estimator, Prior
from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import policy_class
from kvabr.abr.tail import DEFAULT_MAX_TAIL, MAX_TAIL, TailOffer, tail_offers
from kvabr.abr.tail_costs import tail_costs
from kvabr.abr.view import Future, PlannedPlay, View
from kvabr.player.groups import DecodeRates, family
from kvabr.player.play_policy import choose_tail, new_estimator
from kvabr.player.session import Session
from kvabr.player.session_types import WHOLE, BlendGoal, PlayerConfig, PlayRecord, PrefixGoal, check_decoders, opening
from kvabr.replay.clairvoyant import Bound, Clairvoyant
from kvabr.replay.frontier import Frontier
from kvabr.replay.link import (
    FIRST_BYTE_S,
    HANDSHAKE_BYTES,
    INITIAL_WINDOW,
    LOOKUP_ROUND_TRIPS,
    PAYLOAD_SHARE,
    Capacity,
    JointCapacity,
    running_sums,
)
from kvabr.replay.live_bound import LiveClairvoyant, Producer
from kvabr.replay.outcome import (
    NO_CACHE_LOSS,
    PlayOutcome,
    computed_rest,
    computed_whole,
    rounded,
    run_line,
    shift,
    valued,
)
from kvabr.replay.passages import BlendClairvoyant
from kvabr.replay.simulator import LinkUse, Simulator
from kvabr.replay.trace import Trace
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.cost import PrefillCost, objective
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import CacheDelivered, PlayEvent, PlayStarted, RecomputeDone, RecomputeStarted

DEFAULT_RTT_S = 0.04
MAX_DEADLINE_S, MAX_RTT_S = 86_400.0, 3600.0
_MIN_SHARE, _MIN_PLAY_S = 0.1, 1e-3
"""Minimum time for a play after its lookup: as a fraction of the deadline, and in seconds (within its patience)."""


def check_rtt(rtt_s: float) -> None:
    """Raise `UsageError` if a round trip of ``rtt_s`` seconds cannot be simulated."""
    if not 0 <= rtt_s <= MAX_RTT_S:
        raise UsageError(f"the round trip must be 0 to 3,600 s, got {rtt_s:g}")


class LinkSharing(Protocol):
    """How plays share a link; a dataclass such as `kvabr_lab.sharing.Sharing`."""

    def play(
        self,
        alone: Experiment,
        trace: Trace,
        start_s: float,
        policy: str,
        capacity: Capacity,
        rtt_s: float,
        bound: Bound,
        *,
        log: bool,
    ) -> PlayOutcome:
        """Play once while other plays use the same link; see `Experiment.play_on`."""


class Planner(Protocol):
    """A policy class that gets a plan of the whole play in advance (`kvabr.abr.view.Future.plan`)."""

    @staticmethod
    def foresee(
        view: View,
        frontier: Frontier,
        capacity: Capacity,
        first_byte_s: float,
        tried: Callable[[PlannedPlay], float],
    ) -> PlannedPlay:
        """Return the plan of a play that is about to begin.

        ``first_byte_s`` is the time until the first byte of a request; ``tried`` simulates a play with a plan and
        returns its objective.
        """


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of all plays of a replay."""

    deadline_s: float
    rtt_s: float | None = None
    """Round trip time of all traces; None for the trace's own, or `DEFAULT_RTT_S` if it has none."""
    scale_to_mean: float | None = None
    """Scale every trace so that its mean rate carries this fraction of the FP16 cache within the deadline."""
    cost: PrefillCost | None = None
    mode: EngineMode = "hole"
    decode_scale: float = 1.0
    decode_latency_s: float = 0.0
    """Additional seconds per batch on a device that decodes all waiting groups together; 0: groups are decoded one by
    one.
    """
    decoders: int = 1
    slow_start: bool = True
    cold: bool = False
    """True if the deadline includes handshake and lookup; otherwise the connection is open and the catalog known."""
    guard_s: float = 0.0
    """Safety margin before the deadline, in seconds, since a real event loop is sometimes late."""
    estimator: str | None = None
    """Estimator for all policies; None: each policy's default."""
    prior: Prior | None = None
    config: PlayerConfig = field(default_factory=PlayerConfig)
    sharing: LinkSharing | None = None
    """Simulates sharing of the link, packet by packet; None: a play has the link to itself, without queueing."""
    blend: BlendGoal | None = None
    producer: Producer | None = None
    """Producer that prefills the cache during the play; None: the cache is completely published."""
    question: int = 0
    """Number of tokens that the engine always computes after the cache."""
    tail: int = DEFAULT_MAX_TAIL
    """Maximum number of tokens at the cache's end that the engine may compute with the question; see `kvabr.abr.tail`.
    """
    links: tuple[Trace, ...] = ()
    """Links to further sources of the asset; they start together with the trace's link, at their own rates."""
    prefix: bool = False
    """True if a play delivers a prefix and the engine computes the rest, as in vLLM and SGLang."""

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise UsageError(f"the deadline must be more than 0 s and at most a day, got {self.deadline_s:g} s")
        if self.scale_to_mean is not None and not 0 < self.scale_to_mean < math.inf:
            raise UsageError(f"the load must be a positive fraction of the FP16 cache, got {self.scale_to_mean}")
        if self.rtt_s is not None:
            check_rtt(self.rtt_s)
        if not 0 <= self.decode_scale < math.inf:
            raise UsageError(f"decode-scale must be 0 or more and finite, got {self.decode_scale}")
        if not 0 <= self.decode_latency_s < math.inf or (self.decode_latency_s and self.decoders > 1):
            raise UsageError(
                "decode-latency must be 0 or more seconds and finite, with only one decoder, got "
                f"{self.decode_latency_s}"
            )
        check_decoders(self.decoders)
        if self.producer is not None and (self.cost is not None or self.sharing is not None or self.cold):
            raise UsageError(
                "a cache that is still being prefilled cannot be replayed cold, with rivals, or with an engine"
            )
        self._check_question()
        if self.prefix and (self.cost is None or self.mode != "suffix" or self.blend is not None):
            raise UsageError("a play of a prefix needs an engine of mode 'suffix', and cannot have passages")
        if self.blend is not None and (self.producer is not None or self.mode != "hole"):
            raise UsageError(
                "a prompt joined from passages needs an engine of mode 'hole', and its passages must be complete"
            )
        if self.blend is not None and self.cost is None:
            raise UsageError(
                "a prompt of passages needs an engine for the text before them: give --prefill-rate, or --engine asset "
                "in `kvabr lab`"
            )

    def _check_question(self) -> None:
        for what in ("question", "tail"):
            if not 0 <= getattr(self, what) <= MAX_TAIL:
                raise UsageError(f"{what} must be 0 to {MAX_TAIL:,} tokens, got {getattr(self, what):,}")
        alone = self.producer is None and self.blend is None and self.sharing is None
        given_alone = (
            ("a question after the cache", self.question),
            ("several links", self.links),
        )
        for what, given in given_alone:
            if given and not alone:
                raise UsageError(f"{what} cannot be replayed with a producer, passages or rivals")


class Experiment:
    """Plays policies over traces with one catalog and one set of options."""

    def __init__(self, catalog: Catalog, options: ReplayOptions, tail: TailOffer | None = None) -> None:
        self.options, self.tail = options, tail
        self.catalog = catalog.to_play if tail is None else tail.catalog
        self._offers: dict[int, Experiment] = {}
        if options.question and tail is None:
            limit = 0 if options.cost is None else options.tail
            offers = tail_offers(self.catalog, options.cost, following=options.question, limit=limit)
            self._offers = {offer.tokens: Experiment(catalog, options, offer) for offer in offers}
        self.ladder = Ladder(self.catalog)
        self.clairvoyant = self.new_clairvoyant(options.cost)
        self._blend = (
            None
            if options.blend is None
            else BlendClairvoyant.of(
                self.ladder, options.blend, options.cost, options.config, partial(self.new_clairvoyant, options.cost)
            )
        )
        self._live = (
            None
            if options.producer is None
            else LiveClairvoyant(self.catalog, options.decode_scale, options.decode_latency_s, options.config.max_loss)
        )
        self.catalog_bytes = sum(len(each.dumps()) for each in catalog.sources or (catalog,))
        self._last: tuple[Trace, Trace, Trace, list[float]] | None = None

    def prepare(self, trace: Trace, start_s: float) -> tuple[Capacity, float, Bound]:
        """Return the link, the round trip time in seconds, and the clairvoyant bound of one play."""
        capacity, rtt_s = self.link(trace, start_s)
        if self._live is not None and self.options.producer is not None:
            published_s = self.options.producer.published_s(self.catalog)
            price, deadline_s = self.options.config.time_price, self.options.deadline_s
            bound = self._live.best(capacity, published_s, deadline_s, time_price=price, delay_s=rtt_s / 2)
            return capacity, rtt_s, bound
        lookup_s = self.lookup_s(trace, start_s, rtt_s)
        if self._offers:
            bounds = [
                each.bound(each.clairvoyant, capacity, rtt_s, lookup_s=lookup_s) for each in self._offers.values()
            ]
            best = min(bounds, key=lambda bound: bound.objective)
            least_loss = min(bound.least_loss for bound in bounds)
            return capacity, rtt_s, replace(best, least_loss=least_loss, feasible=any(each.feasible for each in bounds))
        if self._blend is not None:

            def shorter(clairvoyant: Clairvoyant, tokens_s: float) -> Bound:
                return self.bound(clairvoyant, capacity, rtt_s, lookup_s=lookup_s + tokens_s)

            return capacity, rtt_s, self._blend.best(shorter)
        return capacity, rtt_s, self.bound(self.clairvoyant, capacity, rtt_s, lookup_s=lookup_s)

    def link(self, trace: Trace, start_s: float) -> tuple[Capacity, float]:
        """Return the link of one play, counting payload only, and its round trip time in seconds."""
        rtt_s = self.options.rtt_s if self.options.rtt_s is not None else trace.rtt_s
        rtt_s = DEFAULT_RTT_S if rtt_s is None else rtt_s
        # Bytes received during the lookup have already opened the window.
        window = INITIAL_WINDOW + HANDSHAKE_BYTES + self.catalog_bytes
        begins_s = start_s + self.lookup_s(trace, start_s, rtt_s)
        slow_start = self.options.slow_start and self.options.sharing is None
        link = self._capacity(trace, begins_s, rtt_s, window, slow_start=slow_start)
        if not self.options.links:
            return link, rtt_s
        times = self.played(trace).mean_rate / trace.mean_rate * PAYLOAD_SHARE
        others = (
            Capacity(each.scaled(times), begins_s, rtt_s, slow_start=slow_start, window=window)
            for each in self.options.links
        )
        return JointCapacity([link, *others]), rtt_s

    def _capacity(self, trace: Trace, start_s: float, rtt_s: float, window: float, *, slow_start: bool) -> Capacity:
        _, carried, sums = self._scaled(trace)
        return Capacity(carried, start_s, rtt_s, slow_start=slow_start, window=window, sums=sums)

    def new_clairvoyant(self, cost: PrefillCost | None, catalog: Catalog | None = None) -> Clairvoyant:
        """Return the clairvoyant for these plays with an engine of this cost (or None), or for another catalog."""
        options = self.options
        return Clairvoyant(
            catalog or self.catalog,
            cost,
            options.mode,
            decode_scale=options.decode_scale,
            decoders=options.decoders,
            decode_latency_s=options.decode_latency_s,
            max_loss=options.config.max_loss,
        )

    def bound(self, clairvoyant: Clairvoyant, capacity: Capacity, rtt_s: float, *, lookup_s: float = 0.0) -> Bound:
        """Return the bound of one play at the options' prices; for ``lookup_s`` see the method `lookup_s`."""
        config, tail_s = self.options.config, self._tail_s
        bound = clairvoyant.best(
            capacity,
            self.options.deadline_s,
            time_price=config.time_price,
            gpu_price=config.gpu_price,
            begun_s=lookup_s + tail_s,
            first_byte_s=rtt_s,
        )
        if tail_s and math.isfinite(config.gpu_price):
            bound = replace(bound, objective=bound.objective + config.gpu_price * tail_s)
        # A play may also end without a cache.
        return replace(bound, objective=min(bound.objective, self._no_cache())) if bound.feasible else bound

    def _no_cache(self) -> float:
        config, deadline_s = self.options.config, self.options.deadline_s
        end_s, price = config.give_up_after * deadline_s, config.time_price
        return objective(NO_CACHE_LOSS, end_s, deadline_s, met=False, engine_s=0.0, time_price=price, gpu_price=0.0)

    def lookup_s(self, trace: Trace, start_s: float, rtt_s: float) -> float:
        """Return the seconds of handshake, request and catalog in slow start; 0 if the deadline excludes them."""
        if not self.options.cold:
            return 0.0
        request_s = (LOOKUP_ROUND_TRIPS - 1.0) * rtt_s
        window, slow_start = INITIAL_WINDOW + HANDSHAKE_BYTES, self.options.slow_start
        link = self._capacity(trace, start_s + request_s, rtt_s, window, slow_start=slow_start)
        return request_s + link.when(rtt_s, self.catalog_bytes)

    def time_for(self, lookup_s: float) -> float:
        """Return the player's deadline in seconds after the end of the lookup."""
        options = self.options
        left_s = options.deadline_s - lookup_s - options.guard_s - self._tail_s
        wanted_s = max(_MIN_SHARE * options.deadline_s, left_s)
        return max(_MIN_PLAY_S, min(wanted_s, options.config.give_up_after * options.deadline_s - lookup_s))

    def played(self, trace: Trace) -> Trace:
        """Return the trace, scaled if the options say so."""
        return self._scaled(trace)[0]

    def _scaled(self, trace: Trace) -> tuple[Trace, Trace, list[float]]:
        if self._last is None or self._last[0] is not trace:
            played = trace
            if self.options.scale_to_mean is not None:
                wanted = self.options.scale_to_mean * self.catalog.fp16_bytes / self.options.deadline_s
                played = trace.scaled(wanted / sum(each.mean_rate for each in (trace, *self.options.links)))
            carried = played.scaled(PAYLOAD_SHARE)
            self._last = (trace, played, carried, running_sums(carried))
        return self._last[1:]

    def play(self, trace: Trace, start_s: float, policy: str, *, log: bool = False) -> PlayOutcome:
        """Play once."""
        capacity, rtt_s, bound = self.prepare(trace, start_s)
        return self.play_on(trace, start_s, policy, capacity, rtt_s, bound, log=log)

    def play_on(
        self, trace: Trace, start_s: float, policy: str, capacity: Capacity, rtt_s: float, bound: Bound, *, log: bool
    ) -> PlayOutcome:
        """Play once over a link from `prepare`; policies compared at one start use the same link."""
        if self._offers:
            chosen = self.with_tail(policy, self.lookup_s(trace, start_s, rtt_s))
            return chosen.play_on(trace, start_s, policy, capacity, rtt_s, bound, log=log)
        if self.options.sharing is not None:
            return self.options.sharing.play(self, trace, start_s, policy, capacity, rtt_s, bound, log=log)
        lines: list[PlayEvent] | None = [] if log else None
        lookup_s = self.lookup_s(trace, start_s, rtt_s)
        session = self.session(trace, start_s, policy, capacity, rtt_s, lines, lookup_s=lookup_s)
        use = self._simulate(session, capacity, rtt_s)
        outcome = self.outcome(
            trace, start_s, policy, session, capacity, bound, lines, lookup_s=lookup_s, ghost_bytes=use.ghost_bytes
        )
        outcome.use = use
        return outcome

    def with_tail(self, policy: str, lookup_s: float = 0.0) -> Experiment:
        """Return the experiment with the tail that the policy chooses; without a question, return this experiment."""
        if not self._offers:
            return self
        options, config = self.options, self.options.config
        offers = [each.tail for each in self._offers.values() if each.tail is not None]
        divides = policy_class(policy).divides and not options.prefix
        costs = tail_costs(
            offers,
            options.deadline_s - lookup_s,
            rate=0.0 if options.prior is None else options.prior.rate,
            ttfb_s=0.0 if options.prior is None else options.prior.ttfb_s,
            cost=options.cost if divides else None,
            mode=options.mode,
            time_price=config.time_price,
            gpu_price=config.gpu_price,
            max_loss=config.max_loss,
            decoders=options.decoders,
        )
        offer = choose_tail(policy, offers, costs)
        return self._offers[offer.tokens]

    @property
    def whole(self) -> Experiment:
        """The experiment in which all of the cache is fetched, including the tail."""
        return self._offers.get(0, self)

    @property
    def _tail_s(self) -> float:
        return 0.0 if self.tail is None else self.tail.engine_s

    @property
    def _latencies(self) -> dict[str, float]:
        return {family(track.name): self.options.decode_latency_s for track in self.catalog.tracks}

    def _simulate(self, session: Session, capacity: Capacity, rtt_s: float) -> LinkUse:
        options = self.options
        simulator = Simulator(
            session,
            self.catalog,
            capacity,
            rtt_s=rtt_s,
            first_byte_s=FIRST_BYTE_S,
            cost=options.cost,
            decode_scale=options.decode_scale,
            decoders=options.decoders,
            decode_latency_s=options.decode_latency_s,
            published_s=() if options.producer is None else options.producer.published_s(self.catalog),
        )
        simulator.run()
        return simulator.use

    def session(
        self,
        trace: Trace,
        start_s: float,
        policy: str,
        capacity: Capacity,
        rtt_s: float,
        lines: list[PlayEvent] | None,
        *,
        lookup_s: float = 0.0,
        share: Callable[[Estimator], Estimator] | None = None,
    ) -> Session:
        """Return the session of one play, for the simulator or a live driver.

        Events are appended to ``lines`` unless it is None. ``lookup_s`` is the part of the deadline before the play.
        ``share`` converts an estimator of the link to an estimator of the play's share of it.
        """
        options, links = self.options, len(capacity.links)
        estimators = [self._estimator(policy, links) for _ in capacity.links]
        if lines is not None:
            title = getattr(estimators[0], "name", type(estimators[0]).__name__)
            lines.append(
                opening(
                    self.ladder,
                    trace=trace.name,
                    policy=policy,
                    estimator=title,
                    deadline_s=options.deadline_s,
                    mode=options.mode,
                    rtt_s=rtt_s,
                    start_s=start_s,
                    tail_s=self._tail_s,
                )
            )

        if share is not None:
            estimators = list(map(share, estimators))

        def carried(seconds: float) -> float:
            return capacity.between(session.view.now, session.view.now + seconds)

        def tried(plan: PlannedPlay) -> float:
            own = [new_estimator(policy) for _ in capacity.links]
            trial = self._session(policy, own, Future(carried, lambda _: plan), None, lookup_s)
            self._simulate(trial, capacity, rtt_s)
            return valued(self.catalog, options.config, options.deadline_s, trial.record)[1]

        def plan(view: View) -> PlannedPlay:
            planner = cast("Planner", policy_class(policy))
            return planner.foresee(view, self.clairvoyant.frontier, capacity, rtt_s + FIRST_BYTE_S, tried)

        session = self._session(policy, estimators, Future(carried, plan), lines, lookup_s)
        return session

    def _estimator(self, policy: str, links: int) -> Estimator:
        options = self.options
        estimator = new_estimator(policy, options.estimator)
        if options.prior is not None:
            estimator.prime(replace(options.prior, rate=options.prior.rate / links))
        return estimator

    def _session(
        self,
        policy: str,
        estimators: Sequence[Estimator],
        oracle: Future,
        lines: list[PlayEvent] | None,
        lookup_s: float,
    ) -> Session:
        options = self.options
        # Patience is measured in multiples of the whole deadline, including the lookup.
        return Session(
            self.ladder,
            self.time_for(lookup_s),
            policy,
            estimators,
            goal=options.blend or (PrefixGoal() if options.prefix else WHOLE),
            cost=options.cost,
            mode=options.mode,
            config=replace(options.config, decoders=options.decoders, together=options.decode_latency_s > 0),
            patience_s=options.config.give_up_after * options.deadline_s - lookup_s,
            oracle=oracle,
            decode_rates=DecodeRates(self.catalog, latencies=self._latencies),
            expected_s=None if options.producer is None else options.producer.expected_s(self.catalog),
            log=None if lines is None else lines.append,
            offers=[None] * len(estimators),
        )

    def outcome(
        self,
        trace: Trace,
        start_s: float,
        policy: str,
        session: Session,
        capacity: Capacity,
        bound: Bound,
        lines: list[PlayEvent] | None,
        *,
        lookup_s: float = 0.0,
        ghost_bytes: float = 0.0,
    ) -> PlayOutcome:
        """Return the outcome of a finished play, as for `session`; ``ghost_bytes`` are those of cancelled requests."""
        options, record = self.options, self.finished(session, lines, lookup_s)
        catalog, config, deadline_s = self.catalog, options.config, options.deadline_s
        run = run_line(catalog, config, deadline_s, trace, start_s, policy, record, bound, capacity, ghost_bytes)
        if self.tail is not None and self.tail.tokens and catalog.even and record.delivered_s is not None:
            self._show_tail(self.tail, record.delivered_s, record, run, lines)
        if lines is None:
            return PlayOutcome(run, record, None, None, catalog)
        end = record.delivered_s if record.delivered_s is not None else session.view.now + lookup_s
        lines.append(CacheDelivered(end, record.met, run["loss"]))
        series = capacity.series(max(end, options.deadline_s) * 1.05 - lookup_s)
        return PlayOutcome(run, record, lines, [(t + lookup_s, rate) for t, rate in series], catalog)

    def _show_tail(
        self, tail: TailOffer, end_s: float, record: PlayRecord, run: dict[str, Any], lines: list[PlayEvent] | None
    ) -> None:
        first, size, begin_s = self.catalog.groups, self.catalog.spec.group_tokens, end_s - tail.engine_s
        last = first - (-tail.tokens // size)
        record.steps.append(("compute", first, last))
        run["track_tokens"][RECOMPUTED] = run["track_tokens"].get(RECOMPUTED, 0) + tail.tokens
        times = {"requested_s": rounded(begin_s), "first_byte_s": None, "done_s": None, "ready_s": rounded(end_s)}
        run["groups"] += [
            {"group": group, "track": RECOMPUTED, "bytes": 0, **times, "source": RECOMPUTED}
            for group in range(first, last)
        ]
        if lines is not None:
            lines[:1] = [replace(line, groups=last) for line in lines[:1] if isinstance(line, PlayStarted)]
            lines += [RecomputeStarted(begin_s, first, last), RecomputeDone(end_s, first, last)]

    def finished(self, session: Session, lines: list[PlayEvent] | None, lookup_s: float) -> PlayRecord:
        """Return the record of a finished play, with times that count from before the lookup.

        If the play of a joined prompt was abandoned, the prompt is computed, as in a client.
        """
        record, cost = session.record, self.options.cost
        if record.gave_up is not None and self.catalog.sources and cost is not None:
            computed_whole(record, self.catalog, cost, session.view.now, self.time_for(lookup_s))
        if self.options.prefix and cost is not None and record.delivered_s is not None:
            computed_rest(record, self.catalog, cost, self.time_for(lookup_s))
        if self.tail is not None and record.delivered_s is not None:
            record.tail, record.tail_s = self.tail.tokens, self.tail.engine_s
            record.recompute_s += self.tail.engine_s
            record.tokens_recomputed += self.tail.tokens
            record.delivered_s += self.tail.engine_s
        if lookup_s or self.options.guard_s or self._tail_s:
            shift(record, lines, lookup_s)
            record.met = record.delivered_s is not None and record.delivered_s <= self.options.deadline_s
        return record
