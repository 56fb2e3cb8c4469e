"""A very small HTTP/1.1 server for two pages: ``/metrics`` for Prometheus, ``/healthz`` for whoever starts servers.

It reads no body, keeps no connection open, and takes neither long requests nor slow ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from kvabr.telemetry.exposition import Exposition
from kvabr.types.errors import TransportError

_MAX_REQUEST_BYTES = 8192
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ScrapeServer:
    """Serves the metrics; an async context manager."""

    def __init__(self, metrics: Exposition, host: str, port: int, healthy: Callable[[], bool] = lambda: True) -> None:
        """Take note; nothing is bound before it is entered.

        Args:
            metrics: what to show.
            host: name or address to bind.
            port: TCP port; 0 takes a free one.
            healthy: whether ``/healthz`` says ok (200) or not (503).
        """
        self._metrics, self._host, self._port, self._healthy = metrics, host, port, healthy
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are bound."""
        if self._server is None:
            return self._host, self._port
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=_MAX_REQUEST_BYTES)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TransportError(
                f"cannot serve metrics on {self._host}:{self._port} ({reason}); give another --metrics HOST:PORT"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # Gone, too slow, or not HTTP: nobody waits for an answer that is worth giving.
            pass
        finally:
            self._tasks.discard(task)
            with suppress(OSError):
                writer.transport.abort()

    def _answer(self, request: bytes) -> bytes:
        parts = request.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "not HTTP/1.1\n", body=True)
        method, path = parts[0], parts[1].split(b"?", 1)[0]
        if method not in {b"GET", b"HEAD"}:
            return _response("405 Method Not Allowed", "GET or HEAD\n", body=True)
        body = method == b"GET"
        if path == b"/metrics":
            return _response("200 OK", self._metrics.expose(), body=body)
        if path == b"/healthz":
            ok = self._healthy()
            return _response(*(("200 OK", "ok\n") if ok else ("503 Service Unavailable", "draining\n")), body=body)
        return _response("404 Not Found", "there are /metrics and /healthz\n", body=body)


def _response(status: str, text: str, *, body: bool) -> bytes:
    data = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (data if body else b"")
