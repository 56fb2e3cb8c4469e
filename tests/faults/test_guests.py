"""Clients that misbehave: limits hold, others are served meanwhile, and nothing is left of them afterwards."""

import asyncio
import os
import random
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvabr.moqt.codes import RequestCode, SessionCode
from kvabr.moqt.events import Ready, Refused
from kvabr.moqt.messages import RequestUpdate, SubscribeNamespace
from kvabr.moqt.wire import DRAFTS, Location, Parameters, write_varint
from kvabr.server import limits
from kvabr.server import server as quicserver
from kvabr.server.client_connection import ClientConnection
from kvabr.store.asset import Asset
from kvabr.transfer.interface import read_all
from kvabr.types.errors import ConnectionLostError, TransportError
from kvabr.types.naming import CATALOG_TRACK
from tests.client.playing import play
from tests.faults.common import LIBRARIES, LIMIT_S, SPEC, TOKENS, right, serving
from tests.faults.rude import rude_client
from tests.fuzz.sessions import held

pytestmark = pytest.mark.process

HERE = Location(0, 0)
EACH = [("qh3", DRAFTS[0]), *(("aioquic", draft) for draft in DRAFTS[1:])]
"""Each library and each draft: neither knows of the other."""
STOPPED = SimpleNamespace(monotonic=lambda: 1000.0)
"""Stands in for the module `time`: no time passes, so a rate is a number of requests."""


async def others_are_served(served):
    async with served.connect() as connection:
        played = await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC)
    assert right(played)
    assert played.met


def ask(end, catalog, track="FP16", group=0):
    """Ask for a group, without the courtesies of a `MoqtConnection`."""
    where = Location(group, 0)
    number = end.session.fetch(catalog.namespace.fields(), track.encode(), where, where, Parameters())
    end.settle()
    return number


def refusals(end):
    return [event.message for event in end.events if isinstance(event, Refused)]


async def until(holds):
    """Wait until something is so that no event tells of."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110  # as it says
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("library", "draft"), EACH, ids=lambda one: getattr(one, "alpn", one))
async def test_a_flood_of_requests(root, tls, fingerprint, catalog, library, draft):
    async with serving(root, tls, fingerprint, library=library, requests_per_connection=8) as served:
        async with rude_client(served.address, draft=draft) as end:
            for number in range(400):
                ask(end, catalog, group=number % 6)
            end.transport.flush()
            most = 0

            async def watch():
                nonlocal most
                while True:
                    most = max(most, *(len(peer._queue) for peer in served.server.peers), 0)
                    await asyncio.sleep(0.001)

            watching = asyncio.create_task(watch())
            await others_are_served(served)
            await until(lambda: refusals(end))
            watching.cancel()
            assert most <= 8
            assert {refusal.code for refusal in refusals(end)} == {RequestCode.EXCESSIVE_LOAD}
            assert all("more than 8 requests at a time" in refusal.reason for refusal in refusals(end))
            assert all(refusal.retry_interval > 0 for refusal in refusals(end))
        await served.empty()


async def test_more_requests_a_second_than_allowed(root, tls, fingerprint, catalog, monkeypatch):
    monkeypatch.setattr(limits, "time", STOPPED)
    async with serving(root, tls, fingerprint, requests_per_s=20) as served:
        async with rude_client(served.address) as end:
            for _ in range(100):
                ask(end, catalog, "no such track")
            end.transport.flush()
            await until(lambda: len(refusals(end)) == 100)
            codes = [refusal.code for refusal in refusals(end)]
            assert codes.count(RequestCode.DOES_NOT_EXIST) == 20
            assert codes.count(RequestCode.EXCESSIVE_LOAD) == 80
            await others_are_served(served)
        await served.empty()


def out_of_time(served):
    """Do now what the server does with connections whose handshake takes longer than `handshake_s`."""
    for peer in list(served.server.peers):
        if not peer._handshake.cancelled():
            peer._too_slow()


GARBAGE = {
    "control stream": (2, os.urandom(200)),
    "request": (0, b"\x3f\x00\x04abcd"),
    "request that does not end": (0, b"\x03\xff\xff" + bytes(100)),
    "objects of an unknown kind": (2, b"\x3e" * 100),
    "objects nobody asked for": (2, b"\x05\x01" + bytes(100)),
}


@pytest.mark.parametrize("library", LIBRARIES)
async def test_garbage_on_streams(root, tls, fingerprint, library):
    async with (
        serving(root, tls, fingerprint, library=library, handshake_s=LIMIT_S) as served,
        AsyncExitStack() as stack,
    ):
        ends = []
        for stream, data in GARBAGE.values():
            end = await stack.enter_async_context(rude_client(served.address, greet=lambda *_: None))
            end.transport.write(stream, data)
            end.transport.flush()
            ends.append(end)
        # Some of it is not wrong yet: it might go on.
        await until(lambda: all(peer._over or (peer.session and held(peer.session)) for peer in served.server.peers))
        out_of_time(served)
        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*(end.over for end in ends))
        for name, (code, reason) in zip(GARBAGE, results, strict=True):
            assert code in {SessionCode.PROTOCOL_VIOLATION, SessionCode.CONTROL_MESSAGE_TIMEOUT}, (name, reason)
        await others_are_served(served)
        await served.empty()


def first_packet(dice):
    """What looks like the first packet of a connection of version 1."""
    return b"\xc0\0\0\0\1\x08" + dice.randbytes(8) + b"\0\0\x44\xb0" + dice.randbytes(1200)


def first_packet_with_token(dice):
    return b"\xc0\0\0\0\1\x08" + dice.randbytes(8) + b"\0\x41\0" + dice.randbytes(256 + 1200)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_garbage_in_packets(root, tls, fingerprint, library):
    """Also handshakes that nobody means to finish, from addresses that need not be the sender's."""
    dice = random.Random(2)
    async with serving(root, tls, fingerprint, library=library, handshake_s=LIMIT_S) as served:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(served.address)
            for number in range(300):
                sock.send(dice.randbytes(dice.randrange(1, 1500)))
                sock.send(first_packet(dice))
                sock.send(first_packet_with_token(dice))
                if number % 10 == 9:
                    await asyncio.sleep(0)
            # Newcomers must prove that their address is theirs.
            await until(lambda: served.server._server._retry is not None)
            for client in LIBRARIES:
                async with served.connect(client) as connection:
                    assert len(served.server.peers) < 80
                    played = await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC)
                    assert right(played)
        out_of_time(served)
        await served.empty()


