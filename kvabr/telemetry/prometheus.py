"""Metrics for Prometheus, and an HTTP server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, ClassVar, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvabr.telemetry.listener import EventRecord, Listener, PlayStates
from kvabr.types import events
from kvabr.types.errors import HomeProcess, TransportError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

MAX_LABEL_VALUES = 256
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_LOSSES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_SHARES = (-1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0)

_SOURCES = {"fetch": "fetched", "upgrade": "upgraded"}


class MetricSet:
    """Metrics of `prometheus_client` in one registry; subclasses create them as attributes."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Create a counter; ``name`` ends in ``_total``."""
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Create a gauge."""
        gauge = Gauge(name, text, labels, registry=None)
        self.registry.register(_Undescribed(gauge))
        return gauge

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """Create a histogram with these upper bounds of buckets, and a last bucket without a bound."""
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def expose(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def value(self, sample: str, **labels: str) -> float:
        """Return the value of a sample such as ``kvabr_play_seconds_count``, given all its labels; 0 if absent."""
        return self.registry.get_sample_value(sample, labels) or 0.0


class _Undescribed(Collector):
    """A gauge that skips the registry's name check, which confuses a gauge ``x`` with a counter ``x_total``."""

    def __init__(self, metric: Gauge) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return self._metric.collect()


