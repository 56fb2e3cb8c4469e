"""Looks up addresses of hosts; a silent name server delays only lookups of its names."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

Address = tuple[socket.AddressFamily, Any]

_lookups: dict[tuple[str, int], Future[Sequence[Address]]] = {}
"""Running lookups, one thread each, since the system call cannot be cancelled."""
_lock = threading.Lock()


async def addresses_of(host: str, port: int) -> Sequence[Address]:
    """Return the addresses of a host, each once; raise `OSError` if it has none.

    Not in the event loop's own threads: silent name servers would occupy all of them.
    """
    try:
        return _found(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    with _lock:
        answer = _lookups.get((host, port))
        if answer is None:
            answer = Future()
            answer.set_running_or_notify_cancel()  # so that one caller cannot cancel it for others
            thread = threading.Thread(target=_look_up, args=(host, port, answer), name="kvabr-names", daemon=True)
            try:
                thread.start()  # it cannot end yet: it needs the lock
            except RuntimeError as error:
                raise OSError(str(error)) from error  # the system has no more threads
            _lookups[host, port] = answer
    return await asyncio.wrap_future(answer)


def _found(host: str, port: int, flags: int = 0) -> Sequence[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _look_up(host: str, port: int, answer: Future[Sequence[Address]]) -> None:
    try:
        found, error = _found(host, port), None
    except Exception as failure:  # noqa: BLE001  # raised in the callers
        found, error = [], failure
    with _lock:
        del _lookups[host, port]
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)
