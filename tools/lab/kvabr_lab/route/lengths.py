"""The prompt length at which remote prefill becomes faster: ``local`` = ``remote`` of `kvabr_lab.route.forecast`.

Without cached tokens or queues, remote prefill is faster above n*(C).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvabr_lab.route.forecast import CacheSize, PrefillSite, RouteLink

Interval = tuple[float, float]
"""An open interval."""


def remote_lengths(local: PrefillSite, remote: PrefillSite, link: RouteLink, cache: CacheSize) -> tuple[Interval, ...]:
    """Return the lengths at which remote prefill is faster than local prefill, in tokens beyond the cached ones.

    The smaller of the two sites' numbers of cached tokens is used, and of earlier requests only ``backlog_bytes``.
    Intervals are for prompts of whole groups; for others the last group is smaller, and remote prefill slightly faster.
    With a live link the intervals are exact, since every condition is a quadratic inequality. Usually there is one
    interval, from n*(C) on.
    """
    before = min(local.cached_tokens, remote.cached_tokens) // cache.group_tokens * cache.group_tokens
    if link.rate <= 0:
        return ()
    own, other, group = local.cost.after(before), remote.cost.after(before), cache.group_tokens
    byte_s, constant_s = cache.per_token / link.rate, cache.constant / link.rate
    begin_s = max(link.rtt_s / 2, remote.queue_s)
    first_s = begin_s + remote.cost.seconds(before, group)
    # The engine's step for the first token takes `step` plus `more` per token.
    step = own.constant_s + own.per_token_s - own.attention_s
    more = 2 * own.attention_s
    over = link.rtt_s / 2 + step + group * cache.decode_s + constant_s
    here = (own.attention_s, own.per_token_s, own.constant_s + local.queue_s)
    there = [
        (other.attention_s, other.per_token_s, begin_s + other.constant_s + group * byte_s + over),
        (0.0, byte_s, link.free_s + over),
        (0.0, cache.decode_s, link.free_s + group * (byte_s - cache.decode_s) + over - constant_s),
    ]
    if link.live:
        there.append((0.0, byte_s, first_s + over))
        there.append((0.0, cache.decode_s, first_s + group * byte_s + over - group * cache.decode_s - constant_s))
    else:
        end = (other.attention_s, other.per_token_s, begin_s + other.constant_s + over)
        there.append((end[0], end[1] + byte_s, end[2]))
        late = group * byte_s - group * cache.decode_s - constant_s
        there.append((end[0], end[1] + cache.decode_s, end[2] + late))
    found: tuple[Interval, ...] = ((0.0, math.inf),)
    for square, linear, constant in there:
        gain = (here[0] - square, here[1] - linear - more, here[2] - constant)
        found = _common(found, _positive(*gain))
    return found


def break_even_tokens(local: PrefillSite, remote: PrefillSite, link: RouteLink, cache: CacheSize) -> float:
    """Return n*(C), the lower end of `remote_lengths`; infinity if there is no interval."""
    intervals = remote_lengths(local, remote, link, cache)
    return intervals[0][0] if intervals else math.inf


def _positive(square: float, linear: float, constant: float) -> tuple[Interval, ...]:
    """Return the intervals above 0 in which a quadratic polynomial is positive."""
    roots = sorted({max(0.0, root) for root in _roots(square, linear, constant)} | {0.0})
    ends = [*roots, math.inf]
    found = []
    for low, high in zip(roots, ends[1:], strict=True):
        middle = low + 1.0 if high == math.inf else (low + high) / 2
        if (square * middle + linear) * middle + constant > 0:
            found.append((low, high))
    return tuple(found)


def _roots(square: float, linear: float, constant: float) -> Iterable[float]:
    if square == 0:
        return [] if linear == 0 else [-constant / linear]
    under = linear * linear - 4 * square * constant
    if under < 0:
        return []
    # If attention is cheap, the usual formula would subtract nearly equal numbers.
    half = -(linear + math.copysign(math.sqrt(under), linear)) / 2
    return [half / square, *([constant / half] if half else [])]


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> tuple[Interval, ...]:
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return tuple(pair for pair in pairs if pair[0] < pair[1])
