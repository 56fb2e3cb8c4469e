"""kvabr against @moq/net, an independent implementation in JavaScript: it subscribes to a growing track over TCP.

The track is empty at first: 0.3.4 of it reads the largest object with a length before it, which draft 17 has removed
(github.com/moq-dev/moq/issues/3558). MoQT's FETCH is not implemented in it.

It needs packages of its own: `tools/setup-peers .peers moqjs`; without them this is skipped.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest

from kvabr.moqt.wire import DRAFT_20
from kvabr.server.limits import ServerLimits
from kvabr.server.live_tracks import GrowingBytes
from kvabr.server.metrics import Metrics
from kvabr.server.server import Server
from tests.faults.common import LIMIT_S, QUIET
from tests.interop.test_aiomoqt import digest
from tests.server.conftest import tls  # noqa: F401  # a fixture
from tests.server.tracks import SPACE, Tracks, data

_ROOT = Path(__file__).parents[2]
_PEER = Path(os.environ.get("KVABR_PEERS", _ROOT / ".peers")) / "moqjs"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (_PEER / "node_modules").exists(), reason="@moq/net is not installed: tools/setup-peers .peers moqjs"
    ),
]


async def test_its_client_is_pushed_what_appears(tls):  # noqa: F811
    source = Tracks()
    track = source.tracks["live"] = GrowingBytes()
    path = "/".join(field.decode() for field in SPACE.split_fields())
    async with (
        asyncio.timeout(LIMIT_S),
        Server(source, "127.0.0.1", 0, tls, ServerLimits(), QUIET, Metrics()) as server,
    ):
        process = await asyncio.create_subprocess_exec(
            "node",
            _PEER / "worker.mjs",
            str(server.address[1]),
            DRAFT_20.alpn,
            path,
            "live",
            stdout=asyncio.subprocess.PIPE,
        )

        async def heard():
            line = await process.stdout.readline()
            assert line, "its client has ended"
            return json.loads(line)

        try:
            assert await heard() == f"moq-transport-{DRAFT_20.number}"
            assert await heard() == "subscribed"
            for group in range(3):
                payload = data(group, 70_000 * (group + 1))
                track.append(payload)
                assert await heard() == [group, digest(payload)]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
