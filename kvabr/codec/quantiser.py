"""The uniform quantiser of the AC tracks, and which depth refines which.

Steps of neighbouring layers are three times apart, so that the intervals of the finer one lie inside those of the
coarser: the index below says where to look, and a base and its layers cost no more than the finest quantiser would
alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvabr.types.errors import FormatError
from kvabr.types.naming import LAYERS

SINGLE = "AC-5x"
"""The track that stands alone."""
RATIO = 3
"""How much finer the step of a layer is than that of the layer below."""


def below(track: str) -> str | None:
    """The layer that a depth refines, or None."""
    place = LAYERS.index(track) if track in LAYERS else 0
    return LAYERS[place - 1] if place else None


def nested(steps: Mapping[str, float]) -> dict[str, str | None]:
    """Every depth with what it refines, each after that.

    Raises:
        FormatError: a depth without the one below, of an unknown name, or with a step that does not nest.
    """
    order = [track for track in (*LAYERS, SINGLE) if track in steps]
    if not order or len(order) != len(steps):
        raise FormatError(f"profile: depths {', '.join(map(str, steps))}; known are {', '.join((*LAYERS, SINGLE))}")
    out = {track: below(track) for track in order}
    for track, lower in out.items():
        if lower is not None and (lower not in steps or abs(steps[lower] / steps[track] - RATIO) > 1e-6):
            raise FormatError(f"profile: the step of {track} is not a third of that of {lower}")
    return out


def quantise(rows: torch.Tensor, step: float, dead: float = 0.0) -> torch.Tensor:
    """Indices of coefficients.

    Args:
        rows: [row, token] float32.
        step: the quantiser's.
        dead: how much further than to the middle a coefficient must reach to take the next index, in steps; what it
            costs in precision it saves twice over in bits while most indices are zero.

    Returns:
        Of the same shape, float32, whole numbers.
    """
    exact = rows / step
    if dead:
        exact -= exact.clamp(-dead, dead)
    return exact.round_()
