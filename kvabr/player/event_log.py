"""What a play tells of itself: one dictionary per event, for logs, pages and traces; nothing if nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvabr.abr.policy import Decision
from kvabr.abr.view import Transfer, View

Log = Callable[[dict[str, Any]], None]


class Journal:
    """Writes a session's events. Every method returns at once when there is no listener."""

    __slots__ = ("_log", "_view")

    def __init__(self, log: Log | None, view: View) -> None:
        self._log, self._view = log, view

    def event(self, event: str, now: float, **fields: Any) -> None:
        """Something happened."""
        if self._log is not None:
            self._log({"t": now, "event": event, **fields})

    def transfer(self, event: str, now: float, transfer: Transfer, **fields: Any) -> None:
        """Something happened to a transfer."""
        if self._log is not None:
            what = {"request": transfer.request, "group": transfer.group, "track": transfer.track}
            self._log({"t": now, "event": event, **what, **fields})

    def progress(self, now: float, received: int) -> None:
        """Bytes received in all, and what the estimator makes of them."""
        if self._log is not None and self._view.in_flight:
            estimates = {"rate": self._view.rate, "lower": self._view.lower_bound, "slack_s": self._slack()}
            self._log({"t": now, "event": "progress", "received": received, **estimates})

    def limited(self, by: str, rate: float, now: float, *, fed: bool) -> None:
        """A sample of ``rate`` bytes per second was not held up by the network; did the estimator hear of it?"""
        self.event("limited", now, by=by, rate=rate, fed=fed)

    def decision(
        self,
        decision: Decision,
        now: float,
        *,
        request: int | None = None,
        kind: str | None = None,
    ) -> None:
        """A decision, with everything it was based on."""
        if self._log is None:
            return
        view = self._view
        self._log(
            {
                "t": now,
                "event": "decision",
                "kind": kind or decision.kind,
                "group": decision.group,
                "track": decision.track,
                "request": request,
                "reason": decision.reason,
                "rate": view.rate,
                "lower": view.lower_bound,
                "ttfb_s": view.ttfb_s,
                "slack_s": self._slack(),
                "alternatives": None if decision.alternatives is None else dict(decision.alternatives),
            }
        )

    def _slack(self) -> float | None:
        slack = self._view.slack_s()
        return None if slack == float("-inf") else slack
