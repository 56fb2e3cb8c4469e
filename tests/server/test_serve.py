"""`kvabr serve`: what it refuses before it binds, what it says, and how it ends."""

import asyncio
import json
import os
import signal
import time

import pytest
import structlog

from kvabr.cli.main import main
from kvabr.cli.options import is_loopback, moqt_url, parse_address
from kvabr.server.certificates import ServerTls, make
from kvabr.server.grants import Grants
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import INTERRUPTED, PATIENCE_S, Server, Watcher, run_until_signal
from kvabr.types.errors import UsageError
from tests.assets import make_asset

pytestmark = pytest.mark.process

LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


def kvabr(*words):
    return main([str(word) for word in words])


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "assets"
    path.mkdir()
    make_asset(path / "one", range(8))
    return path


@pytest.fixture
def pem(tmp_path):
    certificate, key = make()
    (tmp_path / "cert.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(key)
    return tmp_path / "cert.pem", tmp_path / "key.pem"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "--cert and --key"),
        (("--key", "x"), 2, "--cert and --key"),
        (("--dev", "--cert", "x"), 2, "--cert and --key"),
        (("--dev", "--cert", "x", "--key", "y"), 2, "--cert and --key"),
        (("--cert", "nowhere.pem", "--key", "nowhere.pem"), 1, "no such certificate"),
        (("--dev", "--limit", "connections=0"), 2, "limit connections: 0 is not positive; the default is 512"),
        (("--dev", "--limit", "requests-per-s=inf"), 2, "limit requests-per-s: inf is too large"),
        (("--dev", "--limit", "connections-per-address=0"), 2, "0 is not positive"),
        (("--dev", "--limit", "connections=off"), 2, "not a whole number"),
        (("--dev", "--expires", "3"), 2, "--expires needs --new-token"),
        (("--new-token", "--expires", "0"), 2, "--expires 0: must be more than 0"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_bound(root, capsys, words, status, said):
    assert kvabr("serve", root, *words) == status
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_new_token_and_its_entry(tmp_path, capsys):
    """Standard output has the token alone, as `TOKEN=$(kvabr serve --new-token)` needs it."""
    file = tmp_path / "token.json"
    assert kvabr("serve", "--new-token", "--json", file) == 0
    out, said = capsys.readouterr()
    entry = json.loads(said.splitlines()[-1])
    grants = Grants.loads(json.dumps({"schema": "kvabr.grants/1", "grants": [entry]}))
    assert out.count("\n") == 1
    assert grants.check(out.strip().encode()).name == entry["name"]
    assert grants.check(out.strip().encode()).expires_s is None
    assert json.loads(file.read_text()) == {
        "schema": "kvabr.result/1",
        "command": "serve",
        "token": out.strip(),
        "entry": entry,
    }
    assert file.stat().st_mode & 0o077 == 0
    assert kvabr("serve", "--new-token", "--expires", "90") == 0
    later = json.loads(capsys.readouterr().err.splitlines()[-1])
    (grant,) = Grants.loads(json.dumps({"schema": "kvabr.grants/1", "grants": [later]}))
    assert grant.id == later["id"] != entry["id"]
    assert abs(grant.expires_s - time.time() - 90 * 86400) < 86400
    assert kvabr("serve", tmp_path, "--dev", "--json", file) == 2


def test_addresses():
    assert parse_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:4443") == ("::1", 4443)
    assert parse_address(":4443") == ("0.0.0.0", 4443)  # noqa: S104
    assert moqt_url("::1", 1) == "moqt://[::1]:1/"
    assert moqt_url("example.org", 1) == "moqt://example.org:1/"
    assert "0.0.0.0" not in moqt_url("0.0.0.0", 1)  # noqa: S104
    assert [is_loopback(host) for host in ("localhost", "127.0.0.9", "::1", "::", "10.0.0.1", "example.org")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    for bad in ("", ":", "a:b", "[::1]", "::1:80", "a b:1", "a:123456"):
        with pytest.raises(UsageError):
            parse_address(bad)


class Recorder(Server):
    """A server that notes what is asked of it; for how a process ends, no network is needed."""

    backend = "none"

    def __init__(self, library, drains_s=0.0):
        super().__init__(library, "127.0.0.1", 7, ServerTls(None, None), ServerLimits(), LOG, Metrics())
        self.calls, self.draining = [], asyncio.Event()
        self.may_finish = asyncio.Event()

    async def start(self):
        self.calls.append("start")

    @property
    def address(self):
        return "127.0.0.1", 7

    async def drain(self, grace_s):
        self.calls.append(("drain", grace_s))
        self.draining.set()
        await self.may_finish.wait()
        self.calls.append("drained")

    async def close(self):
        self.calls.append("close")


async def running(server, metrics):
    up = asyncio.Event()
    task = asyncio.create_task(run_until_signal(server, 3.0, LOG, metrics, up.set))
    await up.wait()
    return task


@pytest.mark.parametrize(("number", "grace_s"), [(signal.SIGTERM, 3.0), (signal.SIGINT, PATIENCE_S)])
async def test_a_signal_drains(root, number, grace_s):
    server, metrics = Recorder(PublishedAssets(root)), Metrics()
    before = signal.getsignal(number)
    task = await running(server, metrics)
    os.kill(os.getpid(), number)
    await server.draining.wait()
    assert metrics.value("kvabr_draining") == 1
    server.may_finish.set()
    assert await task == 0
    assert server.calls == ["start", ("drain", grace_s), "drained", "close"]
    assert signal.getsignal(number) == before


async def test_a_second_signal_ends_it_at_once(root):
    server = Recorder(PublishedAssets(root))
    task = await running(server, Metrics())
    os.kill(os.getpid(), signal.SIGTERM)
    await server.draining.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert await task == INTERRUPTED
    assert server.calls == ["start", ("drain", 3.0), "close"]


def test_the_watcher_takes_up_assets(root):
    library, metrics = PublishedAssets(root), Metrics()
    with structlog.testing.capture_logs() as events:
        watcher = Watcher(library, structlog.get_logger(), metrics)
        watcher.check()
        assert metrics.value("kvabr_assets") == 1
        make_asset(root / "two", range(100, 108))
        (root / "three" / "a").mkdir(parents=True)
        (root / "three" / "a" / ("0" * 64)).write_text("{}")
        watcher.check()
        watcher.check()
    assert (metrics.value("kvabr_assets"), metrics.value("kvabr_assets_damaged")) == (2, 1)
    assert [event["event"] for event in events if event["log_level"] != "info"] == ["asset left out"]
