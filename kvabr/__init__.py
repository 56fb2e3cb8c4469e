"""kvabr: a video player for KV caches.

A decode node embeds it to stream a prompt's KV cache from wherever it was computed, at the quality that the network
allows, so that the first token comes on time::

    with kvabr.Client("moqt://origin.example/", engine=engine) as client:
        played = client.play(tokens, deadline=2.0)

`kvabr.AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvabr.abr.estimator import Estimator
    from kvabr.abr.policy import Decision, Policy
    from kvabr.abr.view import View
    from kvabr.client.async_client import AsyncClient
    from kvabr.client.blocking import Client, Handle
    from kvabr.client.lookup import Found
    from kvabr.client.options import Limits, PlayOptions
    from kvabr.client.result import NothingCached, Played, PlayedPrefix, Snapshot, save
    from kvabr.client.upgrades import StepGate, Upgrades
    from kvabr.types.catalog import Catalog
    from kvabr.types.cost import PrefillCost
    from kvabr.types.engine import Engine
    from kvabr.types.errors import (
        AssetError,
        BusyError,
        ConnectionLostError,
        ForeignError,
        FormatError,
        HoleError,
        KvabrError,
        ModelError,
        NotFoundError,
        PlayError,
        PolicyError,
        RequestError,
        TraceError,
        TransportError,
        UnauthorizedError,
        UnknownPolicyError,
        UsageError,
    )
    from kvabr.types.kv import KVSpec
    from kvabr.types.naming import TrackNamespace

__version__ = "0.1.0"

__all__ = [
    "AssetError",
    "AsyncClient",
    "BusyError",
    "Catalog",
    "Client",
    "ConnectionLostError",
    "Decision",
    "Engine",
    "Estimator",
    "ForeignError",
    "FormatError",
    "Found",
    "Handle",
    "HoleError",
    "KVSpec",
    "KvabrError",
    "Limits",
    "ModelError",
    "NotFoundError",
    "NothingCached",
    "PlayError",
    "PlayOptions",
    "Played",
    "PlayedPrefix",
    "Policy",
    "PolicyError",
    "PrefillCost",
    "RequestError",
    "Snapshot",
    "StepGate",
    "TraceError",
    "TrackNamespace",
    "TransportError",
    "UnauthorizedError",
    "UnknownPolicyError",
    "Upgrades",
    "UsageError",
    "View",
    "__version__",
    "save",
]

_MODULES = {
    "AssetError": "kvabr.types.errors",
    "AsyncClient": "kvabr.client.async_client",
    "BusyError": "kvabr.types.errors",
    "Catalog": "kvabr.types.catalog",
    "Client": "kvabr.client.blocking",
    "ConnectionLostError": "kvabr.types.errors",
    "Decision": "kvabr.abr.policy",
    "Engine": "kvabr.types.engine",
    "Estimator": "kvabr.abr.estimator",
    "ForeignError": "kvabr.types.errors",
    "FormatError": "kvabr.types.errors",
    "Found": "kvabr.client.lookup",
    "Handle": "kvabr.client.blocking",
    "HoleError": "kvabr.types.errors",
    "KVSpec": "kvabr.types.kv",
    "KvabrError": "kvabr.types.errors",
    "Limits": "kvabr.client.options",
    "ModelError": "kvabr.types.errors",
    "NotFoundError": "kvabr.types.errors",
    "NothingCached": "kvabr.client.result",
    "PlayError": "kvabr.types.errors",
    "PlayOptions": "kvabr.client.options",
    "Played": "kvabr.client.result",
    "PlayedPrefix": "kvabr.client.result",
    "Policy": "kvabr.abr.policy",
    "PolicyError": "kvabr.types.errors",
    "PrefillCost": "kvabr.types.cost",
    "RequestError": "kvabr.types.errors",
    "Snapshot": "kvabr.client.result",
    "StepGate": "kvabr.client.upgrades",
    "TraceError": "kvabr.types.errors",
    "TrackNamespace": "kvabr.types.naming",
    "TransportError": "kvabr.types.errors",
    "UnauthorizedError": "kvabr.types.errors",
    "UnknownPolicyError": "kvabr.types.errors",
    "Upgrades": "kvabr.client.upgrades",
    "UsageError": "kvabr.types.errors",
    "View": "kvabr.abr.view",
    "save": "kvabr.client.result",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: many need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'kvabr' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
