"""The origin of a live replay: the server of `kvabr serve` in its own process, with a development certificate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from multiprocessing.connection import Connection

from kvabr.types.errors import KvabrError
from kvabr.types.peer import Quic
from kvabr_lab.live.child import Child, Usage


class LiveOrigin(Child):
    """The origin's process; a context manager."""

    def __init__(self, asset: str | os.PathLike[str], backend: Quic, *, follow: bool = False) -> None:
        """Serve an asset, or a folder of assets, on a free port of the loopback interface.

        With ``follow``, new assets in the folder are detected.

        Raises:
            TransportError: The server cannot start; the message gives the reason.
        """
        super().__init__("origin", _main, os.fspath(asset), backend, follow)
        self.address: tuple[str, int]
        self.fingerprint: str
        self.address, self.fingerprint = self.greeting

    def usage(self) -> Usage:
        """Return the process's processor time so far.

        Raises:
            TransportError: The process has ended.
        """
        answer: Usage = self.ask("usage")
        return answer


def _main(pipe: Connection, asset: str, backend: Quic, follow: bool) -> None:
    with contextlib.suppress(BrokenPipeError):
        try:
            asyncio.run(_serve(pipe, asset, backend, follow=follow))
        except (KvabrError, OSError, ImportError) as error:
            pipe.send(str(error) or repr(error))


async def _serve(pipe: Connection, asset: str, backend: Quic, *, follow: bool) -> None:
    import structlog  # noqa: PLC0415  # the parent process does not need these modules

    from kvabr.server import certificates  # noqa: PLC0415
    from kvabr.server.limits import ServerLimits  # noqa: PLC0415
    from kvabr.server.metrics import Metrics  # noqa: PLC0415
    from kvabr.server.published_assets import PublishedAssets  # noqa: PLC0415
    from kvabr.server.server import Server, Watcher  # noqa: PLC0415

    log = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr), wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING)
    )
    library, metrics = PublishedAssets(asset, None, log), Metrics()
    tls = certificates.development()
    server = Server(library, "127.0.0.1", 0, tls, ServerLimits(), log, metrics, quic=backend)
    watcher = Watcher(library, log, metrics) if follow else contextlib.nullcontext()
    async with watcher, server:
        pipe.send((server.address, certificates.check(tls).fingerprint))
        await _answer_until_the_end(pipe)


async def _answer_until_the_end(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        try:
            pipe.recv()
            pipe.send(Usage.now())
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            over.set_result(None)

    loop.add_reader(pipe.fileno(), ready)
    await over
