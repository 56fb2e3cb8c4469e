"""Relays and their origins, for the tests of relays: real sockets, or origins in memory that misbehave."""

import asyncio
import contextlib
import functools
import hashlib

import structlog
import structlog.testing

from kvabr.link.moqt.connect import connect, dial
from kvabr.link.moqt.options import DialOptions
from kvabr.server.certificates import check
from kvabr.server.grants import EVERYTHING, Grant
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.relay import Relay
from kvabr.server.server import Server
from kvabr.transfer.interface import read_all
from kvabr.types.errors import Reason, RequestError, TransportError, UnauthorizedError
from kvabr.types.naming import CATALOG_TRACK, TrackNamespace
from kvabr.types.peer import PeerOptions
from tests.memory_transport import MemoryConnection

LOG = structlog.get_logger()
BIG = 1 << 24
LONG_S = 600.0
"""Where a test waits for what must happen, on any machine."""
ELSEWHERE = TrackNamespace("other/model", "0" * 64)
REFUSED = "the origin refuses the relay's token"


@contextlib.asynccontextmanager
async def relaying(upstream, tls, *, quic="aioquic", limits=None, **more):
    """A relay in front of a connection, and its server."""
    metrics = Metrics()
    async with Relay(upstream, LOG, metrics, **more) as relay:
        server = Server(relay, "127.0.0.1", 0, tls, limits or ServerLimits(), LOG, metrics, quic=quic)
        async with server:
            server.fingerprint = check(tls).fingerprint
            yield server


@contextlib.asynccontextmanager
async def origin(root, tls, *, quic="aioquic", tcp="tls", grants=None, port=0, announce_rates=True, **limits):
    arguments = PublishedAssets(root, grants), "127.0.0.1", port, tls, ServerLimits(**limits), LOG, Metrics()
    how = {"quic": quic, "tcp": tcp, "announce_rates": announce_rates}
    async with asyncio.timeout(LONG_S), Server(*arguments, **how) as server:
        server.fingerprint = check(tls).fingerprint
        yield server


def url_of(server):
    return f"moqt://localhost:{server.address[1]}/"


async def relay_before(stack, server, tls, *, quic="aioquic", token=None, **more):
    """A relay in front of a server, until the stack closes; it keeps dialling if the server goes."""
    connecting = connect(
        url_of(server), PeerOptions(fingerprint=server.fingerprint, quic=quic, token=token, timeout_s=LONG_S)
    )
    upstream = await stack.enter_async_context(connecting)
    return await stack.enter_async_context(relaying(upstream, tls, quic=quic, **more))


@contextlib.asynccontextmanager
async def chain_of(root, tls, *, quic="aioquic", token=None, grants=None, **more):
    """An origin, and a relay in front of it."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(origin(root, tls, quic=quic, grants=grants))
        yield server, await relay_before(stack, server, tls, quic=quic, token=token, **more)


@contextlib.asynccontextmanager
async def restartable(root, tls, *, grants=None, token=None):
    """An origin, a relay in front of it, a player's connection to the relay, and what starts the origin anew."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(origin(root, tls, grants=grants))
        port = server.address[1]
        relay = await relay_before(stack, server, tls, token=token)
        connection = await stack.enter_async_context(await dialled(relay))

        async def again(grants=None):
            return await stack.enter_async_context(origin(root, tls, grants=grants, port=port))

        yield server, relay, connection, again


async def dialled(server, library="aioquic", **more):
    how = PeerOptions(fingerprint=server.fingerprint, timeout_s=LONG_S)
    return await dial(DialOptions("localhost", server.address[1], how=how, **more), library)


def in_memory(asset, **more):
    """A connection to an asset in this process."""
    return MemoryConnection(functools.partial(PublishedAssets(asset.store.folder).find, EVERYTHING), **more)


def sent(server):
    """How many groups of each track the origin has sent."""
    samples = [sample for metric in server.metrics.registry.collect() for sample in metric.samples]
    return {one.labels["track"]: one.value for one in samples if one.name == "kvabr_groups_sent_total"}


async def get(connection, namespace, track, group=0):
    async with asyncio.timeout(LONG_S):
        return await read_all(connection.fetch(namespace, track, group, limit=BIG))


async def play(connection, asset, track="FP16"):
    """Fetch a catalog and all groups of a track, and check them."""
    namespace = asset.catalog.namespace
    assert await get(connection, namespace, CATALOG_TRACK) == asset.catalog_bytes()
    groups = range(asset.catalog.groups)
    got = await asyncio.gather(*(get(connection, namespace, track, group) for group in groups))
    assert got == [asset.frame(group, track) for group in groups]


async def until(condition):
    """Wait for something that must happen."""
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)


def grant(token):
    return Grant(token, token_sha256=hashlib.sha256(token.encode()).hexdigest())


def says_unauthorized(error):
    """Whether an error says that a token is refused: that of a request, or of a connection that was closed for it."""
    if isinstance(error, RequestError):
        return error.reason in (Reason.UNAUTHORIZED, Reason.EXPIRED_TOKEN)
    return isinstance(error, UnauthorizedError)


async def unreachable():
    raise TransportError("no answer")
