"""A prompt of published passages, to replay: of the text before them only the number of tokens counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.joined import join, joinable
from kvabr.types.passage import Exact, Passage

EXACT, QUESTION = 32, 24
"""Tokens before the passages of a prompt, and of the question behind them, unless the user says otherwise."""
_APART = 1 << 20
"""Ids of one passage are so far from those of the next: what they are does not matter here, only that they differ."""


def prompt_of(
    catalogs: Sequence[Catalog],
    exact: int,
    max_loss: float = MISS_PENALTY,
    refused: Callable[[int, str], None] = lambda *_: None,
) -> Catalog:
    """Return the catalog of a prompt that is made of passages, in their order.

    What a player would not join (`kvabr.types.joined.joinable`) the engine computes here, too.

    Args:
        catalogs: of the passages, of one model.
        exact: tokens of the text before the first of them, at least one.
        max_loss: most that the joined cache may be expected to lose, nats per generated token.
        refused: told the number of each passage that is not joined, from 0, and why.

    Raises:
        UsageError: one of them is no passage, or is of another model; there is no text before them; or none of them
            may be joined.
    """
    if exact < 1:
        raise UsageError("a prompt of passages begins with a text of its own: give --exact at least 1")
    if not catalogs:
        raise UsageError("give at least one passage")
    found: dict[Passage, Catalog] = {}
    for number, catalog in enumerate(catalogs, 1):
        if catalog.passage is None:
            title = f"{catalog.namespace.model}/{catalog.namespace.prompt[:12]}..."
            raise UsageError(f"{title} is no passage; `kvabr encode --passage` publishes one")
        if catalog.spec.digest() != catalogs[0].spec.digest():
            raise UsageError(f"passages of {catalogs[0].spec.model} and {catalog.spec.model} are not one prompt")
        found[Passage(tuple(range(number * _APART, number * _APART + catalog.tokens)))] = catalog
    order = list(found)
    reasons: dict[str, None] = {}

    def told(passage: Passage, reason: str) -> None:
        reasons[reason] = None
        refused(order.index(passage), reason)

    usable = joinable(found, max_loss, told)
    try:
        joined = join((Exact(tuple(range(exact))), *found), usable, catalogs[0].spec)
    except FormatError as error:
        raise UsageError(str(error)) from error
    if joined is None:
        raise UsageError(f"none of these passages can be joined: {'; '.join(reasons)}")
    return joined
