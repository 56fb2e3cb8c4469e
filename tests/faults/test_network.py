"""Plays over links that lose, delay, fall silent, and lead nowhere: real QUIC, real processes."""

import asyncio
import signal
from contextlib import AsyncExitStack

import pytest

from kvabr.transfer.interface import read_all
from kvabr.types.errors import ConnectionLostError, TransportError
from kvabr.types.naming import TrackNamespace
from tests.client.playing import play
from tests.faults.common import (
    DIGESTS,
    GROUPS,
    LIBRARIES,
    LIMIT_S,
    SPEC,
    TOKENS,
    Log,
    connect,
    for_both,
    relay_process,
    right,
    serve_process,
    shape,
    shaped,
)

pytestmark = pytest.mark.process

MB = 1e6
GROUP = TrackNamespace(SPEC.model, DIGESTS[-1]), "FP16", GROUPS - 1
FORGOTTEN = "the peer fell silent; it answers a new connection"


async def test_an_outage_in_the_middle(origin):
    async def one(library):
        async with origin(library=library) as served:
            with shaped(served.address, rtt_s=0.01) as link:
                async with served.connect(library, link.address) as connection:
                    shape(link, [0.1 * MB, 0, 1 * MB, 1 * MB, 1 * MB], step=0.4, rtt_s=0.01)
                    played = await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:FP16", spec=SPEC)
                    return played, connection.dials

    for played, dials in await for_both(one):
        assert right(played)
        assert played.met
        assert dials == 0  # the old connection has outlived it


async def killed_and_started_again(start, fingerprint, libraries) -> None:
    """Have players in the middle of a play, and others that ask only later, when ``start``'s process is killed."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(start(0))
        links = []

        async def connected(library):
            link = stack.enter_context(shaped(first.address, [0.15 * MB], rtt_s=0.01))
            links.append(link)
            return await stack.enter_async_context(connect(link.address, fingerprint, library))

        def playing(connection, log):
            return asyncio.create_task(
                play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:FP16", spec=SPEC, log=log)
            )

        async def begun(log, link):
            await log.seen("decoded")
            shape(link, [0.005 * MB], rtt_s=0.01)  # however late this process gets its turn, the play is not over

        busy = [(await connected(library), Log()) for library in libraries]
        idle = [(await connected(library), Log()) for library in libraries]
        tasks = [playing(*one) for one in busy]
        await asyncio.gather(*(begun(log, link) for (_, log), link in zip(busy, links, strict=False)))
        cut_off = [asyncio.create_task(read_all(connection.fetch(*GROUP, limit=1 << 20))) for connection, _ in idle]
        await asyncio.sleep(0)  # they are asked for
        await first.kill()
        before = [len(log.lines) for _, log in busy]
        await stack.enter_async_context(start(first.address[1]))
        for link in links:
            shape(link, [2 * MB], rtt_s=0.01)
        for error in await asyncio.gather(*cut_off, return_exceptions=True):
            assert isinstance(error, ConnectionLostError), error
            # Where the new one takes long to start, the connection has timed out before it could say so.
            assert any(why in str(error) for why in (FORGOTTEN, "nothing came from the peer", "Idle timeout")), error
        tasks += [playing(*one) for one in idle]
        results = await asyncio.gather(*tasks)
    for played, (connection, _) in zip(results, busy + idle, strict=True):
        assert right(played)
        assert played.met
        assert connection.dials, connection.backend  # more than once where the new process takes long to start
    for at, (_, log) in zip(before, busy, strict=True):
        had = {line.group for line in log.lines[:at] if line.name == "decoded"}
        asked = {line.group for line in log.lines[at:] if line.name == "request"}
        assert had
        assert asked
        assert not had & asked


async def test_an_origin_or_a_relay_killed_in_the_middle_and_started_again(origin, root, tls, fingerprint):
    """The player reconnects and keeps its groups; without open requests it notices only at the next one."""
    async with origin() as served:
        await asyncio.gather(
            killed_and_started_again(lambda port: serve_process(root, tls, port=port), fingerprint, LIBRARIES),
            killed_and_started_again(lambda port: relay_process(served, tls, port=port), fingerprint, ["qh3"]),
        )


async def test_a_rolling_restart(root, tls, fingerprint):
    """The old server completes open requests and admits no client; the play continues at the new one."""
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(serve_process(root, tls))
        link = stack.enter_context(shaped(old.address, [0.1 * MB], rtt_s=0.01))
        connection = await stack.enter_async_context(connect(link.address, fingerprint))
        log = Log()
        work = play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:FP16", spec=SPEC, log=log)
        task = asyncio.create_task(work)
        await log.seen("first_byte")
        old.process.send_signal(signal.SIGTERM)
        await log.seen("decoded")
        shape(link, [1000.0], rtt_s=0.01)  # so that the old one is still there when somebody else comes
        with pytest.raises(TransportError) as refused:
            async with connect(old.address, fingerprint):
                pass
        shape(link, [0.1 * MB], rtt_s=0.01)
        assert await old.process.wait() == 0
        before = len(log.lines)
        await stack.enter_async_context(serve_process(root, tls, port=old.address[1]))
        shape(link, [2 * MB], rtt_s=0.01)
        played = await task
        dials = connection.dials
    assert "going away" in str(refused.value)
    assert right(played)
    assert played.met
    had = {line.group for line in log.lines[:before] if line.name == "decoded"}
    asked = {line.group for line in log.lines[before:] if line.name == "request"}
    assert dials == 1 or not asked  # a busy machine may stop the old server only once everything has been asked for
    assert had
    assert not had & asked
    reasons = log.reasons()  # a busy machine may take a link at 1 kB/s for a silent one as well
    assert not reasons or any("going away" in reason for reason in reasons), reasons
