"""Counters of the connector, which can be summed over steps and workers. Does not import vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

SECONDS, REQUEST_LOSS = "play_seconds", "request_loss"
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    SECONDS: ("Seconds that plays took", (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)),
    REQUEST_LOSS: (
        "Expected loss of what requests were served with, nats per generated token",
        (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    ),
}
_MAX_NOTED = 10_000

HELP = {
    "params_ignored": "Parameters of requests that were unknown or of a wrong type",
    "lookups_hit": "Requests with a prefix at the origin",
    "lookups_miss": "Requests without",
    "lookups_failed": "Lookups that the origin did not answer in time",
    "lookups_paused": "Requests not looked up because the origin had not answered others",
    "lookups_hopeless": "Requests not looked up because their deadline is shorter than that takes",
    "lookups_refused": "Lookups answered with a cache of another model, or with an invalid catalog",
    "lookups_short": "Requests shorter than one group",
    "lookups_unfit": "Requests whose caches depend on more than their tokens",
    "tokens_refined": "Tokens that were fetched again in the best quality, after a play with a loss",
    "lookups_crowded": "Requests with a prefix at the origin that are computed so that others are played in time",
    "lookups_unplayed": "Requests with a prefix at the origin and no room to play it before their deadline",
    "hints": "Requests that wanted their cache to be kept in the node's store",
    "hints_dropped": "Those for which too many others were followed at the time",
    "hints_failed": "Those of which the origin did not give the cache, or tell what it has",
    "tokens_kept": "Tokens in the node's store for them, once each was followed",
    "plays": "Plays begun",
    "plays_live": "Plays of caches that were still being computed",
    "plays_cut": "Plays that brought less than wanted",
    "groups_damaged": "Groups that came to plays and could not be used, each time that they came",
    "groups_failed": "Requests of plays for groups that failed: not there, refused, or lost with a connection",
    "groups_late": "Other groups that plays wanted, and that were late or better computed",
    "plays_failed": "Plays that brought nothing because of an error",
    "plays_aborted": "Plays cancelled because their request ended or had no use for them any more",
    "plays_unused": "Plays whose cache was in place and not used",
    "plays_not_kept": "Plays that lost more than vLLM's prefix cache may keep: it forgets their blocks",
    "requests_shared_lossy": "Requests that shared blocks of such a play while its own request ran",
    "requests_spared": "Requests that wanted better than such blocks, and did not get them",
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
    "publish_skipped_old": "Requests not published because the engine's caches were reset while they were computed",
    "publish_skipped_window": "Requests not published because vLLM had dropped what their windows held before",
    "publish_dropped_full": "Caches not published because too many waited",
    "publish_dropped_known": "Caches not published because they exist already",
    "publish_dropped_lossy": "Caches not published because they were computed after a lossy cache",
    "publish_dropped_not_finite": "Caches not published, or only their beginning, because a number is NaN or infinite",
    "publish_dropped_failed": "Caches not published because of another error",
    "copy_seconds": "Seconds of decoding plays into the engine's blocks, and of copying publications out of them",
}


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

    def note(self, name: str, value: float) -> None:
        """Record a value for a histogram."""
        if name not in HISTOGRAMS:
            raise KeyError(name)
        with self._lock:
            kept = self._data.setdefault(name, [])
            if len(kept) < _MAX_NOTED:
                kept.append(value)

    def take(self) -> dict[str, Any]:
        """Return and reset all counters."""
        with self._lock:
            data, self._data = self._data, {}
        return data


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two sets of counters."""
    return {**one, **{name: one[name] + value if name in one else value for name, value in other.items()}}


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """Return one number per key, for a log line."""
    out: dict[str, int | float] = {name: round(value, 6) for name, value in data.items() if name not in HISTOGRAMS}
    for name in HISTOGRAMS:
        if ordered := sorted(data.get(name, ())):
            out[f"{name}_p50"] = round(ordered[len(ordered) // 2], 4)
            out[f"{name}_max"] = round(ordered[-1], 4)
    return out
