"""The halves of a connector that does nothing: of an engine whose model has a cache that kvabr does not know.

vLLM computes everything, as it would without a connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvabr.engines.vllm.plays import PlacedPlay, Step
from kvabr.engines.vllm.stats import ConnectorCounts


class IdleScheduler:
    """Has nothing to load, and publishes nothing; see `kvabr.engines.vllm.scheduler.SchedulerHalf`."""

    publishing, told = False, None

    def __init__(self) -> None:
        self.counts = ConnectorCounts()

    def arrived(self, request: Any) -> None:
        """Ignore a request."""

    def matched(self, _request: Any, _computed: int) -> tuple[int | None, bool]:
        """Return that nothing can be loaded."""
        return 0, False

    def allocated(self, request: Any, blocks: object, external: int) -> None:
        """Ignore blocks."""

    def step(self, _scheduled: Mapping[str, int], _tables: object, **_more: object) -> Step:
        """Return a step without requests."""
        return Step()

    def measured(self, cost: object) -> None:
        """Do nothing."""

    def published(self, request: str, tokens: int) -> None:
        """Do nothing: nothing is published."""

    def placed(self, play: PlacedPlay) -> None:
        """Ignore a play; there are none."""

    def received(self, requests: set[str]) -> None:
        """Ignore loads; there are none."""

    def reset(self) -> bool:
        """Have nothing to forget."""
        return True

    def served(self, _request: Any, _blocks: object) -> None:
        """Return that nothing was loaded."""

    def finished(self, _request: Any, _blocks: object) -> bool:
        """Return that the blocks of a request are not needed."""
        return False


class IdleWorker:
    """Neither plays nor publishes; see `kvabr.engines.vllm.worker.WorkerHalf`."""

    publishing = False

    def __init__(self) -> None:
        self.counts = ConnectorCounts()

    def register(self, caches: object, layout_of: object, store: object, *, keepers: object) -> None:
        """Ignore the engine's cache."""

    def sleep(self) -> None:
        """Use no memory of the engine anyway."""

    def wake(self) -> None:
        """Go on doing nothing."""

    def begin(self, step: Step) -> None:
        """Ignore a step."""

    def preempted(self, step: Step) -> None:
        """Have nothing to copy."""

    def computed(self) -> None:
        """Ignore the end of a step."""

    def collect(self) -> tuple[set[str], set[str]]:
        """Return that nothing has ended."""
        return set(), set()

    def measured(self) -> None:
        """Return no news."""

    def published(self) -> list[tuple[str, int]]:
        """Return that nothing was published."""
        return []

    def placed(self) -> list[PlacedPlay]:
        """Return that no play has ended."""
        return []

    def failed_blocks(self) -> set[int]:
        """Return that no block failed."""
        return set()

    def failed_requests(self) -> set[str]:
        """Return that no request failed."""
        return set()

    def close(self) -> None:
        """Do nothing."""
