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
    """Cost of the engine's prefill. None: fitted to the engine's timings, of this and earlier processes; without any,
    the cost that the publisher measured, or a guess for the device. See also `AsyncClient.measure_prefill`."""
    mode: EngineMode | None = None
    """Which groups the engine can compute; None: the engine's own mode."""
    salt: bytes = b""
    """Secret of the tenant, see `kvabr.types.naming.chain`."""
    out: torch.Tensor | None = None
    """Tensor to write the cache to: [layer, K/V, head, token, dim], any float dtype, at least all tokens. None: a new
    tensor."""
    dtype: torch.dtype | None = None
    """Element type of the new tensor; None: that of the cache."""
    device: torch.device | None = None
    """Device on which a prefix will be expanded, to estimate decode times; None: the processor. Other plays use
    ``out``."""
    decode_share: SharedDecodeRate | None = None
    """Decode rates of another process that expands prefixes one batch at a time; None: this process expands them, on
    ``device``."""
    log: Log | None = None
    """Receives every event of the play, see `kvabr.types.events`."""
    telemetry: Telemetry | None = None
    """Reports the play to listeners, see `kvabr.telemetry`."""
    watch: Watch | None = None
    """Called with a `Snapshot` about fifty times per deadline and at least once a second, on the event loop's
    thread."""

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
    """Maximum bytes of encoded groups in memory; 0: none."""
    disk: str | os.PathLike[str] | None = None
    """Folder for encoded groups, which belongs to one client at a time; or the URL of an object store, which clients
    may share (`kvabr.store.group_cache`). None: memory only."""
    disk_bytes: int = 16 << 30
    """Maximum bytes of encoded groups in that folder. In an object store, clients never delete."""
    plays: int = 32
    """Maximum plays under way, and maximum hints under way."""
    waiting: int = 128
    """Maximum waiting plays; each waits for at most a quarter of its deadline."""

    def __post_init__(self) -> None:
        for name, least in (("memory_bytes", 0), ("disk_bytes", 0), ("waiting", 0), ("plays", 1)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")


def warn_not_stored(metrics: ClientMetrics, what: str, why: str) -> None:
    """Warn, and count, that received groups or a profile cannot be stored on disk."""
    metrics.failed_writes_total.labels(what).inc()
    warnings.warn(f"{what} not stored on disk: {why}", RuntimeWarning, stacklevel=2)
