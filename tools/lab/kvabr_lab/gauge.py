"""Measures the link shaper with plain UDP on loopback: errors of rate and delay, and packets per second."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from kvabr.replay.summary import percentile
from kvabr.replay.trace import Trace
from kvabr_lab.live.child import Child
from kvabr_lab.live.packet_schedule import HEADER_BYTES, PACKET_BYTES, Conditions
from kvabr_lab.live.shaper import Shaper, ShaperStats

PAYLOAD_BYTES = PACKET_BYTES - HEADER_BYTES
_STAMP = struct.Struct(">d")
_END = b"end"
_SILENCE_S = 2.0
_OVERLOAD = 1.3
"""Rate of sending, relative to the trace's rate."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement."""

    sent_pps: float
    received_pps: float
    wire_rate: float
    """Received rate in bytes/s, including headers."""
    rate_error: float | None
    """Error of the rate, relative to the trace; None without a trace."""
    delay_error_p50_s: float
    """Median of packet delay minus configured delay, seconds; with a trace it includes queueing."""
    delay_error_p99_s: float
    missed: int | None
    """Number of packets dropped because the shaper was too slow."""
    busy: float

    def to_json(self) -> dict[str, float | int | None]:
        """Return plain JSON values."""
        return asdict(self)


def gauge(pps: float, seconds: float, *, rate: float | None = None, rtt_s: float = 0.0) -> Reading:
    """Send packets of 1,200 bytes through a shaper and measure its output.

    ``pps`` is packets per second. It is ignored if there is a ``rate``, that of the trace in bytes/s; packets are then
    sent 1.3 times as fast.

    Raises:
        TransportError: A process cannot be started, or ends early.
    """
    pps = pps if rate is None else _OVERLOAD * rate / PACKET_BYTES
    conditions = Conditions(rtt_s)
    with (
        Child("sender", _send, pps, seconds) as sender,
        Shaper(("127.0.0.1", sender.greeting), conditions) as shaper,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as player,
    ):
        if rate is not None:
            shaper.begin(Trace("gauge", "gauge", (0.0,), (rate,), 2 * seconds), 0.0, conditions)
        player.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        player.connect(shaper.address)
        player.settimeout(_SILENCE_S + rtt_s)
        player.send(b"begin")
        arrivals, delays = _receive(player)
        sent = sender.ask("sent")
        return _reading(arrivals, delays, shaper.stats(), sent / seconds, rate, rtt_s)


def _receive(player: socket.socket) -> tuple[list[float], list[float]]:
    arrivals: list[float] = []
    delays: list[float] = []
    try:
        while (data := player.recv(2048)) != _END:
            now = time.monotonic()
            arrivals.append(now)
            delays.append(now - _STAMP.unpack_from(data)[0])
    except TimeoutError:
        pass  # the queue dropped the end marker
    return arrivals, delays


def _reading(
    arrivals: list[float],
    delays: list[float],
    stats: ShaperStats,
    sent_pps: float,
    rate: float | None,
    rtt_s: float,
) -> Reading:
    # Count from the sending of the first packet: a busy machine reads it late, which would make the link seem too fast.
    span = arrivals[-1] - (arrivals[0] - delays[0] + rtt_s / 2)
    wire_rate = (len(arrivals) - 1) * PACKET_BYTES / span
    return Reading(
        sent_pps=sent_pps,
        received_pps=(len(arrivals) - 1) / span,
        wire_rate=wire_rate,
        rate_error=None if rate is None else wire_rate / rate - 1,
        delay_error_p50_s=(percentile(delays, 0.5) or 0.0) - rtt_s / 2,
        delay_error_p99_s=(percentile(delays, 0.99) or 0.0) - rtt_s / 2,
        missed=stats.missed,
        busy=stats.usage.busy,
    )


def _send(pipe: Connection, pps: float, seconds: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(_SILENCE_S + seconds)
        pipe.send(sock.getsockname()[1])
        _, player = sock.recvfrom(64)
        fill = bytes(PAYLOAD_BYTES - _STAMP.size)
        sent, began = 0, time.monotonic()
        while (past := time.monotonic() - began) < seconds:
            due = int(past * pps)
            if sent >= due:
                time.sleep(0.5 / pps if pps < 1000 else 0.0002)
            while sent < due:
                sock.sendto(_STAMP.pack(time.monotonic()) + fill, player)
                sent += 1
        for _ in range(10):
            time.sleep(0.05)  # let the queue drain: it drops packets while it is full
            sock.sendto(_END, player)
        pipe.recv()
        pipe.send(sent)
