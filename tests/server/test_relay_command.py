"""`kvabr relay` as a process, and its options."""

import asyncio
import json
import shlex
import socket
import sys
from asyncio.subprocess import PIPE

import pytest

from kvabr.cli.relay import parse_size
from kvabr.link.moqt.connect import asset_of, dial
from kvabr.server.certificates import check
from kvabr.server.grants import Grants
from kvabr.types.errors import UsageError
from kvabr.types.naming import CATALOG_TRACK
from tests.server.relays import LONG_S, get, grant, origin, play, url_of
from tests.server.test_serve_process import running

pytestmark = pytest.mark.process


@pytest.mark.parametrize("text", ["", "lots", "1.5GiB", "-1", "1MiB", "12XiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="MiB"):
        parse_size(text)


async def log_of(relay):
    relay.process.terminate()
    _, log = await asyncio.wait_for(relay.process.communicate(), LONG_S)
    assert relay.process.returncode == 0, log
    return [json.loads(line)["event"] for line in log.splitlines()]


async def test_the_command(asset, tls, tmp_path):
    namespace = asset.catalog.namespace
    async with origin(asset.store.folder, tls) as server:
        words = ["--upstream", f"{url_of(server)}#kvcache:{namespace.model}/{namespace.prompt}", "--memory", "64MiB"]
        words += ["--upstream-fingerprint", server.fingerprint, "--disk", tmp_path / "cache", "--disk-gib", 0.5]
        async with running("relay", *words) as relay:
            told = shlex.split((await relay.process.stdout.readline()).decode().partition(": ")[2])
            assert told[:2] == ["kvabr", "fetch"]
            assert told[2].startswith(relay.url)
            assert asset_of(told[2]) == namespace
            assert told[told.index("--fingerprint") + 1] == relay.fingerprint
            async with await dial(relay.options()) as connection:
                assert await get(connection, namespace, "FP16", 3) == asset.frame(3, "FP16")
            assert not [event for event in await log_of(relay) if "cannot be reached" in event]
            assert len(list((tmp_path / "cache").glob("g/*"))) == 1


async def test_the_command_starts_without_its_origin_and_works_once_it_is_there(asset, tls):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        words = ["--upstream", f"moqt://127.0.0.1:{port}/", "--upstream-fingerprint", check(tls).fingerprint]
        async with running("relay", *words) as relay:
            silent.close()
            async with await dial(relay.options()) as connection:
                asking = asyncio.create_task(get(connection, asset.catalog.namespace, CATALOG_TRACK))
                async with origin(asset.store.folder, tls, port=port):
                    assert await asking
                    await play(connection, asset)
            told = [event for event in await log_of(relay) if "cannot be reached" in event or event == "origin is back"]
            assert told == ["the origin cannot be reached", "origin is back"]


@pytest.mark.parametrize("wrong", ["certificate", "token"])
async def test_the_command_ends_if_its_origin_refuses_it(asset, tls, wrong):
    async with origin(asset.store.folder, tls, grants=Grants([grant("the right token")])) as server:
        trust = [] if wrong == "certificate" else ["--upstream-fingerprint", server.fingerprint]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream", f"moqt://localhost:{server.address[1]}/",
            *trust, "--upstream-token", "a wrong token", "--bind", "127.0.0.1:0", "--dev", stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        out, log = await asyncio.wait_for(process.communicate(), LONG_S)
    assert process.returncode == 1
    assert not out
    assert {"certificate": "certificate was not accepted", "token": "token is"}[wrong] in log.decode()
