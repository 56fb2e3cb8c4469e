import math

import pytest

from kvabr.replay import trace as module
from kvabr.replay.trace import Trace
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
