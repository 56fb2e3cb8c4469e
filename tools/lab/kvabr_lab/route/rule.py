"""The rule: choose the place with the earliest first token, and give a reason.

Remote prefill wins if::

    local queue + local prefill  >  remote queue + RTT + max(remote prefill, n b / C) + tail

if groups are sent during the prefill (`kvabr_lab.route.forecast` has the exact terms). ``b`` is bytes per token, ``C``
the link's expected rate. Deadlines are checked with the rate's lower bound, because a remote prefill cannot be undone.
A `Router` adds the delay of other requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvabr.types.errors import UsageError
from kvabr_lab.route.forecast import (
    BOTH,
    FETCH,
    LOCAL,
    REMOTE,
    CacheSize,
    Forecast,
    Place,
    PrefillSite,
    RouteLink,
    forecasts,
)

_WORDS = {
    LOCAL: "local prefill",
    REMOTE: "remote prefill",
    BOTH: "remote prefill, its beginning here",
    FETCH: "fetching the cached prefix, the rest here",
}
_LIMITS = {"queue": "mostly the queue", "prefill": "mostly prefill", "link": "mostly the link", "decode": "decoding"}


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen place for a request, and the reason."""

    place: Place
    ttft_s: float
    met: bool | None
    """True if the deadline is met at the link's lower bound; None without a deadline."""
    reason: str
    options: tuple[Forecast, ...]
    """Forecasts of all places; the first is local prefill."""

    @property
    def chosen(self) -> Forecast:
        """Forecast of the chosen place; for `BOTH` it has the number of tokens to compute here."""
        return next(one for one in self.options if one.place == self.place)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; infinity becomes None."""
        return {
            "place": self.place,
            "front_tokens": self.chosen.front_tokens,
            "ttft_s": _finite(self.ttft_s),
            "met": self.met,
            "reason": self.reason,
            "options": [
                {
                    "place": one.place,
                    "ttft_s": _finite(one.ttft_s),
                    "bound_s": _finite(one.bound_s),
                    "limit": one.limit,
                    "queue_s": one.queue_s,
                    "prefill_s": one.prefill_s,
                    "bytes": round(one.bytes),
                    "front_tokens": one.front_tokens,
                    "others_s": one.others_s,
                }
                for one in self.options
            ],
        }


def decide(
    tokens: int,
    local: PrefillSite,
    remote: PrefillSite,
    link: RouteLink,
    cache: CacheSize,
    *,
    deadline_s: float | None = None,
    margin_s: float = 0.0,
    both: bool = True,
) -> Route:
    """Decide where to prefill a prompt.

    Of the places that meet the deadline at the lower bound, the one with the lowest total time of all requests is
    chosen. If none meets it, the fastest place at the lower bound is chosen, and the reason says so.

    Args:
        tokens: Length of the prompt.
        local: The decode node's own site.
        remote: The other site.
        link: The link between them.
        cache: Size of the cache on the link.
        deadline_s: Deadline of the first token, seconds.
        margin_s: Minimum advantage of a place over the local site, seconds.
        both: True if the local engine can compute the start of a prompt that arrives from its end.

    Raises:
        UsageError: An argument is out of range.
    """
    return choose(forecasts(tokens, local, remote, link, cache, both=both), deadline_s=deadline_s, margin_s=margin_s)


def choose(options: Sequence[Forecast], *, deadline_s: float | None = None, margin_s: float = 0.0) -> Route:
    """Choose among forecasts; see `decide`."""
    if deadline_s is not None and not deadline_s > 0:
        raise UsageError(f"the deadline must be a positive number of seconds, got {deadline_s}")
    if not 0 <= margin_s < math.inf:
        raise UsageError(f"the margin must be 0 or more seconds, got {margin_s}")
    due_s = math.inf if deadline_s is None else deadline_s
    in_time = [one for one in options if one.bound_s <= due_s] if deadline_s is not None else list(options)
    if in_time:
        best = min(in_time, key=lambda one: one.price_s + _handicap(one, margin_s))
    else:
        best = min(options, key=lambda one: one.bound_s + _handicap(one, margin_s))
    met = None if deadline_s is None else bool(in_time)
    return Route(best.place, best.ttft_s, met, _reason(best, options, deadline_s), tuple(options))


def _handicap(one: Forecast, margin_s: float) -> float:
    return 0.0 if one.place == LOCAL else margin_s


def _reason(best: Forecast, options: Sequence[Forecast], deadline_s: float | None) -> str:
    if len(options) > 1 and all(math.isinf(one.ttft_s) for one in options if one.place != LOCAL):
        return f"local prefill takes {_time(best)}; the rate of the link is not known yet"
    others = [one for one in options if one.place != best.place and math.isfinite(one.ttft_s)]
    against = "; ".join(f"{_WORDS[one.place]} {_time(one)}" for one in others)
    front = f", {best.front_tokens} tokens" if best.place == BOTH else ""
    said = f"{_WORDS[best.place]}{front}, takes {_time(best)}" if front else f"{_WORDS[best.place]} takes {_time(best)}"
    if against:
        said += f", against {against}"
    if deadline_s is not None and best.bound_s > deadline_s:
        return f"no site is sure to meet the deadline of {deadline_s:g} s, and this one is the fastest: {said}"
    sooner = [one for one in others if one.ttft_s < best.ttft_s]
    if deadline_s is not None and any(one.bound_s > deadline_s for one in sooner):
        said += f"; a site that is expected to be faster may miss the deadline of {deadline_s:g} s"
    elif (spared := max((one.others_s - best.others_s for one in sooner), default=0.0)) > 0:
        said += f"; a faster site would make other requests wait {_seconds(spared)} longer"
    return said


def _time(one: Forecast) -> str:
    return f"{_seconds(one.ttft_s)} ({_LIMITS[one.limit]})"


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
