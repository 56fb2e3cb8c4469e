"""Counts, how Prometheus reads them, and the small HTTP server that it reads them from."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.server.metrics import MAX_SERIES, Counter, Gauge, Histogram, Metrics
from kvabr.telemetry import scrape
from kvabr.telemetry.scrape import ScrapeServer
from kvabr.types.errors import TransportError
from kvabr.types.naming import prefix_track

SAMPLE = re.compile(
    r'(?P<name>[a-z_:][a-z0-9_:]*)(\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (?P<value>\S+)'
)


def samples(text):
    """Read the exposition as the format says: each sample once, after its HELP and TYPE."""
    found, declared = {}, set()
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            declared.add(line.split(" ")[2])
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        base = re.sub(r"_(bucket|sum|count)$", "", match["name"])
        assert match["name"] in declared or base in declared
        key = match["name"] + (f"{{{match['labels']}}}" if match["labels"] else "")
        assert key not in found
        found[key] = float(match["value"])
    return found


def test_what_is_counted_is_exposed():
    metrics = Metrics()
    metrics.connections.inc()
    metrics.connections.inc()
    metrics.connections.dec()
    metrics.connections_total.inc("accepted")
    metrics.groups_sent_total.inc("Int4", by=3)
    metrics.bytes_sent_total.inc(by=1 << 40)
    metrics.refusals_total.inc("16")
    metrics.assets.set(7)
    metrics.first_byte_seconds.observe(0.03)
    metrics.first_byte_seconds.observe(99)
    metrics.group_bytes.observe(4096)
    found = samples(metrics.expose())
    assert found["kvabr_connections"] == 1
    assert found['kvabr_connections_total{result="accepted"}'] == 1
    assert found['kvabr_groups_sent_total{track="Int4"}'] == 3
    assert found["kvabr_bytes_sent_total"] == 1 << 40
    assert found['kvabr_refusals_total{code="16"}'] == 1
    assert found["kvabr_assets"] == 7
    assert found["kvabr_requests_in_flight"] == 0
    assert found['kvabr_first_byte_seconds_bucket{le="0.02"}'] == 0
    assert found['kvabr_first_byte_seconds_bucket{le="0.05"}'] == 1
    assert found['kvabr_first_byte_seconds_bucket{le="5"}'] == 1
    assert found['kvabr_first_byte_seconds_bucket{le="+Inf"}'] == found["kvabr_first_byte_seconds_count"] == 2
    assert found["kvabr_first_byte_seconds_sum"] == pytest.approx(99.03)
    assert found['kvabr_group_bytes_bucket{le="4096"}'] == 1
    assert metrics.groups_sent_total.value("Int4") == 3
    assert metrics.groups_sent_total.value("FP16") == 0


@given(st.lists(st.text(max_size=20), max_size=20))
def test_labels_of_any_text_are_escaped(values):
    counter = Counter("c_total", 'back\\slash "quote"\nline', ["v"])
    for value in values:
        counter.inc(value)
    found = samples("".join(line + "\n" for line in counter.expose()))
    assert sum(found.values()) == len(values)
    assert len(found) == len(set(values))


@given(st.lists(st.floats(0, 1e9), max_size=50))
def test_histograms_add_up(values):
    histogram = Histogram("h", "text", (0.5, 10.0, 1e6))
    for value in values:
        histogram.observe(value)
    found = samples("".join(line + "\n" for line in histogram.expose()))
    for end in (0.5, 10.0, 1e6, float("inf")):
        text = {0.5: "0.5", 10.0: "10", 1e6: "1000000"}.get(end, "+Inf")
        assert found[f'h_bucket{{le="{text}"}}'] == sum(value <= end for value in values)
    assert found["h_sum"] == pytest.approx(sum(values))
    assert histogram.count == len(values)


def test_label_values_from_outside_are_bounded():
    counter = Counter("c_total", "text", ["track"])
    for index in range(MAX_SERIES * 3):
        counter.inc(f"track-{index}")
    assert len(list(counter.expose())) == 2 + MAX_SERIES + 1
    assert counter.value("other") == 2 * MAX_SERIES
    counter.inc("track-0")
    assert counter.value("track-0") == 2


def test_names_of_lookups_are_not_shown():
    metrics = Metrics()
    metrics.groups_sent_total.inc(prefix_track(["a" * 64, "b" * 64]))
    metrics.groups_sent_total.inc(prefix_track(["a" * 64]))
    metrics.groups_sent_total.inc("prefix")
    assert "prefix." not in metrics.expose()
    assert metrics.groups_sent_total.value("lookup") == 2


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="cannot shrink"):
        Counter("c_total", "text").inc(by=-1)
    with pytest.raises(TypeError, match="labels"):
        Counter("c_total", "text", ["a"]).inc()
    with pytest.raises(TypeError, match="labels"):
        Gauge("g", "text").set(1, "a")


def test_threads_lose_no_count():
    counter, histogram = Counter("c_total", "text", ["l"]), Histogram("h", "text", (1.0,))

    def work():
        for _ in range(2000):
            counter.inc("x")
            histogram.observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value("x") == histogram.count == 8000


async def ask(server, data, *, eof=False):
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    if eof:
        writer.write_eof()
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_metrics_over_http():
    metrics = Metrics()
    metrics.bytes_sent_total.inc(by=5)
    async with ScrapeServer(metrics, "127.0.0.1", 0) as server:
        head, _, body = (await ask(server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"text/plain; version=0.0.4" in head
        assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body)
        assert samples(body.decode())["kvabr_bytes_sent_total"] == 5
        assert (await ask(server, b"GET /healthz HTTP/1.0\r\n\r\n")).endswith(b"ok\n")
        assert (await ask(server, b"HEAD /healthz HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")


async def test_health_says_when_it_drains():
    metrics = Metrics()
    async with ScrapeServer(metrics, "127.0.0.1", 0, healthy=lambda: not metrics.draining.value()) as server:
        assert b"200 OK" in await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")
        metrics.draining.set(1)
        assert b"503 Service Unavailable" in await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"GET /metrics\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"HTTP/1.1 400"),
        (b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"\x16\x03\x01\x00\xff\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b""),
    ],
)
async def test_other_requests(request_, answer):
    async with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        got = await ask(server, request_)
        assert got.startswith(answer)
        assert bool(got) == bool(answer)
        assert b"200 OK" in await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")


async def test_a_peer_that_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(scrape, "_TIMEOUT_S", 0.05)
    async with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        assert await ask(server, b"GET /met") == b""
        assert await ask(server, b"", eof=True) == b""


async def test_connections_are_bounded_and_closing_ends_them(monkeypatch):
    monkeypatch.setattr(scrape, "_MAX_CONNECTIONS", 3)
    async with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        held = [await asyncio.open_connection(*server.address) for _ in range(3)]
        while len(server._tasks) < 3:  # noqa: ASYNC110 - whatever it takes, and no longer
            await asyncio.sleep(0)
        assert await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
        held[0][1].close()
        while len(server._tasks) > 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert b"200 OK" in await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n")
    for reader, writer in held[1:]:
        assert await reader.read() == b""
        writer.close()


async def test_a_port_in_use():
    async with ScrapeServer(Metrics(), "127.0.0.1", 0) as server:
        with pytest.raises(TransportError, match=r"in use.*--metrics"):
            async with ScrapeServer(Metrics(), *server.address):
                pass
