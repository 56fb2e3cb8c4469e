"""Halves of a connector that do nothing, for unsupported caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvabr.engines.vllm.plays import PlacedPlay, Step
from kvabr.engines.vllm.stats import ConnectorCounts


class IdleScheduler:
    """A `SchedulerHalf` that does nothing."""

    publishing, announced = False, None

    def __init__(self) -> None:
        self.counts = ConnectorCounts()

    def arrived(self, request: Any) -> None:
        """Ignore a request."""

    def matched(self, _request: Any, _computed: int) -> tuple[int | None, bool]:
        """Return (0, False): there are no tokens to load."""
        return 0, False

    def allocated(self, request: Any, blocks: object, external: int) -> None:
        pass

    def step(self, _scheduled: Mapping[str, int], _tables: object, **_more: object) -> Step:
        return Step()

    def measured(self, cost: object) -> None:
        pass

    def published(self, request: str, tokens: int) -> None:
        pass

    def placed(self, play: PlacedPlay) -> None:
        pass

    def received(self, requests: set[str]) -> None:
        pass

    def reset(self) -> bool:
        return True

    def served(self, _request: Any, _blocks: object) -> None:
        pass

    def finished(self, _request: Any, _blocks: object) -> bool:
        return False


class IdleWorker:
    """A `WorkerHalf` that does nothing."""

    publishing = False

    def __init__(self) -> None:
        self.counts = ConnectorCounts()

    def register(self, caches: object, layout_of: object, store: object, *, keepers: object) -> None:
        pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def begin(self, step: Step) -> None:
        pass

    def preempted(self, step: Step) -> None:
        pass

    def computed(self) -> None:
        pass

    def collect(self) -> tuple[set[str], set[str]]:
        return set(), set()

    def measured(self) -> None:
        pass

    def published(self) -> list[tuple[str, int]]:
        return []

    def placed(self) -> list[PlacedPlay]:
        return []

    def failed_blocks(self) -> set[int]:
        return set()

    def failed_requests(self) -> set[str]:
        return set()

    def close(self) -> None:
        pass
