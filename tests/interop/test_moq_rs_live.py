"""kvabr against moq-rs on tracks that grow: its client subscribes to ours, and ours to its."""

import asyncio

import pytest

from kvabr.moqt.events import Answered, Ready, Received
from kvabr.moqt.wire import DRAFTS, Filter, Parameters
from kvabr.server.limits import ServerLimits
from kvabr.server.live_tracks import GrowingBytes
from kvabr.server.metrics import Metrics
from kvabr.server.server import Server
from tests.faults.common import LIMIT_S, QUIET
from tests.faults.rude import rude_client
from tests.faults.test_guests import until
from tests.server.conftest import tls  # noqa: F401  # a fixture
from tests.server.tracks import SPACE, Tracks, data

moq = pytest.importorskip("moq", reason="moq-rs is not installed: tools/setup-venv")
from tests.interop.test_moq_rs import accepting, path_of, routed  # noqa: E402  # it needs moq

pytestmark = [pytest.mark.process, pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.alpn)]


async def test_its_client_subscribes_to_our_growing_track(draft, tls):  # noqa: F811
    source = Tracks()
    track = source.tracks["live"] = GrowingBytes()
    track.append(data(0))
    limits = ServerLimits(), QUIET, Metrics()
    async with asyncio.timeout(LIMIT_S), Server(source, "127.0.0.1", 0, tls, *limits, drafts=(draft,)) as server:
        url = f"moqt://localhost:{server.address[1]}/"
        async with moq.Client(url, tls_verify=False, bind="127.0.0.1:0") as client:
            broadcast = await routed(client, path_of(SPACE))
            consumer = await broadcast.subscribe_track("live")
            await until(lambda: any(len(peer._subscriptions) for peer in server.peers))
            for group in range(1, 4):
                track.append(data(group, 70_000))
                got = await consumer.next_group()
                assert got.sequence == group
                assert b"".join([frame.payload async for frame in got]) == data(group, 70_000)


async def test_we_subscribe_to_its_track(draft, tls):  # noqa: F811
    its_server = moq.Server("127.0.0.1:0", tls_generate=["localhost"])
    async with asyncio.timeout(LIMIT_S), its_server as server, accepting(server):
        broadcast = server.create_broadcast(path_of(SPACE))
        track = broadcast.publish_track("live")
        broadcast.announce()
        port = int(server.local_addr.rsplit(":", 1)[1])
        async with rude_client(("127.0.0.1", port), draft=draft) as end:
            await until(lambda: any(isinstance(event, Ready) for event in end.events))
            fields = tuple(field for field in SPACE.split_fields())
            number = end.session.subscribe(fields, b"live", Parameters(filter=Filter()))
            end.settle_and_send()
            await until(lambda: end.over.done() or any(isinstance(event, Answered) for event in end.events))
            for index in range(3):
                group = track.create_group(index)
                group.write_frame(data(index, 30_000))
                group.finish()

            def payload():
                found = [event for event in end.events if isinstance(event, Received) and event.request_id == number]
                return sum(len(item) for event in found for item in event.items if isinstance(item, memoryview))

            await until(lambda: end.over.done() or payload() == 90_000)
            assert not end.over.done(), end.over.result()
