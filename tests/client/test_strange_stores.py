"""Stores whose answers are not what was published: gateways' pages, compressed and cut bodies."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import logging
import threading

import pytest

from kvabr.cli.main import main
from kvabr.client.async_client import AsyncClient
from kvabr.link.objects import index as store_index
from kvabr.store.cloud import CloudStore
from kvabr.store.store import listing
from kvabr.types.errors import PlayError, Reason, RequestError, StoreError

pytestmark = pytest.mark.process

MODELS = b'{"models": [{"model": "test/model"}]}'
BODIES = {"page": b"<html>Please log in</html>", "gzip": gzip.compress(MODELS), "cut": MODELS[:20], "text": b"not now"}


class Gateway:
    """An HTTP server that answers every GET with one body, whatever range is asked for."""

    def __init__(self, body):
        self.keys, keys = [], None

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):  # as `http.server` calls it
                keys.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        keys = self.keys
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{endpoint}/bucket/p"
        self.bucket_url = f"s3://bucket/p?endpoint={endpoint}&anonymous=true"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def gateway(request):
    with contextlib.closing(Gateway(request.param)) as made:
        yield made


@pytest.mark.parametrize("gateway", BODIES.values(), ids=BODIES, indirect=True)
async def test_strange_answers_are_told_once_and_asked_for_once(gateway, caplog, monkeypatch):
    monkeypatch.setattr(store_index, "_AGAIN_S", 60.0)  # on a slow machine it is asked for again before the answer
    async with AsyncClient(gateway.url) as client:
        for most in (2, 1, 1):
            gateway.keys.clear()
            with caplog.at_level(logging.WARNING, "kvabr.store"), pytest.raises(PlayError) as failed:
                await client.play(list(range(300)), deadline=60.0)
            assert gateway.url in str(failed.value)
            assert 1 <= len(gateway.keys) <= most
        assert client.metrics.value("kvabr_client_wrong_answers_total") >= 1
    (record,) = [each for each in caplog.records if each.name == "kvabr.store"]
    assert gateway.url in record.getMessage()


@pytest.mark.parametrize("gateway", [bytes(1000)], indirect=True)
async def test_a_range_that_is_ignored_is_told(gateway):
    with pytest.raises(RequestError) as failed:
        await CloudStore(gateway.url).get("g/a", 0, 100, limit=1000)
    assert failed.value.reason == Reason.WRONG


@pytest.mark.parametrize("gateway", BODIES.values(), ids=BODIES, indirect=True)
def test_a_web_server_is_no_empty_store(gateway):
    bucket = CloudStore(gateway.bucket_url)
    for ask in (listing(bucket, "a/"), bucket.check_writable()):
        with pytest.raises((StoreError, RequestError)) as failed:
            bucket.blocked(ask)
        assert "correct the URL or the endpoint" in str(failed.value)
    with pytest.raises(RequestError) as failed:
        bucket.blocked(bucket.put_new("a/x", b""))
    assert failed.value.reason == Reason.WRONG


@pytest.mark.parametrize("gateway", [BODIES["page"]], indirect=True)
@pytest.mark.parametrize(
    "words",
    [
        ("store", "ls"),
        ("store", "du"),
        ("store", "verify"),
        ("inspect",),
    ],
)
def test_commands_say_that_a_web_server_is_no_store(gateway, tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main([*words, gateway.bucket_url]) == 1
    said = capsys.readouterr()
    assert "it is a page" in said.err
    assert "no assets" not in said.out
