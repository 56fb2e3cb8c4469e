"""How much of what moq-rs was given it has not sent yet: it does not say, but its counters tell something."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

_OVERHEAD = 33
"""Bytes of a packet that are no payload: QUIC's header and tag, the head of a STREAM frame. So many were seen over
whole transfers; a byte more or less makes a slip of 0.1 % of what is sent without a pause."""
_COUNTED_S = 0.1
"""So often moq-rs brings its counters up to date (measured with 0.5.1)."""
_AHEAD_S = 4 * _COUNTED_S
"""Seconds of what a connection can send that it is given ahead; half of them are left when a large group follows."""
_LEAST_AHEAD, _FIRST_AHEAD = 1 << 20, 1 << 22
"""What it is given ahead at least, and before it is known how fast it is."""
_SILENCE_S, _SILENCE_ROUND_TRIPS = 2.5 * _COUNTED_S, 3.0
"""If nothing was sent for so long, nothing is left to send: of what is on its way QUIC would have sent some again."""
_LONG_SILENCE_S = 2.0
"""The same while the last packet is without an answer: the path may be dead."""
_LOOK_S = _COUNTED_S
"""No look proves a longer silence than this: this machine, too, may have stood still."""
_MOST_SILENCES = 5
_PACKET = 600
"""Bytes that are more than acknowledgements and the like."""
_SLIP_SHARE, _LEAST_SLIP, _MOST_SLIP = 0.02, 2 << 10, 1 << 18
"""What seems to be left and is less is a slip of counting."""
_QUIET_BYTES = 1 << 16
"""Next to nothing."""


@dataclass(frozen=True, slots=True)
class Vanished:
    """Bytes that were given to moq-rs and will not be sent: their receiver has cancelled them, or does not read."""

    count: int
    since_s: float
    """By `time.monotonic`: what was asked for later was asked for after they were cancelled."""


class Unsent:
    """How many bytes of payload a connection was given and has not sent yet, as near as can be known.

    moq-rs brings its counters up to date ten times a second. So nothing is made of a shorter silence, and what may be
    handed over ahead is what the connection can send in a few such turns.

    A group that its receiver cancels moq-rs drops without a word. That shows in a silence while something seems to be
    left: if anything were, or were on its way, something would be sent.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._given = 0
        """Since the counters stood at `_base`."""
        self._base = self._sent = self._marked = self._looked = 0
        self._packets = self._answers = 0
        self._moved_s = self._seen_s = self._still_s = time.monotonic()
        self._silence_s, self._silences = 0.0, 0
        self._answered = True
        self._round_trip_s = 0.0
        self._rate = self._capacity = 0.0
        self._vanished: Vanished | None = None

    def add(self, count: int) -> None:
        """It was given more."""
        if self._given == 0:
            self._look()
            self._base, self._moved_s, self._silence_s = self._sent, time.monotonic(), 0.0
        self._given += count

    def bytes(self) -> int:
        """How many are left now."""
        if self._given == 0:
            return 0
        self._look()
        left = self._given - (self._sent - self._base)
        slip = min(_MOST_SLIP, max(_LEAST_SLIP, int(_SLIP_SHARE * self._given)))
        # A receiver that does not read must not be given group after group: each silence has to be longer.
        least_s = (_SILENCE_S if self._answered else _LONG_SILENCE_S) * 2**self._silences
        if left > 0 and self._silence_s > least_s + _SILENCE_ROUND_TRIPS * self._round_trip_s:
            if left > slip:
                self._silences = min(self._silences + 1, _MOST_SILENCES)
                self._vanished = Vanished(left, self._still_s - _COUNTED_S - 2 * self._round_trip_s)
            left = 0
        if left <= 0:
            self._given = 0
        return left if left > slip else 0

    def vanished(self) -> Vanished | None:
        """What will never be sent, if that has shown since this was last asked."""
        vanished, self._vanished = self._vanished, None
        return vanished

    def ahead(self, most: int) -> int:
        """How many bytes it may be given ahead of what it has sent, ``most`` at the most."""
        rate = max(self._rate, self._capacity)
        return min(most, max(_LEAST_AHEAD, int(_AHEAD_S * rate)) if rate else _FIRST_AHEAD)

    @property
    def rate(self) -> float:
        """Bytes per second that the connection has lately sent; 0.0 while that is not known."""
        return self._rate

    def quiet(self) -> bool:
        """Whether next to nothing was sent since this was asked before."""
        self._look()
        before, self._looked = self._looked, self._sent
        return self._looked - before < _QUIET_BYTES

    def _look(self) -> None:
        """Read the counters."""
        stats, now = self._session.stats(), time.monotonic()
        self._round_trip_s = (stats.rtt_us or 0) / 1e6
        self._capacity = (stats.estimated_send_rate_bps or 0) / 8
        packets, answers = stats.packets_sent or 0, stats.packets_received or 0
        self._silence_s += min(now - self._seen_s, _LOOK_S)
        self._seen_s = now
        if packets != self._packets:
            self._went(stats, packets, now)
            self._answered = answers != self._answers
            if not self._answered or abs(self._sent - self._marked) > _PACKET:
                self._silence_s, self._still_s, self._marked = 0.0, now, self._sent
        elif answers != self._answers:
            self._answered = True
        self._packets, self._answers = packets, answers

    def _went(self, stats: Any, packets: int, now: float) -> None:
        """Packets were sent."""
        lost = stats.packets_lost or 0
        sent = (stats.bytes_sent or 0) - (stats.bytes_lost or 0) - _OVERHEAD * (packets - lost)
        if sent - self._marked > _PACKET:
            self._silences = 0
        rate = (sent - self._sent) / max(_COUNTED_S / 2, now - self._moved_s)
        self._rate = max(rate, 0.7 * self._rate)
        self._sent, self._moved_s = sent, now
