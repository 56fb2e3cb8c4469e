"""What a server counts; what counts it is in `kvabr.telemetry.exposition`."""

from __future__ import annotations

from kvabr.telemetry.exposition import MAX_SERIES, Counter, Exposition, Gauge, Histogram, Metric
from kvabr.types.naming import PREFIX_TRACK, plain_track

__all__ = ["MAX_SERIES", "Counter", "Gauge", "Histogram", "Metric", "Metrics", "TrackCounter"]

FIRST_BYTE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
GROUP_BYTES_BUCKETS = tuple(float(1 << power) for power in range(12, 31, 2))


class TrackCounter(Counter):
    """Counts by track; all lookups are one series, since their names tell what someone asked for."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text, ["track"])

    def inc(self, *labels: str, by: float = 1.0) -> None:
        """Count ``by`` more, of the track with this name."""
        super().inc(*("lookup" if label.startswith(PREFIX_TRACK) else plain_track(label) for label in labels), by=by)


class Metrics(Exposition):
    """Everything that a server of an origin or a relay counts."""

    def __init__(self) -> None:
        self.connections = Gauge("kvabr_connections", "Connections that are open.")
        self.connections_total = Counter(
            "kvabr_connections_total", "Connections so far: accepted, or refused and why.", ["result"]
        )
        self.requests_total = Counter("kvabr_requests_total", "Requests so far, by kind of message.", ["kind"])
        self.requests_in_flight = Gauge("kvabr_requests_in_flight", "Requests that are being served.")
        self.refusals_total = Counter(
            "kvabr_refusals_total", "Requests that were refused, by REQUEST_ERROR or reset code.", ["code"]
        )
        self.cancelled_total = Counter("kvabr_cancelled_total", "Requests that the peer gave up before their end.")
        self.groups_sent_total = TrackCounter("kvabr_groups_sent_total", "Groups sent in full, by track.")
        self.bytes_sent_total = Counter("kvabr_bytes_sent_total", "Payload bytes handed to the transport.")
        self.buffered_bytes = Gauge("kvabr_buffered_bytes", "Bytes handed to moq-rs and not yet sent.")
        self.first_byte_seconds = Histogram(
            "kvabr_first_byte_seconds", "From a request's arrival to its first byte sent.", FIRST_BYTE_BUCKETS_S
        )
        self.group_bytes = Histogram("kvabr_group_bytes", "Sizes of the groups sent.", GROUP_BYTES_BUCKETS)
        self.assets = Gauge("kvabr_assets", "Assets that are served.")
        self.assets_damaged = Gauge("kvabr_assets_damaged", "Assets that were left out.")
        self.draining = Gauge("kvabr_draining", "1 from the GOAWAY on.")
