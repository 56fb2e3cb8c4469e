"""The gauge of the link shaper."""

import pytest

from kvabr_lab.gauge import gauge
from kvabr_lab.live.lane import PACKET_BYTES


@pytest.mark.slow
def test_the_gauge_reads_a_link_that_is_slower_than_what_is_sent():
    for _ in range(100):
        reading = gauge(0, 0.3, rate=1e6)
        assert reading.rate_error is not None
        assert reading.rate_error < 0.02, "a shaper is never faster than its trace"
        if reading.sent_pps * PACKET_BYTES > 1.25e6:  # else too busy to send more than the link carries
            break
    assert reading.received_pps < reading.sent_pps
    assert reading.delay_error_p50_s > 0.01, "there was a queue"
