"""MoQT over TCP: what only TCP has, and peers that misuse it."""

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvabr.link.moqt.connect import MoqtDialler, connect
from kvabr.link.tcp import transport
from kvabr.link.tcp.tls import PREFIX
from kvabr.moqt.wire import DRAFTS
from kvabr.qmux.connection import QmuxConnection
from kvabr.qmux.frames import FrameType, TransportParameters, close_frame, frame
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.transfer.interface import read_all
from kvabr.transfer.work import decoders
from kvabr.types.errors import NoAnswerError, TransportError, UsageError
from kvabr.types.naming import CATALOG_TRACK
from kvabr.types.peer import PeerOptions
from tests.qmux.ends import begun, record, stream
from tests.server.relays import LOG, dialled, origin, url_of

pytestmark = pytest.mark.process

LIMIT_S = 300.0
PARAMETERS = TransportParameters(
    max_data=1 << 20, max_stream_data_bidi_local=1 << 18, max_stream_data_bidi_remote=1 << 18,
    max_stream_data_uni=1 << 18, max_streams_bidi=100, max_streams_uni=100,
)  # fmt: skip


async def fetched(asset, server, over="tcp"):
    """A group, by somebody else, while something else goes on."""
    async with await dialled(server, over) as connection:
        return await read_all(connection.fetch(asset.catalog.namespace, "FP16", 0, limit=1 << 20))


async def opened(server, tls, *protocols):
    """A connection with TLS on which this test writes what it likes."""
    context = ssl.create_default_context(cafile=str(tls.certfile))
    context.set_alpn_protocols(list(protocols) or [PREFIX + DRAFTS[0].alpn])
    return await asyncio.open_connection(*server.address, ssl=context, server_hostname="localhost")


async def said(reader):
    """What a server says to a client until it closes: the events of it."""
    peer = QmuxConnection(client=True, parameters=PARAMETERS)
    peer.data_to_send(1)
    events = []
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            peer.receive(data)
            events += peer.take_events()
    return peer.terminated, events


async def nobody(server):
    while server.peers:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("begin", [b"", b"\x16\x03\x01\x02\x00"], ids=["nothing", "half a handshake"])
async def test_a_peer_that_says_too_little_is_closed(asset, tls, begin):
    async with origin(asset.store.folder, tls, handshake_s=0.2) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await nobody(server)


@pytest.mark.parametrize(
    ("most", "count", "each", "over"),
    [(100, 150, 150, "tcp"), (8, 100, 2, "tcp"), (8, 32, 1, "aioquic")],
    ids=["of one address", "of many addresses", "for others over QUIC"],
)
async def test_silent_peers_leave_room_for_others(asset, tls, most, count, each, over):
    async with origin(asset.store.folder, tls, connections=most) as server, contextlib.AsyncExitStack() as stack:
        for number in range(count):
            silent = stack.enter_context(socket.socket())
            silent.bind((f"127.0.1.{number // each + 1}", 0))
            silent.connect(server.address)
            await asyncio.sleep(0)
        assert await fetched(asset, server, over) == asset.frame(0, "FP16")
        assert each < count or len(server.peers) <= 3 * most // 4 + 1


async def test_a_peer_that_resets_streams_without_end_is_closed(asset, tls):
    async with origin(asset.store.folder, tls, requests_per_s=50) as server:
        reader, writer = await opened(server, tls)
        writer.write(begun(PARAMETERS))
        for number in range(1, 251):  # of one kind that only the peer writes to
            writer.write(record(frame(FrameType.RESET_STREAM, 4 * number + 2, 0, 0)))
            if number % 50 == 0:
                await asyncio.sleep(0.02)
        terminated, _ = await said(reader)
        assert "streams reset a second" in terminated.reason
        writer.close()


