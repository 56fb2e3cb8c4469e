"""So many plays at once, the others in order of their deadlines, and no for those whose time would be eaten."""

from __future__ import annotations

import asyncio

import pytest

from kvabr.client.admission import Gate
from kvabr.client.metrics import NodeMetrics
from kvabr.types.errors import BusyError
from tests.client.virtual import virtual


class Plays:
    def __init__(self, plays=1, waiting=10, share=0.25):
        self.metrics = NodeMetrics()
        self.gate = Gate(plays, waiting, share, self.metrics)
        self.begun = []

    async def one(self, name, deadline_s, takes_s):
        async with self.gate.enter(deadline_s) as waited_s:
            self.begun.append(name)
            await asyncio.sleep(takes_s)
        return waited_s

    def start(self, *args):
        return asyncio.get_running_loop().create_task(self.one(*args))


@virtual
async def test_who_is_due_first_plays_first():
    plays = Plays()
    tasks = [plays.start(*play) for play in (("a", 10, 1), ("late", 30, 1), ("soon", 10, 1), ("sooner", 9, 1))]
    waited = await asyncio.gather(*tasks)
    assert plays.begun == ["a", "sooner", "soon", "late"]
    assert waited == pytest.approx([0, 3, 2, 1])
    assert plays.metrics.value("kvabr_node_plays_in_flight") == plays.metrics.value("kvabr_node_plays_waiting") == 0


@virtual
async def test_who_would_wait_too_long_is_told_in_time():
    plays = Plays()
    busy = plays.start("a", 10, 5)
    await asyncio.sleep(0)
    start = asyncio.get_running_loop().time()
    with pytest.raises(BusyError, match="compute this prompt instead"):
        await plays.one("b", 2.0, 1)
    assert asyncio.get_running_loop().time() - start == pytest.approx(0.5)
    assert plays.metrics.value("kvabr_node_refused_total", reason="late") == 1
    await busy


@virtual
async def test_a_full_queue_refuses_at_once():
    plays = Plays(plays=2, waiting=1)
    tasks = [plays.start(name, 100, 1) for name in "abc"]
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="2 plays are under way and 1 wait"):
        await plays.one("d", 100, 1)
    assert plays.metrics.value("kvabr_node_refused_total", reason="full") == 1
    await asyncio.gather(*tasks)
    assert plays.begun == ["a", "b", "c"]


@virtual
async def test_who_leaves_the_queue_takes_nobodys_turn():
    plays = Plays()
    first, gone, last = (plays.start(name, 100, 1) for name in "abc")
    await asyncio.sleep(0.5)
    gone.cancel()
    await asyncio.gather(first, last)
    assert plays.begun == ["a", "c"]
    assert plays.metrics.value("kvabr_node_plays_in_flight") == 0
    # Cancelled in the moment in which its turn came: the turn goes on to the next.
    first, gone, last = (plays.start(name, 100, 1) for name in "xyz")
    await asyncio.sleep(0)
    first.add_done_callback(lambda _: gone.cancel())
    await asyncio.gather(first, last)
    assert plays.begun[-1] == "z"
    assert plays.metrics.value("kvabr_node_plays_in_flight") == 0


@virtual
async def test_who_leaves_the_queue_does_not_change_the_order_of_the_others():
    plays = Plays(share=1.0)
    names = (10, 50, 20, 60, 70, 30, 40)
    first, *waiting = [plays.start("first", 100, 1), *(plays.start(due, due, 1) for due in names)]
    await asyncio.sleep(0.5)
    waiting[names.index(20)].cancel()
    await asyncio.sleep(0)
    last = plays.start(35, 34.5, 1)  # whoever comes clears away those who left
    await asyncio.gather(first, last, *waiting, return_exceptions=True)
    assert plays.begun == ["first", 10, 30, 35, 40, 50, 60, 70]


@virtual
async def test_closing_tells_who_waits():
    plays = Plays()
    busy, waiting = plays.start("a", 10, 1), plays.start("b", 10, 1)
    await asyncio.sleep(0)
    plays.gate.close()
    with pytest.raises(BusyError, match="closing"):
        await waiting
    with pytest.raises(BusyError, match="closing"):
        await plays.one("c", 10, 1)
    assert plays.metrics.value("kvabr_node_refused_total", reason="closed") == 2
    await busy
