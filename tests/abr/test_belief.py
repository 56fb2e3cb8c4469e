"""A play's belief in the rate of its link."""

import math

import pytest

from kvabr.abr import Ladder, View
from kvabr.abr.belief import Belief, LinkBelief
from kvabr.abr.estimators import LOW_SHARE
from kvabr.types.errors import PolicyError
from tests.catalogs import catalog


def view(now=0.0, rate=0.0, **changes):
    made = View(Ladder(catalog(8)), 2.0)
    made.now, made.rate, made.lower_bound = now, rate, 0.7 * rate
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def looked(link, play):
    link.update(play)
    return link.rates(play)


@pytest.mark.parametrize("rates", [(), (0.0,), (-1.0,), (math.inf,), (math.nan,), ("fast",), (None,)])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(PolicyError):
        Belief.of(rates)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0,)])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(PolicyError):
        Belief.of((1e6, 2e6), weights)


def test_an_unknown_link_may_have_very_different_rates():
    belief = looked(LinkBelief(), view())
    assert belief.state == "unknown"
    assert max(belief.rates) > 10 * min(belief.rates)
    assert sum(belief.weights) == pytest.approx(1.0)
    assert belief.learns_s > 0


def test_slow_start_rules_out_what_it_has_passed():
    link = LinkBelief()
    belief = looked(link, view(0.1, 5e6, growing=True, ttfb_s=0.02))
    assert belief.state == "growing"
    assert min(belief.rates) == 5e6 < max(belief.rates)


def test_a_rate_is_known_once_it_has_held():
    link = LinkBelief()
    for step in range(1, 40):
        belief = looked(link, view(0.05 * step, 5e6, ttfb_s=0.02))
    assert (belief.state, belief.rates, belief.learns_s) == ("known", (5e6,), 0.0)


def test_a_link_that_was_faster_may_recover():
    link = LinkBelief()
    for step in range(1, 11):
        looked(link, view(0.05 * step, 1e7, ttfb_s=0.02))
    belief = looked(link, view(0.6, 1e5, ttfb_s=0.02))
    assert belief.state == "slow"
    assert belief.rates == (1e5, 5e6)


@pytest.mark.parametrize("lower", [0.0, 1e9])
def test_an_estimator_that_knows_no_lower_bound_has_the_usual_one(lower):
    belief = LinkBelief.arrivals(view(1.0, 1e6, lower_bound=lower), 1e6)
    assert min(belief.rates) == LOW_SHARE * 1e6


def test_a_late_first_byte_does_not_confirm_the_rate_of_earlier_plays():
    link, told = LinkBelief(), {"rate": 1e7, "outstanding_bytes": 1e6}
    looked(link, view(0.0, **told))
    assert looked(link, view(0.1, **told)).state == "prior"
    assert looked(link, view(1.0, **told)).state == "silent"
    late = view(1.1, ttfb_s=1.05, **told)
    late.settled.add(0)
    belief = looked(link, late)
    assert belief.state == "silent"
    assert belief.rates[0] < 1e6 < belief.rates[-1]
    assert looked(link, view(1.3, 2e6, ttfb_s=1.05, outstanding_bytes=1e6)).state == "known"


def test_a_link_may_become_faster_during_a_call_but_less_likely_the_longer_it_has_held():
    link, chances = LinkBelief(), []
    for step in range(1, 60):
        play = view(0.02 * step, 1e5, ttfb_s=0.02)
        link.update(play)
        belief = link.before_call(play, link.rates(play), 1.0)
        if step > 3:
            assert (belief.rates, belief.rare) == ((1e6, 1e5), 1)
            assert belief.learns_s > 0
            chances.append(belief.weights[0])
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 1.3 * chances[-1] > 0


def test_a_link_that_is_not_known_stays_unknown_before_a_call():
    link, play = LinkBelief(), view()
    link.update(play)
    assert link.before_call(play, link.rates(play), 1.0) == link.rates(play)
