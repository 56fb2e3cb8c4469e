"""``cheapfirst``: every group on the cheapest track, then the upgrades that save most, until the deadline.

With the cheapest cache in place the play is safe, so the remaining time needs no caution. Layers cost only their own
bytes.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View

_MIN_SAVING = 1e-4
"""Minimum total saving of upgrades, in nats per token; less is not noticeable."""


class _Upgrade(NamedTuple):
    worth: float
    """Loss saved per byte."""
    track: str
    bytes: int
    saving: float
    decode_s: float


class CheapFirst(Policy):
    """Cheapest first, then most loss saved per byte."""

    name: ClassVar[str] = "cheapfirst"
    takes_cached: ClassVar[bool] = True

    def start(self, view: View) -> None:
        self._base = view.ladder.cheapest
        self._known: dict[tuple[int, str], list[_Upgrade]] = {}
        self._ranked: list[tuple[float, int, int, _Upgrade]] = []
        """Upgrades as (saving per byte, minus order, group, upgrade), the best last."""
        self._ranked_for, self._saving = 0, 0.0
        """Number of further decisions that reuse the ranking, see `View.keeps`; and the total of the best savings."""

    def decide(self, view: View) -> Decision:
        group = view.first_missing()
        if group is not None:
            return Decision.fetch(group, view.soonest_track(), "the base of every group comes first")
        return self._upgrade(view)

    def _upgrade(self, view: View) -> Decision:
        budget = view.budget_bytes(view.rate, view.decode_backlog_s)
        self._ranked_for -= 1
        if self._ranked_for <= 0:
            self._rank(view)
        if self._saving < _MIN_SAVING:
            return Decision.wait(f"upgrades could save only {self._saving:.1e} nats")
        while self._ranked:
            _, _, group, best = self._ranked.pop()
            in_time = best.bytes + view.rate * best.decode_s <= budget
            if in_time and group in view.settled and best in self._offers(view, group):
                reason = f"saves {best.saving:.2e} nats with {best.bytes / 1e3:.0f} kB, the most per byte"
                return Decision.upgrade(group, best.track, reason)
        return Decision.wait("no upgrade would arrive in time")

    def _rank(self, view: View) -> None:
        self._ranked, self._ranked_for, self._saving = [], view.keeps, 0.0
        for order, group in enumerate(view.settled):
            offers = self._offers(view, group)
            if view.unavailable:
                offers = [offer for offer in offers if (group, offer.track) not in view.unavailable]
            if offers:
                self._saving += offers[0].saving
                self._ranked += [(offer.worth, -order, group, offer) for offer in offers]
        self._ranked.sort()

    def _offers(self, view: View, group: int) -> list[_Upgrade]:
        """Return the upgrades of a group's track, best first; cached."""
        current = view.track_of[group] or self._base
        key = (group, current)
        if key not in self._known:
            lost = view.loss(group, current)
            offers = []
            for track in view.catalog.tracks:
                saving = lost - track.loss[group]
                if saving > 0 and track.refines in {None, current}:
                    size = track.bytes[group]
                    offers.append(_Upgrade(saving / size, track.name, size, saving, track.decode_s))
            self._known[key] = sorted(offers, reverse=True)
        return self._known[key]
