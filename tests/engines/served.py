"""An origin over QUIC in this process for tests of engines: it looks for what is new when it is told to."""

import time
from contextlib import contextmanager

from kvabr.client.blocking import LoopThread
from kvabr.server.certificates import ServerTls, check, make
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.store.locations import open_store
from tests.client.served import LOG


def assets_of(root):
    store = open_store(root)
    return [store.open(prompt) for prompt in store.list()]


@contextmanager
def harmed(asset, group, track, harm="missing"):
    """A frame has another byte (``corrupt``), or its object is not there (``missing``); afterwards it is as it was."""
    place = asset.place(group, track)
    path = asset.store.path(place.name)
    data = path.read_bytes()
    broken = bytearray(data)
    broken[(place.first + place.last) // 2] ^= 1
    path.unlink() if harm == "missing" else path.write_bytes(broken)
    try:
        yield
    finally:
        path.write_bytes(data)


class Origin:
    """Serves a folder, and looks for what is new when it is told to."""

    def __init__(self, folder):
        self.root = folder / "assets"
        self.root.mkdir()
        certificate, key = make()
        (folder / "cert.pem").write_bytes(certificate)
        (folder / "key.pem").write_bytes(key)
        tls = ServerTls(folder / "cert.pem", folder / "key.pem")
        self.fingerprint = check(tls).fingerprint
        self.loop = LoopThread()
        self.holdings = PublishedAssets(self.root, None, LOG)
        self.server = Server(self.holdings, "127.0.0.1", 0, tls, ServerLimits(), LOG, Metrics())
        self.loop.call(self.server.start())
        self.url = f"moqt://127.0.0.1:{self.server.address[1]}/"

    def look(self, assets):
        """Wait until this number of assets is published."""

        async def refresh():
            self.holdings.refresh()

        end = time.monotonic() + 300
        while len(self.holdings.assets) < assets and time.monotonic() < end:
            time.sleep(0.02)
            self.loop.call(refresh())
        assert len(self.holdings.assets) == assets

    def close(self):
        self.loop.call(self.server.close())
        self.loop.close()
