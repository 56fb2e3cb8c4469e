"""Expected loss of a played cache: what each group's track costs, and what recomputed groups inherit.

Pure Python on catalog numbers, cheap enough to ask thousands of times in a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvabr.errors import FormatError

if TYPE_CHECKING:
    from kvabr.catalog import Catalog

RECOMPUTED = "recomputed"
"""Stands in a list of tracks for a group that the engine computed from the groups before it."""


def predicted_loss(catalog: Catalog, tracks: Sequence[str]) -> float:
    """Expected loss of a cache whose group g was played on ``tracks[g]``, nats per generated token.

    Args:
        catalog: the asset.
        tracks: one entry per group: the name of the highest track in place, or `RECOMPUTED`.

    Raises:
        FormatError: not one entry per group, or a track that the asset does not have.
    """
    if len(tracks) != catalog.groups:
        raise FormatError(f"{len(tracks)} tracks for an asset of {catalog.groups} groups")
    return sum(catalog.track(name).loss[group] for group, name in enumerate(tracks) if name != RECOMPUTED)
