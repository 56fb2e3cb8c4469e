"""The shaper's process, over real sockets. How precise it is a benchmark tells: here the machine may be busy."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvabr.types.errors import TransportError
from kvabr_lab.live.packet_schedule import Conditions
from kvabr_lab.live.shaper import Shaper
from kvabr_lab.live.tun import FAR, MTU, NEAR, TunShaper
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
        with pytest.raises(TransportError, match="has exited"):
            shaper.stats()
    with pytest.raises(TransportError, match="cannot start"):
        Shaper(("127.0.0.1", 9), host="192.0.2.1")


RATE, RTT_S = 2.5e6, 0.03


def made_when_free(conditions):
    """A link, once no other process of these tests has one."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return TunShaper(conditions)
        except TransportError as error:
            if "is in use" not in str(error):
                pytest.skip("a link for TCP needs the right to administer the network: sudo tools/test tests/lab/live")
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="module")
def link():
    conditions = Conditions(rtt_s=RTT_S, loss=0.01)
    with made_when_free(conditions) as made:
        made.begin(trace([RATE], step=1000.0), 0.0, conditions)
        yield made


def test_tcp_crosses_it_in_both_directions(link):
    down, up = random.Random(0).randbytes(600_000), random.Random(1).randbytes(20_000)
    got = {}

    def serve():
        connection, got["peer"] = listening.accept()
        with connection:
            connection.sendall(down)
            connection.shutdown(socket.SHUT_WR)
            got["up"] = connection.makefile("rb").read()

    with socket.create_server((NEAR, 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began_s = time.monotonic()
        with socket.create_connection((FAR, listening.getsockname()[1]), timeout=WAIT_S) as player:
            assert time.monotonic() - began_s >= RTT_S
            began_s = time.monotonic()
            assert player.makefile("rb").read() == down
            assert time.monotonic() - began_s >= 0.9 * len(down) / RATE  # a queue of packets may have been full
            player.sendall(up)
        thread.join(WAIT_S)
    assert got["up"] == up
    assert got["peer"][0] != FAR
    stats = link.stats()
    assert stats.forwarded_down >= len(down) / MTU
    assert stats.forwarded_up
    assert stats.lost_down  # of more than 400 packets, with this seed


def test_udp_crosses_it(link):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as origin,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as player,
    ):
        origin.bind((NEAR, 0))
        origin.settimeout(WAIT_S)
        player.settimeout(WAIT_S)
        player.sendto(b"hello", (FAR, origin.getsockname()[1]))
        said, where = origin.recvfrom(100)
        assert said == b"hello"
        for _ in range(20):  # one may be lost
            origin.sendto(b"welcome", where)
        assert player.recvfrom(100) == (b"welcome", (FAR, origin.getsockname()[1]))


def test_there_is_one_at_a_time(link):
    with pytest.raises(TransportError, match=r"198\.19\.0\.1 is in use by another link; .* needs /dev/net/tun"):
        TunShaper()
    assert link.stats()
