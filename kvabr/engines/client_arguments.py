"""The arguments of an engine's client, from its settings."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits
from kvabr.engines.settings import EngineSettings
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.types.errors import KvabrError
from kvabr.types.peer import TOKEN_VARIABLE, PeerOptions

LOG = logging.getLogger("kvabr.engines")

_MAX_WAITING = 1 << 16
"""Maximum number of waiting plays."""


@dataclass(frozen=True)
class ClientArguments:
    """Arguments of an engine's client. In a player process, engines with equal arguments share a client."""

    urls: tuple[str, ...]
    peer: PeerOptions
    limits: Limits
    cache: Path | None

    @classmethod
    def of(cls, settings: EngineSettings) -> ClientArguments:
        """Return the arguments for an engine's settings and environment."""
        peer = settings.peer
        if peer.token_file is None:  # a player process has another environment, so resolve the token here
            peer = replace(peer, token=os.environ.get(TOKEN_VARIABLE) or None)
        limits = Limits(
            memory_bytes=settings.store_mib << 20,
            plays=settings.plays,
            waiting=_MAX_WAITING,
        )
        if settings.disk is not None:
            limits = replace(limits, disk=_absolute(settings.disk), disk_bytes=settings.disk_mib << 20)
        return cls(
            () if settings.url is None else (settings.url, *settings.sources),
            replace(peer, token_file=_absolute(peer.token_file), ca=_absolute(peer.ca)),
            limits,
            _absolute(settings.cache),
        )

    def open(self, metrics: ClientMetrics | None = None) -> AsyncClient:
        """Return a client in this process; raise `UsageError` for wrong arguments."""
        try:
            return self._client(self.limits, metrics)
        except KvabrError as error:
            if self.limits.disk is None:
                raise
            # Each rank is a process, and only one process can lock the folder.
            LOG.warning("fetched groups are cached in memory only: %s", error)
        return self._client(replace(self.limits, disk=None), metrics)

    def _client(self, limits: Limits, metrics: ClientMetrics | None) -> AsyncClient:
        return AsyncClient(
            self.urls,
            self.peer,
            limits=limits,
            cache=self.cache,
            metrics=metrics,
        )


def _absolute(path: Any) -> Any:
    return path.absolute() if isinstance(path, Path) else path
