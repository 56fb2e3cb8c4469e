"""Peers that send without end what carries no data: each turn of the event loop is bounded, and the connection ends."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from kvabr.link.moqt.connect import dial
from kvabr.link.moqt.options import DialOptions
from kvabr.link.tcp.channel import EmptyRecordsError, TlsChannel
from kvabr.link.tcp.tls import server_context
from kvabr.moqt.wire import DRAFTS
from kvabr.transfer.interface import read_all
from kvabr.types.errors import TransportError
from kvabr.types.peer import PeerOptions
from tests.floods import FLOODS, Flooder, RawTls, client_context, pour
from tests.server.relays import dialled, origin

pytestmark = pytest.mark.process

LIMIT_S = 300.0
PLAYS = 20


@pytest.fixture
def ends(tls):
    """A stranger that has shaken hands, its socket, and the server's end."""
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
        made = []
        shaking = threading.Thread(target=lambda: made.append(RawTls(theirs, client_context(), server=False)))
        shaking.start()
        context = server_context(tls.certfile, tls.keyfile, [draft.alpn for draft in DRAFTS])
        channel = TlsChannel(ours, context, server=True, host=None)
        while not channel.shake():
            pass
        shaking.join()
        ours.setblocking(False)
        yield made[0], theirs, channel


def all_that_comes(channel, size=1 << 14):
    """Everything that a channel yields until it is empty."""
    buffer, data = memoryview(bytearray(size)), b""
    while True:
        try:
            data += bytes(buffer[: channel.receive([buffer])])
        except BlockingIOError:
            if not (channel.pending or channel.spent):
                return data


@pytest.mark.parametrize("answer", [False, True])
def test_a_flood_of_key_updates_ends_after_a_few_records(ends, answer):
    stranger, sock, channel = ends
    sock.sendall(b"".join(stranger.key_update(answer=answer) for _ in range(1500)))
    with pytest.raises(EmptyRecordsError):
        all_that_comes(channel)
    assert channel.unsent <= 1 << 13


def test_long_records_without_data_end_it_too(ends):
    """Padding makes a KeyUpdate as long as a record may be."""
    stranger, sock, channel = ends
    sock.sendall(b"".join(stranger.key_update(answer=False, padding=16_000) for _ in range(8)))
    with pytest.raises(EmptyRecordsError):
        all_that_comes(channel)


def test_key_updates_between_data_are_nothing_special(ends):
    stranger, sock, channel = ends
    for number in range(300):
        data = bytes([number % 256]) * 50
        sock.sendall(stranger.key_update(answer=number % 2 == 0) + stranger.data(data))
        assert all_that_comes(channel) == data
        assert channel.push()
        if number % 20 == 0:
            sock.recv(1 << 16)  # the answers


def test_a_call_takes_a_bounded_number_of_records(ends):
    stranger, sock, channel = ends
    sending = threading.Thread(target=sock.sendall, args=(b"".join(stranger.data(b"x") for _ in range(1000)),))
    sending.start()
    buffer, got = memoryview(bytearray(1 << 14)), []
    while sum(got) < 1000:
        with contextlib.suppress(BlockingIOError):
            got.append(channel.receive([buffer]))
    sending.join()
    assert max(got) <= 256


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_server_ends_a_flood_and_serves_the_others(asset, tls, kind):
    async with origin(asset.store.folder, tls) as server:
        flooder = Flooder(server.address, kind)
        try:
            for _ in range(PLAYS):
                async with await dialled(server, "tcp") as connection:
                    got = await read_all(connection.fetch(asset.catalog.namespace, "FP16", 0, limit=1 << 20))
                    assert got == asset.frame(0, "FP16")
            while not flooder.connections:  # noqa: ASYNC110  # a thread counts them
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(flooder.stop)


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_client_ends_a_flood(tls, kind):
    context = server_context(tls.certfile, tls.keyfile, [draft.alpn for draft in DRAFTS])

    def lie(listener):
        sock, _ = listener.accept()
        with sock:
            pour(sock, RawTls(sock, context, server=True), kind, time.monotonic() + LIMIT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        lying = asyncio.create_task(asyncio.to_thread(lie, listener))
        trusted = DialOptions("localhost", listener.getsockname()[1], how=PeerOptions(insecure=True, timeout_s=LIMIT_S))
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(TransportError):
                async with await dial(trusted, "tcp") as connection:
                    await read_all(connection.fetch(("a", "b", "c"), "FP16", 0, limit=1 << 20))
            await lying
