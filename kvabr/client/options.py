"""Limits of a client, and options of plays."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch

from kvabr.blend.selectors import load_selector
from kvabr.client.snapshot import Watch
from kvabr.player.groups import SharedDecodeRate
from kvabr.player.play_choices import DEFAULT_SELECTOR, PlayChoices
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.telemetry.hub import Telemetry
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, PlayEvent


@dataclass(frozen=True, slots=True)
class PlayOptions(PlayChoices):
    """How to play. The deadline is an argument of each play."""

    recompute: bool = True
    """Let the engine, if there is one, compute what would be late, or everything if nothing is cached."""
    prefill_cost: PrefillCost | None = None
    """Cost of the engine's prefill; None: as its computations took, here and in earlier processes. Until there was one,
    what the cache's publisher measured, or a guess by the device; see also `AsyncClient.measure_prefill`."""
    mode: EngineMode | None = None
    """What the engine can recompute; None: what it says itself."""
    salt: bytes = b""
    """Secret of the tenant, see `kvabr.types.naming.chain`."""
    out: torch.Tensor | None = None
    """Where to put the cache: [layer, K/V, head, token, dim], any float dtype, room for all tokens. None: a new
    tensor."""
    dtype: torch.dtype | None = None
    """Element type of the new tensor; None: that of the cache."""
    device: torch.device | None = None
    """Where a prefix is going to be expanded, for its cost; None: on the processor. Other plays have ``out``."""
    decode_share: SharedDecodeRate | None = None
    """How fast another process expands a prefix, one batch after the other, during its other plays; None: as this one
    does, on ``device``."""
    log: Log | None = None
    """Takes every event of the play, see `kvabr.types.events`."""
    telemetry: Telemetry | None = None
    """Reports the play to listeners, see `kvabr.telemetry`."""
    watch: Watch | None = None
    """Called with a `Snapshot` some fifty times per deadline and at least once a second, on the event loop's thread."""

    def __post_init__(self) -> None:
        PlayChoices.__post_init__(self)
        if self.selector != DEFAULT_SELECTOR and "exact" in load_selector(self.selector)().needs:
            raise UsageError(f"selector {self.selector} needs the exact cache, so it works only in benchmarks")

    def note(self, event: PlayEvent) -> None:
        """Log an event from outside the session."""
        if self.log is not None:
            self.log(event)


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a client."""

    memory_bytes: int = 1 << 30
    """Encoded groups kept in memory, bytes; 0: none."""
    disk: str | os.PathLike[str] | None = None
    """Folder for encoded groups, which belongs to one client at a time; or the URL of an object store, which many may
    share (`kvabr.store.group_cache`). None: memory only."""
    disk_bytes: int = 16 << 30
    """Encoded groups kept in that folder, bytes. An object store is not cleared up by those who use it so."""
    plays: int = 32
    """Plays under way at once, and as many hints."""
    waiting: int = 128
    """Plays that may wait for their turn, each for a quarter of its deadline."""

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 0), ("disk_bytes", 0), ("waiting", 0), ("plays", 1)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")


def warn_not_stored(metrics: ClientMetrics, what: str, why: str) -> None:
    """Warn, and count, that received groups or a profile cannot be saved to disk."""
    metrics.failed_writes_total.labels(what).inc()
    warnings.warn(f"{what} not stored on disk: {why}", RuntimeWarning, stacklevel=2)
