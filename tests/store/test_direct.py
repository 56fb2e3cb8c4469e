"""Ranges over plain HTTP: what comes is in place, and an answer that is not the range is never taken for it."""

import asyncio
import contextlib
import random

import pytest

from kvabr.store.cloud import CloudStore
from kvabr.store.direct import DirectReader
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError, UnauthorizedError

pytestmark = pytest.mark.process
DATA = random.Random(3).randbytes(300_000)
BEGIN, END = 1000, 201_000
RANGE = b"Content-Range: bytes %d-%d/%d\r\n" % (BEGIN, END - 1, len(DATA))
LENGTH = b"Content-Length: %d\r\n" % (END - BEGIN)
PARTIAL = b"HTTP/1.1 206 Partial Content\r\n"


class Memory:
    """A sink of one buffer; it lends at most ``step`` bytes at a time."""

    def __init__(self, size=END - BEGIN, step=1 << 30):
        self.buffer, self.step, self.size = bytearray(size), step, 0
        self.counts = []

    def room(self):
        room = memoryview(self.buffer)[self.size : self.size + self.step]
        assert room, "room was asked for beyond the end"
        return room

    def took(self, count):
        self.size += count
        self.counts.append(count)


class Peer:
    """A server that answers each request by ``answer``: bytes, or a function of the request's head.

    It closes a connection after ``most`` answers.
    """

    def __init__(self, answer, most=1 << 30):
        self.answer, self.most = answer, most
        self.heads, self.connections = [], 0
        self.ports = []  # of the other side, of each request
        self.asked, self.ended = asyncio.Event(), asyncio.Event()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.talk, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.reader = DirectReader.of(CloudStore(f"http://127.0.0.1:{port}/below"))
        return self

    async def __aexit__(self, *_):
        await self.reader.close()
        self.server.close()

    async def talk(self, incoming, outgoing):
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for _ in range(self.most):
                head = await incoming.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.ports.append(outgoing.get_extra_info("peername")[1])
                self.asked.set()
                answer = self.answer(head) if callable(self.answer) else self.answer
                if answer is None:
                    await incoming.read()  # says nothing, until the other side goes
                    self.ended.set()
                    break
                outgoing.write(answer)
                await outgoing.drain()
        outgoing.close()


def serve(head):
    begin, last = map(int, head.partition(b"bytes=")[2].partition(b"\r\n")[0].split(b"-"))
    part = DATA[begin : last + 1]
    told = b"content-range: bytes %d-%d/%d\r\ncontent-length:%d\r\n" % (begin, last, len(DATA), len(part))
    return b"HTTP/1.1 206 Partial Content\r\nServer: test\r\n" + told + b"\r\n" + part


