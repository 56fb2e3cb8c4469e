"""Decides how many tokens of a joined prompt to recompute, by their price, savings and duration."""

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
"""Maximum fraction of the deadline reserved for recomputing tokens if the link is unknown."""
_MAX_SHARES = 64
_ORDERED_SHARE = 0.15
"""Fraction of a passage's tokens to recompute in its publisher's order."""
_ORDER_SAVING_SHARE = 0.3
"""Savings of tokens in the publisher's order, relative to as many tokens chosen by the question (SmolLM2-135M: .3 to
.45)."""


def delivered_loss(catalog: Catalog, record: PlayRecord) -> float:
    """Return the expected loss of a delivered cache, including recomputed tokens, in nats per generated token."""
    loss, blend = played_loss(catalog, record.steps), record.blend
    if blend is None or blend.fusion_loss is None:
        return loss
    coverage = [group.track or "" for group in record.groups]
    codec = max(0.0, loss - (fusion_loss(catalog, coverage) or 0.0))
    return (1 - blend.share) * codec + blend.fusion_loss


@dataclass(frozen=True, slots=True)
class BlendOption:
    """A possible number of tokens to recompute."""

    share: float
    tokens: int
    seconds: float
    """Seconds of engine time, excluding the choice of tokens."""
    fusion: float
    """Fusion loss if all groups are fetched, in nats per generated token; 0.0 if not measured."""


class BlendPlan:
    """The options of a play, and their values at the play's prices."""

    def __init__(
        self, ladder: Ladder, cost: PrefillCost | None, goal: BlendGoal, *, time_price: float, gpu_price: float
    ) -> None:
        """List the options.

        Without ``cost``, the engine's prefill cost, no tokens are recomputed. ``time_price`` and ``gpu_price`` are the
        prices of a second before the first token and of a second of engine time, in nats per generated token. If
        ``gpu_price`` is infinite, tokens are recomputed only if the goal gives a share.
        """
        self._catalog, self._goal = ladder.catalog, goal
        self.passages = joined_passages(ladder.catalog)
        self._tokens = sum(passage.end - passage.first for passage in self.passages)
        idle = gpu_price if math.isfinite(gpu_price) else 0.0
        self._cost, self._price, self._gpu_price = cost, time_price + idle, gpu_price
        can = cost is not None and goal.question > 0 and (goal.share is not None or math.isfinite(gpu_price))
        self.look_s = cost.seconds(ladder.catalog.tokens, goal.question) if cost is not None and can else 0.0
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
        """Lowest expected loss of any option, if all groups are on their best tracks."""
        return min(option.fusion for option in self.options)

    def fusion(self, coverage: Sequence[str], share: float) -> float | None:
        """See `kvabr.types.joined.fusion_loss`."""
        return fusion_loss(self._catalog, coverage, share)

    def loss(self, coverage: Sequence[str], codec: float, share: float) -> float:
        """Return a cache's expected loss after recomputing a share of tokens, in nats per generated token.

        ``codec``: the loss of its tracks before that, without the loss from joining.
        """
        return (1 - share) * codec + (self.fusion(coverage, share) or 0.0)

    def reserve_s(self, left_s: float, received: int, rate: float) -> float:
        """Return the seconds before the deadline in which recomputing tokens gains more than fetching further layers.

        ``rate`` in bytes per second, 0.0 if unknown.
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
            worth = codec + self._worth(option, option.fusion)
            if worth < least:
                best, least = needed_s, worth
        return best

    def ahead(self, number: int) -> BlendOption | None:
        """Return the tokens of a passage to recompute in its publisher's order, or None if that does not pay."""
        cost, passage = self._cost, self.passages[number]
        if cost is None or passage.notes is None or not passage.notes.order or len(self.options) < 2:
            return None
        tokens = math.ceil(_ORDERED_SHARE * (passage.end - passage.first))
        seconds = cost.seconds(passage.end - tokens, tokens)
        saved = (passage.notes.fusion_loss(0.0) or 0.0) - (passage.notes.fusion_loss(_ORDERED_SHARE) or 0.0)
        if self._gpu_price * seconds >= _ORDER_SAVING_SHARE * saved:
            return None
        return BlendOption(_ORDERED_SHARE, tokens, seconds, 0.0)

    def tokens_left(self, coverage: Sequence[str]) -> int:
        """Return the number of passage tokens that the engine has not computed."""
        groups = (group for one in self.passages for group in one.groups if coverage[group] != RECOMPUTED)
        return sum(self._catalog.unit(group).tokens for group in groups)

    def best(self, left_s: float, coverage: Sequence[str], codec: float, *, chosen: bool) -> BlendOption | None:
        """Return the best option for a cache in place, or None if all exceed the loss limit.

        ``codec`` as in `loss`; ``chosen``: True if the tokens are chosen already.
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
            return -option.share * MISS_PENALTY  # the user's choice: a larger share outweighs the price of being late
        return loss + self._price * option.seconds

    def _shares(self) -> list[float]:
        measured = {share for one in self.passages if one.notes is not None for share, _ in one.notes.fusion}
        if self._goal.share is None:
            return _thinned(share for share in measured if share > 0)
        return _thinned({share for share in measured if 0 < share < self._goal.share} | ({self._goal.share} - {0.0}))

    def _codec(self, nbytes: float, share: float) -> float:
        """Return the lowest codec loss if ``nbytes`` arrive; if the base does not fit, the price of a miss and more."""
        if nbytes < self._base_bytes:
            return MISS_PENALTY + self._losses[0] * (2 - nbytes / self._base_bytes)
        return (1 - share) * self._losses[bisect_right(self._spent, nbytes - self._base_bytes) - 1]


def _thinned(shares: Iterable[float]) -> list[float]:
    ascending = sorted(shares)
    step = max(1, -(-len(ascending) // _MAX_SHARES))
    return ascending[::-step][::-1]
