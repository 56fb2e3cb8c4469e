"""``cachegen`` and ``cachegen-oracle``: the two rules of CacheGen (Liu et al., SIGCOMM 2024)."""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View
from kvabr.types.errors import PolicyError


class CacheGen(FrontToBack):
    """The rule of the paper, which assumes that the throughput of the last chunk persists.

    It chooses the least lossy level at which all remaining chunks fit the remaining time. If none fits, it sends the
    chunk as text to the engine. The first chunk is sent at a medium level.
    """

    name: ClassVar[str] = "cachegen"
    estimator: ClassVar[str] = "last"
    abandons: ClassVar[bool] = False

    def choose(self, view: View, group: int) -> Decision:
        """Choose the least lossy track at which all remaining groups fit."""
        tracks = view.ladder.tracks
        if view.rate <= 0:
            return Decision.fetch(
                group, tracks[len(tracks) // 2].name, "no throughput is known yet: a medium level first"
            )
        budget = view.budget_bytes(view.rate)
        for track in reversed(tracks):
            if view.missing_bytes(track) <= budget:
                return Decision.fetch(
                    group, track.name, f"all remaining groups fit {budget / 1e6:.2f} MB at this level"
                )
        begin, end = map(view.catalog.tokens_before, (group, group + 1))
        if view.cost is not None and view.engine_backlog_s + view.cost.seconds(begin, end - begin) <= view.time_left:
            return Decision.recompute(group, f"no level fits {budget / 1e6:.2f} MB: send it as text")
        return Decision.fetch(group, tracks[0].name, f"no level fits {budget / 1e6:.2f} MB: the cheapest level")


class CacheGenOracle(FrontToBack):
    """The rule of the released code: every chunk has an equal share of the deadline, without carry-over.

    The rule reads its bandwidth from the trace in advance.
    """

    name: ClassVar[str] = "cachegen-oracle"
    abandons: ClassVar[bool] = False

    def start(self, view: View) -> None:
        """Raise `PolicyError` if the future is not known."""
        if view.oracle is None:
            raise PolicyError(
                "cachegen-oracle reads the true bandwidth from the trace, so it runs only in a simulation"
            )
        self._carried = view.oracle.carried

    def choose(self, view: View, group: int) -> Decision:
        """Choose the least lossy track that fits this group's equal share of the deadline."""
        share = self._carried(view.deadline_s / view.groups)
        reason = f"the link will carry {share:.0f} bytes in this group's share of the time"
        return Decision.fetch(group, view.best_track(group, share), reason)
