"""Metrics of a client; for metrics of plays see `kvabr.telemetry.PlayerMetrics`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from kvabr.store.group_cache import GroupCache, Tier
from kvabr.telemetry.prometheus import MetricSet

_SECONDS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ClientMetrics(MetricSet):
    """Metrics of a client, for `ScrapeServer`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self.plays_total = self.counter(
            "kvabr_client_plays_total",
            "Finished plays: met, late, nothing (not cached), failed, refused or aborted; and hints with any result.",
            "result",
        )
        self.plays_in_flight = self.gauge("kvabr_client_plays_in_flight", "Plays in progress.")
        self.plays_waiting = self.gauge("kvabr_client_plays_waiting", "Plays waiting to start.")
        self.wait_seconds = self.histogram(
            "kvabr_client_wait_seconds", "Time that plays waited before they started.", _SECONDS
        )
        self.refused_total = self.counter(
            "kvabr_client_refused_total", "Plays refused: queue full, too late, or client closed.", "reason"
        )
        self.groups_total = self.counter(
            "kvabr_client_groups_total",
            "Groups received, by source: memory, disk, host (another process), joined (another play's download), "
            "or network.",
            "source",
        )
        self.bytes_total = self.counter(
            "kvabr_client_bytes_total", "Bytes of groups delivered to plays, by source.", "source"
        )
        self.downloads_total = self.counter(
            "kvabr_client_downloads_total", "Finished downloads: done, cancelled, failed or damaged.", "result"
        )
        self.downloaded_bytes_total = self.counter("kvabr_client_downloaded_bytes_total", "Bytes received from peers.")
        self.store_bytes = self.gauge("kvabr_client_store_bytes", "Bytes of stored groups, by tier.", "tier")
        self.store_groups = self.gauge("kvabr_client_store_groups", "Stored groups, by tier.", "tier")
        self.store_evicted_total = self.counter("kvabr_client_store_evicted_total", "Evicted groups, by tier.", "tier")
        self.store_damaged_total = self.counter(
            "kvabr_client_store_damaged_total", "Stored groups found damaged, by tier.", "tier"
        )
        self.failed_writes_total = self.counter(
            "kvabr_client_failed_writes_total", "Failed writes of groups or profiles to disk.", "what"
        )
        self.store_kept_bytes = self.gauge(
            "kvabr_client_store_kept_bytes", "Bytes of groups protected from eviction by hints, by tier.", "tier"
        )
        self._seen: WeakKeyDictionary[GroupCache, dict[Tier, tuple[int, int]]] = WeakKeyDictionary()
        self.peers = self.gauge("kvabr_client_peers", "Connected peers.")
        self.dials_failed_total = self.counter("kvabr_client_dials_failed_total", "Peers that could not be reached.")
        self.wrong_answers_total = self.counter(
            "kvabr_client_wrong_answers_total",
            "Stores that returned other bytes than published, such as a gateway's page.",
        )

    def show_store(self, store: GroupCache) -> None:
        """Copy the counters of a store, by tier."""
        seen = self._seen.setdefault(store, {})
        for name, tier in store.tiers.items():
            self.store_bytes.labels(name).set(tier.currsize)
            self.store_groups.labels(name).set(len(tier))
            self.store_kept_bytes.labels(name).set(tier.kept_bytes)
            evicted, damaged = seen.get(name, (0, 0))
            self.store_evicted_total.labels(name).inc(tier.evicted - evicted)
            self.store_damaged_total.labels(name).inc(store.damaged[name] - damaged)
            seen[name] = tier.evicted, store.damaged[name]
