"""The log of one play: events with what they were based on."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from kvabr.abr.policy import Decision
from kvabr.abr.view import View
from kvabr.types.events import DecisionMade, Limit, Log, PlayEvent, ProgressMade, SampleLimited

P = ParamSpec("P")


class EventLog:
    """Passes events to the listener. Every method returns at once if there is none."""

    __slots__ = ("_log", "_view")

    def __init__(self, log: Log | None, view: View) -> None:
        self._log, self._view = log, view

    def emit(self, event: Callable[P, PlayEvent], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit an event, given its class and fields."""
        if self._log is not None:
            self._log(event(*args, **kwargs))

    def progress(self, now: float, received: int) -> None:
        """Emit the bytes received in all and the current estimates, if requests are in flight."""
        view = self._view
        if self._log is not None and view.in_flight:
            self._log(ProgressMade(now, received, view.rate, view.lower_bound, self._slack()))

    def limited(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """Emit a throughput sample that the network did not limit; ``rate`` in bytes per second."""
        self.emit(SampleLimited, now, by, rate, fed)

    def decision(
        self,
        decision: Decision,
        now: float,
        *,
        request: int | None = None,
        kind: str | None = None,
        track: str | None = None,
    ) -> None:
        """Emit a decision with everything that it was based on; ``track``: the layer of it that a request is for."""
        if self._log is None:
            return
        view, others = self._view, decision.alternatives
        self._log(
            DecisionMade(
                now,
                kind or decision.kind,
                decision.group,
                track or decision.track,
                request,
                decision.reason,
                rate=view.rate,
                lower=view.lower_bound,
                ttfb_s=view.ttfb_s,
                slack_s=self._slack(),
                alternatives=None if others is None else dict(others),
            )
        )

    def _slack(self) -> float | None:
        slack = self._view.slack_s()
        return None if slack == float("-inf") else slack
