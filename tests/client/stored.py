"""Assets in object stores for tests of playing: put there as publishers do, and a web server that reads them badly."""

import asyncio
import contextlib
import itertools
import re
from dataclasses import dataclass, field

from kvabr.store.locations import open_objects, open_store

_RANGE = re.compile(rb"bytes=(\d+)-(\d*)")
_NAMES = itertools.count()


def memory_url():
    """A store in this process that no other test has."""
    return f"memory://test{next(_NAMES)}"


def put_asset(url, asset):
    """Publish an asset of a folder in a store; return the names of its objects with frames."""
    with open_store(url).writer() as writer:
        writer.begin(asset.catalog.spec)
        for name, track in asset.catalog.published.items():
            for group in range(len(track.bytes)):
                writer.frame(group, name, asset.frame(group, name), track.digests[group])
        if asset.catalog.profile is not None:
            writer.profile(asset.profile_bytes())
        writer.commit(asset.catalog)
    return sorted(open_store(url).open(asset.prompt_digest).objects)


@dataclass
class Fault:
    """The fault of a server at one GET."""

    status: int | None = None
    """Answer with it."""
    silent: bool = False
    """Never answer."""
    stop_after: int | None = None
    """Send this many bytes, and then nothing more."""
    cut_after: int | None = None
    """Send this many bytes, and close the connection."""
    replace: bytes | None = None
    """The object has other bytes."""
    delay_s: float = 0.0
    """Before the first byte."""
    modified: str = "Thu, 01 Jan 2026 00:00:00 GMT"
    """When the object is said to have been written."""


@dataclass
class WebServer:
    """A web server over the objects of a store in memory, which reads ranges, and counts requests."""

    source: str
    """URL of the store."""
    faults: list = field(default_factory=list)
    """Functions of a key and the number of GETs for it before, which return a `Fault` or None."""
    asked: list = field(default_factory=list)
    """(key, first byte, end) of each GET."""
    open: int = 0
    """Connections."""
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a GET is not answered."""

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._tasks = set()
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._answer(await reader.readuntil(b"\r\n\r\n"), writer):
                    pass
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, head, writer):
        key = head.split()[1].decode()[1:]
        fault = self._fault(key)
        try:
            data = bytes(await open_objects(self.source).get(key, limit=1 << 30))
        except Exception:  # noqa: BLE001 - whatever it is, it is not there
            data = None
        first, end, status = 0, 0 if data is None else len(data), 404 if data is None else 200
        if fault.replace is not None and data is not None:
            data, end = fault.replace, len(fault.replace)
        if data is not None and (found := _RANGE.search(head)):
            first, end = int(found[1]), min(end, int(found[2]) + 1 if found[2] else end)
            status = 206 if first < len(data) else 416
        self.asked.append((key, first, end))
        await asyncio.sleep(fault.delay_s)
        if fault.silent:
            self.silent.set()
            await asyncio.Event().wait()
        if fault.status is not None:
            status = fault.status
        body = (data or b"")[first:end] if status in (200, 206) else b""
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", f"Last-Modified: {fault.modified}"]
        if status == 206:
            lines.append(f"Content-Range: bytes {first}-{end - 1}/{len(data)}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        cut = fault.cut_after if fault.stop_after is None else fault.stop_after
        if not head.startswith(b"HEAD"):
            writer.write(body if cut is None else body[:cut])
        await writer.drain()
        if fault.stop_after is not None:
            await asyncio.Event().wait()
        return fault.cut_after is None

    def _fault(self, key):
        before = sum(asked == key for asked, *_ in self.asked)
        return next((fault for each in self.faults if (fault := each(key, before)) is not None), Fault())
