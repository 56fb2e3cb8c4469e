"""A UDP socket read by the batch."""

import asyncio
import socket

import pytest
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.packet import QuicStreamFrame
from aioquic.quic.stream import QuicStreamReceiver

from kvabr.link.quic.backend import MOST_AT_ONCE, BatchTransport, library


class Sink(asyncio.DatagramProtocol):
    def __init__(self, expected):
        self.batches, self.errors, self.lost = [], [], asyncio.Event()
        self.complete, self._expected = asyncio.Event(), expected

    def datagrams_received(self, datagrams, address):
        self.batches.append((list(datagrams), address))
        if sum(len(batch) for batch, _ in self.batches) >= self._expected:
            self.complete.set()

    def error_received(self, exc):
        self.errors.append(exc)
        self.complete.set()

    def connection_lost(self, exc):
        self.lost.set()


def bound():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind(("127.0.0.1", 0))
    return sock


async def test_packets_come_in_order_and_by_sender():
    sock, one, two = bound(), bound(), bound()
    address = sock.getsockname()
    for number in range(MOST_AT_ONCE + 8):
        one.sendto(b"a%d" % number, address)
    two.sendto(b"b", address)
    sink = Sink(MOST_AT_ONCE + 9)
    transport = BatchTransport(asyncio.get_running_loop(), sock, sink)
    await asyncio.wait_for(sink.complete.wait(), 300)
    from_one = [data for batch, source in sink.batches if source == one.getsockname() for data in batch]
    assert from_one == [b"a%d" % number for number in range(MOST_AT_ONCE + 8)]
    assert sink.batches[-1] == ([b"b"], two.getsockname())
    assert max(len(batch) for batch, _ in sink.batches) == MOST_AT_ONCE
    transport.close()
    transport.close()
    await asyncio.wait_for(sink.lost.wait(), 300)
    assert transport.is_closing()
    transport.sendto(b"x", address)  # into nothing, and no error
    for each in (one, two):
        each.close()


async def test_what_the_socket_cannot_take_waits_its_turn():
    receiver = bound()
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)

    class Full:
        """A socket that is full now and then."""

        def __init__(self, sock):
            self._sock, self._turn = sock, 0

        def __getattr__(self, name):
            return getattr(self._sock, name)

        def sendto(self, data, address):
            self._turn += 1
            if self._turn % 3 == 2:
                raise BlockingIOError
            return self._sock.sendto(data, address)

    transport = BatchTransport(asyncio.get_running_loop(), Full(bound()), Sink(1))
    sent = [b"%d" % number for number in range(20)]
    for data in sent:
        transport.sendto(data, receiver.getsockname())
    loop = asyncio.get_running_loop()
    assert [await loop.sock_recv(receiver, 100) for _ in sent] == sent
    transport.close()
    receiver.close()


async def test_a_closed_port_is_an_error_that_the_protocol_hears():
    gone = bound()
    address = gone.getsockname()
    gone.close()
    sock, sink = bound(), Sink(1)
    sock.connect(address)
    transport = BatchTransport(asyncio.get_running_loop(), sock, sink)
    sock.send(b"is anybody there")
    await asyncio.wait_for(sink.complete.wait(), 300)
    assert isinstance(sink.errors[0], ConnectionRefusedError)
    transport.close()


def test_aioquic_ends_a_connection_whose_peer_leaves_many_gaps():
    """It looks at every gap of a stream for each frame."""
    library("aioquic")
    stream = QuicStreamReceiver(0, readable=True)
    for gap in range(1025):
        assert stream.handle_frame(QuicStreamFrame(data=b"x", fin=False, offset=2 + 2 * gap)) is None
    with pytest.raises(QuicConnectionError):
        stream.handle_frame(QuicStreamFrame(data=b"x", fin=False, offset=4000))
