"""How many tokens of a joined prompt are worth computing again: their price, what they save, and the time they take."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvabr.abr.ladder import Ladder
from kvabr.player.session_types import BlendGoal, PlayRecord
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.joined import fusion_loss, joined_passages
from kvabr.types.loss import played_loss

_UNKNOWN_LINK_SHARE = 0.5
"""Share of the deadline that is kept for tokens at most while nothing is known of the link."""
_MOST_SHARES = 64
"""Most shares that are weighed: every passage may name as many of its own."""
_AHEAD = 0.15
"""Share of a passage's tokens that is computed in its publisher's order."""
_ORDER_WORTH = 0.3
"""What the publisher's order saves, as a part of what the question's choice of as many tokens does (SmolLM2-135M: .3 to
.45)."""


def delivered_loss(catalog: Catalog, record: PlayRecord) -> float:
    """Return the expected loss of a cache that was delivered, nats per generated token.

    What computing tokens of passages again saved is taken off, see `kvabr.types.loss.played_loss` for the rest.
    """
    loss, blend = played_loss(catalog, record.steps), record.blend
    if blend is None or blend.fusion_loss is None:
        return loss
    coverage = [group.track or "" for group in record.groups]
    codec = max(0.0, loss - (fusion_loss(catalog, coverage) or 0.0))
    return (1 - blend.share) * codec + blend.fusion_loss


@dataclass(frozen=True, slots=True)
class BlendOption:
    """A number of tokens to compute again."""

    share: float
    tokens: int
    seconds: float
    """Of the engine, without choosing them."""
    fusion: float
    """Fusion loss with all groups fetched, nats per generated token; 0.0 if it was not measured."""


class BlendPlan:
    """What there is to choose from in one play. An option is worth what it saves, at the prices of the play."""

    def __init__(
        self, ladder: Ladder, cost: PrefillCost | None, goal: BlendGoal, *, time_price: float, gpu_price: float
    ) -> None:
        """List the options.

        Args:
            ladder: of the joined catalog.
            cost: what the engine's prefill costs; None: it computes no tokens.
            goal: of the play.
            time_price: price of a second before the first token, nats per generated token.
            gpu_price: price of a second of engine time; infinite: tokens are computed only if the goal names a share.
        """
        self._catalog, self._goal = ladder.catalog, goal
        self.passages = joined_passages(ladder.catalog)
        self._tokens = sum(passage.end - passage.first for passage in self.passages)
        idle = gpu_price if math.isfinite(gpu_price) else 0.0
        self._cost, self._price, self._gpu_price = cost, time_price + idle, gpu_price
        can = cost is not None and goal.question > 0 and (goal.share is not None or math.isfinite(gpu_price))
        self.look_s = cost.seconds(ladder.catalog.tokens, goal.question) if cost is not None and can else 0.0
        """Seconds that the engine takes to choose."""
        shares = self._shares() if can else []
        every = [""] * ladder.catalog.groups
        self.options = [BlendOption(0.0, 0, 0.0, fusion_loss(ladder.catalog, every) or 0.0)]
        for share in shares:
            tokens = math.ceil(round(share * self._tokens, 6))
            seconds = cost.seconds(ladder.catalog.tokens - tokens, tokens) if cost is not None else 0.0
            fusion = fusion_loss(ladder.catalog, every, share)
            least = self.options[0].fusion if fusion is None else fusion
            self.options.append(BlendOption(share, tokens, seconds, least))
        hulls = ladder.layered
        self._base_bytes = sum(hull[0].bytes for hull in hulls)
        self._losses = [max(0.0, sum(hull[0].loss for hull in hulls) - self.options[0].fusion)]
        self._losses += [
            max(0.0, self._losses[0] - saved) for saved in accumulate(step.saving for step in ladder.layered_steps)
        ]
        self._spent = [0, *accumulate(step.bytes for step in ladder.layered_steps)]

    @property
    def least_loss(self) -> float:
        """Least expected loss of any option, if the cache comes as well as it can."""
        return min(option.fusion for option in self.options)

    def fusion(self, coverage: Sequence[str], share: float) -> float | None:
        """Return the fusion loss of a cache, see `kvabr.types.joined.fusion_loss`."""
        return fusion_loss(self._catalog, coverage, share)

    def loss(self, coverage: Sequence[str], codec: float, share: float) -> float:
        """Return the expected loss of a cache of which a share is computed again, nats per generated token.

        ``codec`` is what it is without that share, and without what joining it costs.
        """
        return (1 - share) * codec + (self.fusion(coverage, share) or 0.0)

    def reserve_s(self, left_s: float, received: int, rate: float) -> float:
        """Return the seconds before the deadline that tokens are worth more than the last layers.

        Args:
            left_s: seconds to the deadline.
            received: bytes that are here.
            rate: expected bytes per second; 0.0: not known yet.
        """
        best, least = 0.0, math.inf
        for option in self.options:
            needed_s = option.seconds + self.look_s if option.tokens else 0.0
            if rate <= 0:
                if option.tokens and needed_s > _UNKNOWN_LINK_SHARE * left_s:
                    continue
                codec = 0.0
            else:
                codec = self._codec(received + rate * max(0.0, left_s - needed_s), option.share)
            # Of two that are worth the same, that with more tokens: if the user names a share, it is that one.
            worth = codec + self._worth(option, option.fusion)
            if worth < least:
                best, least = needed_s, worth
        return best

    def ahead(self, number: int) -> BlendOption | None:
        """Return what is worth computing of a passage in its publisher's order; None: nothing."""
        cost, passage = self._cost, self.passages[number]
        if cost is None or passage.notes is None or not passage.notes.order or len(self.options) < 2:
            return None
        tokens = math.ceil(_AHEAD * (passage.end - passage.first))
        seconds = cost.seconds(passage.end - tokens, tokens)
        saved = (passage.notes.fusion_loss(0.0) or 0.0) - (passage.notes.fusion_loss(_AHEAD) or 0.0)
        if self._gpu_price * seconds >= _ORDER_WORTH * saved:
            return None
        return BlendOption(_AHEAD, tokens, seconds, 0.0)

    def tokens_left(self, coverage: Sequence[str]) -> int:
        """Return how many tokens of passages are not of groups which were computed."""
        groups = (group for one in self.passages for group in one.groups if coverage[group] != RECOMPUTED)
        return sum(self._catalog.unit(group).tokens for group in groups)

    def best(self, left_s: float, coverage: Sequence[str], codec: float, *, chosen: bool) -> BlendOption | None:
        """Return what to compute now that the cache is in place; None: its expected loss would exceed the limit.

        Args:
            left_s: seconds to the deadline.
            coverage: per group the track in place, or ``recomputed``.
            codec: expected loss of the cache without what joining it costs.
            chosen: whether the tokens are chosen already.
        """
        found, least = None, math.inf
        for option in self.options if self.tokens_left(coverage) else self.options[:1]:
            loss = self.loss(coverage, codec, option.share)
            if loss > self._goal.max_loss:
                continue
            needed_s = option.seconds + (0.0 if chosen else self.look_s) if option.tokens else 0.0
            late = MISS_PENALTY if needed_s > max(0.0, left_s) else 0.0
            worth = self._worth(option, loss) + late
            if worth < least:
                found, least = option, worth
        return found

    def _worth(self, option: BlendOption, loss: float) -> float:
        if self._goal.share is not None:
            return -option.share * MISS_PENALTY  # the user has decided; what is late is worse than any share
        return loss + self._price * option.seconds

    def _shares(self) -> list[float]:
        """Return the shares to choose from: those that were measured, and the one that the user names."""
        measured = {share for one in self.passages if one.notes is not None for share, _ in one.notes.fusion}
        if self._goal.share is None:
            return _thinned(share for share in measured if share > 0)
        return _thinned({share for share in measured if 0 < share < self._goal.share} | ({self._goal.share} - {0.0}))

    def _codec(self, nbytes: float, share: float) -> float:
        """Return the least loss that the codec costs if ``nbytes`` arrive; without a whole cache, that of missing.

        The ``share`` of the tokens that is computed again costs nothing.
        """
        if nbytes < self._base_bytes:
            return MISS_PENALTY + self._losses[0] * (2 - nbytes / self._base_bytes)
        return (1 - share) * self._losses[bisect_right(self._spent, nbytes - self._base_bytes) - 1]


def _thinned(shares: Iterable[float]) -> list[float]:
    """Return shares, ascending: all of them, or at most `_MOST_SHARES`, evenly spread, with the highest."""
    ascending = sorted(shares)
    step = max(1, -(-len(ascending) // _MOST_SHARES))
    return ascending[::-step][::-1]
