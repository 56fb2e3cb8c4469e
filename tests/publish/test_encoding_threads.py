"""The threads beside an engine: their priorities, what they may take, and which of them is at a cache."""

import os
import threading

import pytest
import torch

from kvabr.publish import encoding_threads
from kvabr.publish.encoding_threads import EncodingBudget, calm_down, encoding_thread, hurry
from kvabr.publish.live_publisher import LivePublisher
from kvabr.types.errors import UsageError
from tests.publish.test_live_publisher import publisher


@pytest.mark.parametrize(("cpu_s", "wall_s", "taken_s"), [(0.03, 0.3, 0.03), (0.03, 0.04, 0.01), (0.03, 0.02, 0.0)])
def test_a_step_takes_its_processor_time_at_most_and_as_much_as_it_waited(cpu_s, wall_s, taken_s):
    budget = EncodingBudget(0.1)
    budget.spend(cpu_s, wall_s)
    assert budget.allows(20 * taken_s + 1e-9)
    assert not taken_s or not budget.allows(20 * taken_s - 1e-6)


def test_of_no_share_nothing_is_taken_but_the_first_step_shows():
    budget = EncodingBudget(0.0)
    assert budget.allows(0.0)
    budget.spend(0.01, 1.0)
    assert not budget.allows(1e9)


def test_the_threads_leave_the_cores_to_the_engine():
    before = torch.get_num_threads()
    for patient in (False, True):
        thread = encoding_thread(patient=patient)
        try:
            assert thread.submit(torch.get_num_threads).result() == 1
        finally:
            thread.shutdown()
    assert torch.get_num_threads() == before


def test_a_thread_that_is_calm_can_be_hurried():
    found, go_on = [], [threading.Event(), threading.Event()]

    def work():
        calm_down()
        found.append((threading.get_native_id(), os.sched_getscheduler(0)))
        go_on[0].set()
        go_on[1].wait()

    thread = threading.Thread(target=work)
    thread.start()
    go_on[0].wait()
    ((number, policy),) = found
    hurry(number)
    after = os.sched_getscheduler(number)
    go_on[1].set()
    thread.join()
    hurry(number)  # it has ended
    assert policy == (os.SCHED_IDLE if encoding_threads._may_hurry() else os.sched_getscheduler(0))
    assert after != os.SCHED_IDLE or os.sched_getscheduler(0) == os.SCHED_IDLE


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none(tmp_path, share):
    with pytest.raises(UsageError, match=r"from 0 to 1|nan"):
        LivePublisher(publisher(tmp_path), share=share)