@pytest.mark.parametrize("step", [1, 999, 1 << 30])
async def test_a_range_is_received_in_place_and_its_connection_used_again(step):
    async with Peer(serve) as peer:
        for size in (END - BEGIN, 1, 5000) if step > 1 else (3000,):
            sink = Memory(size, step)
            await peer.reader.receive("s/o/key", BEGIN, BEGIN + size, sink)
            assert sink.buffer == DATA[BEGIN : BEGIN + size]
            assert sum(sink.counts) == size
        assert peer.connections == peer.reader.dialled == 1
        assert peer.heads[0].startswith(b"GET /below/s/o/key HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_several_at_once_have_a_connection_each():
    async with Peer(serve) as peer:
        sinks = [Memory(9000) for _ in range(12)]
        for _ in range(2):
            await asyncio.gather(*(peer.reader.receive("k", 7, 9007, sink) for sink in sinks))
            assert all(sink.buffer == DATA[7:9007] for sink in sinks)
            sinks = [Memory(9000) for _ in range(3)]
        assert peer.connections == 12  # of which eight stayed open


async def test_a_connection_that_the_server_closed_meanwhile_is_replaced():
    async with Peer(serve, most=1) as peer:
        for _ in range(3):
            sink = Memory(4)
            await peer.reader.receive("k", 0, 4, sink)
            assert sink.buffer == DATA[:4]
        assert peer.connections == 3


async def test_connections_are_opened_ahead():
    async with Peer(serve) as peer:
        await peer.reader.warm(5)
        assert peer.reader.dialled == 5
        sinks = [Memory(9) for _ in range(5)]
        await asyncio.gather(*(peer.reader.receive("k", 7, 16, sink) for sink in sinks))
        await peer.reader.warm(5)
        assert peer.connections == peer.reader.dialled == 5
    reader = DirectReader.of(CloudStore("http://127.0.0.1:1/nobody"))
    await reader.warm(2)  # says nothing: who asks for something is told
    assert not any(reader._idle.values())


async def test_what_is_not_urgent_goes_round_and_leaves_the_connection_used_last():
    """That one has carried most lately, so what is urgent has no slow start on it."""
    async with Peer(serve) as peer:
        await peer.reader.warm(3)
        for urgent in (True, False, False, False, True):
            await peer.reader.receive("k", 7, 16, Memory(9), urgent=urgent)
        assert len(set(peer.ports[:3])) == 3
        assert peer.ports[3:] == [peer.ports[0]] * 2


async def test_what_is_not_urgent_leaves_a_connection():
    async with Peer(lambda head: None if b"/s/large" in head else serve(head)) as peer:
        await peer.reader.warm(1)
        large = asyncio.create_task(peer.reader.receive("s/large", 7, 16, Memory(9), urgent=False))
        await peer.asked.wait()
        assert peer.reader.dialled == 2
        await peer.reader.receive("k", 7, 16, Memory(9))
        assert peer.reader.dialled == 2
        assert peer.ports[0] != peer.ports[1]
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)


async def test_a_whole_object_may_come_as_one():
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(DATA) + DATA
    async with Peer(whole, most=1) as peer:
        sink = Memory(len(DATA))
        await peer.reader.receive("k", 0, len(DATA), sink)
        assert sink.buffer == DATA


BODY = DATA[BEGIN:END]
WRONG = {
    "another range": PARTIAL + b"Content-Range: bytes 0-199999/300000\r\n" + LENGTH + b"\r\n" + BODY,
    "a shorter range": PARTIAL + b"Content-Range: bytes 1000-1999/2000\r\nContent-Length: 1000\r\n\r\n" + BODY[:1000],
    "no range": PARTIAL + LENGTH + b"\r\n" + BODY,
    "no length": PARTIAL + RANGE + b"\r\n" + BODY,
    "two lengths": PARTIAL + RANGE + LENGTH + LENGTH + b"\r\n" + BODY,
    "two lengths, one in capitals": PARTIAL + RANGE + LENGTH + LENGTH.upper() + b"\r\n" + BODY,
    "a signed length": PARTIAL + RANGE + LENGTH.replace(b": ", b": +") + b"\r\n" + BODY,
    "the whole object": b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + DATA,
    "as many bytes from the beginning": b"HTTP/1.1 200 OK\r\n" + LENGTH + b"\r\n" + BODY,
    "chunks": PARTIAL + RANGE + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n30d40\r\n" + BODY,
    "gzip": PARTIAL + RANGE + LENGTH + b"Content-Encoding: gzip\r\n\r\n" + BODY,
    "a folded field": PARTIAL + RANGE + LENGTH + b"X: 1\r\n Content-Length: 5\r\n\r\n" + BODY,
    "a space before the colon": PARTIAL + RANGE + LENGTH.replace(b":", b" :") + b"\r\n" + BODY,
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "a length with a control character": PARTIAL + RANGE + LENGTH.replace(b"\r\n", b"\x1b[2J\r\n") + b"\r\n" + BODY,
    "a bare carriage return": PARTIAL + RANGE + LENGTH.replace(b"\r\n", b"\r\r\n") + b"\r\n" + BODY,
    "a control character in the status": PARTIAL.replace(b"Partial", b"\x1b") + RANGE + LENGTH + b"\r\n" + BODY,
    "a name that is none": PARTIAL + RANGE + LENGTH + b"X(Y): 1\r\n\r\n" + BODY,
    "HTTP/1.0": PARTIAL.replace(b"1.1", b"1.0") + RANGE + LENGTH + b"\r\n" + BODY,
    "a head without end": PARTIAL + b"X: " + b"x" * 20_000,
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\n\r\n",
}


