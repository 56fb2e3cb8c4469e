"""The rules to compare on a day. Each decides for a request with the knowledge available at its arrival.

- ``local``, ``remote``: always at this place.
- ``threshold:N``: remote if more than N tokens of the prompt are not cached locally.
- ``prfaas``: ``threshold:19400``, which Prefill-as-a-service (arXiv 2604.15039) reports for its case study.
- ``break-even``: remote above n*(C), from the link estimate alone, ignoring queues and remote caches.
- ``selfish``: kvabr's rule for each request alone.
- ``whole``: kvabr's rule without local computation during the transfer.
- ``unprobed``: kvabr's rule with link samples only from transfers.
- ``kvabr``: kvabr's rule, with probes of the idle link.

A day begins with the link's mean rate as known. Two further rules measure the cost of missing knowledge:

- ``knows-link``: kvabr's rule with the future link.
- ``knows-present``: kvabr's rule with the true time of the request at each place: the link, prefill times, and sharing
  of transfers. Unlike the oracle, it does not know later requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvabr.abr.estimators import Tracking
from kvabr.types.errors import UsageError, did_you_mean
from kvabr_lab.day.queues import SharedWire
from kvabr_lab.day.requests import DayRequest
from kvabr_lab.day.world import Choice, Day, DayOutcome, World, WorldShape
from kvabr_lab.route import (
    LOCAL,
    REMOTE,
    Forecast,
    LinkMemory,
    Lookahead,
    Place,
    PrefillSite,
    RouteLink,
    Router,
    RouteRequest,
    break_even_tokens,
)
from kvabr_lab.route.router import USUAL_S

PRFAAS_TOKENS = 19_400
KVABR = "kvabr"
RULES = ("local", "remote", "prfaas", "break-even", "selfish", "whole", "unprobed", KVABR)
"""Names of rules. ``threshold:N`` adds a rule for each number N."""
KNOWING = ("knows-link", "knows-present")


class DayRule(Protocol):
    """Decides where to send requests."""

    def place(self, request: DayRequest, world: World, now: float) -> Choice:
        """Return the place of a request that has just arrived."""
        ...


class _Fixed:
    def __init__(self, place: Place) -> None:
        self._choice = Choice(place)

    def place(self, request: DayRequest, world: World, now: float) -> Choice:  # noqa: ARG002  # the rule's whole point
        return self._choice


class _Threshold:
    def __init__(self, tokens: float) -> None:
        self._tokens = tokens

    def place(self, request: DayRequest, world: World, now: float) -> Choice:
        lacking = request.tokens - world.view(request, now)[0].cached_tokens
        return Choice(REMOTE if lacking > self._tokens else LOCAL)


class _BreakEven:
    def __init__(self, shape: WorldShape) -> None:
        self._shape = shape
        self._memory = LinkMemory(Tracking())
        self._memory.sample(USUAL_S * shape.mean_rate, USUAL_S, 0.0)

    def place(self, request: DayRequest, world: World, now: float) -> Choice:
        for end, nbytes, seconds in world.wire.samples(now, probes=True):
            self._memory.sample(nbytes, seconds, end)
        rate = self._memory.rates(0.0, now)[0]
        link = RouteLink(rate, world.rtt_s, live=self._shape.live)
        local, remote = PrefillSite(self._shape.local.cost), PrefillSite(self._shape.remote.cost)
        threshold = break_even_tokens(local, remote, link, self._shape.cache)
        return _Threshold(threshold).place(request, world, now)


class Kvabr:
    """kvabr's rule."""

    def __init__(
        self,
        shape: WorldShape,
        *,
        considerate: bool = True,
        both: bool = True,
        probes: bool = True,
        lookahead: Lookahead | None = None,
    ) -> None:
        """Begin with the link's mean rate as known; for the options see `Router`.

        With ``both``, both sites may work on a prompt; with ``probes``, the idle link is probed.
        """
        self._probes = probes
        self._router = Router(
            shape.local.cost,
            shape.remote.cost,
            shape.cache,
            rtt_s=World(shape).rtt_s,
            workers=(shape.local.workers, shape.remote.workers),
            live=shape.live,
            both=both and shape.both,
            considerate=considerate,
            lookahead=lookahead,
        )
        self._router.arrived(USUAL_S * shape.mean_rate, USUAL_S, 0.0)

    def place(self, request: DayRequest, world: World, now: float) -> Choice:
        """See `DayRule.place`."""
        for end, nbytes, seconds in world.wire.samples(now, probes=self._probes):
            self._router.arrived(nbytes, seconds, end)
        here, there = world.view(request, now)
        found = RouteRequest(
            request.tokens,
            (here.cached_tokens, there.cached_tokens),
            (here.queue_s, there.queue_s),
            world.wire.backlog(now),
        )
        options = self._router.options(found, now)
        known = self._known(options, request, world, now)
        index = min(range(len(known)), key=lambda each: known[each].price_s)
        self._router.take(options, options[index], now)
        return choice_of(options[index])

    def _known(self, options: Sequence[Forecast], request: DayRequest, world: World, now: float) -> Sequence[Forecast]:
        del request, world, now
        return options


class _KnowsPresent(Kvabr):
    def _known(self, options: Sequence[Forecast], request: DayRequest, world: World, now: float) -> Sequence[Forecast]:
        return [replace(one, ttft_s=world.copy().serve(request, choice_of(one), now).ttft_s) for one in options]


class _KnownLink(LinkMemory):
    def __init__(self, wire: SharedWire) -> None:
        super().__init__(Tracking())
        self._wire = wire

    def rates(self, nbytes: float, now: float) -> tuple[float, float]:
        rate = self._wire.rate(nbytes, now)
        return rate, rate


class _KnowsLink(Kvabr):
    def place(self, request: DayRequest, world: World, now: float) -> Choice:
        self._router.memory = _KnownLink(world.wire)
        return super().place(request, world, now)


def choice_of(one: Forecast) -> Choice:
    """Return the choice that a forecast describes."""
    return Choice(one.place, one.front_tokens)


def rule_of(name: str, shape: WorldShape) -> DayRule:
    """Create a rule by name.

    Raises:
        UsageError: There is no such rule.
    """
    kind, _, number = name.partition(":")
    if kind == "threshold":
        if not number.isdecimal():
            raise UsageError(f"rule {name!r} must be threshold:TOKENS, such as threshold:8000")
        return _Threshold(int(number))
    if name == "prfaas":
        return _Threshold(PRFAAS_TOKENS)
    if name == "local":
        return _Fixed(LOCAL)
    if name == "remote":
        return _Fixed(REMOTE)
    if name == "break-even":
        return _BreakEven(shape)
    if name in ("selfish", "whole", "unprobed", KVABR):
        return Kvabr(shape, considerate=name != "selfish", both=name != "whole", probes=name != "unprobed")
    if name in KNOWING:
        return (_KnowsLink if name == "knows-link" else _KnowsPresent)(shape)
    names = (*RULES, *KNOWING)
    raise UsageError(
        f"unknown rule {name!r}{did_you_mean(name, names)}; choose from {', '.join(names)} and threshold:TOKENS"
    )


def play_day(requests: Sequence[DayRequest], shape: WorldShape, rule: DayRule) -> list[DayOutcome]:
    """Return the outcomes of a day's requests under a rule, by number."""
    found: list[DayOutcome | None] = [None] * len(requests)
    day = Day(requests, World(shape))
    while (arriving := day.next()) is not None:
        request, now = arriving
        found[request.number] = day.serve(rule.place(request, day.world, now))
    return [outcome for outcome in found if outcome is not None]
