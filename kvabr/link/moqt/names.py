"""Addresses of hosts. A name server that does not answer holds up nobody but those who ask for that name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

Address = tuple[socket.AddressFamily, Any]
"""Its family, and what a socket of that family connects to."""

_asked: dict[tuple[str, int], Future[Sequence[Address]]] = {}
"""What is being looked up: a thread each, as the system's call cannot be broken off."""
_lock = threading.Lock()


async def addresses_of(host: str, port: int) -> Sequence[Address]:
    """Return the addresses of a host, each once; raise `OSError` if it has none.

    Not in the event loop's own threads, of which a few silent name servers would leave none.
    """
    try:
        return _found(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # it is a name
    with _lock:
        answer = _asked.get((host, port))
        if answer is None:
            answer = Future()
            answer.set_running_or_notify_cancel()  # a caller that gives up must not end it for the others
            thread = threading.Thread(target=_look_up, args=(host, port, answer), name="kvabr-names", daemon=True)
            try:
                thread.start()  # which cannot end it yet: it needs the lock
            except RuntimeError as error:
                raise OSError(str(error)) from error  # the system has no more threads
            _asked[host, port] = answer
    return await asyncio.wrap_future(answer)


def _found(host: str, port: int, flags: int = 0) -> Sequence[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _look_up(host: str, port: int, answer: Future[Sequence[Address]]) -> None:
    try:
        found, error = _found(host, port), None
    except Exception as failure:  # noqa: BLE001  # it is told to those who wait
        found, error = [], failure
    with _lock:
        del _asked[host, port]
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)
