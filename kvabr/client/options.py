"""Limits of a client, and options of plays."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvabr.blend.selectors import load_selector
from kvabr.client.engine_work import EngineCosts
from kvabr.client.snapshot import Watch
from kvabr.player.decode_queue import SharedDecodeRate
from kvabr.player.play_choices import DEFAULT_SELECTOR, PlayChoices
from kvabr.telemetry.client_metrics import ClientMetrics
from kvabr.telemetry.hub import Telemetry
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import Engine, EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import Log, PlayEvent
from kvabr.types.kv import KVSpec
from kvabr.types.media import MediaTokens

_GUARD_SHARE, _MAX_GUARD_S = 0.02, 0.05


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


def check_deadline(deadline_s: float) -> None:
    """Raise `UsageError` unless a deadline is a positive, finite number of seconds."""
    if not 0 < deadline_s < math.inf:
        raise UsageError(f"the deadline must be a positive number of seconds, got {deadline_s:g}")


def warn_not_stored(metrics: ClientMetrics, what: str, why: str) -> None:
    """Warn, and count, that received groups or a profile cannot be saved to disk."""
    metrics.failed_writes_total.labels(what).inc()
    warnings.warn(f"{what} not stored on disk: {why}", RuntimeWarning, stacklevel=2)


def check_prompt(tokens: Sequence[int], engine: Engine | None = None) -> None:
    """Raise `UsageError` unless a prompt has one dimension and at least one token; `chain` checks the ids.

    A prompt with media cannot be played with an ``engine``, which receives only token ids.
    """
    if not hasattr(tokens, "__getitem__") or isinstance(tokens, str | bytes | Mapping):
        raise UsageError(
            f"a prompt must be a sequence of token ids, got {type(tokens).__name__}; tokenize text first, or give the "
            "`tokens` of a loaded file"
        )
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) != 1:
        raise UsageError(f"a prompt must have one dimension, got the shape {tuple(shape)}")
    if not len(tokens):
        raise UsageError("a prompt must have at least 1 token, got 0")
    if engine is not None and isinstance(tokens, MediaTokens):
        raise UsageError(
            "an engine computes from token ids alone, but some of these stand for media: play with "
            "PlayOptions(recompute=False), and let the model compute the rest"
        )


def guard_s(deadline_s: float) -> float:
    """Return the reserve before the deadline, seconds: event loops are sometimes late."""
    return min(_MAX_GUARD_S, _GUARD_SHARE * deadline_s)


def engine_of(
    engine: Engine | None, options: PlayOptions, costs: EngineCosts
) -> tuple[Engine | None, PrefillCost | None]:
    """Return the engine of a play and its prefill cost; both None if it may not compute."""
    if engine is None or not options.recompute:
        return None, None
    return engine, options.prefill_cost or costs.of(engine).cost()


def model_of(model: KVSpec | str | None, engine: Engine | None) -> tuple[KVSpec | str | None, bool]:
    """Return the model of a play for `ClientPeer.find`, and whether any group size is accepted."""
    if engine is None:
        return model, False
    if isinstance(model, KVSpec):
        check_engine(engine, model)
        return model, False
    if model not in (None, engine.spec.model):
        raise UsageError(f"the engine computes caches of {engine.spec.model}, not of {model}")
    return engine.spec, True


def check_engine(engine: Engine, spec: KVSpec) -> None:
    """Raise `UsageError` unless an engine computes caches of a spec."""
    if not engine.spec.same_cache(spec):  # the publisher chooses the group size
        raise UsageError(f"the engine computes caches of {engine.spec.model}, not of {spec.model}")
