"""Verification of a simulated play with the real model: decode, recompute, stitch, score."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchStep:
    """The asset's frame of ``group`` on ``track`` arrived and was decoded."""

    group: int
    track: str


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Groups ``first`` to ``last`` - 1 were recomputed from what was in place before them."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Verification:
    """What the real model measured on the cache that a play put together."""

    kl: float
    """Mean KL divergence against the exact cache, nats per token of the real continuation."""
    dnll: float
    """Change of the mean negative log-likelihood of the real continuation, nats per token."""
    top1: float
    """Share of continuation tokens where the most likely next token is the same."""
    predicted: float
    """The expected loss that the catalog gives for this cache."""
