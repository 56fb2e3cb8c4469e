"""Who held a transfer up."""

from __future__ import annotations

import asyncio
import time

from kvabr.quic.bottleneck import LimitWatch


class Path:
    """A path whose PINGs are answered at once, or never."""

    def __init__(self, answers):
        self.probes, self._answers = 0, answers
        self.watch = LimitWatch(self._probe, lambda: 0.001)
        self.probed = asyncio.Event()

    def _probe(self):
        self.probes += 1
        self.probed.set()
        if self._answers:
            self.watch.alive()


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_a_silent_publisher_on_a_path_that_answers():
    path = Path(answers=True)
    path.watch.asked(1)
    await asyncio.wait_for(path.probed.wait(), 5)
    assert path.watch.limit == "publisher"
    path.watch.asked(0)
    path.watch.close()


async def test_a_silent_path_is_the_network():
    path = Path(answers=False)
    path.watch.asked(1)
    await asyncio.wait_for(path.probed.wait(), 5)
    assert path.watch.limit == "network"
    path.watch.close()
    path.watch.asked(1)  # nothing is armed any more
    assert path.watch._timer is None


async def test_nothing_is_probed_while_nothing_is_wanted_or_all_moves():
    path = Path(answers=True)
    assert path.watch._timer is None
    path.watch.asked(2)
    for _ in range(8):
        path.watch.received(1000)
        path.watch._look(path.watch._bytes - 1)
    assert path.probes == 0
    path.watch.asked(0)
    assert path.watch._timer is None


async def test_a_thread_that_never_rests_is_its_own_limit():
    path = Path(answers=True)
    path.watch.received(1)
    spin(0.12)
    path.watch.received(1000)
    assert path.watch.limit in ("cpu", "network")  # a busy machine may have taken the core away meanwhile
    for _ in range(20):
        begun, used = time.monotonic(), time.thread_time()
        spin(0.06)
        path.watch.received(1000)
        if time.thread_time() - used > 0.95 * (time.monotonic() - begun):
            assert path.watch.limit == "cpu"
            break
    await asyncio.sleep(0.08)
    path.watch.received(1000)
    assert path.watch.limit == "network"
    path.watch.close()
