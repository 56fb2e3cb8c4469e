"""The threads beside an engine: their priorities, what they may take, and which of them is at a cache."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kvabr.codec.threads import encoder_threads
from kvabr.publish.encoding_threads import EncodingBudget, encoding_thread
from kvabr.publish.live_publisher import LiveProduction, LivePublisher, LiveSlot
from kvabr.publish.publisher import Publisher
from kvabr.store.asset_folder import FolderAsset
from kvabr.store.files import NameClaim
from kvabr.types.errors import UsageError
from tests import kvdata
from tests.publish.test_live_publisher import PACE, SPEC, TOKENS, Steps, cache, name_of, publisher

LIMIT_S = 300


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


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="no idle priority here")
def test_the_patient_thread_takes_what_nobody_else_wants():
    before = torch.get_num_threads()
    usual, patient = encoding_thread(), encoding_thread(patient=True)
    try:
        found = [
            thread.submit(lambda: (os.sched_getscheduler(threading.get_native_id()), torch.get_num_threads())).result()
            for thread in (usual, patient)
        ]
    finally:
        usual.shutdown()
        patient.shutdown()
    assert found == [(os.sched_getscheduler(0), 1), (os.SCHED_IDLE, 1)]
    assert torch.get_num_threads() == before


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
    with pytest.raises(UsageError, match="from 0 to 1"):
        LivePublisher(publisher(tmp_path), share=share)


def test_the_first_group_need_not_wait_for_matrices(tmp_path):
    side = kvdata.profile(SPEC)
    analysis = side.of(SPEC.parts[0]).analysis
    names = {"_native", "_stack_inverse"}
    assert not names & vars(analysis).keys()
    LivePublisher(publisher(tmp_path, profile=side)).close()
    assert names & vars(analysis).keys()


class Threads(Publisher):
    """Notes the threads that work."""

    def _work(self, production, patient):
        self.seen.append((patient, threading.current_thread().name.rsplit("_", 1)[0]))
        super()._work(production, patient)


def test_a_cache_moves_to_the_patient_thread_and_back(tmp_path):
    made = LivePublisher(publisher(tmp_path, made_by=Threads), share=0.0)
    seen = made.publisher.seen = []
    over, outcomes = threading.Event(), []
    slot = made.begin(TOKENS, pace=PACE, done=lambda outcome: (outcomes.append(outcome), over.set()))
    assert isinstance(slot, LiveSlot)
    slot.production.spent(1.0, 2.0, patient=False)
    (kv,) = cache(SPEC)
    for first in range(0, 64, 16):
        slot.groups(first, kv[:, :, :, first : first + 16])
    slot.groups(64, kv[:, :, :, 64:])
    while not slot.production.patient() or (True, "kvabr-publish-idle") not in seen:
        assert not over.wait(0.001)
    slot.end()
    assert over.wait(LIMIT_S)
    made.close()
    assert outcomes[0].verdict == "published", outcomes[0].why
    assert {*seen} == {(False, "kvabr-publish"), (True, "kvabr-publish-idle")}
    FolderAsset.open(tmp_path / name_of(SPEC)).check_parts()
