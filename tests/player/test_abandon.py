"""Which transfers are abandoned, and when, on views set by hand."""

import pytest

from kvabr.player.abandon import choose
from tests.abr.plain import fly, view


def overloaded(times_left, *, deadline=10.0, now=0.0, rate=1000.0):
    """A play whose ten groups, all in flight on C, take a multiple of the time left."""
    seen = view(10, deadline)
    seen.now, seen.rate = now, 40_000 / (times_left * (deadline - now))
    for group in range(10):
        fly(seen, group, "C").priority = 0
    return seen


@pytest.mark.parametrize("now", [0.0, 6.0])
@pytest.mark.parametrize(
    ("times_left", "begun", "abandons"),
    [(1.04, False, False), (1.06, False, True), (0.69, True, False), (0.71, True, True), (1.0, True, True)],
)
def test_the_rest_must_be_late_by_a_margin_and_less_once_one_was_abandoned(times_left, begun, abandons, now):
    """Estimates fluctuate; but where one was so wrong that a transfer had to go, the others are no safer."""
    seen = overloaded(times_left, now=now)
    found = choose(seen, lambda _: seen.ladder.tracks[0], begun=begun)
    assert (found is not None) == abandons


def test_one_is_abandoned_only_if_that_helps():
    seen = overloaded(2.0)
    cheapest = seen.ladder.tracks[0]
    transfer, reason = choose(seen, lambda _: cheapest)
    assert (transfer.track, transfer.group) == ("C", 0)
    assert "A instead frees 3 kB" in reason
    assert choose(seen, lambda _: seen.catalog.track("C")) is None  # nothing is cheaper
    seen.ttfb_s = 100.0  # asking again takes longer than what is saved
    assert choose(seen, lambda _: cheapest) is None
