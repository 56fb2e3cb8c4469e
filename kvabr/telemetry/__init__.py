"""Telemetry: what a play tells of itself, for those who watch many of them.

A play writes lines, one dictionary an event; `Telemetry` takes them from any number of plays and hands them to
listeners, each in a thread of its own: `JsonLines` (CMCD names where one fits), `PlayerMetrics` (Prometheus) and
`OpenTelemetry` (spans; extra ``otel``)::

    with Telemetry(JsonLines("plays.jsonl"), PlayerMetrics()) as telemetry:
        played = await kvabr.play(origin, tokens, deadline=2.0, telemetry=telemetry)

Nothing that a listener does can disturb a play: what it is too slow for is dropped and counted, and what it raises is
counted and told once. This room reads lines, and knows nothing of sessions, sockets or tensors.
"""

from kvabr.telemetry.hub import Telemetry
from kvabr.telemetry.jsonl import JsonLines
from kvabr.telemetry.listener import Heard, Listener
from kvabr.telemetry.metrics import PlayerMetrics
from kvabr.telemetry.otel import OpenTelemetry

__all__ = ["Heard", "JsonLines", "Listener", "OpenTelemetry", "PlayerMetrics", "Telemetry"]
