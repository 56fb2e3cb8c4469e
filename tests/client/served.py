"""A real origin over QUIC in this process, on an event loop in a thread of its own."""

import contextlib
import hashlib

import structlog

from kvabr.client.blocking import LoopThread
from kvabr.server.certificates import ServerTls, check, make
from kvabr.server.grants import Grant, Grants
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server

LIMIT_S = 300.0
"""Real seconds that something may take on the slowest machine; also a deadline that no machine misses."""

LOG = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


class Served(contextlib.AbstractContextManager):
    def __init__(self, root, folder, *, token=None, quic="aioquic", certificate=None):
        certificate, key = certificate or make()
        self.pem, keyfile = folder / "cert.pem", folder / "key.pem"
        self.pem.write_bytes(certificate)
        keyfile.write_bytes(key)
        self._root, self._quic = root, quic
        self._grants = None
        if token is not None:
            self._grants = Grants([Grant("t", token_sha256=hashlib.sha256(token.encode()).hexdigest())])
        self._tls = ServerTls(self.pem, keyfile)
        self.metrics = Metrics()
        self.fingerprint = check(self._tls).fingerprint
        self._loop = LoopThread()
        self.port = 0
        self.start()

    def start(self):
        library = PublishedAssets(self._root, self._grants, LOG)
        server = Server(
            library, "127.0.0.1", self.port, self._tls, ServerLimits(), LOG, self.metrics,
            quic=self._quic,
        )  # fmt: skip
        self._loop.call(server.start())
        self._server, self.port, self.look = server, server.address[1], library.refresh

    @property
    def url(self):
        return f"moqt://127.0.0.1:{self.port}/"

    def kill(self):
        """End the server at once, without a word to its peers' requests; `start` brings it back."""
        self._loop.call(self._server.close())

    def __exit__(self, *_):
        self.close()

    def close(self):
        with contextlib.suppress(Exception):
            self.kill()
        self._loop.close()
