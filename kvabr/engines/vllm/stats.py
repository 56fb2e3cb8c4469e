"""Counters of the connector, which can be summed over steps and workers. Does not import vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

SECONDS, REQUEST_LOSS = "play_seconds", "request_loss"
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    SECONDS: ("Duration of plays, seconds", (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)),
    REQUEST_LOSS: (
        "Expected loss of the caches that requests used, nats per generated token",
        (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    ),
}
_MAX_NOTED = 10_000

HELP = {
    "params_ignored": "Request parameters ignored because they are unknown or have a wrong type",
    "lookups_hit": "Lookups that found a prefix of the request at the origin",
    "lookups_miss": "Lookups that found no prefix of the request at the origin",
    "lookups_failed": "Lookups that the origin did not answer in time",
    "lookups_paused": "Requests not looked up because the origin did not answer earlier lookups",
    "lookups_hopeless": "Requests not looked up because their deadline is shorter than a lookup",
    "lookups_refused": "Lookups answered with a cache of another model, or with an invalid catalog",
    "lookups_short": "Requests not looked up because they are shorter than one group",
    "lookups_unfit": "Requests not looked up because their caches depend on more than their tokens",
    "tokens_refined": "Tokens fetched again in the best quality after a lossy play",
    "lookups_crowded": "Requests computed despite a prefix at the origin, so that other plays meet their deadlines",
    "lookups_unplayed": "Requests computed despite a prefix at the origin, because a play would miss the deadline",
    "hints": "Requests with a hint to keep their cache in the node's store",
    "hints_dropped": "Hints dropped because too many others were in progress",
    "hints_failed": "Hints that failed because the origin did not deliver the catalog or the cache",
    "tokens_kept": "Tokens in the node's store because of hints",
    "plays": "Plays started",
    "plays_live": "Plays of caches that were still being computed",
    "plays_cut": "Plays that delivered fewer tokens than requested",
    "groups_damaged": "Received groups that were damaged, each time that they were received",
    "groups_failed": "Failed requests for groups: missing, refused, or lost with a connection",
    "groups_late": "Other requested groups that were late, or faster to compute than to fetch",
    "plays_failed": "Plays that failed with an error",
    "plays_aborted": "Plays cancelled because their request ended or no longer needed them",
    "plays_unused": "Finished plays whose cache was not used",
    "plays_not_kept": "Plays with a loss above keep_loss: vLLM's prefix cache forgets their blocks",
    "requests_shared_lossy": "Requests that shared blocks of a lossy play while its own request ran",
    "requests_spared": "Requests that did not share blocks of a lossy play because of their max_loss",
    "tokens_loaded": "Tokens whose cache was played",
    "tokens_missed": "Tokens of plays that the engine computes instead",
    "tokens_tail": "Tokens of plays that the engine computes with the question to reduce the loss",
    "bytes_fetched": "Bytes received by plays",
    "bytes_wasted": "Received bytes that were not used",
    "loss": "Expected loss of played caches, nats per generated token, summed over plays",
    "published": "Caches published",
    "published_live": "Caches that other nodes could play while they were computed",
    "publish_left_out": "Frames published only after the prefill because encoding was too slow",
    "published_bytes": "Bytes of published caches, all tracks together",
    "publish_skipped_short": "Requests not published because they computed less than one group",
    "publish_skipped_unfit": "Requests not published because their caches depend on more than their tokens",
    "publish_skipped_old": "Requests not published because the engine's caches were reset while they were computed",
    "publish_skipped_window": "Requests not published because vLLM had dropped earlier tokens of their windows",
    "publish_dropped_full": "Caches not published because the queue was full",
    "publish_dropped_known": "Caches not published because they already exist",
    "publish_dropped_lossy": "Caches not published because they were computed after a lossy cache",
    "publish_dropped_not_finite": "Caches not published, or only their beginning, because a number is NaN or infinite",
    "publish_dropped_failed": "Caches not published because of another error",
    "copy_seconds": "Seconds spent decoding plays into the engine's blocks and copying published caches out of them",
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
