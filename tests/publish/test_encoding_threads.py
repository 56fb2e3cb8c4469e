"""The threads beside an engine: their priorities, what they may take, and which of them is at a cache."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kvabr.codec.profile import Profile
from kvabr.codec.threads import encoder_threads
from kvabr.publish import encoding_threads
from kvabr.publish import publisher as publisher_module
from kvabr.publish.encoding_threads import EncodingBudget, calm_down, encoding_thread, hurry
from kvabr.publish.live_publisher import LiveProduction, LivePublisher, LiveSlot
from kvabr.store.files import NameClaim
from kvabr.store.locations import open_asset
from kvabr.types.errors import UsageError
from tests import kvdata
from tests.publish.test_live_publisher import PACE, SPEC, TOKENS, Steps, cache, name_of, publisher, run_of


def test_what_never_waits_for_a_processor_delays_nobody():
    budget = EncodingBudget(0.05)
    for _ in range(100):
        budget.spend(0.03, 0.03)
    assert budget.allows(0.0)


@pytest.mark.parametrize(("cpu_s", "wall_s", "taken_s"), [(0.03, 0.3, 0.03), (0.03, 0.04, 0.01), (0.03, 0.02, 0.0)])
def test_a_step_takes_its_processor_time_at_most_and_as_much_as_it_waited(cpu_s, wall_s, taken_s):
    budget = EncodingBudget(0.1)
    budget.spend(cpu_s, wall_s)
    assert budget.allows(20 * taken_s + 1e-9)
    assert not taken_s or not budget.allows(20 * taken_s - 1e-6)


def test_the_next_step_is_expected_to_take_as_much_as_those_before():
    budget = EncodingBudget(0.05)
    assert budget.allows(0.0)
    for taken_s in (0.01, 0.03):
        budget.spend(taken_s, 1.0)
    assert not budget.allows(1.19)
    assert budget.allows(1.21)


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


def test_a_cache_is_encoded_patiently_once_its_budget_is_spent_until_its_last_token(tmp_path):
    now_s = [100.0]
    made = LivePublisher(publisher(tmp_path), share=0.05, clock=lambda: now_s[0])
    slot = made.publisher.reserve(TOKENS)
    claim = NameClaim(tmp_path / slot.chunks[-1])
    assert claim.take()
    production = LiveProduction(made, slot, claim, [1.0] * 5, lambda _: None)
    assert not production.patient()
    production.spent(0.04, 0.04, patient=False)  # a processor was idle
    assert not production.patient()
    production.spent(0.04, 0.2, patient=False)
    assert production.patient()
    now_s[0] += 0.5
    assert production.patient()
    now_s[0] += 0.7
    assert not production.patient()
    production.spent(0.5, 5.0, patient=True)
    assert not production.patient()
    production.spent(0.04, 0.2, patient=False)
    assert production.patient()
    production.end()
    assert not production.patient()
    production.spent(1.0, 1.0, patient=False)
    while production.has_work():
        production.step()
    outcome = production.outcome
    assert (outcome.encoding_s, outcome.idle_s) == (pytest.approx(0.62), 0.5)


def test_the_last_groups_are_encoded_on_all_cores_even_before_the_engine_says_that_they_are(tmp_path, monkeypatch):
    seen = []
    steps = Steps(tmp_path)
    encode = steps.production._encode
    monkeypatch.setattr(steps.production, "_encode", lambda *given: (seen.append(encoder_threads()), encode(*given)))
    steps.hand(0, 32)
    steps.work()
    steps.hand(32, 70)
    steps.work()
    assert seen == [None, None, *[len(os.sched_getaffinity(0))] * 3]
    assert encoder_threads() is None


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none(tmp_path, share):
    with pytest.raises(UsageError, match=r"from 0 to 1|nan"):
        LivePublisher(publisher(tmp_path), share=share)


def test_the_first_group_need_not_wait_for_matrices(tmp_path):
    side = Profile.from_bytes(kvdata.profile(SPEC).to_bytes())  # other tests have used the shared one
    analysis = side.of(SPEC.parts[0]).analysis
    names = {"_native", "_inverses"}
    assert not names & vars(analysis).keys()
    LivePublisher(publisher(tmp_path, profile=side)).close()
    assert names & vars(analysis).keys()


class ByHand:
    """A thread whose work a test does."""

    def __init__(self):
        self.waiting = []

    def submit(self, work, *given):
        self.waiting.append((work, given))

    def run(self):
        work, given = self.waiting.pop(0)
        work(*given)


def test_a_cache_moves_to_the_patient_thread_and_back(tmp_path, monkeypatch):
    made, outcomes, hurried = LivePublisher(publisher(tmp_path), share=0.0), [], []
    made.publisher.close()
    made.publisher._closed = False
    usual = made.publisher._thread = ByHand()
    patient = made.publisher._patient_thread = ByHand()
    monkeypatch.setattr(publisher_module, "calm_down", lambda: None)
    monkeypatch.setattr(publisher_module, "hurry", hurried.append)

    def waiting():
        return len(usual.waiting), len(patient.waiting)

    slot = made.begin(TOKENS, pace=PACE, done=outcomes.append)
    assert isinstance(slot, LiveSlot)
    assert waiting() == (1, 0)
    slot.production.spent(1.0, 2.0, patient=False)
    usual.run()
    assert waiting() == (0, 0)
    slot.groups(0, run_of(SPEC, cache(SPEC), 0, 32))
    slot.groups(32, run_of(SPEC, cache(SPEC), 32, 40))
    assert waiting() == (0, 1)
    step = slot.production.step
    rest = run_of(SPEC, cache(SPEC), 40, 70)
    monkeypatch.setattr(slot.production, "step", lambda: (slot.groups(40, rest), slot.end(), step()))
    patient.run()
    assert hurried == [threading.get_native_id()] * 2  # for the last tokens, and for the end
    monkeypatch.undo()
    assert waiting() == (1, 0)
    while usual.waiting:
        usual.run()
    assert waiting() == (0, 0)
    assert outcomes[0].verdict == "published", outcomes[0].why
    open_asset(tmp_path / name_of(SPEC)).check_parts()


def test_what_waits_for_the_patient_thread_is_taken_from_it_at_the_end(tmp_path):
    made, outcomes = LivePublisher(publisher(tmp_path), share=0.0), []
    made.publisher.close()
    made.publisher._closed = False
    usual = made.publisher._thread = ByHand()
    patient = made.publisher._patient_thread = ByHand()
    slot = made.begin(TOKENS, pace=PACE, done=outcomes.append)
    slot.production.spent(1.0, 2.0, patient=False)
    usual.run()
    slot.groups(0, run_of(SPEC, cache(SPEC), 0, 40))
    assert (len(usual.waiting), len(patient.waiting)) == (0, 1)
    slot.groups(40, run_of(SPEC, cache(SPEC), 40, 70))
    slot.end()
    assert len(usual.waiting) == 1
    while usual.waiting:
        usual.run()
    assert outcomes[0].verdict == "published", outcomes[0].why
    patient.run()  # finds it gone
    assert len(outcomes) == 1
