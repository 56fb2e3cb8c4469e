"""`kvabr relay` as a process, and its options."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
from asyncio.subprocess import PIPE

import pytest

from kvabr.cli.relay import parse_size
from kvabr.link.moqt.connect import asset_of, connect
from kvabr.server.certificates import check
from kvabr.server.grants import Grants
from kvabr.types.errors import UsageError
from kvabr.types.naming import CATALOG_TRACK
from kvabr.types.peer import PeerOptions
from tests.server.relays import LONG_S, get, grant, origin, play

pytestmark = pytest.mark.process


@pytest.mark.parametrize("text", ["", "lots", "1.5GiB", "-1", "1MiB", "12XiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text)


async def test_the_command(asset, tls, tmp_path):
    namespace = asset.catalog.namespace
    async with origin(asset.store.folder, tls) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream",
            f"moqt://localhost:{server.address[1]}/#kvcache:{namespace.model}/{namespace.prompt}",
            "--upstream-fingerprint", server.fingerprint, "--bind", "127.0.0.1:0", "--dev", "--memory", "64MiB",
            "--disk", str(tmp_path / "cache"), "--disk-gib", "0.5", stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), LONG_S)).decode() for _ in range(3)]
            fingerprint = lines[1].split()[-1]
            assert lines[0].strip() in lines[2]
            words = shlex.split(lines[2].partition(": ")[2])
            assert words[:2] == ["kvabr", "fetch"]
            assert asset_of(words[2]) == namespace
            assert words[words.index("--fingerprint") + 1] == fingerprint
            async with connect(words[2], PeerOptions(fingerprint=fingerprint)) as connection:
                assert await get(connection, namespace, "FP16", 3) == asset.frame(3, "FP16")
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), LONG_S)
            assert process.returncode == 0, log
            assert b"cannot be reached" not in log
            assert len(list((tmp_path / "cache").glob("g/*"))) == 1
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_command_starts_without_its_origin_and_works_once_it_is_there(asset, tls):
    namespace = asset.catalog.namespace
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvabr", "relay", "--upstream", f"moqt://127.0.0.1:{port}/",
            "--upstream-fingerprint", check(tls).fingerprint, "--bind", "127.0.0.1:0", "--dev", "--log-json",
            stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), LONG_S)).decode() for _ in range(2)]
            silent.close()
            async with connect(lines[0].strip(), PeerOptions(fingerprint=lines[1].split()[-1])) as connection:
                asking = asyncio.create_task(get(connection, namespace, CATALOG_TRACK))
                async with origin(asset.store.folder, tls, port=port):
                    assert await asking
                    await play(connection, asset)
            process.terminate()
            _, log = await asyncio.wait_for(process.communicate(), LONG_S)
            assert process.returncode == 0, log
            events = [json.loads(line) for line in log.splitlines()]
            assert [one["event"] for one in events if "cannot be reached" in one["event"]] == [
                "the origin cannot be reached"
            ]
            assert [one["event"] for one in events if one["event"] == "origin is back"] == ["origin is back"]
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


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
    assert f"{wrong} is" in log.decode()
