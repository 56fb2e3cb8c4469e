"""Passes the events of many plays to listeners.

`Telemetry` runs each listener in its own thread: `JsonLines`, `PlayerMetrics` (Prometheus) and `OpenTelemetry` (spans;
extra ``otel``)::

    with Telemetry(JsonLines("plays.jsonl"), PlayerMetrics()) as telemetry:
        played = client.play(tokens, deadline=2.0, options=PlayOptions(telemetry=telemetry))

If a listener is too slow, events are dropped and counted. A listener's exceptions are counted, and logged once.
"""

from kvabr.telemetry.hub import Telemetry
from kvabr.telemetry.jsonl import JsonLines
from kvabr.telemetry.listener import EventRecord, Listener
from kvabr.telemetry.otel import OpenTelemetry
from kvabr.telemetry.prometheus import PlayerMetrics

__all__ = ["EventRecord", "JsonLines", "Listener", "OpenTelemetry", "PlayerMetrics", "Telemetry"]
