"""What is made of a connection's counters: a connection of which only these show, by a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvabr.server import moq_unsent as unsent
from kvabr.server.moq_unsent import Unsent

HEAD = 33
"""Bytes of a packet that are no payload, as seen between two of moq-rs."""


class Path:
    """A path that carries ``rate`` bytes of payload a second; its counters are brought up to date every 0.1 s."""

    def __init__(self, rate, *, packet=1200, head=HEAD, rtt_s=0.02):
        self.head = head
        self.now, self.left, self.rate, self.packet, self.rtt_s = 100.0, 0, rate, packet, rtt_s
        self.sent = self.packets = self.answers = 0
        self.debt = 0.0
        self.seen = (0, 0, 0)
        self.told_s = self.now
        self.chat = self.dead = False
        self.probed_s, self.probe_s = self.now, 0.1
        """A connection whose packets get no answer sends one again, after ever longer pauses."""

    def stats(self):
        sent, packets, answers = self.seen
        return SimpleNamespace(
            bytes_sent=sent, packets_sent=packets, packets_received=answers, bytes_lost=0, packets_lost=0,
            rtt_us=int(self.rtt_s * 1e6), estimated_send_rate_bps=int(8 * self.rate),
        )  # fmt: skip

    def go(self, seconds):
        """Let time pass."""
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            self.debt += 0 if self.dead else min(self.left, self.rate * 0.01)
            self.left -= 0 if self.dead else min(self.left, self.rate * 0.01)
            while self.debt >= self.packet - self.head or (self.debt > 0 and not self.left):
                payload = min(self.debt, self.packet - self.head)
                self.debt -= payload
                self._packet(payload + self.head)
            if self.dead and self.now > self.probed_s + self.probe_s:
                self.packets, self.sent = self.packets + 1, self.sent + 40
                self.probed_s, self.probe_s = self.now, 2 * self.probe_s
            if self.now - self.told_s > 0.1:
                self.told_s = self.now
                if self.chat:
                    self._packet(HEAD + 5)
                self.seen = int(self.sent), self.packets, self.answers

    def _packet(self, size):
        self.packets, self.sent, self.answers = self.packets + 1, self.sent + size, self.answers + 1


@pytest.fixture
def bed(monkeypatch):
    def made(rate, **more):
        path = Path(rate, **more)
        monkeypatch.setattr(unsent, "time", SimpleNamespace(monotonic=lambda: path.now))
        return path, Unsent(path)

    return made


def give(path, reckoned, count):
    reckoned.add(count)
    path.left += count


@pytest.mark.parametrize(("packet", "head"), [(1200, 32), (1452, 34)])
@pytest.mark.parametrize(("rate", "steps"), [(2.5e6, 3000), (20e6, 1500), (250e6, 300)])
def test_a_path_never_waits_however_much_it_is_given(bed, packet, head, rate, steps):
    path, reckoned = bed(rate, packet=packet, head=head)
    group, most = 16 << 20, 96 << 20
    idle = 0
    for step in range(steps):
        left = reckoned.bytes()
        if not left or left <= reckoned.ahead(most) // 2:
            give(path, reckoned, group)
        path.go(0.02)
        idle += step > 50 and not path.left
        assert path.left <= group + 2 * reckoned.ahead(most)
    assert not idle
    assert reckoned.vanished() is None


def test_the_end_of_a_transfer_is_seen_at_once(bed):
    path, reckoned = bed(10e6)
    give(path, reckoned, 16 << 20)
    path.go(1.5)
    assert 1_000_000 < reckoned.bytes() < 3_500_000
    path.go(0.3)
    assert reckoned.bytes() == 0
    assert reckoned.vanished() is None


@pytest.mark.parametrize("chat", [False, True])
def test_a_cancelled_group_shows_in_a_silence(bed, chat):
    path, reckoned = bed(10e6)
    path.chat = chat
    give(path, reckoned, 16 << 20)
    for _ in range(50):
        path.go(0.02)
        assert reckoned.bytes()
    cancelled_s, path.left = path.now, 0
    while reckoned.bytes():
        path.go(0.02)
        assert path.now < cancelled_s + 0.6
    vanished = reckoned.vanished()
    assert vanished is not None
    assert abs(vanished.count - 6_777_216) < 500_000
    assert vanished.since_s < cancelled_s + 0.05
    assert reckoned.vanished() is None


def test_an_outage_is_no_silence(bed):
    path, reckoned = bed(10e6)
    give(path, reckoned, 16 << 20)
    for step in range(150):
        path.dead = 50 <= step < 130
        path.go(0.02)
        assert reckoned.bytes() > 0
    assert reckoned.vanished() is None


def test_who_does_not_read_is_not_given_group_after_group(bed):
    path, reckoned = bed(10e6)
    path.go(0.2)
    given = 0
    for _ in range(500):
        if not reckoned.bytes():
            reckoned.add(16 << 20)  # and nothing goes
            given += 1
        path.go(0.02)
    assert 3 <= given <= 6
    give(path, reckoned, 1 << 20)
    path.go(0.3)
    reckoned.bytes()
    path.left = 0
    for _ in range(500):
        if not reckoned.bytes():
            break
        path.go(0.02)
    else:
        pytest.fail("what has moved since is forgotten as soon as at first")


def test_one_late_look_proves_no_silence(bed):
    path, reckoned = bed(10e6)
    give(path, reckoned, 16 << 20)
    path.go(0.5)
    assert reckoned.bytes()
    path.now += 5.0  # nobody ran, moq-rs neither
    assert reckoned.bytes()
    path.go(0.3)
    assert reckoned.bytes()
    assert reckoned.vanished() is None
