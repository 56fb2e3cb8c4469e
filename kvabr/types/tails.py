"""What a coded prefix loses behind a tail: the tokens that an engine computes on it, together with the question.

Most of a coded prefix's loss sits in its last tokens, since what is read next attends to them most. An engine that
computes some of them again, on the coded cache of those before, loses much less (SmolLM2-135M, six texts, AC-L0: a
third with 16 tokens, a fifth with 128, a sixteenth with 512), and a question is such a tail, too.

A track lists what remains of its loss behind a few lengths of tail. Between them, the logarithm of the share is linear
in that of the length. Of an asset that lists nothing, the groups that are computed lose nothing, and the others what
they lose without a tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple

from msgspec import Meta

from kvabr.types.errors import FormatError

TAILS = (16, 128, 512)
"""Lengths of tails behind which losses are measured, tokens."""
_EVEN = 0.15
"""Share of a loss that is spread evenly behind a question, where it is not known which groups questions are about."""
_ASKED = 0.7
"""Share of a loss that lies, behind a question, where other questions have it, where that is known."""
_LEAST_SHARE = 1e-6
"""Least share of a loss that a tail leaves."""
MOST_LOSS = 1e6
"""The most that a group may lose, nats per generated token."""
Loss = Annotated[float, Meta(ge=0, le=MOST_LOSS)]


class TailLoss(NamedTuple):
    """What is left of the loss of a whole cache on one track."""

    tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Length of the tail: tokens behind the cache that were computed on it."""
    share: Loss
    """Loss behind it, as a share of the loss right behind the prefix (`Track.total_loss`)."""
    spread: Annotated[float, Meta(ge=0, le=20)] = 0.0
    """Standard deviation of the logarithm of that loss, over what may follow; 0.0 if it was not measured."""


Tails = Annotated[tuple[TailLoss, ...], Meta(max_length=16)]


def check_tails(tails: Sequence[TailLoss], what: str) -> None:
    """Raise a `FormatError`, about ``what``, unless tails ascend.

    A longer tail may lose more than a shorter one: measurements do. `share_behind` takes the least of the shorter ones.
    """
    if any(one.tokens >= other.tokens for one, other in pairwise(tails)):
        raise FormatError(f"{what} has losses behind tails that do not ascend")


def share_behind(tails: Sequence[TailLoss], tokens: int) -> float:
    """Return the share of a track's loss that is left behind a tail of ``tokens`` tokens; 1.0 if none is known."""
    if not tails or tokens <= 0:
        return 1.0
    places, shares = share_points(tails)
    place = math.log1p(tokens)
    for (left, low), (right, high) in pairwise(zip(places, shares, strict=True)):
        if place <= right:
            return math.exp(low + (high - low) * (place - left) / (right - left))
    return math.exp(shares[-1])


def share_points(tails: Sequence[TailLoss]) -> tuple[list[float], list[float]]:
    """Return the points between which the share is linear: log(1 + tokens), and the logarithms of the shares."""
    places = [0.0, *(math.log1p(tail.tokens) for tail in tails)]
    return places, [0.0, *accumulate((math.log(max(_LEAST_SHARE, tail.share)) for tail in tails), min)]


def tails_behind(tails: Sequence[TailLoss], tokens: int) -> tuple[TailLoss, ...]:
    """Return what further tokens leave of the loss behind a tail of ``tokens`` tokens."""
    if tokens <= 0:
        return tuple(tails)
    left = share_behind(tails, tokens)
    return tuple(tail._replace(share=share_behind(tails, tokens + tail.tokens) / left) for tail in tails)


def even_share(tail: float, even: float = _EVEN) -> float:
    """Return the share of what groups lose behind a tail of so many tokens that is spread evenly over them."""
    return even * min(1.0, math.log1p(tail) / math.log1p(TAILS[0]))


def spread_out(losses: Sequence[float], tail: float, asked: Sequence[float] = ()) -> tuple[float, ...]:
    """Return what groups lose, laid out over them as behind a tail of so many tokens.

    Which groups a question is about depends on the text, and hardly on the question. So a part of the loss lies where
    other questions had theirs: ``asked`` has a share of each group. Where that is not known, it is spread evenly.
    """
    moved = even_share(tail, _ASKED) if any(asked) else even_share(tail)
    shares = asked if any(asked) else (1.0,) * len(losses)
    whole, every = sum(losses), sum(shares)
    return tuple(
        (1.0 - moved) * loss + moved * whole * (share / every) for loss, share in zip(losses, shares, strict=True)
    )


def losses_behind(
    losses: Sequence[float],
    tails: Sequence[TailLoss],
    groups: int,
    tail: int,
    group_tokens: int,
    asked: Sequence[float] = (),
) -> tuple[float, ...]:
    """Return what the first ``groups`` groups lose on a track behind a tail.

    Together they lose what the tail leaves of the whole loss, laid out by what each loses right behind the cache and
    behind questions (`spread_out`). (To move the losses by the length of a question is worse: of one or two of eight
    groups on a finer layer, chosen so, SmolLM2 lost 7 % more.) Of a shorter prefix, a group counts by its distance from
    the end, and what is missing is the last group's; the first, by which the model steadies itself, counts by itself.
    Where no tails are known, groups lose what they are said to.

    Args:
        losses: of all groups of the cache, right behind it.
        tails: what is known of tails.
        groups: how many of them are fetched.
        tail: tokens that are computed behind them.
        group_tokens: tokens of a group.
        asked: share of each group in what is lost behind questions; empty if that is not known.
    """
    if not tails or not (tail or groups < len(losses)):
        return tuple(losses[:groups])
    last = max(0, len(losses) - groups - tail // group_tokens)
    moved = list(losses[last : last + groups])
    if groups > 1:
        moved[0] = losses[0]
    whole, wanted = sum(moved), sum(losses) * share_behind(tails, tail)
    if tail > (known := tails[-1].tokens):  # then only as far groups lose anything as are behind a longer one
        far, farther = (sum(losses[: max(1, len(losses) - each // group_tokens)]) for each in (known, tail))
        wanted *= farther / far if far > 0 else 1.0
    if whole > wanted or (tail and whole > 0):
        return tuple(min(MOST_LOSS, loss * wanted / whole) for loss in spread_out(moved, tail, asked[:groups]))
    moved[-1] = min(MOST_LOSS, moved[-1] + wanted - whole)
    return tuple(moved)
