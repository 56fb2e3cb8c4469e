"""Moves assets between the tiers of a store while they are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kvabr.store.tiers import TieredAssetStore
from kvabr.types.errors import KvabrError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

EVERY_S = 5.0
"""Seconds between two steps."""


@contextlib.asynccontextmanager
async def moving(
    store: TieredAssetStore | None, log: FilteringBoundLogger, *, every_s: float = EVERY_S
) -> AsyncIterator[None]:
    """Settle a store regularly, in a thread, until the context ends; do nothing for one without tiers."""
    if store is None:
        yield
        return
    task = asyncio.create_task(_settle(store, log, every_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _settle(store: TieredAssetStore, log: FilteringBoundLogger, every_s: float) -> None:
    told: dict[str, str] = {}
    while True:
        await asyncio.sleep(every_s)
        try:
            moves = await asyncio.to_thread(store.settle)
        except (OSError, KvabrError) as error:
            log.warning("cannot move assets", error=str(error))
            continue
        except Exception:  # serving what is where it is would be better than to end
            log.exception("cannot move assets")
            continue
        for name in moves.up:
            log.info("asset moved up", asset=name)
        for name in moves.down:
            log.info("asset moved down", asset=name)
        for name, why in moves.failed.items():
            if told.get(name) != why:
                log.warning("asset not moved", asset=name, error=why)
        told = moves.failed
