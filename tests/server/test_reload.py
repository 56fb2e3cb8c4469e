"""Files that a server reads again: tokens and certificates, good ones and broken ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE

import pytest
import structlog
import structlog.testing

from kvabr.link.moqt.connect import dial
from kvabr.link.moqt.options import DialOptions
from kvabr.server.certificates import ServerTls, check, make
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.reload import Reloads
from kvabr.server.server import Server
from kvabr.types.errors import TransportError, UsageError
from kvabr.types.peer import PeerOptions
from tests.server.relays import LOG, LONG_S, until


@pytest.fixture
def said():
    with structlog.testing.capture_logs() as events:
        yield events


class Loads:
    """Reads a file, which is broken if it is empty."""

    def __init__(self, *paths):
        self.paths, self.loaded = paths, []

    def __call__(self):
        text = "".join(path.read_text() for path in self.paths)
        if not text:
            raise UsageError("empty")
        self.loaded.append(text)


def renewed(path, text):
    """Replace a file in one step, as editors do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def test_a_file_is_read_again_when_it_changes_and_a_broken_one_is_said_once(tmp_path, said):
    path = tmp_path / "tokens"
    path.write_text("one")
    load, files = Loads(path), Reloads(structlog.get_logger())
    files.add("tokens", [path], load)
    files.look()
    assert load.loaded == []
    renewed(path, "two")
    files.look()
    files.look()
    assert load.loaded == ["two"]
    renewed(path, "")
    for _ in range(3):
        files.look()
    path.unlink()
    for _ in range(3):
        files.look()
    renewed(path, "three")
    files.look()
    assert load.loaded == ["two", "three"]
    files.look(anyway=True)
    assert load.loaded == ["two", "three", "three"]
    good, bad = "tokens read again", "tokens not read again"
    assert [line["event"] for line in said] == [good, bad, bad, good, good]
    assert {line["log_level"] for line in said if line["event"] == bad} == {"error"}


def test_files_that_belong_together_are_not_read_while_they_change(tmp_path, said):
    paths = tmp_path / "cert", tmp_path / "key"
    for path in paths:
        path.write_text("1")
    load, files = Loads(*paths), Reloads(structlog.get_logger())
    files.add("certificate", paths, load)
    for path in paths:
        renewed(path, "2")
        files.look()
    assert load.loaded == []
    files.look()
    assert load.loaded == ["22"]


@pytest.mark.process
async def test_a_served_process_reads_tokens_and_certificates_again(tmp_path):
    """Also what is broken: then the old stays in use, and that is said once."""
    (tmp_path / "assets").mkdir()
    tls, grants = ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem"), tmp_path / "grants.json"

    def certify():
        for path, data in zip((tls.certfile, tls.keyfile), make(), strict=True):
            path.write_bytes(data)
        return check(tls).fingerprint

    def allow(token):
        entry = {"name": token, "token_sha256": hashlib.sha256(token.encode()).hexdigest(), "assets": ["*"]}
        renewed(grants, json.dumps({"schema": "kvabr.grants/1", "grants": [entry]}))

    first = certify()
    allow("one")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvabr", "serve", str(tmp_path / "assets"), "--cert", str(tls.certfile), "--key",
        str(tls.keyfile), "--grants", str(grants), "--bind", "127.0.0.1:0", "--log-json", stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    events = []

    async def heard(name):
        async with asyncio.timeout(LONG_S):
            while line := await process.stderr.readline():
                events.append(json.loads(line))
                if events[-1]["event"] == name:
                    return events[-1]
        raise AssertionError(events)

    try:
        port = int((await process.stdout.readline()).decode().strip().strip("/").rpartition(":")[2])

        async def dialled(fingerprint, token):
            options = DialOptions(
                "127.0.0.1", port, how=PeerOptions(fingerprint=fingerprint, timeout_s=LONG_S), token=token
            )
            return await dial(options)

        async with await dialled(first, "one") as connection:
            allow("two")
            await heard("tokens read again")
            await until(lambda: connection.closed)
        second = certify()
        await heard("certificate read again")
        async with await dialled(second, "two"):
            pass
        tls.certfile.write_text("garbage")
        renewed(grants, "{")
        await heard("tokens not read again")
        process.send_signal(signal.SIGHUP)
        await heard("tokens not read again")
        allow("three")
        await heard("tokens read again")
        async with await dialled(second, "three"):
            pass
        process.terminate()
        await heard("stopped")
        wrong = [line for line in events if line["level"] == "error"]
        assert [line["event"] for line in wrong].count("certificate not read again") in (1, 2)
        assert len(wrong) <= 4
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_hangup_reads_everything_again(tmp_path, said):
    path = tmp_path / "tokens"
    path.write_text("one")
    load, files = Loads(path), Reloads(structlog.get_logger(), every_s=LONG_S)
    files.add("tokens", [path], load)
    async with files:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: load.loaded == ["one"])


@pytest.mark.process
async def test_a_new_certificate_is_for_new_connections(tmp_path):
    tls = ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem")

    def write():
        for path, data in zip((tls.certfile, tls.keyfile), make(), strict=True):
            path.write_bytes(data)
        return check(tls).fingerprint

    (tmp_path / "assets").mkdir()
    first = write()
    library_of_assets = PublishedAssets(tmp_path / "assets")
    server = Server(library_of_assets, "127.0.0.1", 0, tls, ServerLimits(), LOG, Metrics())
    async with server:

        async def dialled(fingerprint):
            return await dial(
                DialOptions("localhost", server.address[1], how=PeerOptions(fingerprint=fingerprint, timeout_s=LONG_S))
            )

        async with await dialled(first) as old:
            second = write()
            server.renew_certificates()
            async with await dialled(second):
                pass
            with pytest.raises(TransportError, match="fingerprint"):
                await dialled(first)
            tls.keyfile.write_text("garbage")
            with pytest.raises(TransportError, match="not a certificate and its key"):
                server.renew_certificates()
            async with await dialled(second):
                pass
            assert not old.closed
