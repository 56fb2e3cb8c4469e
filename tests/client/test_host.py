"""Processes that share a host's memory: each group crosses the network once, whatever happens to any of them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.client.neighbours import Neighbour, make_asset
from tests.client.served import LIMIT_S, Served
from tests.client.stored import Fault, WebServer, memory_url, put_asset

PROCESSES = 8


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A store, the catalog of its one asset, and the SHA-256 of the cache."""
    asset, sha256 = make_asset(tmp_path_factory.mktemp("root") / "asset")
    url = memory_url()
    put_asset(url, asset)
    return url, asset.catalog, sha256, asset.path.parent


@pytest.fixture
def served(published, tmp_path):
    """The same at an origin."""
    origin = Served(published[-1], tmp_path)
    yield origin
    origin.close()


def networked(told):
    """Groups that processes have downloaded. The origin's requests tell less: on a slow machine, clients ask again."""
    return sum(one["network"] for one in told)


def slow(seconds):
    """Each GET of a group takes a while."""
    return lambda key, _: Fault(delay_s=seconds) if key.startswith("s/") else None


def left(folder):
    """What is in the folder: hidden files, and the bytes of the groups."""
    files = [path for path in folder.iterdir() if path.name != "kvabr.count"]
    groups = [path for path in files if path.suffix == ".group"]
    return sorted(path.name for path in files if path not in groups), sum(path.stat().st_size for path in groups)


def total(catalog):
    return catalog.track("FP16").total_bytes


async def until(what):
    async with asyncio.timeout(LIMIT_S):
        while not what():  # noqa: ASYNC110  # another process does it
            await asyncio.sleep(0.005)


@pytest.fixture
def started():
    """Start processes that end with the test."""
    every = []

    async def start(count, *given, **options):
        made = [Neighbour(*given, **options) for _ in range(count)]
        every.extend(made)
        await asyncio.gather(*(one.ready() for one in made))
        return made

    yield start
    for one in every:
        one.kill()


async def test_eight_processes_have_the_origin_send_each_group_once(published, served, shm, started):
    _, catalog, sha256, _ = published
    players = await started(PROCESSES, served.url, f"shm://{shm}", catalog, fingerprint=served.fingerprint)
    told = await asyncio.gather(*(one.play() for one in players))
    assert [one["sha256"] for one in told] == [sha256] * PROCESSES
    sent = served.metrics.value("kvabr_groups_sent_total", track="FP16")
    assert catalog.groups <= sent <= 1.1 * catalog.groups
    assert networked(told) == sent
    assert sum(one["network"] + one["host"] + one["disk"] for one in told) == PROCESSES * catalog.groups
    # A further play finds all of it.
    assert (await players[0].play())["sha256"] == sha256
    assert served.metrics.value("kvabr_groups_sent_total", track="FP16") == sent
    await asyncio.gather(*(one.end() for one in players))
    assert left(shm) == ([], total(catalog))


async def test_what_a_killed_process_had_begun_the_others_complete(published, shm, started):
    source, catalog, sha256, _ = published
    async with WebServer(source, faults=[slow(0.1)]) as origin:
        players = await started(4, origin.url, f"shm://{shm}", catalog)
        for one in players:
            one.begin()
        await until(lambda: any(one.has_claim(shm) for one in players))
        killed = next(one for one in players if one.has_claim(shm))
        killed.kill()
        others = [one for one in players if one is not killed]
        told = await asyncio.gather(*(one.result() for one in others))
        assert [one["sha256"] for one in told] == [sha256] * 3
        assert networked(told) <= 1.1 * catalog.groups
        await asyncio.gather(*(one.end() for one in others))
    assert left(shm) == ([], total(catalog))


@pytest.mark.parametrize("after", [0, 200_000])
async def test_a_process_that_stands_still_does_not_hold_up_the_others(published, shm, started, after):
    source, catalog, sha256, _ = published

    def first_time(key, before):
        return Fault(stop_after=after) if key.startswith("s/") and before < 4 else None

    async with WebServer(source, faults=[first_time]) as origin:
        (stuck,) = await started(1, origin.url, f"shm://{shm}", catalog)
        others = await started(3, origin.url, f"shm://{shm}", catalog, deadline=120.0)
        stuck.begin()
        await until(lambda: stuck.has_claim(shm) and any(key.startswith("s/") for key, *_ in origin.asked))
        os.kill(stuck.pid, signal.SIGSTOP)
        told = await asyncio.gather(*(one.play() for one in others))
        assert [one["sha256"] for one in told] == [sha256] * 3
        # One of them tried in its place, not each of them.
        assert networked(told) <= 2 * catalog.groups
        os.kill(stuck.pid, signal.SIGCONT)
        assert (await stuck.result())["sha256"] == sha256
        await asyncio.gather(*(one.end() for one in (stuck, *others)))
    assert left(shm) == ([], total(catalog))


async def test_a_group_that_was_damaged_in_shared_memory_is_fetched_anew(published, shm, started):
    source, catalog, sha256, _ = published
    async with WebServer(source) as origin:

        async def play():
            (one,) = await started(1, origin.url, f"shm://{shm}", catalog)
            told = await one.play()
            await one.end()  # on a slow machine it may have asked for a group twice, and would put it there again
            assert told["sha256"] == sha256
            return told["network"], told["damaged"]

        await play()
        for path in list(shm.glob("*.group"))[:2]:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert await play() == (2, 2)
        assert await play() == (0, 0)


async def test_where_there_is_no_room_each_fetches_for_itself(published, shm, started):
    source, catalog, sha256, _ = published
    room = 3 * catalog.track("FP16").bytes[0]
    async with WebServer(source) as origin:
        players = await started(3, origin.url, f"shm://{shm}", catalog, disk_bytes=room, memory=0)
        for _ in range(2):
            told = await asyncio.gather(*(one.play() for one in players))
            assert [one["sha256"] for one in told] == [sha256] * 3
        await asyncio.gather(*(one.end() for one in players))
    names, nbytes = left(shm)
    assert names == []
    assert 0 < nbytes <= room
