"""Names whose server does not answer, next to others."""

from __future__ import annotations

import asyncio
import socket
import threading

from kvabr.link.moqt.names import _asked, addresses_of


async def test_silent_name_servers_hold_up_nobody_else(monkeypatch):
    answered, asked, real = threading.Event(), [], socket.getaddrinfo

    def silent(host, *rest, **how):
        if host.endswith(".silent") and not how.get("flags"):
            asked.append(host)
            answered.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *rest, **how)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    waiting = [asyncio.create_task(addresses_of(f"{number}.silent", 1)) for number in range(40) for _ in range(2)]
    assert (socket.AF_INET, ("127.0.0.1", 7)) in await addresses_of("localhost", 7)
    assert await addresses_of("127.0.0.1", 7) == [(socket.AF_INET, ("127.0.0.1", 7))]
    await asyncio.to_thread(lambda: None)  # the loop's own threads are free
    waiting[0].cancel()
    answered.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(each, socket.gaierror) for each in found[1:])
    assert sorted(asked) == sorted(f"{number}.silent" for number in range(40))  # each name once
    assert not _asked
