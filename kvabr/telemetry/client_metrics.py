"""Metrics of a client that many plays share; `kvabr.telemetry.PlayerMetrics` has those of the plays."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from kvabr.store.group_cache import CacheTier, GroupCache, Tier
from kvabr.telemetry.prometheus import MetricSet

_SECONDS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ClientMetrics(MetricSet):
    """Metrics of a client; `kvabr.telemetry.prometheus.ScrapeServer` serves them."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Create the metrics, in ``registry`` or in a registry of their own."""
        super().__init__(registry)
        self.plays_total = self.counter(
            "kvabr_client_plays_total",
            "Plays that are over: met, late, nothing, failed, refused or aborted; and hints, however they ended.",
            "result",
        )
        self.plays_in_flight = self.gauge("kvabr_client_plays_in_flight", "Plays under way.")
        self.plays_waiting = self.gauge("kvabr_client_plays_waiting", "Plays that wait for their turn.")
        self.wait_seconds = self.histogram(
            "kvabr_client_wait_seconds", "Time that plays waited for their turn.", _SECONDS
        )
        self.refused_total = self.counter(
            "kvabr_client_refused_total", "Plays that got no turn: full, late, or closed.", "reason"
        )
        self.groups_total = self.counter(
            "kvabr_client_groups_total",
            "Groups that came, by where from: memory, disk, host (another process), joined (another play's download), "
            "or network.",
            "source",
        )
        self.bytes_total = self.counter(
            "kvabr_client_bytes_total", "Bytes of groups given to plays, by where they came from.", "source"
        )
        self.downloads_total = self.counter(
            "kvabr_client_downloads_total", "Downloads that are over: done, cancelled, failed, or damaged.", "result"
        )
        self.downloaded_bytes_total = self.counter("kvabr_client_downloaded_bytes_total", "Bytes that came from peers.")
        self.priority_changes_total = self.counter(
            "kvabr_client_priority_changes_total", "Downloads under way whose priority was changed."
        )
        self.store_bytes = self.gauge("kvabr_client_store_bytes", "Bytes of groups that are kept, by tier.", "tier")
        self.store_groups = self.gauge("kvabr_client_store_groups", "Groups that are kept, by tier.", "tier")
        self.store_evicted_total = self.counter(
            "kvabr_client_store_evicted_total", "Groups that had to make room for others, by tier.", "tier"
        )
        self.store_damaged_total = self.counter(
            "kvabr_client_store_damaged_total", "Groups kept that were no longer what they had been, by tier.", "tier"
        )
        self.unkept_total = self.counter(
            "kvabr_client_unkept_total", "Times that groups or a profile could not be written to the disk.", "what"
        )
        self.store_kept_bytes = self.gauge(
            "kvabr_client_store_kept_bytes", "Bytes of groups for which hints have others make room, by tier.", "tier"
        )
        self._seen: WeakKeyDictionary[CacheTier[Any], tuple[int, int]] = WeakKeyDictionary()
        """Evicted and damaged groups of each tier that are counted already."""
        self.peers = self.gauge("kvabr_client_peers", "Peers that the client has a connection to.")
        self.dials_failed_total = self.counter("kvabr_client_dials_failed_total", "Peers that could not be reached.")
        self.wrong_answers_total = self.counter(
            "kvabr_client_wrong_answers_total",
            "Stores that answered with something else than was published, such as a gateway's page, when they were to "
            "be used.",
        )

    def show_store(self, store: GroupCache) -> None:
        """Copy a store's counters, by tier."""
        tiers: list[tuple[Tier, CacheTier[Any] | None]] = [("memory", store.memory), ("disk", store.disk)]
        for name, tier in tiers:
            if tier is not None:
                self.store_bytes.labels(name).set(tier.total_bytes)
                self.store_groups.labels(name).set(len(tier))
                self.store_kept_bytes.labels(name).set(tier.kept_bytes)
                evicted, damaged = self._seen.get(tier, (0, 0))
                self.store_evicted_total.labels(name).inc(tier.evicted - evicted)
                self.store_damaged_total.labels(name).inc(tier.damaged - damaged)
                self._seen[tier] = tier.evicted, tier.damaged
