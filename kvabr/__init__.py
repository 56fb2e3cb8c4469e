"""kvabr: a video player for KV caches.

A decode node embeds it to stream a prompt's KV cache from wherever it was computed, at the quality that the network
allows, so that the first token comes on time::

    async with kvabr.connect("moqt://origin.example/") as origin:
        played = await kvabr.play(origin, tokens, deadline=2.0, recompute=engine)

`kvabr.sync` has the same for code without asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvabr.client import blocking_api as sync
    from kvabr.client.executors import prefill_cost
    from kvabr.client.play import play, play_asset
    from kvabr.client.result import Played
    from kvabr.client.upgrades import Late, StepGate
    from kvabr.quic.connect import connect

__version__ = "0.1.0"

__all__ = ["Late", "Played", "StepGate", "__version__", "connect", "play", "play_asset", "prefill_cost", "sync"]

_HOMES = {
    "Late": "kvabr.client.upgrades",
    "Played": "kvabr.client.result",
    "StepGate": "kvabr.client.upgrades",
    "connect": "kvabr.quic.connect",
    "play": "kvabr.client.play",
    "play_asset": "kvabr.client.play",
    "prefill_cost": "kvabr.client.executors",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for, and not before: most of it needs torch."""
    if name == "sync":
        return import_module("kvabr.client.blocking_api")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvabr' has no attribute {name!r}")
