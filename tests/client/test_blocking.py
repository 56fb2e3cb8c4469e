"""The blocking client, over real QUIC: threads, handles, and code without asyncio."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvabr
from kvabr.client.blocking import Client
from kvabr.client.options import Limits, PlayOptions
from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.peer import PeerOptions
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import close
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS, LONG = prompt(70).tokens, prompt(160).tokens
INT4 = PlayOptions(policy="fixed:Int4")


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    with Served(root, tmp_path_factory.mktemp("served")) as origin:
        yield origin


def client_of(served, **options):
    return Client(
        served.url,
        PeerOptions(fingerprint=served.fingerprint, quic="aioquic", timeout_s=LIMIT_S),
        model=SPEC,
        **options,
    )


def test_threads_share_one_connection_and_every_download(served, long):
    with client_of(served, options=INT4) as client, ThreadPoolExecutor(8) as threads:
        tasks = [threads.submit(client.play, tokens, deadline=LIMIT_S) for tokens in (LONG, TOKENS) * 4]
        for tokens, task in zip((LONG, TOKENS) * 4, tasks, strict=True):
            assert close(task.result().kv, tokens)
        metrics = client.metrics
        assert metrics.value("kvabr_client_peers") == 1
        assert metrics.value("kvabr_client_groups_total", source="network") <= long.groups + 5
        assert 'kvabr_client_plays_total{result="met"} 8' in metrics.expose()
    assert metrics.value("kvabr_client_peers") == 0
    assert metrics.value("kvabr_client_plays_in_flight") == 0


def test_a_handle_can_be_asked_waited_for_and_cancelled(served):
    with client_of(served, limits=Limits(plays=1)) as client:
        told = threading.Event()
        handle = client.submit(TOKENS, deadline=LIMIT_S)
        waiting = client.submit(TOKENS, deadline=LIMIT_S)
        handle.when_done(lambda _: told.set())
        waiting.cancel()
        assert close(handle.result(LIMIT_S).kv)
        assert handle.done()
        assert told.wait(LIMIT_S)
        with pytest.raises(PlayError, match="cancelled"):
            waiting.result(LIMIT_S)
        assert close(client.submit(TOKENS, deadline=LIMIT_S).result(LIMIT_S).kv)
        name = handle.result().catalog.namespace
        assert close(client.play_asset(name, deadline=LIMIT_S).kv)
        assert close(client.begin(lambda inner: inner.play_asset(name, deadline=LIMIT_S)).result(LIMIT_S).kv)


def test_a_closed_one_says_so():
    client = Client("moqt://origin.example/", model=SPEC)
    client.close()
    client.close()
    for call in (client.play, client.submit):
        with pytest.raises(UsageError, match="closed"):
            call(TOKENS, deadline=1.0)


def seen(digest):
    return kvabr.MediaTokens(TOKENS, [kvabr.Medium(20, 16, digest * 64)])


def test_a_prompt_with_a_picture_is_played_as_far_as_it_is_the_same(tmp_path):
    made = Publisher(tmp_path / "assets", SPEC, prior=default_catalog(), tracks=["FP16"])
    made.reserve(seen("a")).fill(ToyModel().prefill(TOKENS), lambda _: None)
    made.close()
    options = kvabr.PlayOptions(policy="fixed:FP16")
    with (
        Served(tmp_path / "assets", tmp_path) as served,
        kvabr.Client(
            served.url,
            PeerOptions(fingerprint=served.fingerprint, quic="aioquic", timeout_s=LIMIT_S),
            options=options,
        ) as client,
    ):
        for tokens, played in ((seen("a"), 70), (seen("b"), 16), (TOKENS, 16)):
            assert client.play(tokens, deadline=LIMIT_S, model=SPEC).tokens == played
        for play in (client.play, client.play_asset):
            name = () if play == client.play else (kvabr.TrackNamespace(SPEC.model, "0" * 64),)
            given = {"tokens": seen("a"), "engine": ToyModel(), "deadline": 1.0}
            with pytest.raises(kvabr.UsageError, match="some of these stand for media"):
                play(*name, **given)
