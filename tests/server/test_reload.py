"""Files that a server reads again: tokens and certificates, good ones and broken ones."""

import hashlib
import json
import signal

import pytest
import structlog
import structlog.testing

from kvabr.link.moqt.connect import dial
from kvabr.server.certificates import ServerTls, check, make
from kvabr.server.reload import Reloads
from kvabr.types.errors import TransportError, UsageError
from tests.server.relays import until
from tests.server.test_serve_process import serving


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
    files.check()
    assert load.loaded == []
    renewed(path, "two")
    files.check()
    files.check()
    assert load.loaded == ["two"]
    renewed(path, "")
    for _ in range(3):
        files.check()
    path.unlink()
    for _ in range(3):
        files.check()
    renewed(path, "three")
    files.check()
    assert load.loaded == ["two", "three"]
    files.check(anyway=True)
    assert load.loaded == ["two", "three", "three"]
    good, bad = "tokens reloaded", "tokens not reloaded"
    assert [line["event"] for line in said] == [good, bad, bad, good, good]
    assert {line["log_level"] for line in said if line["event"] == bad} == {"error"}


@pytest.mark.process
async def test_a_served_process_reads_tokens_and_certificates_again(tmp_path):
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
    words = ("--cert", tls.certfile, "--key", tls.keyfile, "--grants", grants)
    async with serving(tmp_path / "assets", *words) as served:
        served.may_fail = True

        async def dialled(fingerprint, token):
            served.fingerprint = fingerprint
            return await dial(served.options(token=token))

        async with await dialled(first, "one") as connection:
            allow("two")
            await served.event("tokens reloaded")
            await until(lambda: connection.closed)
        async with await dialled(first, "two") as old:
            second = certify()
            await served.event("certificate reloaded")
            async with await dialled(second, "two"):
                pass
            with pytest.raises(TransportError):
                await dialled(first, "two")
            assert not old.closed
        tls.certfile.write_text("garbage")
        renewed(grants, "{")
        await served.event("tokens not reloaded")
        served.process.send_signal(signal.SIGHUP)
        await served.event("tokens not reloaded")
        allow("three")
        await served.event("tokens reloaded")
        async with await dialled(second, "three"):
            pass
        served.process.terminate()
        await served.event("stopped")
        wrong = [line for line in served.events if line["level"] == "error"]
        assert [line["event"] for line in wrong].count("certificate not reloaded") in (1, 2, 3)
        assert len(wrong) <= 5
        assert await served.process.wait() == 0
