"""Telemetry: the events of plays, for observing many of them.

`Telemetry` takes the events of any number of plays and hands them to listeners, each in a thread of its own:
`JsonLines` (with CMCD names where one fits), `PlayerMetrics` (Prometheus) and `OpenTelemetry` (spans; extra ``otel``)::

    with Telemetry(JsonLines("plays.jsonl"), PlayerMetrics()) as telemetry:
        played = client.play(tokens, deadline=2.0, options=PlayOptions(telemetry=telemetry))

A listener cannot disturb a play: events that it is too slow for are dropped and counted, and its exceptions are counted
and logged once. This package knows nothing of sessions, sockets or tensors.
"""

from kvabr.telemetry.hub import Telemetry
from kvabr.telemetry.jsonl import JsonLines
from kvabr.telemetry.listener import Heard, Listener
from kvabr.telemetry.otel import OpenTelemetry
from kvabr.telemetry.prometheus import PlayerMetrics

__all__ = ["Heard", "JsonLines", "Listener", "OpenTelemetry", "PlayerMetrics", "Telemetry"]
