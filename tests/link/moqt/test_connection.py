"""A connection by aioquic or qh3 to a real origin on loopback, in every pairing and both drafts."""

import asyncio
import contextlib
import itertools
import socket

import pytest

from kvabr.link.moqt import connect as quic
from kvabr.link.moqt.connection import MAX_IN_FLIGHT, MoqtRequest
from kvabr.moqt.objects import ObjectHeader, RangeEnd
from kvabr.moqt.wire import DRAFTS
from kvabr.transfer.interface import Carrier, GroupReader, GroupRequest, GroupTransfer, read_all
from kvabr.types.errors import ConnectionLostError, NoAnswerError, RequestError, TransportError
from kvabr.types.naming import CATALOG_TRACK, TrackNamespace
from tests.assets import make_asset
from tests.client.virtual import virtual
from tests.server.relays import dialled, origin

pytestmark = pytest.mark.process

FRAME = 300_000
LIBRARIES = ("aioquic", "qh3")
PAIRS = [
    pytest.param(ours, theirs, draft.alpn, id=f"{ours}-{theirs}-{draft.alpn}")
    for (ours, theirs), draft in itertools.product(itertools.product(LIBRARIES, LIBRARIES), DRAFTS)
]

TRANSPORTS = (*LIBRARIES, "tcp")
EITHER = ("aioquic", "tcp")
PAIRS += [
    pytest.param(ours, "aioquic", draft.alpn, id=f"{ours}-{draft.alpn}") for ours in TRANSPORTS[-1:] for draft in DRAFTS
]


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    return make_asset(folder / "one", range(40), frame_bytes=FRAME, levels=("FP16", "Int4"))


def served(asset, tls, library="aioquic"):
    return origin(asset.store.folder, tls, quic=library if library in LIBRARIES else "aioquic")


@contextlib.asynccontextmanager
async def joined(asset, tls, ours="aioquic", theirs="aioquic", *, alpn="moqt-20"):
    async with served(asset, tls, theirs) as server, await dialled(server, ours, drafts=(alpn,)) as connection:
        yield server, connection


@pytest.mark.parametrize(("ours", "theirs", "alpn"), PAIRS)
async def test_groups_arrive_as_they_are(asset, tls, ours, theirs, alpn):
    space, track = asset.catalog.namespace, asset.catalog.track("FP16")
    async with joined(asset, tls, ours, theirs, alpn=alpn) as (server, connection):
        assert (connection.backend, connection.protocol) == (ours, alpn)
        groups = range(asset.catalog.groups)
        downloads = [connection.fetch(space, "FP16", g, limit=track.bytes[g]) for g in groups]
        for group, data in enumerate(await asyncio.gather(*map(read_all, downloads))):
            assert data == asset.frame(group, "FP16")
        assert connection.stats().bytes_received == track.total_bytes
        assert 0 < connection.stats().rtt_s < 300
        assert server.requests == 0
        assert server.metrics.value("kvabr_groups_sent_total", track="FP16") == asset.catalog.groups


@pytest.mark.parametrize("library", TRANSPORTS)
async def test_a_group_that_is_declared_too_long_is_not_downloaded(asset, tls, library):
    """Its first object's header says how long the whole group is, and is of a smaller object itself."""
    first = asset.catalog.track("FP16").bytes[0]
    async with joined(asset, tls, library, library) as (_, connection):
        download = connection.fetch(asset.catalog.namespace, "FP16", 0, limit=first - 1)
        with pytest.raises(RequestError, match=f"longer than the {first - 1} bytes"):
            await read_all(download)
        assert not download.data
        assert await read_all(connection.fetch(asset.catalog.namespace, "FP16", 1, limit=1 << 20))


@contextlib.asynccontextmanager
async def held(server, requests):
    """The server sends nothing before it has so many requests, and the body of the block is over."""
    (peer,) = server.peers
    feed, peer.feed = peer.feed, lambda: None
    yield peer
    while len(peer._queue) < requests:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.005)
    peer.feed = feed
    peer.transport.flush()


