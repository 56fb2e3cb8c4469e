"""kvabr against aiomoqt, an independent implementation in Python: it subscribes to a growing track, and fetches.

It needs an environment of its own: `tools/setup-peers .peers aiomoqt`; without one this is skipped.
"""

import asyncio
import hashlib
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvabr.moqt.codes import PublishDoneCode
from kvabr.moqt.wire import DRAFTS
from kvabr.server.limits import ServerLimits
from kvabr.server.live_tracks import GrowingBytes
from kvabr.server.metrics import Metrics
from kvabr.server.server import Server
from tests.faults.common import LIMIT_S, QUIET
from tests.server.conftest import tls  # noqa: F401  # a fixture
from tests.server.tracks import SPACE, Tracks, data

_ROOT = Path(__file__).parents[2]
_PEER = Path(os.environ.get("KVABR_PEERS", _ROOT / ".peers")) / "aiomoqt"
_PYTHON = _PEER / "bin" / "python"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not _PYTHON.exists(), reason="aiomoqt is not installed: tools/setup-peers .peers aiomoqt"),
    pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.alpn),
]


def digest(payload):
    return hashlib.sha256(payload).hexdigest()


@asynccontextmanager
async def its_client(server, draft, *how):
    """Run its client, and yield a function that returns the next value which it prints."""
    space = json.dumps([field.decode() for field in SPACE.fields()])
    arguments = str(server.address[1]), str(draft.number), space, "live", *map(str, how)
    process = await asyncio.create_subprocess_exec(
        _PYTHON, _PEER / "worker.py", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None

    async def heard():
        line = await process.stdout.readline()
        assert line, "its client has ended"
        return json.loads(line)

    try:
        yield heard
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def our_server(tls, *groups):  # noqa: F811
    source = Tracks()
    track = source.tracks["live"] = GrowingBytes()
    for group in groups:
        track.append(group)
    async with (
        asyncio.timeout(LIMIT_S),
        Server(source, "127.0.0.1", 0, tls, ServerLimits(), QUIET, Metrics()) as server,
    ):
        yield server, track


async def test_its_client_is_pushed_what_appears(draft, tls):  # noqa: F811
    async with our_server(tls, data(0), data(1)) as (server, track), its_client(server, draft, "subscribe") as heard:
        assert await heard() == [1, 0]
        for group in range(2, 5):
            payload = data(group, 70_000)
            track.append(payload)
            assert await heard() == [group, 0, digest(payload)]
        track.finish()
        assert await heard() == {"done": PublishDoneCode.TRACK_ENDED}


async def test_its_client_fetches_groups(draft, tls):  # noqa: F811
    groups = [data(group, 5_000) for group in range(4)]
    async with our_server(tls, *groups) as (server, _), its_client(server, draft, "fetch", 1, 2) as heard:
        assert await heard() == [1, 0, digest(groups[1])]
        assert await heard() == [2, 0, digest(groups[2])]
        assert await heard() == "end"
