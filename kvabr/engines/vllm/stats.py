"""Counters of the connector, in a form that adds up over steps and workers. Needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

SECONDS = "play_seconds"
"""The only key with a list as value: the seconds of every play."""
_MAX_PLAYS = 10_000
"""Plays whose seconds are kept until the next `take`."""

HELP = {
    "lookups_hit": "Requests with a prefix at the origin",
    "lookups_miss": "Requests without",
    "lookups_failed": "Lookups that the origin did not answer in time",
    "lookups_paused": "Requests not looked up because the origin had not answered others",
    "lookups_refused": "Lookups answered with a cache of another model, or with an invalid catalog",
    "lookups_short": "Requests shorter than one group",
    "lookups_unfit": "Requests whose caches depend on more than their tokens",
    "lookups_joined": "Requests with passages at the origin, of those with a prefix there",
    "passages_refused": "Passages at the origin that could not be joined, and were computed",
    "lookups_unplayed": "Requests with a prefix at the origin and no room to play it before their deadline",
    "plays": "Plays begun",
    "plays_live": "Plays of caches that were still being computed",
    "plays_cut": "Plays that brought less than wanted",
    "plays_failed": "Plays that brought nothing because of an error",
    "plays_aborted": "Plays cancelled because their request ended or had no use for them any more",
    "plays_unused": "Plays whose cache was in place and not used",
    "tokens_loaded": "Tokens whose cache was played",
    "tokens_missed": "Wanted tokens that the engine computes instead",
    "tokens_tail": "Wanted tokens that it computes with the question because that loses less",
    "bytes_fetched": "Bytes received by plays",
    "bytes_wasted": "Received bytes that were of no use",
    "loss": "Expected loss of what was played, nats per generated token, summed over plays",
    "published": "Caches published",
    "published_live": "Caches that other nodes could play while they were computed",
    "publish_left_out": "Frames offered only after their cache was computed, as encoding was too slow",
    "published_bytes": "Bytes of published caches, all tracks together",
    "publish_skipped_short": "Requests that computed less than one group",
    "publish_skipped_unfit": "Requests whose caches depend on more than their tokens",
    "publish_skipped_blended": "Requests whose caches may have been joined from passages",
    "publish_skipped_old": "Requests not published because the engine's caches were reset while they were computed",
    "publish_skipped_window": "Requests not published because vLLM had dropped what their windows held before",
    "publish_dropped_full": "Caches not published because too many waited",
    "publish_dropped_known": "Caches not published because they exist already",
    "publish_dropped_lossy": "Caches not published because they were computed behind a lossy cache",
    "publish_dropped_failed": "Caches not published because of an error",
    "copy_seconds": "Seconds of decoding plays into the engine's blocks, and of copying publications out of them",
}
"""Meaning of every other key."""


class ConnectorCounts:
    """Counters; thread-safe."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        if name not in HELP:
            raise KeyError(name)
        with self._lock:
            self._data[name] = self._data.get(name, 0) + by

    def play(self, seconds: float) -> None:
        """Record the duration of a play."""
        with self._lock:
            kept = self._data.setdefault(SECONDS, [])
            if len(kept) < _MAX_PLAYS:
                kept.append(seconds)

    def take(self) -> dict[str, Any]:
        """Return and reset all counters; empty if nothing was counted."""
        with self._lock:
            data, self._data = self._data, {}
        return data


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two sets of counters."""
    return {**one, **{name: one[name] + value if name in one else value for name, value in other.items()}}


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """Return one number per key, for a log line."""
    out: dict[str, int | float] = {name: round(value, 6) for name, value in data.items() if name != SECONDS}
    if ordered := sorted(data.get(SECONDS, ())):
        out["play_seconds_p50"] = round(ordered[len(ordered) // 2], 4)
        out["play_seconds_max"] = round(ordered[-1], 4)
    return out
