"""Metrics of a server."""

from __future__ import annotations

from kvabr.telemetry.prometheus import BoundedLabel, MetricSet
from kvabr.types.naming import is_lookup

FIRST_BYTE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics(MetricSet):
    """Metrics of an origin or a relay."""

    def __init__(self) -> None:
        super().__init__()
        self._track, self._token = BoundedLabel(), BoundedLabel()
        self.connections = self.gauge("kvabr_connections", "Connections that are open.")
        self.connections_total = self.counter(
            "kvabr_connections_total", "Connections so far: accepted, or refused and why.", "result"
        )
        self.token_requests_total = self.counter(
            "kvabr_token_requests_total", "Requests so far, by the ID of the token.", "token"
        )
        self.requests_in_flight = self.gauge("kvabr_requests_in_flight", "Requests that are being served.")
        self.refusals_total = self.counter(
            "kvabr_refusals_total", "Requests that were refused, by REQUEST_ERROR or reset code.", "code"
        )
        self.groups_sent_total = self.counter("kvabr_groups_sent_total", "Groups sent in full, by track.", "track")
        self.bytes_sent_total = self.counter("kvabr_bytes_sent_total", "Payload bytes handed to the transport.")
        self.buffered_bytes = self.gauge("kvabr_buffered_bytes", "Bytes of groups that the relay keeps.")
        self.first_byte_seconds = self.histogram(
            "kvabr_first_byte_seconds", "From a request's arrival to its first byte sent.", FIRST_BYTE_BUCKETS_S
        )
        self.assets = self.gauge("kvabr_assets", "Assets that are served.")
        self.assets_growing = self.gauge("kvabr_assets_growing", "Assets that are being prefilled.")
        self.assets_damaged = self.gauge("kvabr_assets_damaged", "Assets left out because they are damaged.")
        self.draining = self.gauge("kvabr_draining", "1 from the GOAWAY on.")

    def group_sent(self, track: str) -> None:
        """Count a group sent in full. All lookups count as one track: their names would reveal requests."""
        label = "lookup" if is_lookup(track) else track
        self.groups_sent_total.labels(self._track(label)).inc()

    def token_used(self, token: str) -> None:
        """Count a request with a token."""
        self.token_requests_total.labels(self._token(token)).inc()
