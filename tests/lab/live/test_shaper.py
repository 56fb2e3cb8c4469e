"""The shaper's process, over real sockets. How precise it is a benchmark tells: here the machine may be busy."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kvabr.types.errors import TransportError
from kvabr_lab.live.lane import Conditions
from kvabr_lab.live.shaper import Shaper
from tests.lab.live.links import WAIT_S, ends, trace, udp
from tests.processes import gone

pytestmark = pytest.mark.process

SIZE = 972
"""Payload of a packet that has 1,000 bytes on the wire."""


def test_packets_pass_both_ways_unchanged_and_in_order_after_the_delay():
    with ends(Conditions(rtt_s=0.1)) as link:
        assert link.greeting == b"hello"
        packets = [bytes([index]) * (index + 1) for index in range(200)]
        link.down(*packets)
        got = link.received(200)
        assert [packet for _, packet in got] == packets
        assert got[0][0] >= 0.045
        stats = link.shaper.stats()
        assert (stats.forwarded_down, stats.forwarded_up) == (200, 1)
        assert stats.bytes_down == sum(map(len, packets)) + 200 * 28
        assert stats.overflowed == stats.lost_down == 0
        assert stats.missed in {0, None}


def test_the_rate_is_the_traces_and_what_does_not_fit_the_queue_is_dropped():
    with ends() as link:
        link.shaper.begin(trace([2e4]), 0.0, Conditions(queue_bytes=50_000))
        link.down(*[bytes(SIZE)] * 200)
        got = link.received(10)
        assert all(after >= 0.05 * count for count, (after, _) in enumerate(got)), "never faster than the trace"
        stats = link.until(lambda stats: stats.forwarded_down + stats.overflowed == 200)
        assert stats.overflowed > 0
        assert stats.most_queued_bytes == 50_000


def test_the_trace_starts_where_and_when_it_is_told_and_may_start_again():
    steps = trace([0, 0, 1e6], 10 * WAIT_S)
    outage = 20 * WAIT_S
    with ends() as link:
        at = time.monotonic()
        link.shaper.begin(steps, outage - 0.3, Conditions(), at_s=at)
        link.down(b"x" * SIZE)
        link.player.recv(2000)
        assert time.monotonic() - at >= 0.3, "0.3 s of outage were left"
        link.shaper.begin(steps, outage - 0.01, Conditions(), at_s=(at := time.monotonic()))
        link.down(b"x" * SIZE)
        link.player.recv(2000)
        assert time.monotonic() - at >= 0.01


def test_losses_are_as_asked_for_each_direction_alone():
    with ends(Conditions(loss=0.3, seed=4)) as link:
        link.down(*[b"%d" % index for index in range(400)])
        link.until(lambda stats: stats.forwarded_down + stats.lost_down == 400)
        link.shaper.open(Conditions(loss_up=0.3))
        link.down(b"end")
        assert len(link.received_until(b"end")) == pytest.approx(280, abs=45)
        for _ in range(400):
            link.player.send(b"up")
        stats = link.until(lambda stats: stats.forwarded_up + stats.lost_up == 400)
        assert stats.lost_up == pytest.approx(120, abs=45)
        assert stats.lost_down == 0


def test_each_player_has_an_address_of_its_own_at_the_origin():
    with ends() as link, udp() as other:
        other.connect(link.shaper.address)
        other.send(b"second")
        data, back = link.origin.recvfrom(100)
        assert data == b"second"
        assert back != link.back
        link.origin.sendto(b"for the second", back)
        link.down(b"for the first")
        assert other.recv(100) == b"for the second"
        assert link.player.recv(100) == b"for the first"


def test_packets_may_overtake_each_other_and_arrive_twice():
    with ends(Conditions(reorder=0.3, seed=4)) as link:
        packets = [b"%03d" % index for index in range(300)]
        link.down(*packets)
        got = [packet for _, packet in link.received(300)]
        assert sorted(got) == packets
        assert got != packets
        link.shaper.open(Conditions(duplicate=0.3))
        link.down(*packets)
        link.until(lambda stats: stats.forwarded_down == 300)
        link.shaper.open(Conditions(rtt_s=0.2))
        link.down(b"end")  # behind all copies
        got = link.received_until(b"end")
        assert set(got) == set(packets)
        assert len(got) == pytest.approx(390, abs=45)


def test_after_rebinding_packets_come_from_another_port_and_those_to_the_old_one_are_lost():
    with ends() as link, udp() as elsewhere:
        link.shaper.rebind()
        link.shaper.stats()  # it has happened
        link.origin.sendto(b"lost", link.back)
        link.player.send(b"again")
        data, back = link.origin.recvfrom(100)
        assert data == b"again"
        assert back != link.back
        link.origin.sendto(b"found", back)
        assert link.player.recv(100) == b"found"
        link.shaper.rebind(elsewhere.getsockname())
        link.player.send(b"to another")
        assert elsewhere.recv(100) == b"to another"


def test_a_dead_origin_does_not_hurt_the_shaper():
    with ends() as link:
        port = link.origin.getsockname()[1]
        link.origin.close()
        for _ in range(20):
            link.player.send(b"anyone?")
            link.shaper.stats()
        with udp(port) as origin:
            link.player.send(b"back again")
            while origin.recvfrom(100)[0] != b"back again":
                pass  # those before it may still be under way


def test_it_ends_with_its_parent_however_that_dies():
    program = (
        "import sys, time; from kvabr_lab.live.shaper import Shaper\n"
        "if __name__ == '__main__':\n"
        "    shaper = Shaper(('127.0.0.1', 9)); print(shaper.pid, flush=True); time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches it too, and is not its business
        assert not gone(pid, 0.2)
    finally:
        parent.kill()
        parent.communicate()
    assert gone(pid)


def test_a_shaper_that_is_killed_or_cannot_start_says_so():
    with Shaper(("127.0.0.1", 9)) as shaper:
        os.kill(shaper.pid, signal.SIGKILL)
        assert gone(shaper.pid)
        with pytest.raises(TransportError, match="died"):
            shaper.stats()
    with pytest.raises(TransportError, match="cannot start"):
        Shaper(("127.0.0.1", 9), host="192.0.2.1")
