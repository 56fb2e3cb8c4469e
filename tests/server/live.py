"""Origins of assets that grow, and decoders that wait for their groups, on the wire."""

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvabr.moqt.codes import RequestCode
from kvabr.moqt.events import Answered, Ended, Received, Refused, SubscriptionDone, SubscriptionEnding
from kvabr.moqt.objects import ObjectHeader
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.setup_options import SetupOptions
from kvabr.moqt.wire import DRAFT_20, Location, Parameters, Token
from kvabr.server.certificates import check
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server, Watcher
from kvabr.types.live import LiveCatalog, PublishedFrames, parse_edge
from kvabr.types.naming import CATALOG_TRACK, EDGE_TRACK, LIVE_PREFIX_TRACK, LIVE_TRACK, PREFIX_TRACK, prefix_track
from tests.faults.common import LIMIT_S, QUIET
from tests.faults.rude import rude_client
from tests.faults.test_guests import until
from tests.store.test_live import OFFER

SPACE = OFFER.namespace


@asynccontextmanager
async def live_origin(root, tls, *, grants=None, log=QUIET, port=0, **limits):
    """An origin as `kvabr serve` runs it; its `source` has what is published."""
    metrics, published = Metrics(), PublishedAssets(root, grants, log)
    limits = ServerLimits(**limits)
    async with (
        Watcher(published, log, metrics),
        Server(published, "127.0.0.1", port, tls, limits, log, metrics) as server,
    ):
        server.fingerprint = check(tls).fingerprint
        yield server


@dataclass(frozen=True)
class Answer:
    data: bytes | None
    code: RequestCode | None = None
    reason: str = ""


@dataclass(frozen=True)
class Awaited:
    """A group that comes by a subscription."""

    number: int
    """Of the subscription."""
    track: str
    group: int


class Decoder:
    """One connection, which fetches what is published, and subscribes to what is not."""

    def __init__(self, end, namespace=SPACE) -> None:
        self.end, self.namespace = end, namespace
        self._subscriptions = {}
        self._fetched = {}

    def ask(self, track, group=0, *, namespace=None):
        """Fetch a group; return the number of the request."""
        where = Location(group, 0)
        fields = (namespace or self.namespace).fields()
        number = self.end.session.fetch(fields, track.encode(), where, where, Parameters())
        self.end.settle_and_send()
        return number

    def wait(self, track, group=0):
        """Subscribe to a track, once, and wait for a group of it."""
        if track not in self._subscriptions:
            fields = self.namespace.fields()
            self._subscriptions[track] = self.end.session.subscribe(fields, track.encode(), Parameters())
            self.end.settle_and_send()
        return Awaited(self._subscriptions[track], track, group)

    def forget(self):
        for number in self._subscriptions.values():
            self.end.session.requester.cancel(number)
        self._subscriptions.clear()
        self._fetched.clear()
        self.end.settle_and_send()

    def answered(self, request):
        """Return what came of a request, or of a group that is waited for; None if nothing has."""
        number, stream, data = request, None, bytearray()
        if isinstance(request, Awaited):
            if (number := self._fetched.get(request)) is not None:
                return self.answered(number)
            number = request.number
        for event in self.end.events:
            if event is None or getattr(event, "request_id", None) != number:
                continue
            if isinstance(event, Refused):
                return Answer(None, RequestCode(event.message.code), event.message.reason)
            if isinstance(event, Answered) and isinstance(request, Awaited):
                largest = event.message.parameters.largest
                if largest is not None and request.group <= largest.group:
                    self._fetched[request] = self.ask(request.track, request.group)
                    return None
            elif isinstance(event, Received) and not isinstance(request, Awaited):
                data += b"".join(item for item in event.items if not isinstance(item, ObjectHeader))
            elif isinstance(event, Received):
                if any(isinstance(item, ObjectHeader) and item.group == request.group for item in event.items):
                    stream = event.stream
                if event.stream == stream:
                    data += b"".join(item for item in event.items if not isinstance(item, ObjectHeader))
            elif isinstance(event, Ended) and (not isinstance(request, Awaited) or event.stream == stream):
                return Answer(bytes(data) if event.reset is None else None)
            elif isinstance(event, SubscriptionDone):
                return Answer(None, RequestCode.DOES_NOT_EXIST, self.ending(number).reason)
        return None

    def ending(self, number):
        return next(
            event.message
            for event in self.end.events
            if isinstance(event, SubscriptionEnding) and event.request_id == number
        )

    async def answer(self, number):
        await until(lambda: self.answered(number) is not None or self.end.over.done())
        found = self.answered(number)
        assert found is not None, self.end.over.result()
        return found

    async def get(self, track, group=0, **more):
        return await self.answer(self.ask(track, group, **more))

    async def news(self, group):
        """The news of a group, or of the end."""
        return parse_edge((await self.answer(self.wait(EDGE_TRACK, group))).data)

    async def found(self):
        """The live catalog, once there is one."""
        async with asyncio.timeout(LIMIT_S):
            while (found := await self.get(LIVE_TRACK)).data is None:
                assert found.code == RequestCode.DOES_NOT_EXIST
        return LiveCatalog.loads(found.data)

    async def lookups(self, chunks=OFFER.chunks):
        """What the two lookups of a prompt find: among what grows, and among the others."""
        space = type(SPACE)(SPACE.model, chunks[0])
        ordinary = prefix_track(chunks)
        growing = ordinary.replace(PREFIX_TRACK, LIVE_PREFIX_TRACK, 1)
        return [(await self.get(track, namespace=space)).data for track in (growing, ordinary)]

    async def complete(self, namespace=None):
        """The ordinary catalog, once there is one."""
        async with asyncio.timeout(LIMIT_S):
            while (found := await self.get(CATALOG_TRACK, namespace=namespace)).data is None:
                pass
        return found.data

    async def follow(self, levels=("FP16", "Int4")):
        """Play the asset at its edge: return the frames, checked against the news, and how it ended."""
        frames, group = {}, 0
        self.wait(levels[0])
        while True:
            message = await self.news(group)
            if not isinstance(message, PublishedFrames):
                assert (await self.answer(self.wait(levels[0], group))).data is None
                return frames, message.reason
            for level in levels:
                request = self.wait(level, group) if level == levels[0] else self.ask(level, group)
                data = (await self.answer(request)).data
                assert hashlib.sha256(data).hexdigest() == message.frames[level][1]
                frames[group, level] = data
            group += 1


@asynccontextmanager
async def decoder(server, draft=DRAFT_20, token=None):
    def greet(_, draft):
        tokens = () if token is None else (Token(token.encode()),)
        return MoqtSession(draft, client=True, options=SetupOptions(tokens=tokens))

    async with asyncio.timeout(LIMIT_S), rude_client(server.address, draft=draft, greet=greet) as end:
        yield Decoder(end)
