"""One direction of a link, without sockets and without a clock."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.replay.link import Capacity
from kvabr.types.errors import UsageError
from kvabr_lab.live.packet_schedule import HEADER_BYTES, PACKET_BYTES, Conditions, PacketSchedule
from tests.lab.live.links import trace

FULL = 1000 - HEADER_BYTES
"""Payload of a packet that has 1,000 bytes on the wire."""


def schedule(rates, *, delay=0.0, loss=0.0, limit=1e9, step=1.0, at=0.0, seed=1):
    made = PacketSchedule(random.Random(seed))
    made.shape(delay_s=delay, loss=loss, limit_bytes=limit)
    made.begin(Capacity(trace(rates, step), slow_start=False), at)
    return made


def test_the_tail_is_dropped_where_the_queue_is_full_but_a_packet_alone_always_fits():
    one = schedule([10_000], limit=2500)
    assert [one.admit(0.0, FULL) is not None for _ in range(4)] == [True, True, False, False]
    assert (one.overflowed, one.queued, one.max_queued) == (2, 2000, 2000)
    assert one.admit(0.1, FULL) is not None, "one has left"
    tiny = schedule([10_000], limit=10)
    assert tiny.admit(0.0, FULL) is not None


def test_what_is_lost_has_taken_its_share_of_the_link():
    one = schedule([1e6], loss=0.25)
    times = [one.admit(0.0, FULL) for _ in range(4000)]
    assert one.lost == pytest.approx(1000, abs=120)
    assert one.lost + one.carried == 4000
    assert max(t for t in times if t is not None) == pytest.approx(4.0, abs=0.02)
    again = schedule([1e6], loss=0.25)
    assert [again.admit(0.0, FULL) for _ in range(4000)] == times, "the same seed loses the same packets"


def test_a_new_play_does_not_wait_for_the_queue_of_the_last():
    one = schedule([1000])
    for _ in range(50):
        one.admit(0.0, FULL)
    one.begin(Capacity(trace([10_000]), slow_start=False), 1.0)
    assert one.admit(1.0, FULL) == pytest.approx(1.1)
    one.begin(None, 2.0)
    assert one.admit(2.0, FULL) == 2.0


rates = st.lists(st.sampled_from([0.0, 500.0, 1e4, 3e5]), min_size=1, max_size=6).filter(any)


@given(rates, st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 1452)), min_size=1, max_size=60), st.floats(0, 0.2))
def test_never_out_of_order_and_never_more_than_the_trace_carries(levels, packets, delay):
    one = schedule(levels, delay=delay, limit=20_000, step=0.5)
    link = Capacity(trace(levels, 0.5), slow_start=False)
    now, out, carried = 0.0, [], 0
    for gap, payload in packets:
        now += gap
        due = one.admit(now, payload)
        if due is None:
            continue
        out.append(due)
        carried += payload + HEADER_BYTES
        assert due >= now + delay
        assert carried <= link.between(0.0, due - delay) + 1e-3
    assert out == sorted(out)
    assert one.overflowed + len(out) == len(packets)


def test_conditions_are_checked_and_a_queue_holds_a_round_trip():
    shares = {"loss": 1.0}, {"loss_up": -0.1}, {"reorder": 1.0}, {"duplicate": -1.0}
    for bad in ({"rtt_s": -1.0}, {"rtt_s": float("nan")}, *shares, {"queue_bytes": 100}):
        with pytest.raises(UsageError):
            Conditions(**bad)
    assert Conditions(rtt_s=0.1).limit_bytes(5e6) == 500_000
    assert Conditions(rtt_s=0.01).limit_bytes(1e5) == 64 * PACKET_BYTES
    assert Conditions(queue_bytes=9999).limit_bytes(5e6) == 9999
