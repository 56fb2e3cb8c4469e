"""kvabr: a video player for KV caches.

A decode node embeds it to stream a prompt's KV cache from wherever it was computed, at the quality that the network
allows, so that the first token is on time::

    with kvabr.Client("moqt://origin.example/", engine=engine) as client:
        played = client.play(tokens, deadline=2.0)

`kvabr.AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvabr.abr.estimators import Estimator
    from kvabr.abr.policy import Decision, Policy
    from kvabr.abr.view import View
    from kvabr.client.async_client import AsyncClient
    from kvabr.client.blocking import Client, Handle
    from kvabr.client.engine_hook import StepGate
    from kvabr.client.lookup import Found
    from kvabr.client.options import Limits, PlayOptions
    from kvabr.client.result import Hinted, IncompleteError, NothingCached, Played, PlayedPrefix, save
    from kvabr.client.snapshot import Snapshot
    from kvabr.client.upgrades import Upgrades
    from kvabr.types.catalog import Catalog
    from kvabr.types.cost import PrefillCost
    from kvabr.types.engine import Engine
    from kvabr.types.errors import (
        AssetError,
        BusyError,
        ConnectionLostError,
        ExhaustedError,
        ForbiddenError,
        ForeignError,
        ForkedError,
        FormatError,
        HoleError,
        KvabrError,
        MissingAssetError,
        MissingTraceError,
        ModelError,
        NoAnswerError,
        NotFiniteError,
        NotFoundError,
        PlayError,
        PolicyError,
        RequestError,
        StoreError,
        TraceError,
        TraceQuestionError,
        TransportError,
        UnauthorizedError,
        UnknownPolicyError,
        UsageError,
        VersionError,
    )
    from kvabr.types.kv import KVSpec
    from kvabr.types.media import MediaTokens, Medium
    from kvabr.types.naming import TrackNamespace
    from kvabr.types.passage import Exact, Passage
    from kvabr.types.peer import PeerOptions

__version__ = "0.2.0"

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
    "Exact",
    "ExhaustedError",
    "ForbiddenError",
    "ForeignError",
    "ForkedError",
    "FormatError",
    "Found",
    "Handle",
    "Hinted",
    "HoleError",
    "IncompleteError",
    "KVSpec",
    "KvabrError",
    "Limits",
    "MediaTokens",
    "Medium",
    "MissingAssetError",
    "MissingTraceError",
    "ModelError",
    "NoAnswerError",
    "NotFiniteError",
    "NotFoundError",
    "NothingCached",
    "Passage",
    "PeerOptions",
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
    "StoreError",
    "TraceError",
    "TraceQuestionError",
    "TrackNamespace",
    "TransportError",
    "UnauthorizedError",
    "UnknownPolicyError",
    "Upgrades",
    "UsageError",
    "VersionError",
    "View",
    "__version__",
    "save",
]

_MODULES = {
    "kvabr.abr.estimators": "Estimator",
    "kvabr.abr.policy": "Decision Policy",
    "kvabr.abr.view": "View",
    "kvabr.client.async_client": "AsyncClient",
    "kvabr.client.blocking": "Client Handle",
    "kvabr.client.engine_hook": "StepGate",
    "kvabr.client.lookup": "Found",
    "kvabr.client.options": "Limits PlayOptions",
    "kvabr.client.result": "Hinted IncompleteError NothingCached Played PlayedPrefix save",
    "kvabr.client.snapshot": "Snapshot",
    "kvabr.client.upgrades": "Upgrades",
    "kvabr.types.catalog": "Catalog",
    "kvabr.types.cost": "PrefillCost",
    "kvabr.types.engine": "Engine",
    "kvabr.types.errors": (
        "AssetError BusyError ConnectionLostError ExhaustedError ForbiddenError ForeignError "
        "ForkedError FormatError HoleError KvabrError MissingAssetError MissingTraceError ModelError "
        "NoAnswerError NotFiniteError NotFoundError PlayError PolicyError RequestError StoreError "
        "TraceError TraceQuestionError TransportError UnauthorizedError UnknownPolicyError "
        "UsageError VersionError"
    ),
    "kvabr.types.kv": "KVSpec",
    "kvabr.types.media": "MediaTokens Medium",
    "kvabr.types.naming": "TrackNamespace",
    "kvabr.types.passage": "Exact Passage",
    "kvabr.types.peer": "PeerOptions",
}
"""The public names of each module. A module is imported when one of its names is first used, since many need torch."""


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'kvabr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