@pytest.mark.parametrize("ours", EITHER)
async def test_downloads_that_are_cancelled_at_once_leave_nothing(asset, tls, ours):
    space = asset.catalog.namespace
    async with joined(asset, tls, ours) as (server, connection):
        async with held(server, 1) as peer:
            cancelled = [connection.fetch(space, "FP16", 0, limit=1 << 20) for _ in range(100)]
            while len(peer._queue) < MAX_IN_FLIGHT:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.005)
            for download in cancelled:
                download.cancel()
            with pytest.raises(RequestError, match="cancelled"):
                await cancelled[0].read()
            last = asyncio.create_task(read_all(connection.fetch(space, "FP16", 1, limit=1 << 20)))
        assert await last == asset.frame(1, "FP16")
        assert server.requests == 0
        assert len(peer.session.responder) == 0


@pytest.mark.parametrize("library", TRANSPORTS)
async def test_what_a_silent_publisher_sends_at_last_was_limited_by_it(asset, tls, library):
    """The path is fine, as PINGs are answered: the estimate of the link must not suffer."""
    space = asset.catalog.namespace
    async with joined(asset, tls, library, library) as (server, connection):
        await read_all(connection.fetch(space, "FP16", 0, limit=1 << 20))
        (peer,) = server.peers
        feed, peer.feed = peer.feed, lambda: None
        download = connection.fetch(space, "FP16", 1, limit=1 << 20)
        while connection.watch.limit != "publisher":  # noqa: ASYNC110  # which nothing tells of
            await asyncio.sleep(0.01)
        peer.feed = feed
        peer.transport.flush()
        assert await download.read()
        assert download.limit == "publisher"


@pytest.mark.parametrize("ours", EITHER)
async def test_the_urgent_comes_first(asset, tls, ours):
    space, order = asset.catalog.namespace, []

    async def one(connection, group):
        download = connection.fetch(space, "FP16", group, priority=200 - group, limit=1 << 20)
        await read_all(download)
        order.append(group)

    async with joined(asset, tls, ours) as (server, connection):
        async with held(server, asset.catalog.groups):
            tasks = [asyncio.create_task(one(connection, group)) for group in range(asset.catalog.groups)]
        await asyncio.gather(*tasks)
        assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("library", TRANSPORTS)
async def test_a_lost_connection_is_told_to_every_reader(asset, tls, library):
    space = asset.catalog.namespace
    async with joined(asset, tls, library, library) as (server, connection):
        downloads = [connection.fetch(space, "FP16", group % 10, limit=1 << 20) for group in range(60)]
        await downloads[0].read()
        await server.close()
        ends = await asyncio.gather(*map(read_all, downloads), return_exceptions=True)
        assert isinstance(ends[-1], ConnectionLostError)
        assert {type(end) for end in ends} <= {bytes, ConnectionLostError}
        assert connection.closed
        with pytest.raises(ConnectionLostError):
            await connection.fetch(space, "FP16", 0, limit=1 << 20).read()


def test_a_gap_or_a_foreign_group_ends_a_download():
    class Nowhere(Carrier):
        dropped = 0

        def carry(self, transfer):
            self.fetch = MoqtRequest(transfer, (b"a",))

        def reprioritise(self, transfer):
            pass

        def drop(self, transfer):
            self.dropped += 1

    for item, words in (
        (RangeEnd((3, 5), unknown=True), "does not have the whole group"),
        (ObjectHeader(4, 0, 0, 128, 10), "objects of group 4"),
        (ObjectHeader(3, 0, 0, 128, 101), "longer than the 100 bytes"),
    ):
        connection = Nowhere()
        request = GroupRequest(TrackNamespace("m", "0" * 64), "FP16", 3, 100)
        transfer = GroupTransfer(request)
        transfer.begin(connection)
        connection.fetch.take([item], "network")
        assert connection.dropped == 1
        with pytest.raises(RequestError, match=words):
            raise transfer.error


async def test_what_comes_behind_a_complete_group_takes_nothing_from_it():
    """A peer may send more before it hears that the group is complete here."""
    request = GroupRequest(TrackNamespace("m", "0" * 64), "FP16", 3, 5, exact=True)
    reader = GroupReader(transfer := GroupTransfer(request), 0)
    fetch = MoqtRequest(transfer, (b"a",))
    fetch.take([ObjectHeader(3, 0, 0, 128, 5), memoryview(b"whole")], "network")
    await asyncio.sleep(0)
    assert transfer.complete
    fetch.take([ObjectHeader(3, 0, 1, 128, 6), memoryview(b"beyond")], "network")
    assert await read_all(reader) == b"whole"


