"""The fetcher for engines with threads, over real QUIC."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvabr.client.blocking_fetcher import BlockingFetcher
from kvabr.client.fetcher import Limits
from kvabr.types.errors import PlayError, UsageError
from tests.client.served import Served
from tests.client.test_play import close
from tests.toymodel import SPEC, prompt

TOKENS, LONG = prompt(70).tokens, prompt(160).tokens


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    origin = Served(root, tmp_path_factory.mktemp("served"))
    yield origin
    origin.close()


def test_threads_share_one_connection_and_every_download(served, long):
    with BlockingFetcher() as node, ThreadPoolExecutor(8) as threads:
        peer = node.peer(served.url, fingerprint=served.fingerprint, quic="aioquic")
        tasks = [
            threads.submit(node.play, peer, tokens, deadline=20.0, spec=SPEC, policy="fixed:Int4")
            for tokens in (LONG, TOKENS) * 4
        ]
        for tokens, task in zip((LONG, TOKENS) * 4, tasks, strict=True):
            assert close(task.result().kv, tokens)
        assert peer.connection.dials == 0
        metrics = node.metrics
        assert metrics.value("kvabr_node_peers") == 1
        assert metrics.value("kvabr_node_groups_total", source="network") <= long.groups + 5
        assert 'kvabr_node_plays_total{result="met"} 8' in metrics.expose()
    assert metrics.value("kvabr_node_peers") == 0
    assert metrics.value("kvabr_node_plays_in_flight") == 0


def test_a_handle_can_be_asked_waited_for_and_cancelled(served):
    with BlockingFetcher(Limits(plays=1, wait_share=1.0)) as node:
        peer = node.peer(served.url, fingerprint=served.fingerprint, quic="aioquic")
        told = threading.Event()
        handle = node.submit(peer, TOKENS, deadline=20.0, spec=SPEC)
        waiting = node.submit(peer, TOKENS, deadline=20.0, spec=SPEC)
        handle.when_done(lambda _: told.set())
        waiting.cancel()
        assert close(handle.result(20.0).kv)
        assert handle.done()
        assert told.wait(20.0)
        with pytest.raises(PlayError, match="cancelled"):
            waiting.result(20.0)
        assert close(node.submit(peer, TOKENS, deadline=20.0, spec=SPEC).result(20.0).kv)
        assert close(node.submit_asset(peer, handle.result().catalog.namespace, deadline=20.0).result(20.0).kv)


def test_a_closed_one_says_so(served):
    node = BlockingFetcher()
    node.close()
    node.close()
    for call in (node.play, node.submit):
        with pytest.raises(UsageError, match="closed"):
            call(served.url, TOKENS, deadline=1.0, spec=SPEC)
