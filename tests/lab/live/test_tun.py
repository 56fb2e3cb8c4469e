"""The kernel's TCP and UDP through a link that a process carries packet by packet."""

import random
import socket
import threading
import time

import pytest

from kvabr.types.errors import TransportError
from kvabr_lab.live.lane import Conditions
from kvabr_lab.live.tun import FAR, MTU, NEAR, TunShaper
from tests.lab.live.links import WAIT_S, trace

pytestmark = pytest.mark.process
RATE, RTT_S = 2.5e6, 0.03


def made_when_free(conditions):
    """A link, once no other process of these tests has one."""
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            return TunShaper(conditions)
        except TransportError as error:
            if "is taken" not in str(error):
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
    with pytest.raises(TransportError, match=r"198\.19\.0\.1 is taken: another link runs; .* needs /dev/net/tun"):
        TunShaper()
    assert link.stats()
