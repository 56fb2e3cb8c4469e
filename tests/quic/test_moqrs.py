"""The client on moq-rs: real sockets, against kvabr's origin on moq-rs and against servers of moq-rs itself."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import socket
import time

import pytest

from kvabr.quic import moq_connection as moqconnection
from kvabr.quic import moq_dial as moqrs
from kvabr.quic import moq_lib as moqlib
from kvabr.quic.interface import read_all
from kvabr.quic.library import library
from kvabr.quic.options import DialOptions
from kvabr.server import certificates
from kvabr.server.server import ServerTls
from kvabr.store.grants import Grant, Grants
from kvabr.types.errors import ConnectionLostError, NotFoundError, RequestError, TransportError
from kvabr.types.naming import CATALOG_TRACK, TrackNamespace
from tests.assets import make_asset
from tests.moqbed import Path, RawServer, dialled, moq, origin

ELSEWHERE = TrackNamespace("other/model", "0" * 64)
SOON_S = 3.0


@pytest.fixture
def asset(tmp_path):
    return make_asset(tmp_path / "asset", list(range(40)), frame_bytes=200_000, levels=("FP16", "Int4"))


@pytest.mark.parametrize("names", ["draft", "split"])
async def test_groups_come_as_they_are_on_disk(asset, names):
    async with origin(asset.path) as server, await dialled(server, names=names) as connection:
        assert (connection.backend, connection.protocol) == ("moq", moqconnection.MOQ_LITE)
        namespace = asset.catalog.namespace
        catalog = await read_all(connection.fetch(namespace, CATALOG_TRACK, limit=1 << 20))
        assert catalog == (asset.path / "catalog.json").read_bytes()
        download = connection.fetch(namespace, "FP16", 3, limit=1 << 20)
        parts = []
        while part := await download.read():
            parts.append(part)
        assert b"".join(parts) == asset.frame(3, "FP16")
        stats = download.stats
        assert stats.requested_s <= stats.first_byte_s <= stats.done_s
        assert stats.received == len(asset.frame(3, "FP16"))
        assert connection.stats().bytes_received == stats.received + len(catalog)
        assert connection.stats().rtt_s > 0
        assert await download.read() == b""


async def test_fifty_at_a_time(asset):
    async with origin(asset.path) as server, await dialled(server) as connection:
        downloads = [
            (group, track, connection.fetch(asset.catalog.namespace, track, group, limit=1 << 20))
            for group in range(10)
            for track in ("FP16", "Int4")
            for _ in range(3)
        ][:50]
        got = await asyncio.gather(*(read_all(download) for _, _, download in downloads))
        for (group, track, _), data in zip(downloads, got, strict=True):
            assert data == asset.frame(group, track)
        await asyncio.gather(*(download.task for _, _, download in downloads))
        await asyncio.sleep(0)
        assert not connection._in_flight
        assert not connection._asked_bytes


async def test_only_so_many_bytes_are_asked_for_at_a_time(asset, monkeypatch):
    monkeypatch.setattr(moqconnection, "IN_FLIGHT_BYTES", 500_000)
    async with origin(asset.path) as server, await dialled(server) as connection:
        namespace = asset.catalog.namespace
        downloads = [
            connection.fetch(namespace, "FP16", group, priority=10 - group, limit=210_000) for group in range(10)
        ]
        assert [download.task is not None for download in downloads] == [True, True] + [False] * 8
        downloads[2].prioritise(0)
        waiting = [download.group for _, _, download in connection._waiting]
        assert waiting == [2, 9, 8, 7, 6, 5, 4, 3]
        downloads[3].cancel()
        got = await asyncio.gather(*(read_all(each) for each in downloads if each is not downloads[3]))
        assert got == [asset.frame(group, "FP16") for group in range(10) if group != 3]


async def test_what_is_not_there_is_not_found_at_once(asset):
    async with origin(asset.path) as server, await dialled(server) as connection:
        namespace = asset.catalog.namespace
        began = time.monotonic()
        for missing, track, group in (
            (namespace, "FP16", 10),
            (namespace, "AC-5x", 0),
            (namespace, "x" * 4000, 0),
            (namespace, CATALOG_TRACK, 1),
            (ELSEWHERE, CATALOG_TRACK, 0),
            (ELSEWHERE, "FP16", 0),
        ):
            with pytest.raises(NotFoundError, match="no such track"):
                await asyncio.wait_for(read_all(connection.fetch(missing, track, group, limit=1 << 20)), SOON_S)
        assert time.monotonic() - began < SOON_S
        assert await read_all(connection.fetch(namespace, "FP16", 0, limit=1 << 20)) == asset.frame(0, "FP16")


async def test_bytes_come_while_the_publisher_still_writes():
    go_on = asyncio.Event()

    async def write(request):
        group = request.accept()
        group.write_frame(b"first")
        await go_on.wait()
        group.write_frame(b"second")
        group.finish()

    async with RawServer(write) as server, await dialled(server) as connection:
        download = connection.fetch(ELSEWHERE, "FP16", 0, limit=100)
        assert await download.read() == b"first"
        go_on.set()
        assert await read_all(download) == b"firstsecond"


async def test_a_cancelled_download_comes_no_further():
    written = 0

    async def write(request):
        nonlocal written
        group = request.accept()
        while written < 300:
            group.write_frame(bytes(20_000))
            written += 1
            await asyncio.sleep(0.001)
        group.finish()

    async with RawServer(write) as server, await dialled(server) as connection:
        download = connection.fetch(ELSEWHERE, "FP16", 0, limit=10_000_000)
        await download.read()
        download.cancel()
        at_cancel = connection._session.stats().bytes_received
        with pytest.raises(RequestError, match="cancelled"):
            await download.read()
        while written < 300:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert connection._session.stats().bytes_received - at_cancel < 300 * 20_000 / 2
        assert not connection._in_flight
        download.cancel()


async def test_a_priority_is_told():
    seen = []

    async def write(request):
        seen.append(request.priority)
        group = request.accept()
        group.write_frame(b"x")
        group.finish()

    async with RawServer(write) as server, await dialled(server) as connection:
        for number, priority in enumerate((0, 10, 255)):
            await read_all(connection.fetch(ELSEWHERE, "FP16", number, priority=priority, limit=10))
    assert seen == [255, 245, 0]


async def test_a_publisher_that_sends_too_much_is_cut_off():
    async def write(request):
        group = request.accept()
        for _ in range(100 if request.sequence == 0 else 1):
            group.write_frame(bytes(1000))
        group.finish()

    async with RawServer(write) as server, await dialled(server) as connection:
        with pytest.raises(RequestError, match="longer than the 5000 bytes expected"):
            await read_all(connection.fetch(ELSEWHERE, "FP16", 0, limit=5000))
        assert await read_all(connection.fetch(ELSEWHERE, "FP16", 1, limit=5000)) == bytes(1000)


async def test_a_group_without_bytes_is_not_there():
    async def write(request):
        request.accept().finish()

    async with RawServer(write) as server, await dialled(server) as connection:
        with pytest.raises(NotFoundError, match="nothing there"):
            await read_all(connection.fetch(ELSEWHERE, "FP16", 0, limit=5000))


async def test_a_group_that_moq_rs_cannot_carry_says_so():
    async def write(request):
        group = request.accept()
        for _ in range(9):
            group.write_frame(bytes(4 << 20))
            await asyncio.sleep(0.02)  # else moq-rs may give it up before it has told the client that there is one
        group.finish()

    async with RawServer(write) as server, await dialled(server) as connection:
        with pytest.raises(RequestError, match="32 MiB"):
            await read_all(connection.fetch(ELSEWHERE, "FP16", 0, limit=1 << 30))


@pytest.mark.parametrize(
    ("code", "kind", "match"),
    [(0x10, NotFoundError, "no such"), (0x9, RequestError, "too much to do"), (0x3, RequestError, "app code=3")],
)
async def test_refusals_keep_their_codes(code, kind, match):
    async def write(request):
        request.abort(code)

    async with RawServer(write) as server, await dialled(server) as connection:
        with pytest.raises(kind, match=match) as refused:
            await read_all(connection.fetch(ELSEWHERE, "FP16", 0, limit=10))
        assert refused.value.code == code
        assert (refused.value.retry_after_s is not None) == (code == 0x9)


async def test_a_request_that_nobody_answers_ends(monkeypatch):
    monkeypatch.setattr(moqconnection, "_ANSWER_S", 0.3)
    held = []

    async def write(request):
        held.append(request)
        await asyncio.Event().wait()

    async with RawServer(write) as server, await dialled(server) as connection:
        with pytest.raises(RequestError, match=r"no answer within 0.3 s"):
            await asyncio.wait_for(read_all(connection.fetch(ELSEWHERE, "FP16", 0, limit=10)), SOON_S)
        assert held


async def test_catalogs_are_asked_for_anew(asset, tmp_path, monkeypatch):
    monkeypatch.setattr(moqconnection, "_FRESH_S", 0.05)
    async with origin(tmp_path) as server, await dialled(server) as connection:
        namespace = asset.catalog.namespace
        before = await read_all(connection.fetch(namespace, CATALOG_TRACK, limit=1 << 20))
        (tmp_path / "asset").rename(tmp_path / ".old")
        new = make_asset(tmp_path / "asset", list(range(40)), frame_bytes=300, levels=("FP16",), seed=2)
        assert new.catalog.namespace == namespace
        after = before
        end_s = time.monotonic() + SOON_S
        while after == before and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
            after = await read_all(connection.fetch(namespace, CATALOG_TRACK, limit=1 << 20))
        assert after == (new.path / "catalog.json").read_bytes()


# ---------------------------------------------------------------- the end of a connection


async def test_when_the_peer_closes_every_reader_is_told(asset):
    async def write(request):
        request.accept().write_frame(b"first")
        await asyncio.Event().wait()

    async with RawServer(write) as server:
        connection = await dialled(server)
        half = connection.fetch(ELSEWHERE, "FP16", 0, limit=10)
        assert await half.read() == b"first"
        reading = asyncio.create_task(half.read())
    with pytest.raises(ConnectionLostError):
        await asyncio.wait_for(reading, SOON_S)
    with pytest.raises(ConnectionLostError, match="the connection is over"):
        await read_all(connection.fetch(ELSEWHERE, "FP16", 1, limit=10))
    assert connection.closed
    await connection.close()
    await connection.close()


async def test_a_peer_that_falls_silent_is_given_up(asset):
    async def write(request):
        request.accept().write_frame(b"first")
        await asyncio.Event().wait()

    async with (
        RawServer(write) as server,
        Path(server.address) as path,
        await dialled(server, port=path.port, timeout_s=1.0) as connection,
    ):
        half = connection.fetch(ELSEWHERE, "FP16", 0, limit=10)
        assert await half.read() == b"first"
        await asyncio.sleep(1.5)  # nothing to send is no silence: it answers when it is asked
        assert await connection.answers(1.0)
        assert not connection.closed
        path.cut = True
        began = time.monotonic()
        while await connection.answers(0.2):
            assert time.monotonic() - began < 1.0  # only what was on its way before the cut
        with pytest.raises(ConnectionLostError, match="nothing came from the peer"):
            await asyncio.wait_for(half.read(), 5.0)
        assert time.monotonic() - began < 2.0
        assert not await connection.answers(1.0)


async def test_close_leaves_no_task(asset):
    async with origin(asset.path) as server:
        connection = await dialled(server)
        downloads = [connection.fetch(asset.catalog.namespace, "FP16", group, limit=1 << 20) for group in range(10)]
        await connection.close()
        for download in downloads:
            with pytest.raises(ConnectionLostError, match="closed by this side"):
                await read_all(download)
        assert not connection._tasks


# ---------------------------------------------------------------- reaching a peer


async def test_nobody_there_is_found_out_in_time():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        began = time.monotonic()
        with pytest.raises(TransportError, match=r"no answer within 0.4 s; is it running there, and may UDP pass"):
            await moqrs.dial(DialOptions("127.0.0.1", deaf.getsockname()[1], insecure=True, timeout_s=0.4))
        assert time.monotonic() - began < 1.4


async def test_no_such_host():
    with pytest.raises(TransportError, match="no such host"):
        await moqrs.dial(DialOptions("nowhere.invalid", 4443, insecure=True))


def certificate(folder, **more):
    """A certificate with its key, and its fingerprint."""
    pem, key = certificates.make(**more)
    (folder / "cert.pem").write_bytes(pem)
    (folder / "key.pem").write_bytes(key)
    tls = ServerTls(folder / "cert.pem", folder / "key.pem")
    parsed = certificates.x509.load_pem_x509_certificate(pem)
    return tls, certificates.facts_of(parsed).fingerprint


async def test_whom_to_trust(asset, tmp_path):
    tls, fingerprint = certificate(tmp_path)
    async with origin(asset.path, tls=tls) as server:
        host, port = "localhost", server.address[1]
        for trusted in (
            DialOptions(host, port, ca=tls.certfile),
            DialOptions("127.0.0.1", port, ca=tls.certfile),
            DialOptions(host, port, insecure=True),
            DialOptions(host, port, fingerprint=fingerprint.upper()),
            DialOptions(host, port, fingerprint=":".join(fingerprint[at : at + 2] for at in range(0, 64, 2))),
        ):
            async with await moqrs.dial(trusted) as connection:
                assert await read_all(connection.fetch(asset.catalog.namespace, "Int4", 0, limit=1 << 20))
        for doubtful, why in (
            (DialOptions(host, port), "signed by nobody that is trusted"),
            (DialOptions(host, port, fingerprint="00" * 32), "does not have the fingerprint"),
            (DialOptions(host, port, ca=tmp_path / "none.pem"), "certificate file"),
        ):
            with pytest.raises(TransportError, match=why):
                await moqrs.dial(doubtful)


async def test_an_expired_certificate_is_refused(tmp_path):
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=400)
    tls, _ = certificate(tmp_path, now=then)
    server = moq.Server("127.0.0.1:0", tls_cert=[str(tls.certfile)], tls_key=[str(tls.keyfile)])
    await server.__aenter__()
    port = int(server.local_addr.rpartition(":")[2])
    with pytest.raises(TransportError, match="has expired"):
        await moqrs.dial(DialOptions("localhost", port, ca=tls.certfile))
    await moqlib.close(server)


async def test_a_token_is_shown_whatever_is_in_it(asset):
    token = "a b&c=d%/+é?#"  # noqa: S105
    grant = Grant("team", token_sha256=hashlib.sha256(token.encode()).hexdigest())
    async with origin(asset.path, grants=Grants([grant])) as server:
        for path in ("/", "/some/where?x=1"):
            async with await dialled(server, token=token, path=path) as connection:
                assert await read_all(connection.fetch(asset.catalog.namespace, "Int4", 0, limit=1 << 20))
        for wrong in (None, "guess"):
            with pytest.raises(TransportError, match="token is missing or wrong") as refused:
                await dialled(server, token=wrong)
            assert "guess" not in str(refused.value)


async def test_a_peer_without_a_common_protocol(tmp_path):
    tls, _ = certificate(tmp_path)
    lib = library("aioquic")
    configuration = lib.configure(client=False, alpn=["moqt-99"])
    configuration.load_cert_chain(tls.certfile, tls.keyfile)
    from aioquic.asyncio import serve

    server = await serve("127.0.0.1", 0, configuration=configuration)
    try:
        port = server._transport.get_extra_info("sockname")[1]
        with pytest.raises(TransportError, match="no common protocol"):
            await moqrs.dial(DialOptions("localhost", port, insecure=True))
    finally:
        server.close()


async def test_without_the_library_it_is_said_how_to_get_it(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(moqlib, "import_module", missing)
    with pytest.raises(TransportError, match=r"pip install 'kvabr\[moq\]'"):
        await moqrs.dial(DialOptions("localhost", 4443))
