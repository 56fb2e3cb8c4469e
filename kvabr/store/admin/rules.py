"""Decides which assets of a store stay: pins, leases, grace, expiry and quotas, as arithmetic on the store's own clock.

An asset is a root, which keeps everything that it names, while one of these holds:

1. a pin of it has not ended;
2. it is younger than the grace;
3. its lease lives: it was used less than the time to live ago, and is not older than the maximal age. Without a time
   to live, all leases live.

An asset that was published before its model expired is no root, whatever else holds. Of the roots, those that are
neither pinned nor in their grace are evicted until the rest fits a quota.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from kvabr.store.eviction import DEFAULT_ORDER, Candidate, Order, Part, victims
from kvabr.types.errors import UsageError

Reason = Literal["expired", "unused", "too old", "over the quota", "broken"]

GRACE_S = 3600.0
"""Seconds that what nothing names any more is kept, for the plays that still read it."""

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|h|d|w)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kMGT]?)B?")
_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Holding:
    """An asset that a store holds, as far as managing needs to know it. Times are the store's, seconds since 1970."""

    name: str
    """In its store: the path of a folder, the prompt's digest in a bucket."""
    model: str
    tokens: int
    created_s: float
    """When it was published."""
    used_s: float
    """When it was last published, or looked for by a publisher; plays are not seen."""
    bytes: int
    """All its bytes, with those that it shares with other assets."""
    own_bytes: int
    """Bytes that are freed whenever it goes, whatever other assets are there."""
    uses: int = 0
    """How often it was used since it was published; 0 if the store does not count."""
    pinned_until_s: float | None = None
    measured: bool = False
    """Whether its losses were measured, as `kvabr encode` does, which is expensive."""
    parts: tuple[Part, ...] = ()
    """What it may share with other assets, in the order of the prompt."""
    tracks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each track."""
    oldest_s: float = math.inf
    """When the oldest of its parts was written; it may be older than the asset."""

    def is_pinned(self, now_s: float) -> bool:
        """Return whether a pin holds it."""
        return self.pinned_until_s is not None and now_s < self.pinned_until_s


@dataclass(frozen=True, slots=True)
class Rules:
    """What stays in a store."""

    grace_s: float = GRACE_S
    """Seconds that a new asset stays in any case, and that what nothing names is kept."""
    ttl_s: float = math.inf
    """Seconds that an asset stays after its last use."""
    model_ttl_s: Mapping[str, float] = field(default_factory=dict)
    """The same for single models."""
    max_age_s: float = math.inf
    """Seconds after which use renews an asset no longer."""
    max_bytes: int | None = None
    """Bytes that the assets of a tenant may have together."""
    order: Order = DEFAULT_ORDER
    """Which asset goes first if they have more, see `kvabr.store.eviction`."""
    keep_measured: bool = True
    """Whether assets with measured losses stay unless their model expires."""

    def __post_init__(self) -> None:
        for what, seconds in (("grace", self.grace_s), ("time to live", self.ttl_s), ("maximal age", self.max_age_s)):
            if not seconds >= 0:
                raise UsageError(f"the {what} must be a time of 0 or more, not {seconds:g} s")
        if self.max_bytes is not None and self.max_bytes < 0:
            raise UsageError(f"a quota is 0 bytes or more, not {self.max_bytes}")

    def lease_end_s(self, holding: Holding) -> float:
        """Return until when the lease of an asset lives."""
        ttl_s = self.model_ttl_s.get(holding.model, self.ttl_s)
        return min(max(holding.used_s, holding.created_s) + ttl_s, holding.created_s + self.max_age_s)

    def kept_until_s(self, holding: Holding) -> float:
        """Return until when an asset is a root, if its model does not expire and there is no quota."""
        if holding.measured and self.keep_measured:
            return math.inf
        pin_s = -math.inf if holding.pinned_until_s is None else holding.pinned_until_s
        return max(pin_s, holding.created_s + self.grace_s, self.lease_end_s(holding))


@dataclass(frozen=True, slots=True)
class Eviction:
    """An asset that goes, and why."""

    holding: Holding
    reason: Reason


def evictions(
    holdings: Iterable[Holding], rules: Rules, now_s: float, expired: Mapping[str, float] | None = None
) -> list[Eviction]:
    """Return which assets go, in this order.

    Args:
        holdings: All assets of one tenant.
        rules: What stays.
        now_s: The time on the store's clock.
        expired: By model, the time before which everything is expired.
    """
    held, gone, left = list(holdings), list[Eviction](), list[Holding]()
    for holding in held:
        if is_expired(holding, expired or {}):
            gone.append(Eviction(holding, "expired"))
        elif now_s < rules.kept_until_s(holding):
            left.append(holding)
        else:
            too_old = now_s >= holding.created_s + rules.max_age_s
            gone.append(Eviction(holding, "too old" if too_old else "unused"))
    if rules.max_bytes is None:
        return gone
    excess = total_bytes(left) - rules.max_bytes
    by_name = {holding.name: holding for holding in left}
    order = victims([_candidate(each, rules, now_s) for each in left], excess, now_s, order=rules.order)
    return gone + [Eviction(by_name[each.key], "over the quota") for each in order]


def is_expired(holding: Holding, expired: Mapping[str, float]) -> bool:
    """Return whether an asset, or a part of it, was written before the time at which its model expired."""
    return min(holding.created_s, holding.oldest_s) < expired.get(holding.model, -math.inf)


def total_bytes(holdings: Iterable[Holding]) -> int:
    """Return the bytes of assets together; what they share counts once."""
    shared: dict[str | bytes, int] = {}
    own = 0
    for holding in holdings:
        own += holding.own_bytes
        shared.update((part.key, part.bytes) for part in holding.parts)
    return own + sum(shared.values())


def _candidate(holding: Holding, rules: Rules, now_s: float) -> Candidate:
    """Return an asset as eviction sees it; what must stay is pinned."""
    held_s = [holding.created_s + rules.grace_s]
    if holding.pinned_until_s is not None:
        held_s.append(holding.pinned_until_s)
    if holding.measured and rules.keep_measured:
        held_s.append(math.inf)
    return Candidate(
        holding.name,
        holding.own_bytes,
        holding.created_s,
        min(max(holding.used_s, holding.created_s), now_s),
        holding.uses,
        holding.parts,
        max(held_s),
    )


def duration(text: str) -> float:
    """Parse a time such as ``90``, ``1h`` or ``30d``, in seconds; `UsageError` if it is none."""
    found = _DURATION.fullmatch(text.strip())
    if found is not None:
        return float(found[1]) * _UNITS[found[2]]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(f"{text!r} is not a time; write seconds, or 30m, 12h, 7d, 4w")
    return seconds


def size(text: str) -> int:
    """Parse a number of bytes such as ``500M`` or ``2TB`` (powers of ten); `UsageError` if it is none."""
    found = _SIZE.fullmatch(text.strip())
    number = math.inf if found is None else float(found[1]) * _SIZES[found[2]]
    if not math.isfinite(number):
        raise UsageError(f"{text!r} is not a number of bytes; write 500M, 20G or 2T")
    return int(number)


def date(text: str) -> float:
    """Parse ``2026-11-30`` or ``2026-11-30T12:00``, UTC unless it says otherwise, as seconds since 1970."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a date; write 2026-11-30 or 2026-11-30T12:00 (UTC)") from error
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def model_durations(texts: Sequence[str]) -> dict[str, float]:
    """Parse ``MODEL=TIME``, several times; `UsageError` if one is something else."""
    found = {}
    for text in texts:
        model, equals, time = text.rpartition("=")
        if not equals or not model:
            raise UsageError(f"{text!r}: write MODEL=TIME, such as meta-llama/Llama-3.1-8B=7d")
        found[model] = duration(time)
    return found
