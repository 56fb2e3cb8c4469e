"""Shared by the live tests: sockets at both ends of a shaper, and traces that end soon."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvabr.replay.trace import Trace
from kvabr_lab.live.shaper import Shaper

WAIT_S = 300.0
"""Real seconds that something may take on the slowest machine."""


def trace(rates, step=1.0, name="live/t"):
    times = tuple(index * step for index in range(len(rates)))
    return Trace(name, "live", times, tuple(map(float, rates)), len(rates) * step)


def udp(port=0):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.bind(("127.0.0.1", port))
    made.settimeout(WAIT_S)
    return made


class Ends:
    """A player's socket and an origin's, with a shaper between them."""

    def __init__(self, shaper, origin, player):
        self.shaper, self.origin, self.player = shaper, origin, player
        player.send(b"hello")
        self.greeting, self.back = origin.recvfrom(100)

    def down(self, *packets):
        self.sent_s = time.monotonic()
        for packet in packets:
            self.origin.sendto(packet, self.back)

    def until(self, holds):
        began = time.monotonic()
        while not holds(stats := self.shaper.stats()):
            time.sleep(0.001)
            assert time.monotonic() - began < WAIT_S, stats
        return stats

    def received(self, count):
        """(seconds since the last `down` began, packet) of the next packets at the player; late where we are slow."""
        out = []
        for _ in range(count):
            packet = self.player.recv(65536)
            out.append((time.monotonic() - self.sent_s, packet))
        return out

    def received_until(self, last):
        """The packets at the player before ``last``."""
        out = []
        while (packet := self.player.recv(65536)) != last:
            out.append(packet)
        return out


@contextmanager
def ends(conditions=None) -> Iterator[Ends]:
    with udp() as origin, Shaper(origin.getsockname(), conditions) as shaper, udp() as player:
        player.connect(shaper.address)
        yield Ends(shaper, origin, player)