NONSENSE = {
    "no QMux": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "a record without end": begun() + b"\xbf\xff\xff\xff",
    "a stream that does not exist": begun(PARAMETERS) + record(stream(1, b"x")),
    "resets of everything": begun(PARAMETERS) + record(*(frame(FrameType.RESET_STREAM, n, 0, 0) for n in range(1, 99))),
    "too many streams": begun(PARAMETERS) + record(stream(4 * 128, b"x")),
    "a gap": begun(PARAMETERS) + record(stream(0, b"x", offset=7)),
    "no SETUP": begun(PARAMETERS) + record(stream(2, b"\x3f\x00\x00")),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_ends_its_connection_with_a_reason(asset, tls, what):
    async with origin(asset.store.folder, tls) as server:
        reader, writer = await opened(server, tls)
        writer.write(NONSENSE[what])
        closed, _ = await said(reader)
        assert closed is not None
        assert closed.code
        assert closed.reason
        writer.close()
        await nobody(server)
        assert await fetched(asset, server) == asset.frame(0, "FP16")


async def test_a_tcp_port_in_use_is_named(asset, tls):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = (PublishedAssets(asset.store.folder, log=LOG), "127.0.0.1", port, tls, ServerLimits(), LOG)
        with pytest.raises(TransportError, match=r"cannot be bound .* or --tcp off"):
            await Server(*arguments, Metrics()).start()
        async with Server(*arguments, Metrics(), tcp="off") as server:
            assert server.address[1] == port


async def test_a_request_and_a_close_at_once_leave_nothing(asset, tls):
    async with origin(asset.store.folder, tls) as server:
        before = asyncio.all_tasks()
        async with await dialled(server, "tcp") as connection:
            connection.transport._busy = True  # so that both leave together
            connection.fetch(asset.catalog.namespace, CATALOG_TRACK, 0, limit=1 << 20)
            transport = connection.transport
            last = [*transport._conn.data_to_send(1 << 20), record(close_frame(0, "", application=True))]
            assert transport._channel.send(deque(last))
        await nobody(server)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= before


async def test_a_client_that_reads_nothing_holds_nothing_up(asset, tls):
    """What waits for it is bounded, and ends with its idle time."""
    async with origin(asset.store.folder, tls) as server, await dialled(server, "tcp") as connection:
        connection.transport._loop.remove_reader(connection.transport._sock.fileno())
        downloads = [connection.fetch(asset.catalog.namespace, "FP16", n % 10, limit=1 << 20) for n in range(60)]
        assert await fetched(asset, server) == asset.frame(0, "FP16")
        for peer in server.peers:
            assert peer.transport.unsent(()) <= 3 << 20
        for download in downloads:
            download.cancel()


async def test_a_connection_that_is_over_keeps_no_socket(asset, tls):
    async with origin(asset.store.folder, tls) as server:
        connection = await dialled(server, "tcp")
        channel = connection.transport._channel
        connection.transport._loop.remove_reader(channel.sock.fileno())
        (peer,) = server.peers
        for number in range(60):
            connection.fetch(asset.catalog.namespace, "FP16", number % 10, limit=1 << 20)
        while not peer.transport._waits:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)
        channel.send(deque([record(b"\x3f")]))
        await nobody(server)
        with contextlib.suppress(ConnectionError):
            while not peer.transport._closed:
                channel.send(deque([b"\0"]))
                await asyncio.sleep(0.05)


@pytest.fixture
def beside(monkeypatch):
    """All payload is read in a thread, as far as a frame goes; the two events: it has read, and may tell."""
    read, go = threading.Event(), threading.Event()
    go.set()
    fill = transport.QmuxTransport._fill

    def held(self, *arguments):
        came = fill(self, *arguments)
        read.set()
        assert go.wait(LIMIT_S)
        return came

    monkeypatch.setattr(transport.QmuxTransport, "_fill", held)
    monkeypatch.setattr(transport, "_MAX_THREAD_WAIT_S", LIMIT_S)
    monkeypatch.setattr(transport, "_CORES", 2)
    return read, go


async def test_what_comes_fast_is_decrypted_in_a_thread(asset, tls, beside):
    """A request that is cancelled, or a connection that is closed, while it reads: nothing is mixed up."""
    read, go = beside

    async def reading(connection):
        read.clear()
        go.clear()
        download = connection.fetch(asset.catalog.namespace, "FP16", 0, limit=1 << 20)
        while not read.is_set():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)
        return download

    async with origin(asset.store.folder, tls) as server, await dialled(server, "tcp") as connection:
        for _ in range(2):
            downloads = [connection.fetch(asset.catalog.namespace, "FP16", n, limit=1 << 20) for n in range(10)]
            for number, download in enumerate(downloads):
                assert await read_all(download) == asset.frame(number, "FP16")
        assert read.is_set()
        (await reading(connection)).cancel()
        other = connection.fetch(asset.catalog.namespace, "FP16", 1, limit=1 << 20)
        go.set()
        assert await read_all(other) == asset.frame(1, "FP16")
        await reading(connection)
        sock = connection.transport._sock
        await connection.close()
        assert sock.fileno() >= 0  # or its number might be another's while the thread reads
        go.set()
        while sock.fileno() >= 0:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)


