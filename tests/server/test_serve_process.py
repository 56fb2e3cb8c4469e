"""`kvabr serve` as a process, and clients that fetch from it over QUIC."""

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from contextlib import asynccontextmanager

import pytest

from kvabr.link.moqt.connect import asset_of, dial
from kvabr.link.moqt.options import DialOptions
from kvabr.store.locations import open_asset
from kvabr.transfer.interface import read_all
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog
from kvabr.types.errors import NotFoundError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace, prefix_track
from kvabr.types.peer import PeerOptions
from tests.assets import digests, make_asset

pytestmark = pytest.mark.process


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "assets"
    for team, start in (("team-a", 0), ("team-b", 100)):
        (path / team).mkdir(parents=True)
        make_asset(path / team / "one", range(start, start + 8), profile=team.encode(), frame_bytes=200_000)
    return path


class Served:
    def __init__(self, process, url, fingerprint):
        self.process, self.url, self.fingerprint = process, url, fingerprint
        self.port = int(url.rsplit(":", 1)[1].strip("/"))
        self.events, self.may_fail = [], False

    async def event(self, name):
        async with asyncio.timeout(300):
            while line := await self.process.stderr.readline():
                self.events.append(json.loads(line))
                assert self.may_fail or self.events[-1]["level"] != "error", self.events[-1].get("exception")
                if self.events[-1]["event"] == name:
                    return self.events[-1]
        raise AssertionError((name, self.events))

    def options(self, **changes):
        return DialOptions(
            "127.0.0.1", self.port, how=PeerOptions(fingerprint=self.fingerprint, timeout_s=300.0), **changes
        )


def serving(root, *words, stderr=asyncio.subprocess.PIPE):
    return running("serve", root, *words, stderr=stderr)


@asynccontextmanager
async def running(*words, stderr=asyncio.subprocess.PIPE):
    """An origin or a relay; its fingerprint is known if it has made its certificate itself."""
    own = [] if "--cert" in words else ["--dev"]
    argv = ["-m", "kvabr", *map(str, words), *own, "--bind", "127.0.0.1:0", "--log-json"]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=stderr)
    try:
        async with asyncio.timeout(300):
            url = (await process.stdout.readline()).decode().strip()
            fingerprint = (await process.stdout.readline()).decode().split()[-1] if own else None
        yield Served(process, url, fingerprint)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def fetch(connection, namespace, track, group=0):
    return await read_all(connection.fetch(namespace, track, group, limit=MAX_CATALOG_BYTES))


async def test_it_serves_what_is_there_and_what_comes_and_goes(root):
    quic = "aioquic"
    first = open_asset(root / "team-a" / "one").catalog
    async with serving(root, "--quic", quic, "--metrics", "127.0.0.1:0") as served:
        metrics_url = (await served.event("metrics"))["url"]
        assert (await served.event("serving"))["quic"] == quic
        words = shlex.split((await served.process.stdout.readline()).decode())
        assert asset_of(words[words.index("fetch", 5) + 1]) == first.namespace
        assert words[words.index("--fingerprint") + 1] == served.fingerprint
        async with await dial(served.options(), quic) as connection:
            assert Catalog.loads(await fetch(connection, first.namespace, CATALOG_TRACK)) == first
            profile = TrackNamespace(first.spec.model, first.profile)
            assert await fetch(connection, profile, PROFILE_TRACK) == b"team-a"
            for track in first.tracks:
                frames = await asyncio.gather(*(fetch(connection, first.namespace, track.name, g) for g in range(2)))
                assert tuple(hashlib.sha256(frame).hexdigest() for frame in frames) == track.digests
            with pytest.raises(NotFoundError):
                await fetch(connection, first.namespace, "FP16", 2)
            with pytest.raises(NotFoundError):
                await fetch(connection, first.namespace, "FP8")

            new = make_asset(root / "new", range(300, 324)).catalog
            assert (await served.event("asset added"))["asset"] == f"new/{new.namespace.prompt}"
            asked = digests(range(300, 340))
            found = await fetch(connection, TrackNamespace(new.spec.model, asked[0]), prefix_track(asked))
            assert Catalog.loads(found) == new
            shutil.rmtree(root / "new")
            await served.event("asset removed")
            with pytest.raises(NotFoundError):
                await fetch(connection, new.namespace, CATALOG_TRACK)

        text = (await scrape(metrics_url)).decode()
        assert 'kvabr_groups_sent_total{track="FP16"} 2' in text
        assert "kvabr_assets 2" in text
        served.process.send_signal(signal.SIGTERM)
        assert await served.process.wait() == 0
        await served.event("stopped")


async def scrape(url):
    host, port = url.removeprefix("http://").split("/")[0].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_a_port_in_use_is_an_error_and_no_traceback(root):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        argv = ["-m", "kvabr", "serve", str(root), "--dev", "--bind", f"127.0.0.1:{port}", "--quic", "aioquic"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 1
    assert out == b""
    assert b"in use" in err
    assert b"another --bind HOST:PORT" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize("where", ["a full disk", "a pipe that nobody reads"])
async def test_a_log_that_cannot_be_written_stops_nobody(root, where):
    if where == "a full disk":
        log = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, log = os.pipe()
        os.close(reader)
    catalog = open_asset(root / "team-a" / "one").catalog
    try:
        async with serving(root, stderr=log) as served:
            for _ in range(2):
                async with await dial(served.options()) as connection:
                    assert await fetch(connection, catalog.namespace, CATALOG_TRACK)
            served.process.send_signal(signal.SIGTERM)
            assert await served.process.wait() is not None
    finally:
        os.close(log)
