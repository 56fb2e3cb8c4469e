import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.replay import trace as module
from kvabr.replay.trace import Trace, describe, sparkline
from kvabr.types.errors import TraceError


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
        ({"times": (0.0, 0.0)}, "segment 1: the time 0 s comes twice"),
        ({"times": (0.0, 2.0, 1.0), "rates": (1.0, 1.0, 1.0)}, "segment 2: the time 1 s comes after 2 s; sort"),
        ({"times": (0.0, math.nan)}, "segment 1: the time is nan"),
        ({"times": (0.0, math.inf)}, "segment 1: the time is inf"),
        ({"rates": (1.0, -1.0)}, "segment 1: the rate is negative"),
        ({"rates": (math.nan, 1.0)}, "segment 0: the rate is nan"),
        ({"rates": (1.0, math.inf)}, "segment 1: the rate is inf"),
        ({"rates": (0.0, 0.0)}, "zero throughout"),
        ({"duration": 1.0}, "must end later"),
        ({"duration": math.nan}, "must end later"),
        ({"duration": math.inf}, "must end later"),
        ({"rtt": -0.1}, "round-trip time"),
        ({"rtt": math.nan}, "round-trip time"),
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


def test_description_is_weighted_by_time():
    # 1 s of nothing, 18 s at 8 Mbit/s, 1 s at 16: the mean is 8, and 1 of 20 s is the lowest 5 %.
    told = describe(make((0.0, 1.0, 19.0), (0.0, 1e6, 2e6), 20.0, 0.03))
    assert told["mean_mbps"] == pytest.approx(8.0)
    assert told["cv"] == pytest.approx(math.sqrt((64 + 64) / 20) / 8)
    assert (told["min_mbps"], told["p5_mbps"], told["max_mbps"]) == (0.0, 0.0, 16.0)
    assert told["zero_share"] == pytest.approx(0.05)
    assert (told["segments"], told["duration_s"], told["rtt_s"]) == (3, 20.0, 0.03)


def test_sparkline_shows_level_and_outage():
    assert sparkline(make((0.0, 1.0, 2.0), (8e6, 0.0, 4e6), 4.0), 4) == "█ ▅▅"
    assert sparkline(make((0.0, 0.5), (8e6, 2e6), 1.0), 1) == "█"


rates = st.just(0.0) | st.floats(1e-3, 1e9)


@given(st.lists(st.tuples(st.floats(1e-3, 50), rates), min_size=1, max_size=30), st.integers(1, 40))
def test_sparkline_has_as_many_cells_as_asked(segments, cells):
    if not any(rate for _, rate in segments):
        segments = [(1.0, 1.0)]
    times = [0.0]
    for length, _ in segments:
        times.append(times[-1] + length)
    line = sparkline(make(tuple(times[:-1]), tuple(rate for _, rate in segments), times[-1]), cells)
    assert len(line) == cells
    assert "█" in line
