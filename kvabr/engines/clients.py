"""The client of an engine's adapter: in the engine's process, or in a player process that the engines of a node share.

In the engine's process, network, policy and checks share the interpreter's lock with the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import torch

from kvabr.client.lookup import Found
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.codec.block_slots import BlockLayers
from kvabr.engines.client_arguments import ClientArguments
from kvabr.engines.settings import INSIDE, EngineSettings
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Part, Passage


class EngineClient(Protocol):
    """What an adapter needs of a client. Arguments and errors are those of `AsyncClient`, which is one."""

    metrics: ClientMetrics

    async def find(
        self,
        tokens: Sequence[int],
        *,
        model: KVSpec | str | None = None,
        salt: bytes | None = None,
        within_s: float = ...,
        any_dtype: bool = False,
    ) -> Found | None: ...

    async def find_joined(
        self, parts: Sequence[Part], model: KVSpec, *, salt: bytes = ..., max_loss: float = ..., any_dtype: bool = False
    ) -> tuple[Found | None, Sequence[tuple[Passage, str]]]: ...

    async def find_asset(self, asset: TrackNamespace | str, *, within_s: float = ...) -> Found: ...

    async def fetch_profile(self, catalog: Catalog, *, within_s: float = ...) -> None: ...

    async def tail_of(
        self,
        catalog: Catalog,
        *,
        deadline: float,
        cost: PrefillCost,
        behind: int,
        block: int = 1,
        options: PlayOptions | None = None,
    ) -> int: ...

    async def play_prefix(
        self,
        found: Found,
        *,
        deadline: float,
        cost: PrefillCost,
        skip: int = 0,
        behind: int = 0,
        block: int = 1,
        options: PlayOptions | None = None,
    ) -> PlayedPrefix: ...

    async def play_coded(
        self, found: Found, *, deadline: float, options: PlayOptions | None = None
    ) -> PlayedPrefix: ...

    async def round_trip(self, *, probe_s: float | None = None) -> float | None: ...

    async def warm(
        self, spec: KVSpec, device: torch.device, dtype: torch.dtype, like: Sequence[BlockLayers] = ()
    ) -> None: ...

    async def close(self) -> None: ...


Begin = Callable[[Callable[[EngineClient], Coroutine[Any, Any, None]]], object]
"""Runs a coroutine of a client in the background."""


def open_client(settings: EngineSettings) -> EngineClient:
    """Return the client of an engine's settings, which may be a `UsageError`; nothing is dialled."""
    arguments = ClientArguments.of(settings)
    if settings.player == INSIDE:
        return arguments.open()
    from kvabr.engines.player_process.client import RemoteClient  # noqa: PLC0415  # not every system has what it needs

    return RemoteClient(arguments, settings.player)
