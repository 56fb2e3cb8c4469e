"""Prometheus metrics of plays."""

from __future__ import annotations

from typing import ClassVar

from prometheus_client import CollectorRegistry

from kvabr.telemetry.listener import Heard, Listener
from kvabr.telemetry.plays import Plays
from kvabr.telemetry.prometheus import BoundedLabel, MetricSet
from kvabr.types.events import (
    CacheDelivered,
    DecisionMade,
    FirstByteReceived,
    GroupDecoded,
    PlayEnded,
    PlayGaveUp,
    PlayStarted,
    ProgressMade,
    RecomputeDone,
    RecomputeEvent,
    RecomputeStarted,
    RequestCancelled,
    RequestDone,
    RequestFailed,
    RequestSent,
    TransferEvent,
)
from kvabr.types.naming import plain_track

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_LOSSES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_SHARES = (-1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0)

_SOURCES = {"fetch": "fetched", "upgrade": "upgraded"}


class _Play:
    """What is remembered of one play."""

    def __init__(self, _sid: str) -> None:
        self.deadline_s: float | None = None
        self.kinds: dict[int, str] = {}
        """Of each request under way, ``fetch`` or ``upgrade``."""
        self.sent_s: dict[int, float] = {}
        self.computing_s = 0.0
        self.result: str | None = None


class PlayerMetrics(Listener, MetricSet):
    """Counts plays; `expose` returns the text, `kvabr.telemetry.prometheus.ScrapeServer` serves it."""

    name: ClassVar[str] = "prometheus"

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create the metrics, in ``registry`` or in a registry of their own."""
        MetricSet.__init__(self, registry)
        self._track = BoundedLabel()
        self.plays_total = self.counter(
            "kvabr_plays_total", "Plays that are over: met, late, gave_up, failed, or nothing was cached.", "result"
        )
        self.plays_in_progress = self.gauge("kvabr_plays_in_progress", "Plays that are going on.")
        self.ttft_seconds = self.histogram(
            "kvabr_play_seconds", "From the end of the lookup until the cache was delivered.", _SECONDS
        )
        self.spare_share = self.histogram(
            "kvabr_play_spare_ratio", "Share of the deadline that was left at delivery; below 0: late.", _SHARES
        )
        self.loss = self.histogram(
            "kvabr_play_loss_nats", "Expected loss of delivered caches, nats per token.", _LOSSES
        )
        self.requests_total = self.counter(
            "kvabr_play_requests_total", "Requests for groups that are over: done, cancelled, or failed.", "result"
        )
        self.bytes_total = self.counter("kvabr_play_bytes_total", "Bytes of groups that came, by track.", "track")
        self.lost_bytes_total = self.counter(
            "kvabr_play_lost_bytes_total", "Bytes received of requests that were cancelled or failed."
        )
        self.groups_total = self.counter(
            "kvabr_play_groups_total", "Groups put in place, by how: fetched, upgraded, or recomputed.", "source"
        )
        self.recompute_seconds_total = self.counter(
            "kvabr_play_recompute_seconds_total", "Seconds that engines computed."
        )
        self.first_byte_seconds = self.histogram(
            "kvabr_play_first_byte_seconds", "From a request to its first byte.", _SECONDS
        )
        self.rate = self.gauge("kvabr_play_rate_bytes_per_second", "What the last play expected of its link.")
        self.lower_bound = self.gauge("kvabr_play_rate_lower_bytes_per_second", "The lower bound of that.")
        self._plays = Plays(_Play)

    def hear(self, heard: Heard) -> None:
        """Count one event."""
        play, event = self._plays.of(heard), heard.event
        self.plays_in_progress.set(len(self._plays))
        match event:
            case PlayStarted():
                play.deadline_s = event.deadline_s
            case DecisionMade() | ProgressMade():
                self._estimates(play, event)
            case FirstByteReceived():
                if event.request in play.sent_s:
                    self.first_byte_seconds.observe(event.t - play.sent_s.pop(event.request))
            case TransferEvent():
                self._transfer(play, event)
            case RecomputeEvent():
                self._engine(play, event)
            case CacheDelivered():
                self._delivered(play, event)
            case PlayGaveUp():
                play.result = "gave_up"
            case PlayEnded():
                self.plays_total.labels(play.result or ("nothing" if event.error is None else "failed")).inc()

    def _estimates(self, play: _Play, event: DecisionMade | ProgressMade) -> None:
        if event.rate:
            self.rate.set(event.rate)
            self.lower_bound.set(event.lower)
        if isinstance(event, DecisionMade) and event.request is not None:
            play.kinds[event.request] = event.kind

    def _transfer(self, play: _Play, event: TransferEvent) -> None:
        match event:
            case RequestSent():
                play.sent_s[event.request] = event.t
            case RequestDone():
                self.requests_total.labels("done").inc()
                self.bytes_total.labels(self._track(plain_track(event.track))).inc(event.bytes)
            case GroupDecoded():
                self.groups_total.labels(_SOURCES[play.kinds.pop(event.request, "fetch")]).inc()
            case RequestCancelled() | RequestFailed():
                self.requests_total.labels("cancelled" if isinstance(event, RequestCancelled) else "failed").inc()
                self.lost_bytes_total.inc(event.received)
                play.sent_s.pop(event.request, None)
                play.kinds.pop(event.request, None)

    def _engine(self, play: _Play, event: RecomputeEvent) -> None:
        if isinstance(event, RecomputeStarted):
            play.computing_s = event.t
            return
        self.recompute_seconds_total.inc(max(0.0, event.t - play.computing_s))
        if isinstance(event, RecomputeDone):
            self.groups_total.labels("recomputed").inc(event.last - event.first)

    def _delivered(self, play: _Play, event: CacheDelivered) -> None:
        play.result = "met" if event.met else "late"
        self.ttft_seconds.observe(event.t)
        self.loss.observe(event.loss)
        if play.deadline_s is not None:
            self.spare_share.observe((play.deadline_s - event.t) / play.deadline_s)
