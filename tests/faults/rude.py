"""Servers that misbehave: an origin that lies about its groups, and ends of QUIC that do whatever a test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial

from kvabr.link.moqt.endpoint import Endpoint
from kvabr.link.quic.backend import library, load_certificates
from kvabr.link.quic.transport import protocol_class
from kvabr.moqt.objects import FetchWriter
from kvabr.moqt.session import MoqtSession
from kvabr.moqt.wire import DRAFTS, Location
from kvabr.server.client_connection import ClientConnection
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.publication import Publication
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from tests.assets import whole
from tests.faults.common import LIMIT_S, QUIET, Origin, level

GOAL = 2
"""The group that is lied about."""


class Answer:
    """A liar's possible actions in answer to one FETCH."""

    def __init__(self, peer: LyingPeer, number: int, publication: Publication, group: int) -> None:
        self.peer, self.number, self.group = peer, number, group
        self.first_object = publication.objects(group)[0].object_id
        another = (group + 1) % publication.groups
        self.frame, self.other = (whole(publication.open(at)) for at in (group, another))
        self.writer = FetchWriter()
        self.stream: int | None = None

    def accept(self) -> None:
        self.stream = self.peer.session.responder.accept_fetch(self.number, Location(self.group, 0), end_of_track=False)
        self.peer.settle()

    def write(self, data: bytes, *, end: bool = False) -> None:
        if self.stream is None:
            self.accept()
        self.peer.transport.write(self.stream, data, fin=end)

    def one_object(self, payload: bytes, *, group: int | None = None, size: int | None = None, end: bool = True):
        at = self.group if group is None else group
        self.write(self.writer.header(at, self.first_object, len(payload) if size is None else size) + payload, end=end)

    def reset(self, code: int) -> None:
        self.peer.session.responder.break_off(self.number, code)
        self.peer.settle_and_send()

    def refuse(self, code: int, reason: str) -> None:
        self.peer.session.responder.refuse(self.number, code, reason)


Lie = Callable[[Answer], None]


class LyingPeer(ClientConnection):
    """Answers one group, once or always, as its server's lie says."""

    def _fetch(self, request, message):
        server = self._server
        track, group = request.track, message.start.group
        if not level(track) or group != GOAL or (server.told and server.once):
            super()._fetch(request, message)
            return
        server.told += 1
        server.lie(Answer(self, request.number, request.publication, group))


class LyingServer(Server):
    def __init__(self, *arguments, lie: Lie, once: bool, **options) -> None:
        super().__init__(*arguments, **options)
        self.lie, self.once, self.told = lie, once, 0

    def make_peer(self):
        return LyingPeer(self)


@asynccontextmanager
async def lying(root, tls, fingerprint, lie: Lie, *, once: bool = True):
    server = LyingServer(
        PublishedAssets(root, None, QUIET), "127.0.0.1", 0, tls, ServerLimits(), QUIET, Metrics(), lie=lie, once=once
    )
    async with server:
        yield Origin(server, tls, fingerprint)


class RudeEnd(Endpoint):
    """One end of a connection: ``greet`` gets it after the handshake, ``heard`` each event of its session."""

    def __init__(self, *, greet=None, heard=None, client=False) -> None:
        super().__init__()
        self._greet, self._heard, self._client = greet, heard, client
        self.shaken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self.events = []

    def make_session(self, draft):
        if not self.shaken.done():
            self.shaken.set_result(None)
        if self._greet is not None:
            return self._greet(self, draft)
        return MoqtSession(draft, client=self._client)

    def happened(self, event):
        self.events.append(event)
        if self._heard is not None:
            self._heard(self, event)

    def ended(self, reason, code):
        if not self.over.done():
            self.over.set_result((code, reason))


@asynccontextmanager
async def rude_server(tls, *, greet=None, heard=None, alpn=tuple(draft.alpn for draft in DRAFTS)):
    """A server that does as it likes; yields its address."""
    lib = library("aioquic")
    configuration = lib.configure(client=False, alpn=alpn)
    load_certificates(configuration, tls.certfile, tls.keyfile)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind(("127.0.0.1", 0))
    made = protocol_class(lib, lambda _: RudeEnd(greet=greet, heard=heard))
    served = partial(lib.server, configuration=configuration, create_protocol=made)
    transport, _ = await lib.open_socket(sock, served)
    try:
        yield sock.getsockname()
    finally:
        transport.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def rude_client(address, *, draft=DRAFTS[0], greet=None, name="aioquic", window=None):
    """A client that sends only what a test makes it send; with a ``window`` in bytes, it never opens this further."""
    lib = library(name)
    configuration = lib.configure(client=True, alpn=[draft.alpn], server_name="localhost", idle_timeout=LIMIT_S)
    configuration.verify_mode = 0
    if window is not None:
        configuration.max_data = configuration.max_stream_data = window
    end = RudeEnd(greet=greet, client=True)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind(("127.0.0.1", 0))
    made = protocol_class(lib, lambda _: end)
    transport, protocol = await lib.open_socket(sock, lambda: made(lib.connection(configuration=configuration)))
    try:
        if window is not None:
            protocol._quic._write_connection_limits = protocol._quic._write_stream_limits = lambda *_, **__: None
        protocol.connect(address)
        async with asyncio.timeout(LIMIT_S):
            await end.shaken
        yield end
    finally:
        end.shut(0, "")
        transport.close()
        await asyncio.sleep(0)
