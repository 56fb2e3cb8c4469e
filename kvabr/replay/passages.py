"""A prompt of published passages, to replay: of the text before them only the number of tokens counts."""

from __future__ import annotations

from collections.abc import Sequence

from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.joined import join
from kvabr.types.passage import Exact, Passage

EXACT, QUESTION = 32, 24
"""Tokens before the passages of a prompt, and of the question behind them, unless the user says otherwise."""
_APART = 1 << 20
"""Ids of one passage are so far from those of the next: what they are does not matter here, only that they differ."""


def prompt_of(catalogs: Sequence[Catalog], exact: int) -> Catalog:
    """Return the catalog of a prompt that is made of passages, in their order.

    Args:
        catalogs: of the passages, of one model.
        exact: tokens of the text before the first of them, at least one.

    Raises:
        UsageError: one of them is no passage, or is of another model; or there is no text before them.
    """
    if exact < 1:
        raise UsageError("a prompt of passages begins with a text of its own: give --exact at least 1")
    found: dict[Passage, Catalog] = {}
    for number, catalog in enumerate(catalogs, 1):
        if catalog.passage is None:
            title = f"{catalog.namespace.model}/{catalog.namespace.prompt[:12]}..."
            raise UsageError(f"{title} is no passage; `kvabr encode --passage` publishes one")
        if catalog.spec.digest() != catalogs[0].spec.digest():
            raise UsageError(f"passages of {catalogs[0].spec.model} and {catalog.spec.model} are not one prompt")
        found[Passage(tuple(range(number * _APART, number * _APART + catalog.tokens)))] = catalog
    try:
        joined = join((Exact(tuple(range(exact))), *found), found, catalogs[0].spec)
    except FormatError as error:
        raise UsageError(str(error)) from error
    if joined is None:
        raise UsageError("give at least one passage")
    return joined
