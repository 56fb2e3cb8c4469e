"""Loss of a coded prefix after a tail. The tail is the tokens that an engine computes next, including the question.

Most of a coded prefix's loss is due to its last tokens, since the next tokens attend to these most. Computing some
tokens on the coded cache reduces the loss (SmolLM2-135M, six texts, AC-L0: to a third with 16 tokens, a fifth with 128,
a sixteenth with 512). A track lists its remaining loss for a few tail lengths; log(share) is interpolated linearly in
log(1 + tokens). Without a list, computed groups have loss 0, and the loss of other groups is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple

from msgspec import Meta

from kvabr.types.errors import FormatError

TAILS = (16, 128, 512)
_EVEN_SHARE = 0.15
"""Fraction of a loss that is spread evenly over groups after a question, if the distribution was not measured."""
_ASKED_SHARE = 0.7
"""Fraction of a loss that is distributed as after other questions, if measured."""
_MIN_SHARE = 1e-6
MAX_LOSS = 1e6
Loss = Annotated[float, Meta(ge=0, le=MAX_LOSS)]


class TailLoss(NamedTuple):
    """Remaining loss of a whole cache on one track after a tail."""

    tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    share: Loss
    """Loss after the tail, divided by the loss without a tail (`Track.total_loss`)."""
    spread: Annotated[float, Meta(ge=0, le=20)] = 0.0
    """Standard deviation, over continuations, of the logarithm of the loss after the tail; 0.0 if not measured."""


Tails = Annotated[tuple[TailLoss, ...], Meta(max_length=16)]


def check_tails(tails: Sequence[TailLoss], what: str) -> None:
    """Raise `FormatError` about ``what`` if tail lengths do not ascend.

    Measured losses may grow with the tail; `share_after_tail` uses the minimum over shorter tails.
    """
    if any(one.tokens >= other.tokens for one, other in pairwise(tails)):
        raise FormatError(f"{what}: tail lengths must ascend")


def share_after_tail(tails: Sequence[TailLoss], tokens: int) -> float:
    """Return the fraction of a track's loss that remains after a tail of ``tokens`` tokens; 1.0 if not measured."""
    if not tails or tokens <= 0:
        return 1.0
    places, shares = share_points(tails)
    place = math.log1p(tokens)
    for (left, low), (right, high) in pairwise(zip(places, shares, strict=True)):
        if place <= right:
            return math.exp(low + (high - low) * (place - left) / (right - left))
    return math.exp(shares[-1])


def share_points(tails: Sequence[TailLoss]) -> tuple[list[float], list[float]]:
    """Return the points to interpolate: log(1 + tokens), and logs of shares."""
    places = [0.0, *(math.log1p(tail.tokens) for tail in tails)]
    return places, [0.0, *accumulate((math.log(max(_MIN_SHARE, tail.share)) for tail in tails), min)]


def tails_after(tails: Sequence[TailLoss], tokens: int) -> tuple[TailLoss, ...]:
    """Return the tails of a cache that already has a tail of ``tokens`` tokens."""
    if tokens <= 0:
        return tuple(tails)
    left = share_after_tail(tails, tokens)
    return tuple(tail._replace(share=share_after_tail(tails, tokens + tail.tokens) / left) for tail in tails)


def even_share(tail: float, even: float = _EVEN_SHARE) -> float:
    """Return the fraction of the loss after ``tail`` tokens that is spread evenly over the groups."""
    return even * min(1.0, math.log1p(tail) / math.log1p(TAILS[0]))


def spread_out(losses: Sequence[float], tail: float, asked: Sequence[float] = ()) -> tuple[float, ...]:
    """Redistribute losses among groups as after a tail of ``tail`` tokens.

    Which groups are relevant to a question depends on the text, and hardly on the question. So part of the loss is
    distributed according to ``asked``, the shares measured with other questions, or evenly if there are none.
    """
    moved = even_share(tail, _ASKED_SHARE) if any(asked) else even_share(tail)
    shares = asked if any(asked) else (1.0,) * len(losses)
    whole, every = sum(losses), sum(shares)
    return tuple(
        (1.0 - moved) * loss + moved * whole * (share / every) for loss, share in zip(losses, shares, strict=True)
    )


def losses_with_tail(
    losses: Sequence[float],
    tails: Sequence[TailLoss],
    groups: int,
    tail: int,
    group_tokens: int,
    asked: Sequence[float] = (),
) -> tuple[float, ...]:
    """Return the losses of the first ``groups`` groups on a track after a tail.

    The losses sum to the remaining share of the whole loss, distributed according to the groups' losses without a tail
    and after questions (`spread_out`). In a shorter prefix, a group's loss depends on its distance from the end; the
    last group gets the remainder, and the loss of the first group, an attention sink, is unchanged.

    ``losses`` has the losses of all groups without a tail; they are returned unchanged if ``tails`` is empty. ``asked``
    is each group's share of the loss after questions, if measured.
    """
    if not tails or not (tail or groups < len(losses)):
        return tuple(losses[:groups])
    last = max(0, len(losses) - groups - tail // group_tokens)
    moved = list(losses[last : last + groups])
    if groups > 1:
        moved[0] = losses[0]
    whole, wanted = sum(moved), sum(losses) * share_after_tail(tails, tail)
    if tail > (known := tails[-1].tokens):  # beyond the measured tails, only groups at that distance from the end count
        far, farther = (sum(losses[: max(1, len(losses) - each // group_tokens)]) for each in (known, tail))
        wanted *= farther / far if far > 0 else 1.0
    if whole > wanted or (tail and whole > 0):
        return tuple(min(MAX_LOSS, loss * wanted / whole) for loss in spread_out(moved, tail, asked[:groups]))
    moved[-1] = min(MAX_LOSS, moved[-1] + wanted - whole)
    return tuple(moved)