async def test_connections_without_end(root, tls, fingerprint):
    async with serving(root, tls, fingerprint, connections=5, handshake_s=LIMIT_S) as served:
        async with served.connect() as guest, AsyncExitStack() as stack:
            client = lambda: stack.enter_async_context(rude_client(served.address, greet=lambda *_: None))  # noqa: E731
            ends = [await client() for _ in range(12)]
            await until(lambda: sum(end.over.done() for end in ends) == 8)
            out_of_time(served)
            async with asyncio.timeout(LIMIT_S):
                reasons = [reason for _, reason in await asyncio.gather(*(end.over for end in ends))]
            assert sum("too many connections" in reason for reason in reasons) == 8
            assert sum("no SETUP arrived in time" in reason for reason in reasons) == 4
            played = await play(guest, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC)
            assert right(played)
        await served.empty()


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.alpn)
async def test_names_that_are_too_long(root, tls, fingerprint, catalog, draft):
    fits = ((b"x" * 100,) * 32, b"y" * 800), ((b"\xff\xfe",), b"\xff")
    too_long = ((b"x" * 100,) * 33, b"y"), ((b"x" * 4000,), b"y" * 200), ((b"x" * 40000,), b"y")
    async with serving(root, tls, fingerprint) as served:
        for name in (*fits, *too_long):
            async with rude_client(served.address, draft=draft) as end:
                await until(lambda: any(isinstance(event, Ready) for event in end.events))
                number = end.session.fetch(catalog.namespace.fields(), b"Int4", HERE, HERE, Parameters())
                (command,) = end.session.take_commands()
                end._carry_out(replace(command, data=raw_fetch(number, *name)))
                end.transport.flush()
                await until(lambda: end.over.done() or refusals(end))
                if name in fits:
                    assert refusals(end)[0].code == RequestCode.DOES_NOT_EXIST
                else:
                    assert end.over.result()[0] == SessionCode.PROTOCOL_VIOLATION
        await others_are_served(served)
        await served.empty()


def raw_fetch(number, namespace, track):
    """A FETCH as our own encoder would never write it."""
    encode = write_varint
    name = encode(len(namespace)) + b"".join(encode(len(field)) + field for field in namespace)
    body = encode(number) + name + encode(len(track)) + track + bytes(1)
    return encode(0x16) + len(body).to_bytes(2, "big") + body


