"""A server of tracks that a test makes grow, and one connection to it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from kvabr.codec.container import ObjectSpan
from kvabr.moqt.events import Received
from kvabr.moqt.objects import ObjectHeader
from kvabr.moqt.wire import DRAFT_20, DRAFTS, Location, Parameters
from kvabr.server.grants import EVERYTHING
from kvabr.server.limits import ServerLimits
from kvabr.server.live_tracks import GrowingBytes
from kvabr.server.metrics import Metrics
from kvabr.server.server import Server
from kvabr.types.errors import AssetError
from kvabr.types.naming import TrackNamespace
from tests.faults.common import LIMIT_S, QUIET
from tests.faults.rude import rude_client
from tests.faults.test_guests import until

SPACE = TrackNamespace("test/model", "0" * 64)
every = pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.alpn)
LONG_MS = int(LIMIT_S * 1000)


class Tracks:
    """A source with the tracks that a test puts there."""

    def __init__(self) -> None:
        self.tracks, self.listeners = {}, []

    def admit(self, token):
        return EVERYTHING

    def renewed(self, grant):
        return grant

    def listen(self, changed):
        self.listeners.append(changed)

    def find(self, grant, namespace, track, *, at_once=False):
        return self.tracks.get(track)

    async def find_soon(self, grant, namespace, track):
        return self.tracks.get(track)


class Wide(GrowingBytes):
    """Groups of three objects, of which one cannot be read."""

    broken = -1

    def objects(self, group):
        size = self.open(0).size
        return tuple(ObjectSpan(100 * at, size * at // 3, size * (at + 1) // 3) for at in range(3))

    def open(self, group, priority=128, on_more=lambda: None):
        if group == self.broken:
            raise AssetError("the file is gone")
        opened = super().open(group)
        size = opened.size
        opened.objects = tuple(ObjectSpan(100 * at, size * at // 3, size * (at + 1) // 3) for at in range(3))
        return opened


class Served:
    """A server, its tracks, and one connection to it."""

    def __init__(self, source, server, end) -> None:
        self.source, self.server, self.end = source, server, end

    def subscribe(self, track="live", **parameters):
        number = self.end.session.subscribe(SPACE.fields(), track.encode(), Parameters(**parameters))
        self.end.settle_and_send()
        return number

    def fetch(self, start, end, track="live", **parameters):
        arguments = Location(*start), Location(*end), Parameters(**parameters)
        number = self.end.session.fetch(SPACE.fields(), track.encode(), *arguments)
        self.end.settle_and_send()
        return number

    def cancel(self, number):
        self.end.session.requester.cancel(number)
        self.end.settle_and_send()

    def update(self, number, **parameters):
        assert self.end.session.requester.update(number, Parameters(**parameters))
        self.end.settle_and_send()

    def told(self, *kinds):
        return [event for event in self.end.events if isinstance(event, kinds)]

    async def soon(self, *kinds, count=1):
        """Return the events of some kinds once there are enough of them."""
        await until(lambda: len(self.told(*kinds)) >= count or self.end.over.done())
        assert len(self.told(*kinds)) >= count, self.end.over.result()
        return self.told(*kinds)

    def groups(self, number):
        """What was pushed or fetched completely, by group, as (object, payload) each."""
        out, streams = {}, {}
        for event in self.end.events:
            if isinstance(event, Received) and event.request_id == number:
                for item in event.items:
                    if isinstance(item, ObjectHeader):
                        streams[event.stream] = item.group
                        out.setdefault(item.group, []).append((item.object, b""))
                    else:
                        at, payload = out[streams[event.stream]][-1]
                        out[streams[event.stream]][-1] = at, payload + bytes(item)
        return out

    @property
    def requests(self):
        return self.server.requests


@asynccontextmanager
async def serving(tls, draft=DRAFT_20, **limits):
    source = Tracks()
    async with (
        asyncio.timeout(LIMIT_S),
        Server(source, "127.0.0.1", 0, tls, ServerLimits(**limits), QUIET, Metrics()) as server,
        rude_client(server.address, draft=draft) as end,
    ):
        yield Served(source, server, end)


def growing(served, *groups, kind=GrowingBytes, track="live"):
    made = served.source.tracks[track] = kind()
    for data in groups:
        made.append(data)
    return made


def data(group, size=300):
    return bytes([group]) * size
