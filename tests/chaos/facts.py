"""Messages between the laboratory and its players: orders to play, and reports of the results.

A report has facts and no judgement: the player does not know what would be right. `tests.chaos.judge` does.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch

from kvabr.types.engine import EngineMode

GRACE_S = 0.1
"""A play returns this long after its deadline at most."""

How = Literal["play", "asset", "prefix", "upgrades"]
EngineKind = Literal["good", "slow", "failing"]


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    """Which play of the round this is."""
    at_s: float
    """Seconds after the round has begun."""
    prompt: int
    tokens: int
    """How many of the prompt's tokens are asked for."""
    deadline_s: float
    quic: str = "aioquic"
    how: How = "play"
    engine: EngineKind | None = None
    mode: EngineMode = "hole"
    """Of the engine."""
    policy: str | None = None
    """None: the default."""
    fresh: bool = False
    """Whether the play has a client of its own, which must connect first and keeps no groups."""
    own_tensor: bool = False
    """Whether the caller brings the memory; it is full of NaN."""
    cancel_s: float | None = None
    """When the caller loses interest, seconds after the call."""


Outcome = Literal["complete", "incomplete", "prefix", "nothing", "refused", "error", "cancelled", "crash", "hang"]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    track: str
    sha256: str
    """Of its numbers."""
    nan: bool
    """Whether some are not numbers."""


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """A cache, or part of one, that a play handed over."""

    tokens: int
    groups: tuple[GroupFacts, ...]
    covered: int
    """Groups that the play says it has."""
    catalog_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    number: int
    outcome: Outcome
    elapsed_s: float
    """From the call to its return, on the player's clock."""
    bound_s: float
    """When it should have returned."""
    cache: CacheFacts | None = None
    later: CacheFacts | None = None
    """The same memory a while after it was handed over, or after its upgrades."""
    upgraded: bool = False
    missing: tuple[int, ...] = ()
    bases: tuple[tuple[CacheFacts, CacheFacts], ...] = ()
    """Caches that the play gave its engine to compute on, as they were at the beginning and at the end of that."""
    error: str = ""
    """Class and text of the error."""


def facts_of(
    kv: torch.Tensor, group_tokens: int, tracks: tuple[str, ...] = (), catalog_sha256: str | None = None
) -> CacheFacts:
    """Look at a cache, [layer, K/V, head, token, dim]."""
    tokens = int(kv.shape[3])
    groups = []
    for group, first in enumerate(range(0, tokens, group_tokens)):
        part = kv[:, :, :, first : first + group_tokens]
        track = tracks[group] if group < len(tracks) else ""
        groups.append(GroupFacts(track, digest_of(part), bool(torch.isnan(part).any())))
    return CacheFacts(tokens, tuple(groups), len(tracks), catalog_sha256)


def digest_of(part: torch.Tensor) -> str:
    """SHA-256 of the numbers of a group."""
    return hashlib.sha256(part.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
