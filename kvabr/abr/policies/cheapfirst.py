"""``cheapfirst``: every group at the cheapest track, then better ones for those that gain most, until the deadline.

Once the cheapest cache is in place nothing can go wrong any more, so the rest of the time needs no caution: upgrades
are asked for in the order of loss saved per byte, as long as the expected rate brings them in before the deadline.
Layers, where an asset has them, are upgrades that cost only their own bytes.
"""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View

_GOOD_ENOUGH = 1e-4
"""Nats per token that upgrades could still save in all, below which the play ends early: no one could tell."""
_OPTIMISM = 1.25
"""An upgrade is tried if it arrives in time at this multiple of the expected rate: a try costs bytes, not time."""


class CheapFirst(Policy):
    """Cheapest first, then most loss saved per byte."""

    name: ClassVar[str] = "cheapfirst"

    def start(self, view: View) -> None:
        """Pick the base track: the one whose whole cache is soonest in place, decoding included."""
        self._base = view.ladder.cheapest
        self._ranked: list[tuple[float, int, str]] | None = None

    def decide(self, view: View) -> Decision:
        """First the base of every group, then the upgrades."""
        group = view.first_missing()
        if group is not None:
            return Decision.fetch(group, self._soonest(view), "the base of every group comes first")
        return self._upgrade(view)

    def _soonest(self, view: View) -> str:
        """The cheapest track, or a dearer one where its faster decoding brings the whole cache in sooner."""
        if view.rate <= 0:
            return self._base
        left = len(view.missing)

        def seconds(name: str) -> float:
            track = view.catalog.by_name[name]
            network = track.total_bytes / view.groups * left / view.rate
            return max(network, view.decode_backlog_s + track.decode_s * left)

        if seconds(self._base) <= view.time_left:
            return self._base
        return min(view.ladder.names, key=seconds)

    def _upgrade(self, view: View) -> Decision:
        reach = _OPTIMISM * view.rate
        saving_left = 0.0
        best: tuple[float, int, str] | None = None
        for group, current in enumerate(view.track_of):
            if current is None or current == "recomputed":
                continue
            now_lost = view.loss(group, current)
            if now_lost < _GOOD_ENOUGH / view.groups:
                continue
            top = 0.0
            for track in view.catalog.tracks:
                if track.refines is not None and track.refines != current:
                    continue
                saving = now_lost - track.loss[group]
                top = max(top, saving)
                size = track.bytes[group]
                if saving <= 0 or (best is not None and saving / size <= best[0]):
                    continue
                if view.budget_bytes(reach, view.decode_backlog_s + track.decode_s) < size:
                    continue
                best = (saving / size, group, track.name)
            saving_left += top
        if saving_left < _GOOD_ENOUGH:
            return Decision.finish(f"upgrades could save only {saving_left:.1e} nats more")
        if best is None:
            return Decision.finish("no upgrade would arrive in time")
        worth, group, name = best
        return Decision.upgrade(group, name, f"saves most: {worth * 1e9:.2f} nats per GB")
