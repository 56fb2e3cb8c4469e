"""Chooses how many of a prompt's last tokens the engine computes with the question instead of fetching them.

An engine computes the tokens after the cached prefix anyway. The same call can compute the last tokens of the prefix on
the coded cache, which removes most of the loss (`kvabr.types.tails`). That is cheap, or free if calls have a minimum
duration, and saves bytes. The cost of each choice is estimated before a play, at the rate of earlier plays or over
several rates of an unknown link. It is that of the best single track, or of a mixture of two that uses all the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations

from kvabr.abr.belief import LOADS, MIN_WAIT_S
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost, objective
from kvabr.types.errors import UsageError
from kvabr.types.joined import joined_with_tail, last_groups

DEFAULT_MAX_TAIL = 512
"""Default maximum tokens of a tail; a longer one hardly reduces the loss further."""
MAX_TAIL = 1 << 20
"""Largest accepted number of tokens of a tail or a question."""
_MAX_OFFERS = 8
_UNKNOWN_RATE_SHARE = 0.02
"""Fraction of the time left that a tail may take while the rate is unknown, since the network may deliver everything
soon."""


@dataclass(frozen=True)
class TailOffer:
    """One way to divide a prefix between the network and the engine's call for the question."""

    catalog: Catalog
    """The part to fetch, after skipped groups, with the losses that remain after the tail."""
    tokens: int
    """Number of tokens to compute; 0: the whole prefix is fetched."""
    engine_s: float
    """Seconds that these tokens add to the engine's call."""

    def objective(
        self, rate: float, left_s: float, *, time_price: float, gpu_price: float, decoders: int = 1,
        computed_s: float = math.inf,
    ) -> float:  # fmt: skip
        """Return the expected cost of a play: loss, time and engine, in nats per generated token.

        ``rate`` is in bytes per second; ``left_s`` is the time to the deadline; prices are per second; ``computed_s``
        is as in `tail_costs`.
        """

        def cost(loss: float, seconds: float, front_s: float = 0.0) -> float:
            return objective(
                loss, seconds, left_s, met=seconds <= left_s, engine_s=self.engine_s + front_s,
                time_price=time_price, gpu_price=gpu_price,
            )  # fmt: skip

        times = [(max(size / rate, s / decoders), loss) for size, s, loss in self._ways]
        least = min(cost(loss, self.engine_s + seconds) for seconds, loss in times)
        if math.isfinite(computed_s) and math.isfinite(gpu_price):
            # The engine computes the front while the rest arrives, or computes everything.
            whole_s = max(0.0, computed_s - self.engine_s)
            shares = [(1.0, 0.0), *((seconds / (seconds + whole_s), loss) for seconds, loss in times if seconds > 0)]
            fronts = ((share * whole_s, (1.0 - share) * loss) for share, loss in shares)
            least = min(least, *(cost(loss, self.engine_s + front_s, front_s) for front_s, loss in fronts))
        # If it uses all the time, a play mixes the two tracks next to the link's capacity.
        carried = rate * (left_s - self.engine_s)
        mixtures = (
            worse + (better - worse) * (carried - fewer) / (more - fewer)
            for (fewer, _, worse), (more, _, better) in permutations(self._ways, 2)
            if fewer <= carried <= more and fewer < more
        )
        return min(least, cost(min(mixtures, default=math.inf), left_s))

    @cached_property
    def _ways(self) -> list[tuple[int, float, float]]:
        """Bytes, seconds of decoding, and loss of the whole prefix on each track with its lower layers."""
        ways, groups, below = [], sum(self.catalog.shares), dict[str, tuple[int, float]]()
        for track in self.catalog.tracks:
            nbytes, decode_s = below.get(track.refines or "", (0, 0.0))
            below[track.name] = nbytes + track.total_bytes, decode_s + track.decode_s * groups
            ways.append((*below[track.name], track.total_loss))
        return ways