# ---------------------------------------------------------------- several addresses


def attempts(what, log):
    """``what`` says of each candidate: after how long it ends, and with what error, if any."""

    async def attempt(name):
        log.append(name)
        seconds, error = what[name]
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            log.append(f"{name} cancelled")
            raise
        if error is not None:
            raise error
        return name

    return attempt


@virtual
async def test_the_first_address_that_answers_is_taken():
    log = []
    what = {"dead": (3600.0, None), "good": (0.01, None), "never tried": (0.0, None)}
    assert await quic.first_of(list(what), attempts(what, log), 0.05) == "good"
    assert log == ["dead", "good", "dead cancelled"]


@virtual
async def test_who_answers_is_believed_before_who_is_silent():
    log = []
    silent = NoAnswerError("no answer")
    what = {"silent": (3600.0, silent), "bad": (0.0, TransportError("its certificate has expired"))}
    with pytest.raises(TransportError, match="expired"):
        await quic.first_of(list(what), attempts(what, log), 0.01)
    assert log[-1] == "silent cancelled"
    what = {"one": (0.0, silent), "two": (0.01, NoAnswerError("no answer either"))}
    with pytest.raises(NoAnswerError, match="no answer"):
        await quic.first_of(list(what), attempts(what, log), 0.01)


@pytest.mark.parametrize("library", TRANSPORTS)
async def test_all_addresses_of_a_host_are_dialled(asset, tls, library, monkeypatch):
    async with served(asset, tls, library) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
            deaf.bind(("127.0.0.2", server.address[1]))

            async def found(*_, **__):
                return [(socket.AF_INET, (host, server.address[1])) for host in ("127.0.0.2", "127.0.0.1")]

            monkeypatch.setattr(quic, "addresses_of", found)
            async with await dialled(server, library) as connection:
                assert await read_all(connection.fetch(asset.catalog.namespace, CATALOG_TRACK, limit=1 << 20))


class StuckCore:
    """qh3's core after it has lost track of a packet."""

    def __init__(self, core):
        self._core = core

    def __getattr__(self, name):
        return getattr(self._core, name)

    def poll_transmit(self, now):
        raise ValueError("another stream reservation is already active")


@pytest.mark.parametrize("end", ["client", "server"])
async def test_a_connection_on_which_qh3_cannot_send_any_more_ends(asset, tls, end):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with joined(asset, tls, "qh3", "qh3") as (server, connection):
        (peer,) = server.peers
        broken = connection if end == "client" else peer
        broken.transport.quic._core = StuckCore(broken.transport.quic._core)
        fetching = asyncio.create_task(read_all(connection.fetch(asset.catalog.namespace, "FP16", 0, limit=FRAME + 8)))
        if end == "client":
            with pytest.raises(ConnectionLostError, match="can no longer send"):
                await fetching
        else:
            while server.peers:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            fetching.cancel()
            await asyncio.wait({fetching})
    assert not errors


async def test_a_connection_goes_on_when_qh3_loses_a_packet_but_no_stream(asset, tls):
    async with joined(asset, tls, "qh3", "qh3") as (_, connection):
        core, lost = connection.transport.quic._core, []

        class LosingCore(StuckCore):
            def poll_transmit(self, now):
                if not lost:
                    lost.append(now)
                    raise ValueError("reserved stream is missing")
                return core.poll_transmit(now)

        connection.transport.quic._core = LosingCore(core)
        for group in range(3):
            assert await read_all(connection.fetch(asset.catalog.namespace, "FP16", group, limit=FRAME + 8))
        assert lost


@pytest.mark.parametrize("ours", EITHER)
async def test_more_requests_than_streams_wait_their_turn(asset, tls, ours):
    space = asset.catalog.namespace
    async with joined(asset, tls, ours) as (_, connection):
        many = [connection.fetch(space, CATALOG_TRACK, limit=1 << 20) for _ in range(3 * MAX_IN_FLIGHT)]
        many[-1].prioritise(0)
        waiting = connection.fetch(space, "Int4", 0, limit=1 << 20)
        waiting.cancel()
        ended = []

        async def read(reader):
            data = await read_all(reader)
            ended.append(reader)
            return len(data)

        assert set(await asyncio.gather(*map(read, many))) == {len(asset.catalog.dumps())}
        assert ended.index(many[-1]) < ended.index(many[-2])
