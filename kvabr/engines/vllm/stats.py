"""What the connector counts, in a form that adds up over steps and workers. Needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

SECONDS = "play_seconds"
"""The one key whose value is a list: seconds of every play."""
_MOST = 10_000
"""Plays whose seconds are kept until somebody asks."""

HELP = {
    "lookups_hit": "Requests of which the origin has a prefix",
    "lookups_miss": "Requests of which it has nothing",
    "lookups_failed": "Lookups that it did not answer, or not in time",
    "lookups_paused": "Requests that were not looked up because the origin had not answered others",
    "lookups_refused": "Lookups answered with a cache of another model, or with what is no catalog",
    "lookups_short": "Requests shorter than one group",
    "lookups_unfit": "Requests whose caches depend on more than their tokens",
    "plays": "Plays begun",
    "plays_cut": "Plays that brought less than was wanted",
    "plays_failed": "Plays that brought nothing because of an error",
    "plays_aborted": "Plays whose request was aborted",
    "tokens_loaded": "Tokens whose cache was played",
    "tokens_missed": "Tokens that were wanted and are computed instead",
    "bytes_fetched": "Bytes received by plays",
    "bytes_wasted": "Bytes of these that were of no use",
    "loss": "Expected loss of what was played, nats per generated token, summed over plays",
    "published": "Caches published",
    "published_bytes": "Bytes of these, all tracks together",
    "publish_skipped_short": "Requests that computed less than one group",
    "publish_skipped_unfit": "Requests whose caches depend on more than their tokens",
    "publish_dropped_full": "Caches not published because others waited",
    "publish_dropped_known": "Caches not published because they are there",
    "publish_dropped_lossy": "Caches not published because they were computed behind a lossy cache",
    "publish_dropped_failed": "Caches not published because of an error",
    "copy_seconds": "Seconds of copying between kvabr's caches and the engine's blocks",
}
"""Every key, and what it counts."""


class Counts:
    """Counters; may be added to by any thread."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, name: str, by: float = 1) -> None:
        """Count."""
        if name not in HELP:
            raise KeyError(name)
        with self._lock:
            self._data[name] = self._data.get(name, 0) + by

    def play(self, seconds: float) -> None:
        """A play took so long."""
        with self._lock:
            kept = self._data.setdefault(SECONDS, [])
            if len(kept) < _MOST:
                kept.append(seconds)

    def take(self) -> dict[str, Any]:
        """All that was counted since the last time; empty if nothing was."""
        with self._lock:
            data, self._data = self._data, {}
        return data


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two of them together."""
    out = dict(one)
    for name, value in other.items():
        out[name] = out[name] + value if name in out else value
    return out


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """One number per key, for a log line."""
    out: dict[str, int | float] = {}
    for name, value in data.items():
        if name == SECONDS:
            ordered = sorted(value)
            out["play_seconds_p50"] = round(ordered[len(ordered) // 2], 4) if ordered else 0.0
            out["play_seconds_max"] = round(ordered[-1], 4) if ordered else 0.0
        else:
            out[name] = round(value, 6) if isinstance(value, float) else value
    return out
