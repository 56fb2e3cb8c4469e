"""The client of an engine's adapter: in the engine's process, or in a player process that the engines of a node share.

In the engine's process, network, policy and checks share the interpreter's lock with the thread that runs the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.lookup import Found
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.codec.block_slots import BlockLayers
from kvabr.engines.settings import INSIDE, EngineSettings
from kvabr.link.moqt.options import TransportChoice
from kvabr.link.quic.backend import Quic
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Part, Passage

LOG = logging.getLogger("kvabr.engines")

_MAX_WAITING = 1 << 16
"""Plays that may wait for their turn: an engine bounds its requests itself."""


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


@dataclass(frozen=True)
class ClientArguments:
    """What the settings of an engine say of its client. Engines with the same share one in a player process."""

    url: str | None
    token: str | None
    token_file: Path | None
    ca: Path | None
    fingerprint: str | None
    insecure: bool
    quic: Quic
    transport: TransportChoice
    limits: Limits
    cache: Path | None

    @classmethod
    def of(cls, settings: EngineSettings) -> ClientArguments:
        """Return those of an engine's settings, with what its environment adds."""
        token = settings.token
        if token is None and settings.token_file is None:
            token = os.environ.get("KVABR_TOKEN") or None
        limits = Limits(memory_bytes=settings.store_mib << 20, plays=settings.plays, waiting=_MAX_WAITING)
        if settings.disk is not None:
            limits = replace(limits, disk=_absolute(settings.disk), disk_bytes=settings.disk_mib << 20)
        return cls(
            settings.url,
            token,
            _absolute(settings.token_file),
            _absolute(settings.ca),
            settings.fingerprint,
            settings.insecure,
            settings.quic,
            settings.transport,
            limits,
            _absolute(settings.cache),
        )

    def open(self, metrics: ClientMetrics | None = None) -> AsyncClient:
        """Return a client in this process; a `UsageError` if something is wrong with these."""
        try:
            return self._client(self.limits, metrics)
        except KvabrError as error:
            if self.limits.disk is None:
                raise
            # Each rank is a process, and only one of them can have the folder.
            LOG.warning("fetched groups are kept in memory only (ranks can share shm://): %s", error)
        return self._client(replace(self.limits, disk=None), metrics)

    def _client(self, limits: Limits, metrics: ClientMetrics | None) -> AsyncClient:
        return AsyncClient(
            self.url,
            token=self.token,
            token_file=self.token_file,
            ca=self.ca,
            fingerprint=self.fingerprint,
            insecure=self.insecure,
            quic=self.quic,
            transport=self.transport,
            limits=limits,
            cache=self.cache,
            metrics=metrics,
        )


def _absolute(path: Any) -> Any:
    """Return a path that another process understands, too; URLs stay as they are."""
    return path.absolute() if isinstance(path, Path) else path


def open_client(settings: EngineSettings) -> EngineClient:
    """Return the client of an engine's settings, which may be a `UsageError`; nothing is dialled."""
    arguments = ClientArguments.of(settings)
    if settings.player == INSIDE:
        return arguments.open()
    from kvabr.engines.player_process.client import RemoteClient  # noqa: PLC0415  # not every system has what it needs

    return RemoteClient(arguments, settings.player)
