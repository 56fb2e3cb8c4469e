"""The belief of a play: possible rates of its link, each with a weight.

It combines samples (an estimator's rate and spread), earlier plays on the path, and slow start so far:

- For an unknown link, rates spread over three orders of magnitude around the rate that the deadline needs.
- In slow start, rates up to the present one are excluded.
- The rate of earlier plays is assumed to be reached within a factor of `LOW_SHARE`; rarely, the link is much faster. So
  a call of the engine that would miss the deadline waits for a sample first.
- A link much slower than before may be dead or recover; the longer it is silent, the more likely it is dead.
- Otherwise the belief is the estimate. Before a call of the engine that cannot be stopped, the link may also become
  much faster: the longer its rate has held, the less likely.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from kvabr.abr.estimators import LOW_SHARE, SLOT_SHARE, WINDOW
from kvabr.abr.view import View
from kvabr.types.errors import PolicyError

LOADS = (0.1, 10.0)
"""Rates of an unknown link, as multiples of the rate that delivers the exact cache by the deadline."""
UNKNOWN_TTFB_S = 0.04
"""Assumed seconds to first byte of an unknown peer."""
SLOW, RECOVERED = 0.3, 0.5
"""A link below the first fraction of its best rate is slow; it may recover to the second fraction."""
_SURPRISE = 2e-5
"""Probability that a link is much faster than in earlier plays. It is so small that a call of the engine waits only if
it would miss the deadline, and such a link would not."""
_HIGH, _WEIGHTS = 1.25, (0.3, 0.4, 0.3)
"""Rate above the expected one, as a multiple of it, and the weights of the lower, the expected and this rate."""
_GROWN, _GROWN_WEIGHTS = (0.75, 1.0, 2.0, 4.0), (0.2, 0.3, 0.3, 0.2)
"""Possible rates in slow start, as multiples of the rate so far, and their weights."""
GROWTH = 2.0
"""Minimum mean rate until the deadline in slow start, as a multiple of the present rate."""
SPEED_UP, _SPEED_UP_WEIGHT = 10.0, 0.3
"""Factor by which a link may suddenly become faster, and the maximum probability of that during a call of the
engine."""
_STALLED_SHARE = 0.03
"""Rate of a link that has stopped, as a fraction of its best rate."""
_GROWTH_ROUNDS, _MIN_GROWTH = 1.5, 1.3
"""A link is in slow start if its rate grew by the factor `_MIN_GROWTH` within `_GROWTH_ROUNDS` times to first byte."""
MIN_WAIT_S = 0.02
"""Minimum seconds until the rate is better known."""
_SILENT_ROUNDS, _DEAD_LINK_SHARE = 4.0, 1e-3
"""Round trips of silence after which a link may be dead, and the fraction of the base that a dead link delivers in
time."""


RATE_TOLERANCE, TIME_TOLERANCE, DIVISION_TOLERANCE, HELD_TOLERANCE = 0.1, 0.01, 0.02, 0.25
"""Plans are reused until the rate changes by the first fraction, or until a fraction of the deadline has passed: the
second for upgrades, the third for the division between network and engine. A division that has held for a while is
reused for the last fraction of that time in addition."""


class Belief(NamedTuple):
    """Possible rates of a link."""

    rates: tuple[float, ...]
    """Rates in bytes per second, finite and positive; ascending, after the rates of a dead link and of one
    that is much faster than in earlier plays."""
    weights: tuple[float, ...]
    """Weight of each rate; their sum is 1."""
    ramp: tuple[float, float] | None = None
    """In slow start, the initial rate and its doubling time in seconds."""
    learns_s: float = 0.0
    """Seconds until the rate should be known much better; 0.0 if it is known."""
    rare: int = 0
    """Number of rates at the front that are so rare that only waits consider them, not the division."""
    state: str = "known"
    """``unknown``, ``growing`` (slow start), ``prior`` (rate of earlier plays), ``slow``, ``silent``, or ``known``."""

    @staticmethod
    def of(rates: tuple[float, ...], weights: tuple[float, ...] = ()) -> Belief:
        """Return a belief in the given rates, by default with equal weights.

        Raises:
            PolicyError: there are no rates, or rates or weights are not positive finite numbers.
        """
        weights = weights or (1.0,) * len(rates)
        sound = all(isinstance(each, int | float) and 0.0 < each < math.inf for each in (*rates, *weights))
        if not rates or len(rates) != len(weights) or not sound:
            raise PolicyError(
                f"a belief needs positive, finite rates and one weight for each, got {rates} and {weights}"
            )
        total = sum(weights)
        return Belief(tuple(rates), tuple(weight / total for weight in weights))


class LinkBelief:
    """Updates the belief of one play."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, float]] = deque()
        self._prior_rate = 0.0
        self._round_s = math.inf
        self._silent = self._was_silent = False
        """True if the first bytes are so late that the link may be dead; the second stays True when they arrive."""
        self._growing = False
        """True if the link may be in slow start."""
        self._at_prior = False
        """True if the rate is still that of earlier plays."""
        self.best_rate = 0.0
        """Highest rate measured so far, bytes per second."""
        self.fast_s = 0.0
        """When the link last had about this rate, in seconds since the play began."""
        self.held_since_s = self._held_rate = 0.0
        """Since when the rate has stayed within a factor of 2, and that rate; minus infinity for a rate of earlier
        plays."""

    def update(self, view: View) -> None:
        """Take the present estimate into account."""
        self._growing, self._at_prior = self._grows(view), 0.0 < view.rate == self._prior_rate
        if not self._at_prior and view.rate >= SLOW * self.best_rate:
            self.best_rate, self.fast_s = max(self.best_rate, view.rate), view.now
        # A late first byte says little: only a sample confirms the rate of earlier plays.
        answered = self.best_rate > 0 or (not self._was_silent and (view.in_flight.receiving or view.settled.history))
        first_s = max((not self._was_silent and view.ttfb_s) or UNKNOWN_TTFB_S, SLOT_SHARE * view.deadline_s)
        self._silent = not answered and view.outstanding_bytes > 0 and view.now > _SILENT_ROUNDS * first_s
        self._was_silent = self._was_silent or self._silent
        if not 0.5 * self._held_rate <= view.rate <= 2.0 * self._held_rate or self._growing:
            self.held_since_s, self._held_rate = -math.inf if self._at_prior else view.now, view.rate
        if view.ttfb_s > 0:  # after an outage, this says little about the round trip
            self._round_s = min(self._round_s, UNKNOWN_TTFB_S if self._was_silent else view.ttfb_s)

    def rates(self, view: View) -> Belief:
        """Return the possible rates."""
        growing, silent, slow = self._growing, self._silent, view.rate < SLOW * self.best_rate
        found = self._alive(view, slow=slow)
        if silent:
            dead = min(1.0, view.now / view.deadline_s)
            rate = _DEAD_LINK_SHARE * view.ladder.tracks[0].total_bytes / max(view.time_left, MIN_WAIT_S)
            weights = (dead, *((1.0 - dead) * weight for weight in found.weights))
            found = found._replace(rates=(rate, *found.rates), weights=weights)
        if growing or slow or silent or found.state == "prior":
            # The longer the wait so far, the longer it will last.
            since_s = view.now - self.fast_s if slow else 0.0 if growing and not silent else view.now
            learns_s = max(MIN_WAIT_S if view.ttfb_s > 0 else UNKNOWN_TTFB_S, view.ttfb_s, since_s)
            if found.ramp is not None:  # slow start must exclude the lower rate
                begins, round_s = found.ramp
                learns_s = max(learns_s, round_s * math.log2(min(found.rates) / begins))
            found = found._replace(learns_s=learns_s)
        return found._replace(state="slow" if slow else "silent" if silent else found.state)

    def faster(self, view: View, seconds: float) -> float:
        """Return the probability that the link suddenly becomes faster within some seconds.

        The longer a rate has held, the smaller it is.
        """
        return _SPEED_UP_WEIGHT * (1.0 - (1.0 + seconds / self._held_s(view)) ** -2)

    def before_call(self, view: View, belief: Belief, seconds: float) -> Belief:
        """Return the belief before a call of some seconds that cannot be stopped: the link may become faster."""
        if len(belief.rates) > 1 or self.held_since_s < 0.0:
            return belief
        faster, (rate,) = self.faster(view, seconds), belief.rates
        rates, weights = (SPEED_UP * rate, rate), (faster, 1.0 - faster)
        return belief._replace(rates=rates, weights=weights, rare=1, learns_s=self._held_s(view))

    def _held_s(self, view: View) -> float:
        return max(MIN_WAIT_S, view.now - self.held_since_s)

    @staticmethod
    def arrivals(view: View, rate: float) -> Belief:
        """Return the possible rates of new requests; ``rate``: the expected one, bytes per second."""
        if view.growing:
            rates = sorted((*(each * rate for each in _GROWN[:-1]), LinkBelief.grown(view, rate)))
            return Belief.of(tuple(rates), _GROWN_WEIGHTS)
        low = view.lower_bound if 0.0 < view.lower_bound <= rate else LOW_SHARE * rate
        return Belief.of((low, rate, _HIGH * rate), _WEIGHTS)

    @staticmethod
    def grown(view: View, rate: float) -> float:
        """Return the mean rate until the deadline, given the present rate and slow start.

        Growth is expected only up to the rate of earlier plays.
        """
        if not view.growing:
            return rate
        round_s = view.ttfb_s or UNKNOWN_TTFB_S
        rounds = max(view.time_left, round_s) / round_s
        grows = math.log2(max(LOW_SHARE * view.prior_rate / rate, 1.0))
        doubled = min(rounds, grows)
        mean = rate * (math.exp2(doubled) - 1.0) / math.log(2.0) + (rounds - doubled) * rate * math.exp2(doubled)
        return max(GROWTH * rate, mean / rounds)

    def _alive(self, view: View, *, slow: bool) -> Belief:
        if slow:  # it may be slow only for a moment
            return Belief.of((view.rate or _STALLED_SHARE * self.best_rate, RECOVERED * self.best_rate))
        round_s = self._round_s if view.ttfb_s > 0 else UNKNOWN_TTFB_S
        left_s = max(view.time_left, 0.01 * view.deadline_s, MIN_WAIT_S)
        if view.rate > 0 and not self._growing:
            if not self._at_prior:
                return Belief.of((view.rate,))
            ramp = 2.0 ** min(view.now / round_s, 64.0) * WINDOW / round_s, round_s
            return _near_prior(view, LOW_SHARE * view.rate, view.rate, left_s)._replace(ramp=ramp, state="prior")
        begins = max(view.rate, WINDOW / round_s)
        state = "growing" if view.rate > 0 else "unknown"
        if view.prior_rate > view.rate:  # too fast for an initial estimate, but reachable by slow start
            found = Belief.of((max(LOW_SHARE * view.prior_rate, view.rate), view.prior_rate))
            return found._replace(ramp=(begins, round_s), state=state)
        if 0.0 < view.rate <= GROWTH * view.prior_rate:
            found = _near_prior(view, view.rate, GROWTH * view.prior_rate, left_s)
            return found._replace(ramp=(begins, round_s), state=state)
        # The rate will not fall, and an unknown link is assumed to carry the base in time.
        least = max(view.rate, view.ladder.tracks[0].total_bytes / left_s)
        low, high = (load * view.catalog.fp16_bytes / left_s for load in LOADS)
        return Belief.of((max(least, low), max(least, high, GROWTH * view.rate)))._replace(
            ramp=(begins, round_s), state=state
        )

    def _grows(self, view: View) -> bool:
        """Return True if the link may be in slow start: its rate grew during the last round trip, or is unknown."""
        if view.rate > 0:
            if not self._rates and view.now <= 0:
                self._prior_rate = view.rate
            self._rates.append((view.now if self._prior_rate != view.rate else -math.inf, view.rate))
        before_s = view.now - _GROWTH_ROUNDS * view.ttfb_s
        while len(self._rates) > 1 and self._rates[1][0] <= before_s:
            self._rates.popleft()
        known = bool(self._rates) and self._rates[0][0] <= before_s
        return view.growing or not known or view.rate > _MIN_GROWTH * self._rates[0][1]


def _near_prior(view: View, low: float, rate: float, left_s: float) -> Belief:
    """Return a belief in two rates near that of earlier plays, or in a much higher one."""
    high, weight = LOADS[1] * view.catalog.fp16_bytes / left_s, 0.5 - 0.5 * _SURPRISE
    return Belief.of((high, low, rate), (_SURPRISE, weight, weight)) if high > rate else Belief.of((low, rate))
