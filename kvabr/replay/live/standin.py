"""An engine that takes the time that a cost model says, and computes nothing: the network is what is live here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.kv import KVSpec

if TYPE_CHECKING:
    import torch


class StandInEngine:
    """Implements `kvabr.types.engine.Engine`; the cache that it returns is all zeros, for plays that only time."""

    def __init__(self, spec: KVSpec, cost: PrefillCost, mode: EngineMode) -> None:
        self._spec, self._cost, self._mode = spec, cost, mode

    @property
    def spec(self) -> KVSpec:
        """Of the cache that is played."""
        return self._spec

    @property
    def mode(self) -> EngineMode:
        """What it would be able to recompute."""
        return self._mode

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Wait as long as a prefill takes; zeros of the right shape."""
        import torch  # noqa: PLC0415  # the one who calls this has loaded it

        time.sleep(self._cost.seconds(0 if before is None else before.shape[3], len(tokens)))
        return torch.zeros(self._spec.shape(len(tokens)), dtype=self._spec.torch_dtype)
