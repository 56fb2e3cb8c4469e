"""An origin that has failed is left alone until it answers a probe, and longer if it fails again."""

import asyncio
import time

from kvabr.engines import origin_pause
from kvabr.engines.origin_pause import MAX_PAUSE_S, OriginPause
from kvabr.types.errors import ConnectionLostError

LIMIT_S = 300.0


class Peer:
    """A client whose origin answers when it is told to."""

    def __init__(self):
        self.alive, self.probes = False, 0

    async def round_trip(self, *, probe_s):
        self.probes += 1
        if not self.alive:
            raise ConnectionLostError("gone")
        return probe_s / 2


def paused(peer):
    tasks = []

    def begin(work):
        tasks.append(asyncio.get_running_loop().create_task(work(peer)))

    return OriginPause(begin), tasks


async def test_it_is_asked_again_once_it_answers(monkeypatch):
    monkeypatch.setattr(origin_pause, "FIRST_PAUSE_S", 0.0)
    peer = Peer()
    pause, tasks = paused(peer)
    assert not pause.active
    assert pause.failed(time.monotonic()) == 0.0
    while peer.probes < 3:
        assert pause.active
        await asyncio.sleep(0.01)
    peer.alive = True
    async with asyncio.timeout(LIMIT_S):
        await tasks[0]
    assert not pause.active
    assert len(tasks) == 1


async def test_failures_at_the_same_time_are_one_and_each_further_one_doubles_the_pause(monkeypatch):
    monkeypatch.setattr(origin_pause, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(origin_pause, "MAX_PAUSE_S", 3000.0)
    peer = Peer()
    peer.alive = True
    pause, tasks = paused(peer)
    began_s = time.monotonic()
    assert pause.failed(began_s) == 1000.0
    assert pause.failed(began_s) is None  # the probe is under way
    await tasks[-1]
    assert pause.failed(began_s) is None  # it began before the pause did
    assert pause.active
    later_s = began_s + LIMIT_S
    assert [pause.failed(later_s), await tasks[-1], pause.failed(later_s + 5000.0)] == [2000.0, None, 3000.0]
    await tasks[-1]
    pause.answered()
    assert not pause.active
    assert pause.failed(time.monotonic()) == 1000.0
    await tasks[-1]
    assert MAX_PAUSE_S == 30.0


async def test_a_request_that_had_no_time_for_an_answer_pauses_nothing(monkeypatch):
    monkeypatch.setattr(origin_pause, "_NAPS_S", (0.01,))
    peer = Peer()
    pause, tasks = paused(peer)
    for alive in (True, False):
        peer.alive = alive
        for _ in range(6):
            assert pause.failed(time.monotonic(), within_s=0.001) is None
            assert pause.failed(time.monotonic(), within_s=0.3, rtt_s=0.1) is None
        assert not pause.active
        assert len(tasks) == (1 if alive else 2)  # one probe for all of them
        if alive:
            await tasks[0]
    async with asyncio.timeout(LIMIT_S):
        while not pause.active:  # noqa: ASYNC110  # it does not answer the probe either
            await asyncio.sleep(0.01)
        peer.alive = True
        await tasks[-1]
    assert not pause.active