class BoundedLabel:
    """Limits the number of values of a label, since peers choose track names."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        """Return the value, or ``other`` if it is new and the limit is reached."""
        with self._lock:
            if value not in self._known and len(self._known) >= MAX_LABEL_VALUES:
                return "other"
            self._known.add(value)
        return value


@dataclass(slots=True)
class _PlayState:
    sid: str
    deadline_s: float | None = None
    kinds: dict[int, str] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)
    computing_s: float = 0.0
    result: str | None = None


class PlayerMetrics(Listener, MetricSet):
    """Counts plays. `expose` returns the metrics as text; `ScrapeServer` serves them."""

    name: ClassVar[str] = "prometheus"

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        MetricSet.__init__(self, registry)
        self._track = BoundedLabel()
        self.plays_total = self.counter(
            "kvabr_plays_total", "Finished plays: met, late, gave_up, failed, or nothing (not cached).", "result"
        )
        self.plays_in_progress = self.gauge("kvabr_plays_in_progress", "Plays in progress.")
        self.ttft_seconds = self.histogram(
            "kvabr_play_seconds", "Time from the end of the lookup to delivery of the cache.", _SECONDS
        )
        self.spare_share = self.histogram(
            "kvabr_play_spare_ratio", "Share of the deadline left at delivery; negative if late.", _SHARES
        )
        self.loss = self.histogram(
            "kvabr_play_loss_nats", "Expected loss of delivered caches, nats per token.", _LOSSES
        )
        self.requests_total = self.counter(
            "kvabr_play_requests_total", "Finished requests for groups: done, cancelled, or failed.", "result"
        )
        self.bytes_total = self.counter("kvabr_play_bytes_total", "Bytes of received groups, by track.", "track")
        self.lost_bytes_total = self.counter(
            "kvabr_play_lost_bytes_total", "Bytes received for cancelled or failed requests."
        )
        self.groups_total = self.counter(
            "kvabr_play_groups_total", "Groups in place: fetched, upgraded or recomputed.", "source"
        )
        self.recompute_seconds_total = self.counter("kvabr_play_recompute_seconds_total", "Compute time of engines.")
        self.first_byte_seconds = self.histogram(
            "kvabr_play_first_byte_seconds", "Time from a request to its first byte.", _SECONDS
        )
        self.rate = self.gauge("kvabr_play_rate_bytes_per_second", "Link rate expected by the last play.")
        self.lower_bound = self.gauge("kvabr_play_rate_lower_bytes_per_second", "Lower bound of that rate.")
        self._plays = PlayStates(_PlayState)

    def receive(self, record: EventRecord) -> None:
        """Count one event."""
        play, event = self._plays.of(record), record.event
        self.plays_in_progress.set(len(self._plays))
        match event:
            case events.PlayStarted():
                play.deadline_s = event.deadline_s
            case events.DecisionMade() | events.ProgressMade():
                self._estimates(play, event)
            case events.FirstByteReceived():
                if event.request in play.sent_s:
                    self.first_byte_seconds.observe(event.t - play.sent_s.pop(event.request))
            case events.TransferEvent():
                self._transfer(play, event)
            case events.RecomputeEvent() | events.TokensStarted() | events.TokensDone():
                self._engine(play, event)
            case events.CacheDelivered():
                self._delivered(play, event)
            case events.PlayGaveUp():
                play.result = "gave_up"
            case events.PlayEnded():
                self.plays_total.labels(play.result or ("nothing" if event.error is None else "failed")).inc()

    def _estimates(self, play: _PlayState, event: events.DecisionMade | events.ProgressMade) -> None:
        if event.rate:
            self.rate.set(event.rate)
            self.lower_bound.set(event.lower)
        if isinstance(event, events.DecisionMade) and event.request is not None:
            play.kinds[event.request] = event.kind

    def _transfer(self, play: _PlayState, event: events.TransferEvent) -> None:
        match event:
            case events.RequestSent():
                play.sent_s[event.request] = event.t
            case events.RequestDone():
                self.requests_total.labels("done").inc()
                self.bytes_total.labels(self._track(event.track)).inc(event.bytes)
            case events.GroupDecoded():
                self.groups_total.labels(_SOURCES[play.kinds.pop(event.request, "fetch")]).inc()
            case events.RequestCancelled() | events.RequestFailed():
                self.requests_total.labels(
                    "cancelled" if isinstance(event, events.RequestCancelled) else "failed"
                ).inc()
                self.lost_bytes_total.inc(event.received)
                play.sent_s.pop(event.request, None)
                play.kinds.pop(event.request, None)

    def _engine(
        self, play: _PlayState, event: events.RecomputeEvent | events.TokensStarted | events.TokensDone
    ) -> None:
        if isinstance(event, events.RecomputeStarted | events.TokensStarted):
            play.computing_s = event.t
            return
        self.recompute_seconds_total.inc(max(0.0, event.t - play.computing_s))
        if isinstance(event, events.RecomputeDone):
            self.groups_total.labels("recomputed").inc(event.last - event.first)

    def _delivered(self, play: _PlayState, event: events.CacheDelivered) -> None:
        play.result = "met" if event.met else "late"
        self.ttft_seconds.observe(event.t)
        self.loss.observe(event.loss)
        if play.deadline_s is not None:
            self.spare_share.observe((play.deadline_s - event.t) / play.deadline_s)


class ScrapeServer:
    """Serves ``/metrics`` and ``/healthz`` to at most 32 connections, each for up to 5 seconds; a context manager."""

    def __init__(self, metrics: MetricSet, host: str, port: int, healthy: Callable[[], bool] = lambda: True) -> None:
        """Prepare a server; entering the context binds the address. Port 0 selects a free port.

        ``/healthz`` returns status 503 unless ``healthy()`` is True.
        """
        self._metrics, self._host, self._port, self._healthy = metrics, host, port, healthy
        self._server: _Server | None = None
        self._home = HomeProcess("the server of metrics")

    @property
    def address(self) -> tuple[str, int]:
        """Bound host and port."""
        if self._server is None:
            return self._host, self._port
        host, port = self._server.socket.getsockname()[:2]
        return str(host), int(port)

    def __enter__(self) -> Self:
        try:
            self._server = _Server(self._host, self._port)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TransportError(
                f"cannot serve metrics on {self._host}:{self._port} ({reason}); give another --metrics HOST:PORT"
            ) from error
        self._server.set_app(self._answer)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="kvabr-metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._home.here:  # in a forked child, this would wait for the thread forever
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        method, path, kind = environ["REQUEST_METHOD"], environ["PATH_INFO"], "text/plain; charset=utf-8"
        if method not in {"GET", "HEAD"}:
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD\n"
        elif path == "/metrics":
            status, text, kind = HTTPStatus.OK, self._metrics.expose(), CONTENT_TYPE_PLAIN_0_0_4
        elif path != "/healthz":
            status, text = HTTPStatus.NOT_FOUND, "not found; try /metrics or /healthz\n"
        elif self._healthy():
            status, text = HTTPStatus.OK, "ok\n"
        else:
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, "draining\n"
        body = text.encode()
        start(f"{status.value} {status.phrase}", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if method == "HEAD" else [body]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]  # typeshed's addresses have any fields

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        # A socket timeout covers only one read, so it does not stop a client that sends a byte per second.
        timer = threading.Timer(_TIMEOUT_S, self.shutdown_request, (request,))
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of clients that left, were too slow, or do not speak HTTP."""


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002  # the name of its base
        """Do nothing, so that scrapes are not logged."""
