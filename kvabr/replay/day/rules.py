"""The rules that a day compares: each decides for a request from what can be known when it arrives.

- ``local``, ``remote``: always there.
- ``threshold:N``: remote if more than N tokens of the prompt are not cached here.
- ``prfaas``: ``threshold:19400``, which Prefill-as-a-service (arXiv 2604.15039) reports for its case study.
- ``break-even``: remote beyond n*(C), from the link's estimate alone: neither queues nor caches there count.
- ``selfish``: kvabr's rule for every request by itself; others do not count.
- ``kvabr``: kvabr's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvabr.abr.estimators.tracking import Tracking
from kvabr.replay.day.requests import DayRequest
from kvabr.replay.day.world import Day, DayOutcome, World, WorldShape
from kvabr.route import FETCH, LOCAL, REMOTE, LinkMemory, Place, PrefillSite, RouteLink, Router, break_even_tokens
from kvabr.types.errors import UsageError, did_you_mean

PRFAAS_TOKENS = 19_400
KVABR = "kvabr"
RULES = ("local", "remote", "prfaas", "break-even", "selfish", KVABR)
"""Names of the rules; ``threshold:N`` is another for each number."""


class DayRule(Protocol):
    """Decides where requests go."""

    def place(self, request: DayRequest, world: World, now: float) -> Place:
        """Return where a request goes that has just arrived."""
        ...


class _Fixed:
    def __init__(self, place: Place) -> None:
        self._place = place

    def place(self, request: DayRequest, world: World, now: float) -> Place:  # noqa: ARG002  # the rule's whole point
        return self._place


class _Threshold:
    def __init__(self, tokens: float) -> None:
        self._tokens = tokens

    def place(self, request: DayRequest, world: World, now: float) -> Place:
        lacking = request.tokens - world.view(request, now)[0].cached_tokens
        return REMOTE if lacking > self._tokens else LOCAL


class _BreakEven:
    def __init__(self, shape: WorldShape) -> None:
        self._shape = shape
        self._memory = LinkMemory(Tracking())
        self._memory.sample(shape.mean_rate, 1.0, 0.0)

    def place(self, request: DayRequest, world: World, now: float) -> Place:
        for end, nbytes, seconds in world.wire.samples(now):
            self._memory.sample(nbytes, seconds, end)
        rate = self._memory.rates(0.0, now)[0]
        link = RouteLink(rate, world.rtt_s, live=self._shape.live)
        local, remote = PrefillSite(self._shape.local.cost), PrefillSite(self._shape.remote.cost)
        threshold = break_even_tokens(local, remote, link, self._shape.cache)
        return _Threshold(threshold).place(request, world, now)


class _Kvabr:
    def __init__(self, shape: WorldShape, *, considerate: bool) -> None:
        self._router = Router(
            shape.local.cost,
            shape.remote.cost,
            shape.cache,
            rtt_s=World(shape).rtt_s,
            workers=(shape.local.workers, shape.remote.workers),
            live=shape.live,
            considerate=considerate,
        )
        self._router.arrived(shape.mean_rate, 1.0, 0.0)

    def place(self, request: DayRequest, world: World, now: float) -> Place:
        for end, nbytes, seconds in world.wire.samples(now):
            self._router.arrived(nbytes, seconds, end)
        here, there = world.view(request, now)
        return self._router.route(
            request.tokens,
            now,
            cached=(here.cached_tokens, there.cached_tokens),
            queue_s=(here.queue_s, there.queue_s),
            backlog_bytes=world.wire.backlog(now),
        ).place


def rule_of(name: str, shape: WorldShape) -> DayRule:
    """Return a fresh rule by its name.

    Raises:
        UsageError: There is none of that name.
    """
    kind, _, number = name.partition(":")
    if kind == "threshold":
        if not number.isdecimal():
            raise UsageError(f"rule {name!r}: write threshold:TOKENS, such as threshold:8000")
        return _Threshold(int(number))
    if name == "prfaas":
        return _Threshold(PRFAAS_TOKENS)
    if name == "local":
        return _Fixed(LOCAL)
    if name == "remote":
        return _Fixed(REMOTE)
    if name == "break-even":
        return _BreakEven(shape)
    if name in ("selfish", KVABR):
        return _Kvabr(shape, considerate=name == KVABR)
    raise UsageError(f"no rule {name!r}{did_you_mean(name, RULES)}; there are {', '.join(RULES)} and threshold:TOKENS")


def play_day(requests: Sequence[DayRequest], shape: WorldShape, rule: DayRule) -> list[DayOutcome]:
    """Return what becomes of every request under a rule, by their numbers."""
    found: list[DayOutcome | None] = [None] * len(requests)
    day = Day(requests, World(shape))
    while (arriving := day.next()) is not None:
        request, now = arriving
        found[request.number] = day.serve(rule.place(request, day.world, now))
    return [outcome for outcome in found if outcome is not None]


CHOICES: tuple[Place, ...] = (LOCAL, REMOTE, FETCH)
