"""An origin to dial, servers of moq-rs (an independent peer), and a path that can be cut."""

import asyncio
import contextlib

import pytest
import structlog

from kvabr.link.moqt.connect import dial
from kvabr.link.moqt.options import DialOptions
from kvabr.server.certificates import check, development
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server

moq = pytest.importorskip("moq", reason="moq-rs is not installed: tools/setup-venv")

LOG = structlog.get_logger()


@contextlib.asynccontextmanager
async def origin(root, *, grants=None, limits=None, port=0, tls=None):
    tls = tls or development()
    server = Server(PublishedAssets(root, grants), "127.0.0.1", port, tls, limits or ServerLimits(), LOG, Metrics())
    server.fingerprint = check(tls).fingerprint
    async with server:
        yield server


def options(server, **more):
    return DialOptions(
        "localhost", **{"timeout_s": 300.0, "port": server.address[1], "fingerprint": server.fingerprint} | more
    )


async def dialled(server, **more):
    return await dial(options(server, **more))


class RawServer:
    """A server of moq-rs, whose groups the test writes itself."""

    def __init__(self, write):
        """``write(request)`` is awaited for each group that is asked for."""
        self._write = write
        self.tasks = set()
        self.paths = []

    async def __aenter__(self):
        self.origin = moq.OriginProducer()
        self._server = moq.Server("127.0.0.1:0", tls_generate=["localhost"], publish=self.origin)
        await self._server.__aenter__()
        self.address = "127.0.0.1", int(self._server.local_addr.rpartition(":")[2])
        self.fingerprint = self._server.cert_fingerprints()[0]
        self._go(self._sessions())
        self._go(self._broadcasts())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_):
        for task in list(self.tasks):
            task.cancel()
        await asyncio.wait(self.tasks)
        await self._server.__aexit__(None, None, None)

    def _go(self, work):
        async def guarded():
            with contextlib.suppress(moq.Error):
                await work

        self.tasks.add(asyncio.create_task(guarded()))

    async def _sessions(self):
        async def hold(request):
            session = await request.accept()
            await session.closed()

        async for request in self._server:
            self._go(hold(request))

    async def _broadcasts(self):
        async with self.origin.dynamic("", moq.Route()) as wanted:
            while True:
                request = await wanted.requested_broadcast()
                self.paths.append(request.path)
                broadcast = moq.BroadcastProducer()
                self._go(self._tracks(broadcast, broadcast.dynamic()))
                request.accept(broadcast)

    async def _tracks(self, broadcast, wanted):
        async with wanted:
            while True:
                request = await wanted.requested_track()
                groups = request.dynamic()
                self._go(self._groups(broadcast, request.accept(moq.TrackInfo(max_age_us=10**12)), groups))

    async def _groups(self, broadcast, producer, wanted):
        async with wanted:
            while True:
                self._go(self._write(await wanted.requested_group()))


class Path(asyncio.DatagramProtocol):
    """A UDP path to a server, for one client, that can be cut."""

    def __init__(self, server):
        self.server = server
        self.cut = False
        self.client = None

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        path = self

        class Back(asyncio.DatagramProtocol):
            def datagram_received(self, data, addr):
                if not path.cut and path.client is not None:
                    path.transport.sendto(data, path.client)

        self.transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.back, _ = await loop.create_datagram_endpoint(Back, remote_addr=self.server)
        self.port = self.transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_):
        self.transport.close()
        self.back.close()

    def datagram_received(self, data, addr):
        self.client = addr
        if not self.cut:
            self.back.sendto(data)
