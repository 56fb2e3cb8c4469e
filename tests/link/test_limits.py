"""Who held a transfer up."""

import asyncio

from kvabr.transfer import interface
from kvabr.transfer.interface import LimitWatch


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


async def test_a_silent_publisher_on_a_path_that_answers():
    path = Path(answers=True)
    path.watch.set_in_flight(1)
    await asyncio.wait_for(path.probed.wait(), 300)
    assert path.watch.limit == "publisher"
    path.watch.set_in_flight(0)
    path.watch.close()


class Clock:
    """Stands in for the module `time`: the clocks advance as a test says."""

    def __init__(self):
        self.wall_s = self.cpu_s = 100.0

    def monotonic(self):
        return self.wall_s

    def thread_time(self):
        return self.cpu_s

    def run(self, seconds, *, busy):
        self.wall_s += seconds
        self.cpu_s += busy * seconds


async def test_a_thread_that_never_rests_is_its_own_limit(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interface, "time", clock)
    path = Path(answers=True)
    for busy, limit in ((0.5, "network"), (0.95, "cpu"), (0.85, "network"), (1.0, "cpu"), (0.0, "network")):
        clock.run(0.06, busy=busy)
        path.watch.received(1000)
        assert path.watch.limit == limit, busy
    clock.run(0.01, busy=1.0)
    path.watch.received(1000)
    assert path.watch.limit == "network", "too short a time to judge by"
    path.watch.close()


async def test_what_ends_a_silence_of_the_publisher_is_limited_by_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interface, "time", clock)
    path = Path(answers=True)
    path.watch.set_in_flight(1)
    await asyncio.wait_for(path.probed.wait(), 300)
    clock.run(0.3, busy=0.0)
    limits = []
    for pause_s in (0.0, 0.02, 0.02, 0.02, 0.06):
        clock.run(pause_s, busy=0.5)
        path.watch.received(1000)
        limits.append(path.watch.limit)
    assert limits == ["publisher", "publisher", "publisher", "network", "network"]
    path.watch.close()
