"""What a decode node counts, as Prometheus' own parser reads it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvabr.telemetry import PlayerMetrics, Telemetry
from kvabr.types.events import CacheDelivered, PlayGaveUp, RequestCancelled, RequestFailed, RequestSent
from tests.telemetry.plays import DEADLINE_S, GROUPS, OFFER, broken, simulated


def read(metrics):
    """Every sample: (name, labels) to value."""
    found = {}
    for family in text_string_to_metric_families(metrics.expose()):
        assert family.documentation
        assert family.type in {"counter", "gauge", "histogram"}
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def counted(*plays):
    metrics = PlayerMetrics()
    with Telemetry(metrics) as telemetry:
        for lines in plays:
            telemetry.feed(lines)
    assert telemetry.counts["prometheus"].errors == 0
    return read(metrics)


def test_a_play_is_counted():
    lines = simulated()
    found = counted(lines, lines)
    done = [line for line in lines if line.name == "done"]
    (delivered,) = [line for line in lines if line.name == "deliver"]
    assert found["kvabr_plays_total", (("result", "met"),)] == 2
    assert found["kvabr_plays_in_progress", ()] == 0
    assert found["kvabr_play_requests_total", (("result", "done"),)] == 2 * len(done)
    by_track = {labels[0][1]: value for (name, labels), value in found.items() if name == "kvabr_play_bytes_total"}
    assert by_track == {
        track: 2 * sum(line.bytes for line in done if line.track == track) for track in {line.track for line in done}
    }
    assert by_track["base"] == 2 * OFFER.track("base").total_bytes
    assert found["kvabr_play_groups_total", (("source", "fetched"),)] == 2 * GROUPS
    assert found["kvabr_play_groups_total", (("source", "upgraded"),)] > 0
    assert found["kvabr_play_seconds_count", ()] == 2
    assert found["kvabr_play_seconds_sum", ()] == pytest.approx(2 * delivered.t)
    assert found["kvabr_play_loss_nats_sum", ()] == pytest.approx(2 * delivered.loss)
    spare = (
        found["kvabr_play_spare_ratio_bucket", (("le", "1.0"),)]
        - found["kvabr_play_spare_ratio_bucket", (("le", "0.0"),)]
    )
    assert spare == (2 if delivered.t < DEADLINE_S else 0)
    assert found["kvabr_play_first_byte_seconds_count", ()] == 2 * sum(line.name == "first_byte" for line in lines)
    assert found["kvabr_play_rate_bytes_per_second", ()] == pytest.approx(3e5 * 0.948, rel=0.3)
    lower = found["kvabr_play_rate_lower_bytes_per_second", ()]
    assert 0 < lower <= found["kvabr_play_rate_bytes_per_second", ()]


def test_plays_that_bring_nothing_are_told_apart():
    metrics = PlayerMetrics()
    with Telemetry(metrics) as telemetry:
        with telemetry.play():
            pass  # nothing is cached
        with pytest.raises(OSError, match="away"):
            broken(telemetry, [], OSError("the origin is away"))
        with pytest.raises(OSError, match="late"):
            broken(telemetry, [PlayGaveUp(1.0, "too late")], OSError("late"))
        telemetry.feed([CacheDelivered(3.0, met=False, loss=0.1)])
        with telemetry.play() as log:
            log(RequestSent(0.0, 0, 0, "base", 10))
            log(RequestFailed(0.1, 0, 0, "base", 7, "reset"))
            log(RequestCancelled(0.1, 0, 0, "base", 3, "reset"))
            telemetry.flush()
            assert read(metrics)["kvabr_plays_in_progress", ()] == 1
    found = read(metrics)
    results = {labels[0][1]: value for (name, labels), value in found.items() if name == "kvabr_plays_total"}
    assert results == {"nothing": 2, "failed": 1, "gave_up": 1, "late": 1}
    assert found["kvabr_play_lost_bytes_total", ()] == 10
    assert found["kvabr_play_requests_total", (("result", "failed"),)] == 1
    assert found["kvabr_play_requests_total", (("result", "cancelled"),)] == 1
    assert found["kvabr_play_spare_ratio_count", ()] == 0  # no deadline was ever heard of
