"""Metrics for Prometheus: sets of metrics, each with a registry of its own, and the HTTP server that shows one.

`MetricSet` is the base of what servers, clients and plays count; its attributes are metrics of `prometheus_client`.
`ScrapeServer` answers ``GET /metrics`` and ``GET /healthz``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvabr.types.errors import TransportError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

MAX_LABEL_VALUES = 256
_OTHER = "other"
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32
_POLL_S = 0.1
_TEXT = "text/plain; charset=utf-8"


class MetricSet:
    """Metrics in one registry; subclasses create them as attributes."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create an empty set.

        Args:
            registry: where the metrics are registered; None makes a registry for this set alone.
        """
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
        """Create a histogram with these upper bounds; a bucket without bound is added."""
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def expose(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def value(self, sample: str, **labels: str) -> float:
        """Return a sample's value, 0 if it has never been counted.

        Args:
            sample: its full name, for instance ``kvabr_play_seconds_count``.
            labels: all its labels.
        """
        return self.registry.get_sample_value(sample, labels) or 0.0


class _Undescribed(Collector):
    """A metric without the registry's check of names, which takes a gauge ``x`` and a counter ``x_total`` for one."""

    def __init__(self, metric: Gauge) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return self._metric.collect()


class BoundedLabel:
    """Limits how many values a label takes: peers choose names of tracks, and every value costs memory."""

    def __init__(self, limit: int = MAX_LABEL_VALUES) -> None:
        """Allow ``limit`` values besides ``other``."""
        self._limit = limit
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        """Return the value, or ``other`` if it is new and there are too many already."""
        with self._lock:
            if value not in self._known and len(self._known) >= self._limit:
                return _OTHER
            self._known.add(value)
        return value


class ScrapeServer:
    """Serves ``/metrics`` and ``/healthz`` from threads of its own; a context manager.

    It takes at most 32 connections at once and gives each 5 seconds.
    """

    def __init__(self, metrics: MetricSet, host: str, port: int, healthy: Callable[[], bool] = lambda: True) -> None:
        """Prepare; nothing is bound before the server is entered.

        Args:
            metrics: what to show.
            host: name or address to bind.
            port: TCP port; 0 takes a free one.
            healthy: whether ``/healthz`` answers 200 or 503.
        """
        self._metrics, self._host, self._port, self._healthy = metrics, host, port, healthy
        self._server: _Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are bound."""
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
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="kvabr-metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        status, text, kind = self._page(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        body = text.encode()
        start(f"{status.value} {status.phrase}", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _page(self, method: str, path: str) -> tuple[HTTPStatus, str, str]:
        if method not in {"GET", "HEAD"}:
            return HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD\n", _TEXT
        match path:
            case "/metrics":
                return HTTPStatus.OK, self._metrics.expose(), CONTENT_TYPE_PLAIN_0_0_4
            case "/healthz" if self._healthy():
                return HTTPStatus.OK, "ok\n", _TEXT
            case "/healthz":
                return HTTPStatus.SERVICE_UNAVAILABLE, "draining\n", _TEXT
            case _:
                return HTTPStatus.NOT_FOUND, "there are /metrics and /healthz\n", _TEXT


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
        # A socket's own timeout covers one read; a client that sends a byte a second would stay forever.
        timer = threading.Timer(_TIMEOUT_S, self.shutdown_request, (request,))
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: the client is gone, too slow, or does not speak HTTP."""


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002  # the name of its base
        """Stay silent; a scrape every few seconds is no news."""