def tail_offers(
    catalog: Catalog,
    cost: PrefillCost | None,
    *,
    following: int,
    limit: int = DEFAULT_MAX_TAIL,
    skip: int = 0,
    block: int = 1,
) -> list[TailOffer]:
    """Return the ways to divide a prefix, from no tail to the longest.

    A tail has whole groups, since a partial group would be fetched whole. It leaves at least one group to fetch; in
    joined passages, at least one of the last passage. If there are many ways, a few are offered, including the longest
    tail.

    Args:
        catalog: the cached prefix, as a play needs it (`Catalog.to_play`).
        cost: prefill cost from the first token of the prompt; None: unknown, or free.
        following: number of tokens computed after the prefix anyway, such as a question.
        limit: maximum tokens of a tail, which must fit into a step of the engine.
        skip: number of leading groups that need not be fetched.
        block: block size of the engine in tokens; a tail begins at a block.

    Raises:
        UsageError: a number of tokens is negative or absurd, or everything is skipped.
    """
    for what, tokens in (("the question", following), ("the tail", limit)):
        if not 0 <= tokens <= MAX_TAIL:
            raise UsageError(f"{what} must have 0 to {MAX_TAIL:,} tokens, got {tokens:,}")
    groups, with_tail = (
        len(catalog.chunks),
        partial(joined_with_tail if catalog.sources else Catalog.with_tail, catalog),
    )
    if not 0 <= skip < groups:
        return [TailOffer(catalog.suffix(skip), 0, 0.0)]
    first, size = catalog.first_token, catalog.spec.group_tokens
    shortest = max(skip, (last_groups(catalog) or range(groups, groups)).start) if catalog.sources else skip
    ends: dict[int, int] = {}
    for kept in range(groups - 1, shortest, -1):
        end = catalog.tokens_before(kept) if catalog.sources else kept * size
        if catalog.tokens - end > limit:
            break
        if not (first + end) % block:
            ends[kept] = end
    possible = list(ends) if following else []
    step = max(1, math.ceil(len(possible) / _MAX_OFFERS))
    alone_s = 0.0 if cost is None else cost.seconds(first + catalog.tokens, following)
    offers = [TailOffer(with_tail(groups, following).suffix(skip), 0, 0.0)]
    for kept in reversed(possible[::-1][::step]):
        tokens = catalog.tokens - ends[kept]
        try:
            fetched = with_tail(kept, following + tokens).suffix(skip)
        except UsageError:  # a state has no snapshot there
            continue
        engine_s = 0.0
        if cost is not None:
            engine_s = max(0.0, cost.seconds(first + ends[kept], tokens + following) - alone_s)
        offers.append(TailOffer(fetched, tokens, engine_s))
    return offers


def tail_costs(
    offers: Sequence[TailOffer],
    left_s: float,
    *,
    rate: float = 0.0,
    time_price: float,
    gpu_price: float,
    decoders: int = 1,
    computed_s: float = math.inf,
) -> list[float]:
    """Return the expected cost of a play with each offer, nats per generated token.

    Args:
        offers: from `tail_offers`.
        left_s: seconds to the deadline.
        rate: link rate, bytes per second; 0.0: unknown, and a tail may take only a little of the time left.
        time_price: price of a second before the first token, nats per generated token.
        gpu_price: price of a second of engine time, nats per generated token; infinite: no tail is computed.
        decoders: number of groups decoded in parallel.
        computed_s: seconds to compute the whole prefix, if the engine may also compute its front, or everything, while
            the network fetches the rest; infinite if it may not.
    """
    left_s = max(MIN_WAIT_S, left_s)
    whole = offers[0].catalog
    rates = [rate]
    if rate <= 0:  # an unknown link is assumed to carry the base in time
        base = min(track.total_bytes for track in whole.tracks if track.refines is None)
        rates = [max(load * whole.fp16_bytes, base) / left_s for load in LOADS]
    costs = []
    for offer in offers:
        ways = (
            offer.objective(
                one, left_s, time_price=time_price, gpu_price=gpu_price, decoders=decoders, computed_s=computed_s
            )
            for one in rates
        )
        cost = sum(ways) / len(rates)
        refused = not math.isfinite(gpu_price) or (rate <= 0 and offer.engine_s > _UNKNOWN_RATE_SHARE * left_s)
        costs.append(math.inf if offer.tokens and refused else cost)
    return costs
