"""Dialling over QUIC in Python, by aioquic or qh3."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvabr.moqt.wire import DRAFTS
from kvabr.quic import trust as certificate
from kvabr.quic.connection import QuicConnection
from kvabr.quic.endpoint import protocol_class
from kvabr.quic.library import LibraryName, QuicLibrary, library
from kvabr.quic.options import DialOptions
from kvabr.types.errors import TransportError

HEAD_START_S = 0.25
"""What an address has before the next one of the same host is tried beside it (RFC 8305, section 5)."""
_MOST_ADDRESSES = 8

A = TypeVar("A")
C = TypeVar("C")


async def dial(options: DialOptions, library_name: LibraryName = "aioquic") -> QuicConnection:
    """Connect to a publisher or a relay, at whichever of its addresses answers first.

    Args:
        options: whom, and how.
        library_name: ``aioquic`` or ``qh3``.

    Returns:
        The connection, on which the peer's SETUP has come.

    Raises:
        TransportError: the host is unknown, does not answer, has a bad certificate, speaks none of the drafts, or
            does not want us.
    """
    lib = library(library_name)
    where = f"{options.host}:{options.port}"
    loop = asyncio.get_running_loop()
    end_s = loop.time() + options.timeout_s
    try:
        found = await asyncio.wait_for(
            loop.getaddrinfo(options.host, options.port, type=socket.SOCK_DGRAM), options.timeout_s
        )
    except TimeoutError as error:
        raise TransportError(f"{where}: the name server did not answer within {options.timeout_s:.3g} s") from error
    except OSError as error:
        raise TransportError(f"{where}: no such host ({error})") from error
    known = {draft.alpn for draft in DRAFTS}
    alpn = [draft for draft in options.drafts if draft in known]
    if not alpn:
        raise TransportError(f"{where}: {', '.join(options.drafts)}: this kvabr speaks {', '.join(sorted(known))}")

    made: list[QuicConnection] = []

    async def attempt(address: tuple[int, Any]) -> QuicConnection:
        made.append(await _dial_address(lib, options, alpn, address, max(0.0, end_s - loop.time())))
        return made[-1]

    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    chosen: QuicConnection | None = None
    try:
        chosen = await first_of(addresses[:_MOST_ADDRESSES], attempt, HEAD_START_S)
    except TransportError as error:
        raise TransportError(f"{where}: {error}") from error
    finally:
        for connection in made:  # two may have answered at the same time
            if connection is not chosen:
                await connection.close()
    return chosen


class NoAnswerError(TransportError):
    """Nothing came from an address: who knows whether anybody is there."""


async def first_of(candidates: Sequence[A], attempt: Callable[[A], Coroutine[Any, Any, C]], head_start_s: float) -> C:
    """What the first attempt that succeeds brings, of one for each candidate.

    Each begins when the one before it has failed, or has had its head start. Once somebody has answered, and nobody is
    left to be tried, silence lasts no longer than one more head start. Attempts that are not needed are cancelled.

    Raises:
        TransportError: that of who answered; `NoAnswerError` if nobody did.
    """
    tasks: list[asyncio.Task[C]] = []
    waiting = list(candidates)
    try:
        while waiting or not all(task.done() for task in tasks):
            if waiting:
                tasks.append(asyncio.get_running_loop().create_task(attempt(waiting.pop(0))))
            pending = {task for task in tasks if not task.done()}
            patient = not waiting and _answer(tasks) is None
            done, _ = await asyncio.wait(
                pending, timeout=None if patient else head_start_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if task.exception() is None:
                    return task.result()
            if not waiting and not done and not patient:
                break
        raise _answer(tasks) or NoAnswerError("no address to dial") from None
    finally:
        losers = [task for task in tasks if not task.done()]
        for task in losers:
            task.cancel()
        if losers:
            await asyncio.wait(losers)


def _answer(tasks: Sequence[asyncio.Task[C]]) -> BaseException | None:
    """What an attempt that failed has to say: one that had an answer, or, if all had none, any."""
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    said = [error for error in errors if not isinstance(error, NoAnswerError)]
    return said[0] if said else errors[0] if len(errors) == len(tasks) else None


async def _dial_address(
    lib: QuicLibrary, options: DialOptions, alpn: list[str], address: tuple[int, Any], timeout_s: float
) -> QuicConnection:
    family, where = address
    configuration = lib.configure(client=True, alpn=alpn, server_name=options.host)
    certificate.trust(configuration, options, lib.name)
    connection = QuicConnection(lib, options)
    cls = protocol_class(lib, lambda _: connection)
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104  # a client's port
        transport, protocol = await lib.open_socket(sock, lambda: cls(lib.connection(configuration=configuration)))
    except OSError as error:
        sock.close()
        raise TransportError(f"no socket can be opened ({error})") from error
    connection.attach(transport)
    try:
        protocol.connect(where)
        await asyncio.wait_for(asyncio.shield(connection.ready), timeout_s)
    except TimeoutError as error:
        await connection.close()
        within = f"within {options.timeout_s:.3g} s"
        if connection.shaken:
            raise TransportError(f"it accepts connections, but sent no SETUP {within}") from error
        raise NoAnswerError(f"no answer {within}; is it running there, and may UDP pass?") from error
    except (TransportError, OSError, ssl.SSLError) as error:
        await connection.close()
        raise TransportError(str(error)) from error
    except BaseException:
        await connection.close()
        raise
    return connection
