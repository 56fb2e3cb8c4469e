"""Converts running totals, such as the bytes received by an interface, to rates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvabr.replay.readers.source import GAP_STEPS, Rows, TraceFile, median_step

_RISES_PER_FALL = 10
"""Minimum number of rises per fall. A counter falls only when it restarts at zero."""


def is_total(values: Sequence[float | None]) -> bool:
    """Return True if values rise like a running total, possibly with a few restarts."""
    known = [value for value in values if value is not None]
    rises = sum(after > before for before, after in pairwise(known))
    falls = sum(after < before for before, after in pairwise(known))
    return len(known) > 2 and rises > _RISES_PER_FALL * falls


def growth(source: TraceFile, places: Sequence[int], times: Sequence[float], totals: Sequence[float | None]) -> Rows:
    """Return rows between consecutive readings of a counter, without a rate if the counter fell or has a gap.

    ``totals`` are bytes; a missing total is bridged by its neighbours. Raise `TraceError` for fewer than two readings,
    or two readings at the same time.
    """
    readings = [
        (place, time, total) for place, time, total in zip(places, times, totals, strict=True) if total is not None
    ]
    # Loggers of cell information repeat a row for each neighbouring cell.
    kept = [reading for index, reading in enumerate(readings) if index == 0 or reading[1:] != readings[index - 1][1:]]
    if len(kept) < 2:
        raise source.error(f"the counter has {len(kept)} readings; a rate needs at least two")
    longest = GAP_STEPS * median_step([time for _, time, _ in kept])
    rates: list[float | None] = []
    for (_, start, before), (place, end, after) in pairwise(kept):
        if end <= start:
            raise source.error("the counter's time is not later than in the row before; correct or remove it", place)
        fits = after >= before and end - start <= longest
        rates.append((after - before) / (end - start) if fits else None)
    return Rows([place for place, _, _ in kept[1:]], [t for _, t, _ in kept[:-1]], [t for _, t, _ in kept[1:]], rates)
