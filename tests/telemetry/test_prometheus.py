"""Sets of metrics, as Prometheus' own parser reads them, the HTTP server that shows them, and what players count."""

import re
import socket
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvabr.server.metrics import Metrics
from kvabr.telemetry import PlayerMetrics, Telemetry, prometheus
from kvabr.telemetry.prometheus import MAX_LABEL_VALUES, ScrapeServer
from kvabr.types.errors import TransportError
from kvabr.types.events import CacheDelivered, PlayGaveUp, RequestCancelled, RequestFailed, RequestSent
from kvabr.types.naming import prefix_track
from tests.telemetry.plays import DEADLINE_S, OFFER, broken, simulated


def samples(text):
    families = text_string_to_metric_families(text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_a_set_is_exposed_under_its_names():
    metrics = Metrics()
    metrics.connections.inc()
    metrics.group_sent("Int4")
    metrics.bytes_sent_total.inc(1 << 40)
    metrics.first_byte_seconds.observe(0.03)
    metrics.first_byte_seconds.observe(99)
    found = samples(metrics.expose())
    assert found["kvabr_connections",] == 1
    assert found["kvabr_groups_sent_total", "Int4"] == 1
    assert found["kvabr_bytes_sent_total",] == 1 << 40
    assert found["kvabr_first_byte_seconds_bucket", "0.02"] == 0
    assert found["kvabr_first_byte_seconds_bucket", "0.05"] == 1
    assert found["kvabr_first_byte_seconds_bucket", "+Inf"] == found["kvabr_first_byte_seconds_count",] == 2
    assert found["kvabr_first_byte_seconds_sum",] == pytest.approx(99.03)
    assert metrics.value("kvabr_groups_sent_total", track="FP16") == 0


def test_tracks_that_peers_name_are_bounded():
    metrics = Metrics()
    for index in range(MAX_LABEL_VALUES * 3):
        metrics.group_sent(f"track-{index}")
    found = [key for key in samples(metrics.expose()) if key[0] == "kvabr_groups_sent_total"]
    assert len(found) == MAX_LABEL_VALUES + 1
    assert metrics.value("kvabr_groups_sent_total", track="other") == 2 * MAX_LABEL_VALUES
    metrics.group_sent("track-0")
    assert metrics.value("kvabr_groups_sent_total", track="track-0") == 2


def ask(server, request, *, end=False):
    with socket.create_connection(server.address, timeout=120) as peer:
        peer.sendall(request)
        if end:
            peer.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := peer.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            return b""
        return answer


def test_metrics_over_http():
    metrics = Metrics()
    metrics.bytes_sent_total.inc(5)
    with ScrapeServer(metrics, "127.0.0.1", 0) as server:
        head, _, body = ask(server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n").partition(b"\r\n\r\n")
        assert re.match(rb"HTTP/1.\d 200 OK", head)
        assert b"text/plain; version=" in head
        assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body)
        assert samples(body.decode())["kvabr_bytes_sent_total",] == 5
        assert ask(server, b"GET /healthz HTTP/1.0\r\n\r\n").endswith(b"ok\n")
        assert ask(server, b"HEAD /healthz HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics over there HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/x\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", b"431"),
    ],
)
def test_other_requests(request_, status):
    with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        assert status in ask(server, request_)[:200]
        assert b"200 OK" in ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")


def test_a_peer_that_is_silent_or_slow_is_cut_off(monkeypatch):
    monkeypatch.setattr(prometheus, "_TIMEOUT_S", 0.05)
    with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        assert ask(server, b"GET /met") == b""
        ask(server, b"", end=True)


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(prometheus, "_MAX_CONNECTIONS", 3)
    monkeypatch.setattr(prometheus, "_TIMEOUT_S", 600.0)
    with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        held = [socket.create_connection(server.address) for _ in range(3)]
        while ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"):
            pass  # until all three are accepted
        held[0].close()
        while b"200 OK" not in ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"):
            pass  # until the place is free
        for one in held:
            one.close()


def test_names_of_lookups_are_not_shown():
    metrics = Metrics()
    metrics.group_sent(prefix_track(["a" * 64, "b" * 64]))
    metrics.group_sent(prefix_track(["a" * 64]))
    metrics.group_sent("prefix")
    assert "prefix." not in metrics.expose()
    assert metrics.value("kvabr_groups_sent_total", track="lookup") == 2


