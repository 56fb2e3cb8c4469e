"""Plays of a prefix: the groups before the first missing one, for an engine that computes the rest without kvabr."""

from __future__ import annotations

import math

from kvabr.player.goals.whole import Playing, WholeAim
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.loss import predicted_loss

_MAX_CUTS = 64
"""Maximum number of cuts to consider for a prefix with too much loss."""


class PrefixAim(WholeAim):
    """Delivers a prefix, cut at the first group that the engine would compute."""

    def __init__(self, play: Playing, mode: EngineMode) -> None:
        """Raise `UsageError` if the engine's cost is unknown, or its mode is not ``suffix``."""
        super().__init__(play)
        if play.engine is None or mode != "suffix":
            raise UsageError("a play of a prefix needs the engine's prefill cost, and mode 'suffix'")

    def cuts(self, now: float) -> bool:
        """Return True if the rest should be faster to compute than to fetch."""
        play, view = self.play, self.play.view
        play.look(now)
        assert view.cost is not None  # noqa: S101  # there is an engine
        before = play.catalog.tokens_before(view.solid)
        computed_s = view.cost.added_s(before, play.catalog.tokens_before(view.groups) - before)
        late_s = now - view.deadline_s
        return late_s + view.base_s() >= computed_s

    def computes(self, now: float, first: int, last: int, why: str | None) -> bool:
        self.play.record.used = first
        what = f"group {first} is" if last == first + 1 else f"groups {first} to {last - 1} are"
        self.deliver(now, cut=why or f"{what} faster to compute than to fetch")
        return False

    def deliver(self, now: float, *, cut: str | None = None) -> None:
        play, limit = self.play, self.play.view.max_loss
        if math.isfinite(limit):
            here = used = play.view.solid if play.record.used is None else play.record.used
            tracks, groups = [play.record.groups[group].track or "" for group in range(used)], play.catalog.groups
            while used and predicted_loss(play.catalog, [*tracks[:used], *(RECOMPUTED,) * (groups - used)]) > limit:
                used = play.catalog.cut(max(0, used - 1 - here // _MAX_CUTS))
            if used < here:
                play.record.used = used
                cut = f"a longer prefix would lose more than max_loss ({limit:g} nats per token)"
        super().deliver(now, cut=cut)

    def exceed(self, now: float) -> None:
        self.deliver(now)

    def wait(self, now: float, *, complete: bool, stopped: bool) -> None:
        play = self.play
        if (play.view.coming and not stopped) or play.waiting():
            super().wait(now, complete=complete, stopped=stopped)
        elif stopped:
            self.fall_short(now)
        else:
            self.deliver(now, cut=None if complete else "the rest cannot be fetched, or is faster to compute")

    def fall_short(self, now: float) -> None:
        self.deliver(now, cut=self.play.lacking())

    def stop(self, now: float, reason: str) -> None:
        self.deliver(now, cut=None if self.play.groups.complete else reason)
