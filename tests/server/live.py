"""Origins of assets that grow, and decoders that wait for their groups, on the wire."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvabr.moqt.codes import RequestCode
from kvabr.moqt.events import Ended, Received, Refused
from kvabr.moqt.objects import ObjectHeader
from kvabr.moqt.parameters import Parameters, SetupOptions, Token
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import DRAFT_20, Location
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
WAIT_MS = int(LIMIT_S * 1000)


@asynccontextmanager
async def live_origin(root, tls, *, grants=None, log=QUIET, port=0, **limits):
    """An origin as `kvabr serve` runs it; its `source` has what is published."""
    metrics, published = Metrics(), PublishedAssets(root, grants, log)
    limits = ServerLimits(**{"held_s": LIMIT_S} | limits)
    async with (
        Watcher(published, log, metrics),
        Server(published, "127.0.0.1", port, tls, limits, log, metrics) as server,
    ):
        server.fingerprint = check(tls).fingerprint
        yield server


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    data: bytes | None
    code: RequestCode | None = None
    reason: str = ""


class Decoder:
    """One connection, whose requests wait for what is not published yet."""

    def __init__(self, end, namespace=SPACE) -> None:
        self.end, self.namespace = end, namespace

    def ask(self, track, group=0, *, waits=True, namespace=None):
        """Request a group; return the number of the request."""
        where, wait_ms = Location(group, 0), WAIT_MS if waits else None
        fields = (namespace or self.namespace).fields()
        number = self.end.session.fetch(fields, track.encode(), where, where, Parameters(fill_timeout=wait_ms))
        self.end.settle_and_send()
        return number

    def answered(self, number):
        """Return what came of a request, None if nothing has."""
        data = bytearray()
        for event in self.end.events:
            if event is None or getattr(event, "request_id", None) != number:
                continue
            if isinstance(event, Refused):
                return Answer(None, RequestCode(event.message.code), event.message.reason)
            if isinstance(event, Received):
                for item in event.items:
                    data += b"" if isinstance(item, ObjectHeader) else item
            elif isinstance(event, Ended):
                return Answer(bytes(data) if event.reset is None else None)
        return None

    async def answer(self, number):
        await until(lambda: self.answered(number) is not None or self.end.over.done())
        return self.answered(number)

    async def get(self, track, group=0, **more):
        return await self.answer(self.ask(track, group, **more))

    async def news(self, group):
        """The news of a group, or of the end."""
        return parse_edge((await self.get(EDGE_TRACK, group)).data)

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

    async def follow(self, levels=("FP16", "Int4"), *, held=3):
        """Play the asset at its edge: return the frames, checked against the news, and how it ended."""
        frames, group = {}, 0
        ahead = {at: self.ask(EDGE_TRACK, at) for at in range(held)}
        bases = {at: self.ask(levels[0], at) for at in range(held)}
        while True:
            answer = await self.answer(ahead.pop(group))
            message = parse_edge(answer.data)
            if not isinstance(message, PublishedFrames):
                for number in bases.values():
                    assert (await self.answer(number)).code == RequestCode.DOES_NOT_EXIST
                return frames, message.reason
            for level in levels:
                number = bases.pop(group) if level == levels[0] else self.ask(level, group)
                data = (await self.answer(number)).data
                assert hashlib.sha256(data).hexdigest() == message.frames[level][1]
                frames[group, level] = data
            group += 1
            ahead[group + held - 1] = self.ask(EDGE_TRACK, group + held - 1)
            bases[group + held - 1] = self.ask(levels[0], group + held - 1)


@asynccontextmanager
async def decoder(server, draft=DRAFT_20, token=None):
    def greet(_, draft):
        tokens = () if token is None else (Token(token.encode()),)
        return MoqtSession(draft, client=True, options=SetupOptions(tokens=tokens))

    async with asyncio.timeout(LIMIT_S), rude_client(server.address, draft=draft, greet=greet) as end:
        yield Decoder(end)
