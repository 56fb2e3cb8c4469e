"""What goes wrong between a play and a store: never a wrong cache, never a hang, always a reason."""

import asyncio
import time

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.origins import dialling
from kvabr.client.result import IncompleteError, NothingCached
from kvabr.link.objects import connection as store_connection
from kvabr.store.locations import open_asset, open_objects
from kvabr.store.store import listing
from kvabr.transfer.interface import read_all
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ConnectionLostError, NotFoundError, PlayError, Reason, RequestError, TransportError
from tests.client.served import LIMIT_S
from tests.client.stored import Fault, WebServer, memory_url, put_asset
from tests.client.test_play import close
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
COST = PrefillCost(0.001, 0.03)  # a play fetches, and computes what does not come


@pytest.fixture
def stored(root):
    """URL of a store with one asset, and the names of its objects with frames, one for each track."""
    url = memory_url()
    return url, put_asset(url, open_asset(root / "short"))


def on_data(keys, fault, *, times=1 << 30):
    """Return a function for `WebServer.faults`: the first GETs of some objects go wrong."""
    return lambda asked, before: fault if asked in keys and before < times else None


async def play(url, *, deadline=LIMIT_S, engine=None, **options):
    cost = None if engine is None else COST
    async with AsyncClient(url, options=PlayOptions(prefill_cost=cost, **options), engine=engine) as client:
        return await client.play(TOKENS, deadline=deadline, model=SPEC)


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503), Fault(status=429), Fault(cut_after=100), Fault(replace=b"x" * 100_000)],
    ids=["503", "429", "cut", "replaced"],
)
async def test_a_fault_that_passes_does_no_harm(stored, fault):
    url, keys = stored
    async with WebServer(url, [on_data(keys, fault, times=2)]) as server:
        played = await play(server.url)
    assert played.tokens == 70
    assert close(played.kv)


BROKEN = [
    *(Fault(status=503), Fault(status=404), Fault(status=416), Fault(status=403), Fault(silent=True)),
    *(Fault(cut_after=100), Fault(stop_after=100), Fault(replace=b"x" * 100_000), Fault(replace=b"x" * 10)),
]


async def test_what_cannot_be_fetched_is_computed_or_ends_the_play_at_its_deadline(stored):
    """Some of these last until the deadline, which is far enough for a busy machine: all at once, then."""
    url, keys = stored

    async def computed(fault):
        engine = ToyModel()
        async with WebServer(url, [on_data(keys, fault)]) as server:
            played = await play(server.url, deadline=10.0, engine=engine)
            assert {asked for asked, *_ in server.asked} & set(keys), fault
        assert played.tokens == engine.prefilled == 70, fault
        assert close(played.kv), fault

    async def ended():
        async with WebServer(url, [on_data(keys, Fault(silent=True))]) as server, AsyncClient(server.url) as client:
            with pytest.raises(IncompleteError, match="missing"):
                await client.play(TOKENS, deadline=10.0, model=SPEC)
            assert not store_of(await client.connect())._pieces

    await asyncio.gather(ended(), *map(computed, BROKEN))


async def test_what_was_removed_is_computed_and_then_not_found(stored):
    url, keys = stored
    async with AsyncClient(url, engine=ToyModel(), options=PlayOptions(prefill_cost=COST)) as client:
        found = await client.find(TOKENS, model=SPEC)
        await open_objects(url).delete(keys)
        with pytest.raises(PlayError, match="no such object"):
            await client.play_asset(found, deadline=LIMIT_S)
        # The pages are still there; they are not believed any more.
        assert await client.find(TOKENS, model=SPEC) is None
        assert close((await client.play(TOKENS, deadline=LIMIT_S, model=SPEC)).kv)


async def test_a_store_that_stays_silent_fails_what_waits_for_it(stored, short, monkeypatch):
    url, keys = stored
    async with WebServer(url, [on_data(keys, Fault(silent=True))]) as server, dialling(server.url) as connection:
        await connection.finder.find(SPEC, short.chunks, any_dtype=False)
        monkeypatch.setattr(store_connection, "FIRST_BYTE_S", 0.05)
        with pytest.raises(ConnectionLostError, match="sent no data for"):
            await read_all(connection.fetch(short.namespace, "FP16", 0, limit=short.by_name["FP16"].bytes[0]))
        assert "sent no data" in connection.trouble
        assert not store_of(connection)._transfers


def store_of(peer):
    """Return the connection of a peer that is a store."""
    return peer._current


def silent(where, *, times=1 << 30):
    """Return a function for `WebServer.faults`: the first GETs of some keys are never answered."""
    return lambda asked, before: Fault(silent=True) if where in asked and before < times else None


@pytest.mark.parametrize("where", ["m/0", "i/", "g/"])
async def test_one_get_that_is_never_answered_costs_little(stored, where):
    # No play here takes nearly as long as its deadline, nor does one GET have as long to be answered.
    url, _ = stored
    async with WebServer(url, [silent(where, times=1)]) as server:
        assert close((await play(server.url, deadline=15.0)).kv)
        asked = [asked for asked, *_ in server.asked if where in asked]
        assert len(asked) > len(set(asked))