async def test_answers_that_nobody_reads(root, tls, fingerprint, monkeypatch):
    """Each change of a request has one, on the request's stream. (What qh3 has sent once it no longer counts.)"""
    monkeypatch.setattr(ClientConnection, "most_unread", 1000)
    async with serving(root, tls, fingerprint) as served:
        async with rude_client(served.address) as end:
            await until(lambda: any(isinstance(event, Ready) for event in end.events))
            (peer,) = served.server.peers
            asyncio.get_running_loop()._remove_reader(end.transport.driver._transport.get_extra_info("socket").fileno())
            channel = end.session._channel
            stream = channel.open_bidi()
            channel.write(stream, SubscribeNamespace(channel.take_id(), ()))
            for _ in range(600):
                channel.write(stream, RequestUpdate(channel.take_id()))
            end.settle()
            end.transport.flush()
            await until(lambda: peer.transport.quic._close_event is not None)
            assert peer.transport.quic._close_event.reason_phrase == "the peer does not read answers"
            await until(lambda: peer not in served.server.peers)
        await others_are_served(served)
        await served.empty()


async def test_a_mistake_of_ours_ends_one_connection_and_says_so(root, tls, fingerprint, catalog, monkeypatch, caplog):
    right_way = ClientConnection._fetch

    def fetch(peer, request, message):
        if message.track == b"FP16":
            raise ZeroDivisionError("nobody thought of that")
        right_way(peer, request, message)

    monkeypatch.setattr(ClientConnection, "_fetch", fetch)
    async with serving(root, tls, fingerprint) as served, served.connect() as guest:
        assert await read_all(guest.fetch(catalog.namespace, "Int4", limit=1 << 20))
        async with served.connect() as connection:
            with pytest.raises(ConnectionLostError, match="internal error"):
                await read_all(connection.fetch(catalog.namespace, "FP16", limit=1 << 20))
            assert await read_all(connection.fetch(catalog.namespace, "Int4", limit=1 << 20))
        assert await read_all(guest.fetch(catalog.namespace, "Int4", 1, limit=1 << 20))
        assert not guest.dials
    assert "nobody thought of that" in caplog.text


async def test_priorities_changed_without_end(root, tls, fingerprint, catalog, monkeypatch):
    monkeypatch.setattr(limits, "time", STOPPED)
    async with serving(root, tls, fingerprint, requests_per_s=50) as served:
        async with rude_client(served.address) as end:
            await until(lambda: any(isinstance(event, Ready) for event in end.events))
            number = ask(end, catalog)
            for priority in range(300):
                end.session.requester.update(number, Parameters(priority=priority % 256))
            end.settle_and_send()
            async with asyncio.timeout(LIMIT_S):
                _, reason = await end.over
            assert "updates of requests a second" in reason
        await others_are_served(served)
        await served.empty()


@pytest.mark.parametrize("library", LIBRARIES)
async def test_more_connections_than_can_be_told_so(root, tls, fingerprint, library, monkeypatch):
    """Nothing is kept of them; and when others have gone there is room again."""
    monkeypatch.setattr(quicserver, "_HALF_OPEN", 2)
    dice = random.Random(3)
    async with serving(root, tls, fingerprint, library=library, connections=2, handshake_s=LIMIT_S) as served:
        async with served.connect(), served.connect():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect(served.address)
                for _ in range(2):
                    sock.send(first_packet(dice))
                await until(lambda: len(served.server.peers) == 4)
                for client in LIBRARIES:
                    with pytest.raises(TransportError):
                        async with served.connect(client, timeout_s=0.3):
                            pass
                assert len(served.server.peers) <= 4
        out_of_time(served)
        await until(lambda: not served.server.peers)
        await others_are_served(served)
        await served.empty()


async def test_a_mistake_of_ours_beside_the_event_loop(root, tls, fingerprint, catalog, monkeypatch, caplog):
    def catalog_data(asset):
        raise ZeroDivisionError(asset)

    monkeypatch.setattr(Asset, "catalog_bytes", catalog_data)
    async with serving(root, tls, fingerprint) as served:
        async with served.connect() as connection:
            with pytest.raises(ConnectionLostError, match="internal error"):
                await read_all(connection.fetch(catalog.namespace, CATALOG_TRACK, limit=1 << 20))
            assert await read_all(connection.fetch(catalog.namespace, "Int4", limit=1 << 20))
        await served.empty()
    assert "ZeroDivisionError" in caplog.text
