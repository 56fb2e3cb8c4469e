"""Content steering: an origin tells of further sources, from which later plays take groups as well."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvabr.cli.main import main
from kvabr.client import steering
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.steering import _nearness
from kvabr.server.publication import BytesPublication
from kvabr.types.errors import UsageError
from kvabr.types.events import RequestSent
from kvabr.types.steering import MOST_SOURCES, SteeringManifest
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import TOKENS


@pytest.fixture
def serve(root, tmp_path):
    made = []

    def start(**how):
        (folder := tmp_path / str(len(made))).mkdir()
        made.append(Served(root / "short", folder, **how))
        return made[-1]

    yield start
    for each in made:
        each.close()


def client(served, sent, **how):
    options = PlayOptions(policy="fixed:FP16", log=sent.append)
    return AsyncClient(served.url, insecure=True, timeout_s=LIMIT_S, options=options, **how)


def sources(sent):
    return {event.source for event in sent if isinstance(event, RequestSent)}


async def test_plays_after_connecting_take_groups_from_what_the_origin_tells_of(serve):
    origin, sent = serve(sources=(serve().url,)), []
    async with client(origin, sent, steering=True) as playing:
        await playing.connect()
        both = playing._some(None)
        await asyncio.gather(*(one.transfers.connected() for one in both))
        assert (await playing.play(TOKENS, deadline=LIMIT_S)).met
    assert len(both) == 2
    assert sources(sent) == {0, 1}


async def test_a_play_asks_for_the_next_one(serve, monkeypatch):
    monkeypatch.setattr(steering, "_BESIDE_S", 0.0)
    origin, sent = serve(sources=(serve().url,)), []
    async with client(origin, sent, steering=True) as playing:
        assert (await playing.play(TOKENS, deadline=LIMIT_S)).met
        await asyncio.gather(*playing._asking_sources)
        assert len(playing._some(None)) == 2


async def test_what_an_origin_tells_of_joins_the_play_that_is_under_way(serve, monkeypatch):
    """The origin dies as soon as it was asked for a group of the first play."""
    monkeypatch.setattr(steering, "_BESIDE_S", LIMIT_S)
    origin, sent = serve(sources=(serve().url,)), []
    killed = False

    def log(event):
        nonlocal killed
        sent.append(event)
        if isinstance(event, RequestSent) and not killed:
            killed = True
            origin.kill()

    options = PlayOptions(policy="fixed:FP16", log=log)
    async with AsyncClient(origin.url, insecure=True, timeout_s=LIMIT_S, options=options, steering=True) as playing:
        assert (await playing.play(TOKENS, deadline=LIMIT_S)).coverage == ("FP16",) * 5
    assert 1 in sources(sent)


async def test_what_nobody_tells_of_any_more_makes_room(serve):
    others = [serve() for _ in range(2)]
    origin = serve()
    async with client(origin, [], steering=True, price_per_gb=0.5) as playing:
        for other in others:
            origin._server.steering = BytesPublication(SteeringManifest(1, 60.0, (other.url,)).dumps())
            playing._steering._until_s.clear()
            await playing.connect()
            assert [peer.name for peer in playing._some(None)] == [origin.url, other.url]
            assert playing._some(None)[1].price_per_gb == 0.5
        assert len(playing._peers) == len(playing._steering._known) == 1


@pytest.mark.parametrize(
    ("origin", "told", "follows"),
    [
        ("8.8.8.8", "1.1.1.1", True), ("8.8.8.8", "10.0.0.1", False), ("8.8.8.8", "127.0.0.1", False),
        ("8.8.8.8", "169.254.169.254", False), ("8.8.8.8", "[::1]", False), ("8.8.8.8", "[::ffff:10.0.0.1]", False),
        ("10.0.0.1", "192.168.1.1", True), ("10.0.0.1", "1.1.1.1", True), ("10.0.0.1", "169.254.169.254", False),
        ("127.0.0.1", "10.0.0.1", True), ("127.0.0.1", "[fe80::1]", True), ("8.8.8.8", "[::]", False),
    ],
)  # fmt: skip
async def test_an_origin_leads_to_nothing_nearer_than_itself(origin, told, follows):
    near = [await _nearness(f"moqt://{host}:4443/") for host in (origin, told)]
    assert (max(near[1]) <= min(near[0])) == follows


@pytest.mark.parametrize("origins", [["8.8.8.8", "127.0.0.1"], []])
async def test_what_an_origin_says_of_its_own_addresses_leads_nowhere_nearer(serve, monkeypatch, origins):
    """Who publishes there also answers for its name: with an address of this machine beside the true one, or none."""
    other = serve()
    origin = serve(sources=(other.url,))

    async def addresses_of(host, port):
        if f":{port}/" in other.url:
            return [(2, ("127.0.0.1", port))]
        if not origins:
            raise OSError("no answer")
        return [(2, (address, port)) for address in origins]

    monkeypatch.setattr(steering, "addresses_of", addresses_of)
    async with client(origin, [], steering=True) as playing:
        await playing.connect()
        assert playing._some(None) == playing.origins


async def test_an_origin_changes_neither_prices_nor_peers_that_the_client_was_given(serve, monkeypatch):
    monkeypatch.setattr(steering, "_ASK_S", LIMIT_S)
    second, third = serve(), serve()
    first, sent = serve(sources=(second.url, third.url)), []
    options = PlayOptions(policy="fixed:FP16", log=sent.append)
    how = {"insecure": True, "timeout_s": LIMIT_S}
    both = [first.url, second.url]
    async with AsyncClient(both, options=options, steering=True, price_per_gb=[0.0, 0.5], **how) as playing:
        own = playing.peer(third.url, price_per_gb=0.25, **how)
        await asyncio.gather(*(one.transfers.connected() for one in playing.origins))
        await playing._steering.ask(playing.origins)
        assert [peer.name for peer in playing._some(None)] == [*both, third.url]
        assert [peer.price_per_gb for peer in (*playing.origins, own)] == [0.0, 0.5, 0.25]
        first._server.steering = BytesPublication(SteeringManifest(1, 60.0, ()).dumps())
        playing._steering._until_s.clear()
        await playing._steering.ask(playing.origins)
        assert playing._some(None) == playing.origins
        assert (await playing.play(TOKENS, deadline=LIMIT_S, peer=own)).met


async def test_tokens_are_shown_over_tls_to_what_an_origin_tells_of():
    how = {"transport": "tcp-plain", "token": "t", "steering": True}
    async with AsyncClient("moqt://127.0.0.1:1/", **how) as playing:
        told = playing._steering._peer("moqt://127.0.0.1:2/")
        assert playing.origins[0].transfers.source._transport == "tcp-plain"
        assert told.transfers.source._transport == "tcp"


async def test_a_play_goes_on_with_what_an_origin_told_of_before_it_died(serve):
    other = serve()
    origin, sent = serve(sources=(other.url,)), []
    async with client(origin, sent, steering=True) as playing:
        assert (await playing.find(TOKENS)) is not None
        await playing.connect()
        origin.kill()
        assert (await playing.play(TOKENS, deadline=LIMIT_S)).coverage == ("FP16",) * 5
        assert 1 in sources(sent)


async def test_nobody_asks_unless_the_client_wants_to(serve):
    origin, sent = serve(sources=(serve().url,)), []
    async with client(origin, sent) as playing:
        await playing.connect()
        assert (await playing.play(TOKENS, deadline=LIMIT_S)).met
        assert len(playing._some(None)) == 1


@pytest.mark.parametrize("what", [
    b"", b"[]", b"null", b'{"version": 2, "ttl_s": 300, "sources": []}',
    b'{"version": 1, "ttl_s": 1, "sources": ["moqt://a.test/"]}',
    b'{"version": 1, "ttl_s": NaN, "sources": ["moqt://a.test/"]}',
    b'{"version": 1, "ttl_s": 300, "sources": ["s3://bucket/", "file:///etc", "http://a.test/", "moqt://:0/", "moqt://"]}',
    SteeringManifest(1, 300.0, ("moqt://a.test/",) * (MOST_SOURCES + 1)).dumps(), bytes(17 << 10),
])  # fmt: skip
async def test_what_an_origin_may_not_tell_is_left_out(serve, what):
    origin, sent = serve(), []
    origin._server.steering = BytesPublication(what)
    async with client(origin, sent, steering=True) as playing:
        await playing.connect()
        assert len(playing._some(None)) == 1
        assert (await playing.play(TOKENS, deadline=LIMIT_S)).met


async def test_origins_make_a_client_know_a_few_sources_only(serve, monkeypatch):
    monkeypatch.setattr(steering, "_MOST_PEERS", 3)
    urls = tuple(f"moqt://127.0.0.1:{1 + each}/" for each in range(MOST_SOURCES))
    async with client(serve(sources=urls), [], steering=True) as playing:
        await playing.connect()
        assert [peer.name for peer in playing._some(None)[1:]] == list(urls[:3])


@pytest.mark.parametrize("wrong", [("s3://bucket/",), ("moqt://",), ("moqt://a.test/",) * (MOST_SOURCES + 1)])
def test_a_server_tells_of_what_can_be_played_only(serve, wrong):
    with pytest.raises(UsageError):
        serve(sources=wrong)


def test_fetch_with_steering(serve, tmp_path, capsys):
    origin = serve(sources=(serve().url,))
    (tmp_path / "prompt.json").write_text(json.dumps(list(TOKENS)))
    words = ["fetch", origin.url, "--steering", "--prompt", str(tmp_path / "prompt.json"), "--insecure"]
    assert main([*words, "--deadline", "60", "--timeout", str(LIMIT_S)]) == 0, capsys.readouterr().err
