import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvabr.replay import trace as module
from kvabr.replay.link import INITIAL_WINDOW, WINDOW_GROWTH, Capacity
from kvabr.replay.trace import Trace
from kvabr.types.errors import TraceError


def trace(rates, step=1.0, name="t"):
    return Trace(name, "test", tuple(i * step for i in range(len(rates))), tuple(map(float, rates)), len(rates) * step)


rates = st.lists(st.sampled_from([0.0, 10.0, 1e3, 123456.0, 5e6]), min_size=1, max_size=12).filter(any)
times = st.floats(0, 60)


@example([0.0, 0.0, 5e6, 123456.0, 0.0], 0.0, 11.0, 3.125, 0.3)
@given(rates, times, times, st.floats(0, 30), st.sampled_from([0.0, 0.05, 0.3]))
def test_bytes_add_up_and_when_is_the_inverse_of_between(levels, a, b, start, rtt):
    link = Capacity(trace(levels), start, rtt)
    low, high = min(a, b), max(a, b)
    middle = (low + high) / 2
    whole = link.between(low, high)
    assert whole >= -1e-6
    assert link.between(low, middle) + link.between(middle, high) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    if whole > 1:
        reached = link.when(low, whole)
        assert reached <= high + 1e-6
        assert link.between(low, reached) == pytest.approx(whole, rel=1e-6, abs=1e-3)


@given(
    at=st.floats(0, 5000),
    nbytes=st.floats(1, 1e8),
    mean=st.sampled_from([1e6, 1e9, 1e10]),
    seconds=st.sampled_from([10, 5000]),
)
def test_when_lacks_at_most_a_tenth_of_a_byte_however_much_the_trace_carries(at, nbytes, mean, seconds):
    link = Capacity(trace([mean * (1 + index % 3) / 2 for index in range(seconds)]), 0.9 * seconds)
    reached = link.when(at, nbytes)
    slack = 0.12 + mean * 2e-12  # and the resolution of a time of hours
    assert nbytes - slack <= link.between(at, reached) <= nbytes + slack


def test_it_wraps_and_says_so():
    link = Capacity(trace([100, 300]), 1.0)
    assert link.between(0, 1) == 300
    assert link.between(1, 2) == 100
    assert link.between(0, 20) == 4000
    assert link.when(0, 350) == pytest.approx(1.5)
    assert not link.wraps_within(0.9)
    assert link.wraps_within(1.1)


def test_an_outage_is_waited_out():
    link = Capacity(trace([100, 0, 0, 100]))
    assert link.when(0, 150) == pytest.approx(3.5)
    assert link.when(1.5, 1) == pytest.approx(3.01)
    assert link.rate(1.5) == 0


def test_slow_start_begins_after_a_round_trip_and_then_nearly_doubles():
    rtt = 0.1
    link = Capacity(trace([1e9]), 0.0, rtt)
    assert link.between(0, rtt) == 0
    first = link.between(rtt, 2 * rtt)
    second = link.between(2 * rtt, 3 * rtt)
    assert first == pytest.approx(INITIAL_WINDOW)
    assert second == pytest.approx(WINDOW_GROWTH * first)
    assert Capacity(trace([1e9]), 0.0, rtt, window=50_000).between(0, 2 * rtt) == pytest.approx(50_000)
    warm = Capacity(trace([1e9]), 0.0, rtt, slow_start=False)
    assert warm.between(0, rtt) == 1e8
    late = 30.0
    assert link.rate(late) == 1e9
    assert link.between(0, late) < warm.between(0, late)


def test_an_outage_opens_no_window():
    rtt = 0.1
    link = Capacity(trace([0, 0, 1e9], 0.25), 0.0, rtt)
    begins = 0.5
    assert link.between(0, begins) == 0
    assert link.between(begins, begins + 2 * rtt) <= (1 + WINDOW_GROWTH) * INITIAL_WINDOW


def test_series_integrates_to_the_same_bytes():
    link = Capacity(trace([1e6, 0, 3e6, 2e5]), 1.5, 0.08)
    points = link.series(9.0)
    total = 0.0
    for (t, rate), (after, _) in zip(points, [*points[1:], (9.0, 0.0)], strict=True):
        assert after > t
        total += rate * (after - t)
    assert total == pytest.approx(link.between(0, 9.0))


def make(times=(0.0, 1.0), rates=(1e6, 2e6), duration=4.0, rtt=None):
    return Trace("test/a", "test", times, rates, duration, rtt)


def test_mean_is_weighted_by_time():
    assert make().mean_rate == (1 * 1e6 + 3 * 2e6) / 4


def test_scaling_scales_every_rate_and_nothing_else():
    twice = make(rtt=0.1).scaled(2.0)
    assert twice == make(rates=(2e6, 4e6), rtt=0.1)
    assert twice.mean_rate == 2 * make().mean_rate


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_scaling_by_nonsense_is_refused(factor):
    with pytest.raises(TraceError, match="positive number"):
        make().scaled(factor)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"times": (), "rates": ()}, "no samples"),
        ({"rates": (1.0,)}, "2 times but 1 rates"),
        ({"times": (0.5, 1.0)}, "segment 0: starts at 0.5 s"),
        ({"times": (0.0, 0.0)}, "segment 1: the time 0 s occurs twice"),
        ({"times": (0.0, 2.0, 1.0), "rates": (1.0, 1.0, 1.0)}, "segment 2: the time 1 s follows 2 s; sort"),
        ({"times": (0.0, math.nan)}, "segment 1: the time must be a finite number, got nan"),
        ({"times": (0.0, math.inf)}, "segment 1: the time must be a finite number, got inf"),
        ({"rates": (1.0, -1.0)}, "segment 1: the rate must be 0 or more"),
        ({"rates": (math.nan, 1.0)}, "segment 0: the rate must be a finite number, got nan"),
        ({"rates": (1.0, math.inf)}, "segment 1: the rate must be a finite number, got inf"),
        ({"rates": (0.0, 0.0)}, "zero throughout"),
        ({"duration": 1.0}, "must end later"),
        ({"duration": math.nan}, "must end later"),
        ({"duration": math.inf}, "must end later"),
        ({"rtt": -0.1}, "the round trip must be"),
        ({"rtt": math.nan}, "the round trip must be"),
    ],
)
def test_what_no_link_could_play_is_refused(change, says):
    with pytest.raises(TraceError, match=says):
        make(**change)


def test_too_many_segments_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_SEGMENTS", 2)
    make()
    with pytest.raises(TraceError, match="more than the 2 allowed"):
        make((0.0, 1.0, 2.0), (1.0, 1.0, 1.0))
