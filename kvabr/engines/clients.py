"""The client of an adapter, in the engine's process or in a player process shared by the engines of a node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import Any

from kvabr.client.async_client import AsyncClient
from kvabr.engines.client_arguments import ClientArguments
from kvabr.engines.player_process.client import RemoteClient
from kvabr.engines.settings import INSIDE, EngineSettings

EngineClient = AsyncClient | RemoteClient
Begin = Callable[[Callable[[EngineClient], Coroutine[Any, Any, None]]], object]
"""Runs a coroutine of the client in the background."""


def open_client(settings: EngineSettings) -> EngineClient:
    """Return the client for an engine's settings without connecting; raise `UsageError` for wrong settings."""
    arguments = ClientArguments.of(settings)
    if settings.player == INSIDE or not sys.platform.startswith("linux"):  # player processes need Linux
        return arguments.open()
    return RemoteClient(arguments, settings.player)