def test_a_forked_process_has_threads_of_its_own():
    pools = (transport._readers, decoders)
    for pool in pools:
        assert pool().submit(int).result() == 0
    child = os.fork()
    if not child:
        found = 1
        try:
            found = sum(pool().submit(int).result(LIMIT_S / 10) for pool in pools)
        finally:
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_an_idle_connection_ends(asset, tls):
    async with origin(asset.store.folder, tls, idle_s=0.3) as server, await dialled(server, "tcp") as connection:
        await nobody(server)
        while not connection.closed:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def joined(server):
    async with connect(url_of(server), PeerOptions(fingerprint=server.fingerprint, timeout_s=LIMIT_S)) as connection:
        yield connection


async def test_tcp_comes_first(asset, tls, monkeypatch):
    monkeypatch.setattr("kvabr.link.moqt.connect.HEAD_START_S", LIMIT_S)  # a busy machine may take longer
    monkeypatch.setattr("kvabr.link.moqt.connect._TCP_HEAD_START_S", LIMIT_S)
    async with origin(asset.store.folder, tls) as server, joined(server) as connection:
        assert (connection.backend, connection.peer) == ("tcp", f"localhost:{server.address[1]} tcp")
        assert await read_all(connection.fetch(asset.catalog.namespace, "FP16", 0, limit=1 << 20))


async def test_a_server_without_tcp_is_reached_over_quic(asset, tls):
    async with origin(asset.store.folder, tls, tcp="off") as server, joined(server) as connection:
        assert connection.backend in ("qh3", "aioquic")


async def test_a_peer_that_is_silent_on_tcp_does_not_keep_quic_away(asset, tls, monkeypatch):
    """Another service may have the TCP port."""
    async with origin(asset.store.folder, tls, tcp="off") as server:
        with socket.create_server(server.address), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60), joined(server) as connection:
                assert connection.backend in ("qh3", "aioquic")
                return
        raise AssertionError("it waits for TCP")


async def test_a_peer_that_refuses_on_tcp_does_not_cut_quic_short(asset, tls, monkeypatch):
    """Another service may have the TCP port, and the path may lose QUIC's first packets."""
    dial_over, refused, answers = MoqtDialler._dial_over, [], True

    async def slow(self, over, connect_s=None):
        if over == "tcp":
            refused.append(over)
            raise TransportError("this is a web server")
        while len(refused) < 2:  # noqa: ASYNC110  # TCP is tried once more
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        if not answers:
            raise NoAnswerError("nothing came back")
        return await dial_over(self, over, connect_s)

    monkeypatch.setattr(MoqtDialler, "_dial_over", slow)
    monkeypatch.setattr("kvabr.link.moqt.connect._TCP_HEAD_START_S", 0.005)
    async with origin(asset.store.folder, tls) as server:
        async with joined(server) as connection:
            assert connection.backend in ("qh3", "aioquic")
        answers = False
        with pytest.raises(TransportError, match="this is a web server"):
            async with joined(server):
                pass


async def test_where_udp_is_blocked_there_is_tcp(asset, tls):
    async with origin(asset.store.folder, tls) as server:
        server._transport.close()
        async with joined(server) as connection:
            assert connection.backend == "tcp"


async def test_where_no_thread_can_be_had_the_loop_decrypts(asset, tls, beside, monkeypatch):
    """As while Python ends: a thread of the pool that is there already may still take what it was given."""
    none, one = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    none.shutdown()

    class Exhausted:
        def submit(self, *work):
            one.submit(*work)
            raise RuntimeError("can't start new thread")

    async with origin(asset.store.folder, tls) as server, await dialled(server, "tcp") as connection:
        for pool in (none, Exhausted()):
            monkeypatch.setattr(transport, "_readers", lambda pool=pool: pool)
            downloads = [connection.fetch(asset.catalog.namespace, "FP16", n, limit=1 << 20) for n in range(10)]
            for number, download in enumerate(downloads):
                assert await read_all(download) == asset.frame(number, "FP16")
    one.shutdown()


def test_an_unknown_transport_is_refused():
    with pytest.raises(UsageError, match="transport is 'sctp'"):
        connect("moqt://localhost/", PeerOptions(transport="sctp"))