def test_health_says_when_it_drains():
    metrics = Metrics()
    with ScrapeServer(metrics, "127.0.0.1", 0, healthy=lambda: not metrics.value("kvabr_draining")) as server:
        assert b"200 OK" in ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")
        metrics.draining.set(1)
        assert b"503 Service Unavailable" in ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")


def test_a_port_in_use():
    with (
        ScrapeServer(Metrics(), "127.0.0.1", 0) as server,
        pytest.raises(TransportError, match=r"in use.*--metrics"),
        ScrapeServer(Metrics(), *server.address),
    ):
        pass


def read(metrics):
    """Every sample: (name, labels) to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.expose()):
        assert family.documentation
        assert family.type in {"counter", "gauge", "histogram"}
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def counted(*plays):
    metrics = PlayerMetrics()
    with Telemetry(metrics) as telemetry:
        for lines in plays:
            telemetry.feed(lines)
    assert telemetry.counts["prometheus"].errors == 0
    return read(metrics)


def test_a_play_is_counted():
    lines = simulated()
    found = counted(lines, lines)
    done = [line for line in lines if line.name == "done"]
    (delivered,) = [line for line in lines if line.name == "deliver"]
    assert found["kvabr_plays_total", (("result", "met"),)] == 2
    assert found["kvabr_plays_in_progress", ()] == 0
    assert found["kvabr_play_requests_total", (("result", "done"),)] == 2 * len(done)
    by_track = {labels[0][1]: value for (name, labels), value in found.items() if name == "kvabr_play_bytes_total"}
    assert by_track == {
        track: 2 * sum(line.bytes for line in done if line.track == track) for track in {line.track for line in done}
    }
    assert by_track["base"] == 2 * OFFER.track("base").total_bytes
    kinds = {line.request: line.kind for line in lines if line.name == "decision"}
    decoded = Counter(kinds[line.request] for line in lines if line.name == "decoded")  # a base may be replaced before
    for source, kind in (("fetched", "fetch"), ("upgraded", "upgrade")):
        assert found["kvabr_play_groups_total", (("source", source),)] == 2 * decoded[kind] > 0
    assert found["kvabr_play_seconds_count", ()] == 2
    assert found["kvabr_play_seconds_sum", ()] == pytest.approx(2 * delivered.t)
    assert found["kvabr_play_loss_nats_sum", ()] == pytest.approx(2 * delivered.loss)
    spare = (
        found["kvabr_play_spare_ratio_bucket", (("le", "1.0"),)]
        - found["kvabr_play_spare_ratio_bucket", (("le", "0.0"),)]
    )
    assert spare == (2 if delivered.t < DEADLINE_S else 0)
    assert found["kvabr_play_first_byte_seconds_count", ()] == 2 * sum(line.name == "first_byte" for line in lines)
    assert found["kvabr_play_rate_bytes_per_second", ()] == pytest.approx(3e5 * 0.948, rel=0.3)
    lower = found["kvabr_play_rate_lower_bytes_per_second", ()]
    assert 0 < lower <= found["kvabr_play_rate_bytes_per_second", ()]


def test_plays_that_bring_nothing_are_told_apart():
    metrics = PlayerMetrics()
    with Telemetry(metrics) as telemetry:
        with telemetry.play():
            pass  # nothing is cached
        with pytest.raises(OSError, match="away"):
            broken(telemetry, [], OSError("the origin is away"))
        with pytest.raises(OSError, match="late"):
            broken(telemetry, [PlayGaveUp(1.0, "too late")], OSError("late"))
        telemetry.feed([CacheDelivered(3.0, met=False, loss=0.1)])
        with telemetry.play() as log:
            log(RequestSent(0.0, 0, 0, "base", 10))
            log(RequestFailed(0.1, 0, 0, "base", 7, "reset"))
            log(RequestCancelled(0.1, 0, 0, "base", 3, "reset"))
            telemetry.flush()
            assert read(metrics)["kvabr_plays_in_progress", ()] == 1
    found = read(metrics)
    results = {labels[0][1]: value for (name, labels), value in found.items() if name == "kvabr_plays_total"}
    assert results == {"nothing": 2, "failed": 1, "gave_up": 1, "late": 1}
    assert found["kvabr_play_lost_bytes_total", ()] == 10
    assert found["kvabr_play_requests_total", (("result", "failed"),)] == 1
    assert found["kvabr_play_requests_total", (("result", "cancelled"),)] == 1
    assert found["kvabr_play_spare_ratio_count", ()] == 0  # no deadline was ever heard of