async def test_a_store_that_is_too_busy_says_so_in_the_words_of_the_protocol(stored, short):
    url, keys = stored
    async with WebServer(url, [on_data(keys, Fault(status=503))]) as server, dialling(server.url) as connection:
        await connection.finder.find(SPEC, short.chunks, any_dtype=False)
        with pytest.raises(RequestError) as caught:
            await read_all(connection.fetch(short.namespace, "FP16", 0, limit=1 << 20))
    assert caught.value.reason == Reason.BUSY
    assert caught.value.retry_after_s


async def test_more_than_the_limit_is_refused(stored, short):
    url, _ = stored
    async with dialling(url) as connection:
        await connection.finder.find(SPEC, short.chunks, any_dtype=False)
        with pytest.raises(RequestError, match="longer than the 10 bytes"):
            await read_all(connection.fetch(short.namespace, "FP16", 0, limit=10))
        with pytest.raises(NotFoundError):
            await read_all(connection.fetch(short.namespace, "FP16", 5, limit=1 << 20))
        with pytest.raises(NotFoundError):
            await read_all(connection.fetch(short.namespace, "FP8", 0, limit=1 << 20))


async def test_models_of_another_version_are_left_alone(stored):
    url, _ = stored
    for number, text in enumerate((b'{"schema": "kvabr.models/9"}', b"not JSON at all"), 1):
        await open_objects(url).put_new(f"m/{number}", text)
    played = await play(url)
    assert close(played.kv)


async def test_a_damaged_page_is_as_good_as_none(stored):
    url, _ = stored
    store = open_objects(url)
    for name in await listing(store, "i/"):
        await store.delete([name])
        await store.put_new(name, b"damaged")
    async with AsyncClient(url) as client:
        assert isinstance(await client.play(TOKENS, deadline=LIMIT_S, model=SPEC), NothingCached)


@pytest.mark.parametrize("status", [401, 403])
async def test_credentials_that_expire_are_not_taken_for_an_empty_store(stored, status):
    """403 may also mean that there is no such object, where we may not list; 401 does not."""
    url, _ = stored
    expired = []
    faults = [lambda _asked, _before: Fault(status=status) if expired else None]
    async with WebServer(url, faults) as server, AsyncClient(server.url) as client:
        assert (await client.play(TOKENS, deadline=LIMIT_S, model=SPEC)).tokens == 70
        expired.append(True)
        other = client.play(TOKENS[::-1], deadline=LIMIT_S, model=SPEC)
        if status == 403:
            assert isinstance(await other, NothingCached)
        else:
            with pytest.raises(PlayError, match="wrong or have expired"):
                await other


async def test_a_store_that_cannot_be_reached_is_an_error_that_says_so(stored):
    url, _ = stored
    async with WebServer(url) as server:
        gone = server.url
    async with AsyncClient(gone) as client:
        with pytest.raises(TransportError, match="cannot be read"):
            await client.connect()
        with pytest.raises(PlayError, match="cannot be read"):
            await client.play(TOKENS, deadline=5.0, model=SPEC)
    async with dialling(gone, needed=False) as connection:
        assert "connection refused" in connection.trouble
        assert not await connection.answers(0.1)


async def test_a_store_that_comes_back_is_used_again(stored, short):
    url, _ = stored
    async with WebServer(url) as server, dialling(server.url) as connection:
        server.faults.append(lambda *_: Fault(status=503))
        with pytest.raises(TransportError):
            await read_all(connection.fetch(short.namespace, "FP16", 0, limit=1 << 20))
        server.faults.clear()
        assert await read_all(connection.fetch(short.namespace, "FP16", 0, limit=1 << 20))
        assert connection.trouble is None


async def test_closing_fails_what_is_under_way_and_leaves_nothing(stored, short):
    url, keys = stored
    before = asyncio.all_tasks()
    async with WebServer(url, [on_data(keys, Fault(silent=True))]) as server:
        async with dialling(server.url) as connection:
            await connection.finder.find(SPEC, short.chunks, any_dtype=False)
            reads = [
                asyncio.create_task(read_all(connection.fetch(short.namespace, track, group, limit=1 << 20)))
                for track in ("FP16", "Int8")
                for group in range(5)
            ]
            await server.silent.wait()
        for result in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(result, ConnectionLostError)
        with pytest.raises(ConnectionLostError):
            await read_all(connection.fetch(short.namespace, "FP16", 0, limit=1 << 20))
        assert asyncio.all_tasks() - before <= server._tasks
    assert asyncio.all_tasks() == before


async def test_a_slow_store_is_not_taken_for_a_slow_link(stored, short):
    url, keys = stored
    track = short.by_name["FP16"]

    async def limits():
        download = connection.fetch(short.namespace, "FP16", 0, limit=track.bytes[0], exact=True)
        found = set()
        while await download.read():
            found.add(download.limit)
        return found

    async with (
        WebServer(url, [on_data(keys, Fault(delay_s=1.0), times=1)]) as server,
        dialling(server.url) as connection,
    ):
        await connection.finder.find(SPEC, short.chunks, any_dtype=False)
        store_of(connection)._soonest = (0.02, time.monotonic())
        assert await limits() == {"publisher"}
