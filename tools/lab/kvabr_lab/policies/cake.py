"""``cake``: the engine computes from the front, the network loads one track from the back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvabr.abr.policies.fixed import check_alone
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View
from kvabr.types.parameters import Parameter

_FLYING = 2
_AHEAD_TTFB, _AHEAD_SHARE = 1.5, 0.02
"""Target of bytes in flight: a multiple of the time to first byte, plus a fraction of the deadline, at the rate."""


class Cake(Policy):
    """Compute from the front and load from the back until both meet (Jin et al., arXiv:2410.03065).

    It uses no estimates and ignores the deadline: the faster side gets more groups. Cake loads uncompressed caches and
    computes batches of chunks. Here one track is chosen before the play, and the engine computes one group at a time,
    since it may meet the loaded part after each. Without an engine, or with an engine in mode ``suffix``, groups are
    only loaded; with ``suffix``, from the front.
    """

    name: ClassVar[str] = "cake"
    abandons: ClassVar[bool] = False
    paces: ClassVar[bool] = True  # otherwise the engine would idle until the next transfer is done
    computes: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Parameter]] = {"loss": Parameter(1e-6, 0.3, 0.01, log=True)}

    def __init__(self, track: str = "", *, loss: float = 0.01) -> None:
        """Set the track (``cake:FP8``); default: the cheapest with at most ``loss`` nats per token, else the best."""
        self._track, self._loss = track, loss

    def start(self, view: View) -> None:
        """Choose the track; raise `PolicyError` if the asset has no such self-contained track."""
        if self._track:
            check_alone(view, self.name, self._track)
            return
        tracks = view.ladder.tracks
        good = (track for track in tracks if track.total_loss <= self._loss)
        self._track = next(good, tracks[-1]).name

    def decide(self, view: View) -> Decision:
        """Keep both the engine and the link busy."""
        front = view.first_missing()
        if front is None:
            return Decision.finish("every group is in place, under way, or computed by the engine")
        meets = view.cost is not None and not view.front_first
        if meets and view.engine_backlog_s <= 0:
            return Decision.recompute(front, "the engine computes from the front")
        ahead_s = _AHEAD_TTFB * view.ttfb_s + _AHEAD_SHARE * view.deadline_s
        if len(view.in_flight) >= _FLYING and view.outstanding_bytes >= view.rate * ahead_s:
            return Decision.wait("enough is in flight")
        if view.front_first:
            return Decision.fetch(
                front, self._track, "the engine computes everything after a miss: the front comes first"
            )
        return Decision.fetch(next(reversed(view.missing_groups)), self._track, "the network loads from the back")