@pytest.mark.parametrize("what", WRONG)
async def test_another_answer_is_refused(what):
    async with Peer(WRONG[what], most=1) as peer:
        sink = Memory()
        with pytest.raises(
            RequestError, match=r"below/.*s/key: (the store's answer is wrong|cannot be read)"
        ) as caught:
            await peer.reader.receive("s/key", BEGIN, END, sink)
        assert str(caught.value).isprintable()  # of the peer's own text nothing is told
        assert sink.size == 0
        assert not any(peer.reader._idle.values())


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (404, NotFoundError, "no such object"), (403, UnauthorizedError, "refuses these credentials"),
        (401, UnauthorizedError, "wrong or have expired"), (416, RequestError, "shorter than the range"),
        (503, RequestError, "overloaded"), (429, RequestError, "overloaded"), (500, RequestError, "overloaded"),
    ],
)  # fmt: skip
async def test_an_error_is_told(status, error, says):
    body = b"<Error><Code>secret words of the server</Code></Error>"
    answer = b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body
    async with Peer(answer) as peer:
        with pytest.raises(error, match=says) as caught:
            await peer.reader.receive("s/key", BEGIN, END, Memory())
        assert "secret" not in str(caught.value)
        assert (status in (503, 429, 500)) == (getattr(caught.value, "retry_after_s", None) is not None)


@pytest.mark.parametrize("count", [0, 1, 70_000, END - BEGIN - 1])
async def test_what_is_cut_off_is_lost(count):
    async with Peer(PARTIAL + RANGE + LENGTH + b"\r\n" + BODY[:count], most=1) as peer:
        sink = Memory()
        with pytest.raises(ConnectionLostError, match=f"{END - BEGIN - count} bytes are missing"):
            await peer.reader.receive("k", BEGIN, END, sink)
        assert sink.size == count
        assert sink.buffer[:count] == BODY[:count]


async def test_a_server_that_only_closes():
    async with Peer(b"", most=1) as peer:
        with pytest.raises(ConnectionLostError, match="closed the connection"):
            await peer.reader.receive("k", BEGIN, END, Memory())
    with pytest.raises(ConnectionLostError, match="cannot be reached"):  # and one that is gone
        await peer.reader.receive("k", BEGIN, END, Memory())


async def test_cancelling_ends_the_request():
    async with Peer(lambda _: None) as peer:
        task = asyncio.create_task(peer.reader.receive("k", BEGIN, END, Memory()))
        await peer.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await peer.ended.wait()  # the server saw the end of the connection
        peer.answer = serve
        sink = Memory()
        await peer.reader.receive("k", BEGIN, END, sink)
        assert sink.buffer == BODY


@pytest.mark.parametrize(("passed_by", "direct"), [("", False), ("127.0.0.1", True)])
def test_a_proxy_is_left_to_obstore(monkeypatch, passed_by, direct):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", passed_by)
    assert (DirectReader.of(CloudStore("http://127.0.0.1:8080/x")) is not None) == direct


async def test_a_private_store_takes_signed_requests(seaweed):
    bucket = CloudStore(seaweed.url("signed"))
    await bucket.put_new("s/a", DATA)
    reader = DirectReader.of(bucket)
    sink = Memory()
    await reader.receive("s/a", BEGIN, END, sink)
    assert sink.buffer == BODY
    with pytest.raises(NotFoundError):
        await reader.receive("s/b", BEGIN, END, Memory())
    with pytest.raises(RequestError):
        await reader.receive("s/a", len(DATA) - 10, len(DATA) + 10, Memory(20))
    await reader.close()
    assert reader.dialled <= 2
