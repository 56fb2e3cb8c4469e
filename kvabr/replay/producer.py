"""A producer in a replay: it prefills a cache while that is played, and publishes each group once it is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError


@dataclass(frozen=True, slots=True)
class Producer:
    """When the groups of a cache appear."""

    seconds: float
    """Time of the whole prefill. Its pace is that of the catalog's prefill cost, which grows with the context."""
    begins_s: float = 0.0
    """When it begins, seconds since the play began; negative if it began before."""
    surprise: float = 1.0
    """How much longer it takes than the player is told."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"a prefill of {self.seconds} s; it must take a positive number of seconds")
        if not (math.isfinite(self.begins_s) and 0 < self.surprise < math.inf):
            raise UsageError("when a prefill begins must be a finite number, its surprise a positive one")

    def expected_s(self, catalog: Catalog) -> list[float]:
        """Return when the player expects each group, seconds since the play began."""
        return self._times(catalog, self.seconds)

    def published_s(self, catalog: Catalog) -> list[float]:
        """Return when each group is published, seconds since the play began."""
        return self._times(catalog, self.seconds * self.surprise)

    def _times(self, catalog: Catalog, seconds: float) -> list[float]:
        cost = catalog.prefill or PrefillCost.from_rate(1.0)
        size, tokens = catalog.spec.group_tokens, catalog.tokens
        chunks = [(first, min(size, tokens - first)) for first in range(0, tokens, size)]
        took_s = list(accumulate(cost.seconds(first, count) for first, count in chunks))
        ends = [self.begins_s + seconds * took / took_s[-1] for took in took_s]
        return [ends[catalog.unit(group).chunk] for group in range(catalog.groups)]
