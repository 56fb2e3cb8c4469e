"""Simulates very many players of one asset, served by a tree of caches, as a fluid.

A flow replaces the sessions of a million similar players: in small time steps, all players at a machine share its
capacity, each up to the rate of its own link. A table of simulated plays of the policy over constant rates gives a
player's duration and result. Finally, a sample of players is played with the policy over the exact rates of the flow.

To represent a larger model, an asset's bytes are multiplied by a factor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvabr.abr.policies import DEFAULT
from kvabr.replay.experiment import MAX_DEADLINE_S, Experiment, ReplayOptions, check_rtt
from kvabr.replay.trace import Trace
from kvabr.types.catalog import Catalog
from kvabr.types.errors import UsageError

Floats = NDArray[np.float64]

_SPAN_GROUPS = 16
_LOOKUP_GETS = 15
"""GETs of a lookup in addition to one per full span: 5 for offers, 9 to 11 for pointers, as measured."""
_MIN_RANGES = 9
"""Number of ranges observed for a small cache: the first ranges are short while the rate is unknown."""
_SLICE_BYTES = 1 << 20
"""Unit of a cache for fetching and storing, bytes."""
_STEPS_PER_DEADLINE = 50
_MAX_DEADLINES = 100_000
_MAX_ACCESS = 1.25e12
_RATES = 20


@dataclass(frozen=True, slots=True)
class CacheMachine:
    """Capacity of one machine of a kind."""

    kind: str
    bytes_per_s: float
    cores: int
    cpu_s_per_byte: float
    cpu_s_per_group: float
    """Additional core seconds per group and level."""
    connection_bytes: float
    """Memory per connection."""
    player_bytes: float
    """Additional memory per active player, bytes."""
    memory_bytes: float

    @property
    def carries(self) -> float:
        """Maximum rate in bytes/s, for a single large piece."""
        return min(self.bytes_per_s, self.cores / self.cpu_s_per_byte)

    def serving(self, group_bytes: float) -> CacheMachine:
        """Return this machine with the cost per group, of ``group_bytes``, included in the cost per byte."""
        each = self.cpu_s_per_byte + self.cpu_s_per_group / group_bytes
        return replace(self, cpu_s_per_byte=each, cpu_s_per_group=0.0)


_GBIT, _GB, _KIB, _GIB = 1.25e8, 1e9, 1024.0, 1024.0**3
MACHINES = {
    "nginx": CacheMachine("nginx", 90 * _GBIT, 16, 0.10 / _GB, 0.0, 0.4 * _KIB, 64 * _KIB, 64 * _GIB),
    "nginx-tls": CacheMachine("nginx-tls", 90 * _GBIT, 16, 0.89 / _GB, 0.0, 40 * _KIB, 64 * _KIB, 64 * _GIB),
    "relay": CacheMachine("relay", 90 * _GBIT, 1, 2.9 / _GB, 1.3e-3, 120 * _KIB, 700 * _KIB, 16 * _GIB),
}
"""Kinds of caches with 16 cores and a card of 100 Gbit/s; `kvabr relay` is one process on one core. Processor time and
memory were measured on loopback. Except for relays, the cost per byte includes that of groups.
"""


@dataclass(frozen=True, slots=True)
class PlayerCost:
    """Core seconds per player, not counting decoding."""

    cpu_s: float
    """Core seconds of lookup, decisions and the end."""
    cpu_s_per_byte: float
    """Core seconds per byte for receiving and checking."""


PLAYERS = {
    "nginx": PlayerCost(0.064, 0.95 / _GB),
    "nginx-tls": PlayerCost(0.064, 1.8 / _GB),
    "relay": PlayerCost(0.064, 3.2 / _GB),
}
"""Cost by kind of edge, measured on loopback: the first value with small caches, the second with FP16 in large groups.
"""


@dataclass(frozen=True, slots=True)
class BucketModel:
    """Capacity of an object store."""

    bytes_per_s: float = 100 * _GBIT
    requests_per_s: float = 5500.0
    """Requests per second under one prefix; S3 guarantees 5,500."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The players of one asset."""

    players: int = 1_000_000
    within_s: float = 60.0
    """Seconds in which players arrive, evenly distributed."""
    access: float = 1e9 / 8
    """Rate of each player's own link, bytes/s."""
    deadline_s: float = 1.0
    rtt_s: float = 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.players <= 10**9:
            raise UsageError(f"players must be 1 to 1,000,000,000, got {self.players}")
        check_rtt(self.rtt_s)
        most = {"deadline": MAX_DEADLINE_S, "within": _MAX_DEADLINES * self.deadline_s, "access": _MAX_ACCESS}
        for name, limit in most.items():
            value = getattr(self, name if name == "access" else f"{name}_s")
            if not 0 < value <= limit:
                raise UsageError(f"{name} must be more than 0 and at most {limit:g}, got {value:g}")

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.players / self.within_s


@dataclass(frozen=True, slots=True)
class Tree:
    """Caches between players and store: edges for the players, and possibly middle caches for the edges."""

    edge: CacheMachine
    edges: int
    middle: CacheMachine | None = None
    middles: int = 0
    store: BucketModel = field(default_factory=BucketModel)

    def __post_init__(self) -> None:
        if self.edges < 1 or self.middles < 0 or (self.middle is None) != (self.middles == 0):
            raise UsageError(
                "a tree of caches needs at least one edge, and both or neither of a kind and a number of middle caches"
            )

    @property
    def fill_rate(self) -> float:
        """Rate in bytes/s at which an edge fills its cache if all edges do so at the same time."""
        if self.middle is None:
            return min(self.edge.carries, self.store.bytes_per_s / self.edges)
        per_middle = math.ceil(self.edges / self.middles)
        return min(self.edge.carries, self.middle.carries / per_middle, self.store.bytes_per_s / self.middles)


@dataclass(frozen=True, slots=True)
class RatePlay:
    """Result of a play at one rate."""

    rate: float
    stays_s: float
    """Seconds until delivery or abandonment."""
    received: float
    loss: float
    """Nats per generated token."""
    met: bool
    groups: int
    """Number of fetched groups, counted on each level."""
    requests: int
    """Number of GETs at a store: ranges of spans, and the lookup."""


class PlayTable:
    """Plays of an asset with the real policy, at constant rates and at given rates."""

    def __init__(
        self, catalog: Catalog, crowd: Crowd, *, scale: float = 1.0, policy: str = DEFAULT, decoders: int = 8
    ) -> None:
        """Play the asset at rates up to those of the players' own links.

        ``scale`` is the size of the model's cache relative to the catalog's.
        """
        self.catalog, self.crowd, self.scale, self.policy = catalog, crowd, scale, policy
        options = ReplayOptions(
            deadline_s=crowd.deadline_s, rtt_s=crowd.rtt_s, slow_start=False, decode_scale=scale, decoders=decoders
        )
        self._experiment = Experiment(catalog, options)
        base = min(track.total_bytes for track in catalog.tracks if track.refines is None) * scale / crowd.deadline_s
        lowest = min(0.25 * base, 0.5 * crowd.access)
        self.plays = [self.play([rate], 1.0) for rate in np.geomspace(lowest, crowd.access, _RATES)]
        self._rates = np.log([play.rate for play in self.plays])

    @property
    def asset_bytes(self) -> float:
        """Bytes that all players together fetch, counting each only once."""
        used = max(play.received for play in self.plays)
        return float(used)

    @property
    def base_rate(self) -> float:
        """Minimum rate at which a play meets its deadline; infinite if there is none."""
        return min((play.rate for play in self.plays if play.met), default=math.inf)

    @property
    def group_bytes(self) -> float:
        """Mean bytes of a group on one level, for plays at the rate of the players' own links."""
        full = self.plays[-1]
        return max(1.0, full.received / max(1, full.groups))

    def play(self, rates: Sequence[float], step_s: float) -> RatePlay:
        """Play once over rates in bytes/s of ``step_s`` seconds each; the last rate continues."""
        times = tuple(step_s * index for index in range(len(rates)))
        floor = 1e-3 * max(rates)
        scaled = tuple(max(rate, floor) / self.scale for rate in rates)
        # Traces wrap at their end, so the last rate must outlast any play.
        trace = Trace("crowd", "crowd", times, scaled, times[-1] + 100 * self.crowd.deadline_s)
        run = self._experiment.play(trace, 0.0, self.policy).run
        stays = 10 * self.crowd.deadline_s if run["ttft_s"] is None else run["ttft_s"]
        fetched = [self._levels(group["track"]) for group in run["groups"]]
        levels = {name for each in fetched for name in each}
        spans, received = math.ceil(self.catalog.groups / _SPAN_GROUPS), run["bytes_fetched"] * self.scale
        return RatePlay(
            rate=float(np.mean(rates)),
            stays_s=stays,
            received=received,
            loss=run["loss"],
            met=bool(run["met"]),
            groups=sum(len(each) for each in fetched),
            requests=_LOOKUP_GETS
            + self.catalog.groups // _SPAN_GROUPS
            + max(spans * len(levels), _MIN_RANGES, math.ceil(received / _SLICE_BYTES)),
        )

    def _levels(self, track: str) -> list[str]:
        levels, name = list[str](), track if track in self.catalog.by_name else None
        while name is not None:
            levels.append(name)
            name = self.catalog.by_name[name].refines
        return levels

    def stays_s(self, rates: Floats) -> Floats:
        """Return the seconds that plays take at constant rates."""
        stays = np.array([play.stays_s for play in self.plays])
        return self._at(rates, stays)

    def loss(self, rates: Floats) -> Floats:
        """Return the loss at constant rates, nats per generated token."""
        losses = np.array([play.loss for play in self.plays])
        return self._at(rates, losses)

    def _at(self, rates: Floats, values: Floats) -> Floats:
        found: Floats = np.interp(np.log(np.maximum(rates, 1e-9)), self._rates, values)
        return found


@dataclass(frozen=True)
class Flow:
    """Results of the players of one edge."""

    step_s: float
    shares: Floats
    """Rate of each active player, bytes/s, by step."""
    active: Floats
    losses: Floats
    """Loss by step of arrival."""
    met: NDArray[np.bool_]
    """True if the cache was complete by the deadline, by step of arrival."""

    @property
    def loss(self) -> float:
        """Mean over all players, nats per generated token."""
        return float(self.losses.mean())

    @property
    def met_share(self) -> float:
        """Fraction of players that met their deadline."""
        return float(self.met.mean())


def flow(table: PlayTable, tree: Tree) -> Flow:
    """Return the flow of the players at one edge; all edges are equal."""
    crowd, step_s = table.crowd, table.crowd.deadline_s / _STEPS_PER_DEADLINE
    coming = math.ceil(crowd.within_s / step_s)
    each = crowd.players / tree.edges / coming
    got, ages = np.zeros(coming), np.zeros(coming)
    first = last = step = 0
    gone = np.zeros(coming, dtype=bool)
    shares, active, limit = [], [], coming + 20 * _STEPS_PER_DEADLINE
    while (first < coming) and step < limit:
        last = min(coming, step + 1)
        here = ~gone[first:last]
        count = each * float(here.sum())
        there = tree.fill_rate * (step + 1) * step_s
        share = min(crowd.access, tree.edge.carries / count) if count else crowd.access
        room = np.maximum(0.0, there - got[first:last])
        window = slice(first, last)
        got[window] += np.where(here, np.minimum(share * step_s, room), 0.0)
        ages[window] += np.where(here, step_s, 0.0)
        means = got[window] / np.maximum(ages[window], 1e-12)
        gone[window] |= here & (ages[window] >= table.stays_s(means))
        shares.append(min(share, float(room.max(initial=0.0)) / step_s) if room.size else share)
        active.append(count)
        while first < coming and gone[first]:
            first += 1
        step += 1
    means = got / np.maximum(ages, step_s)
    met = (ages <= crowd.deadline_s * (1 + 1 / _STEPS_PER_DEADLINE)) & gone
    return Flow(step_s, np.array(shares), np.array(active), table.loss(means), met)


def drawn(table: PlayTable, found: Flow, players: int, seed: int) -> Iterator[RatePlay]:
    """Yield plays of sampled players with the policy, over the rates of the flow."""
    draw = random.Random(seed)  # noqa: S311  # not for secrets
    coming = len(found.losses)
    for _ in range(players):
        start = draw.randrange(coming)
        yield table.play(
            found.shares[start : start + 12 * _STEPS_PER_DEADLINE].tolist() or [table.crowd.access], found.step_s
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Demand for a resource if only the players' own links are the limit."""

    resource: str
    share: float
    """Demand as a fraction of the capacity; above 1 the resource is overloaded."""
    machines: int | None
    """Number of machines needed; None if more machines do not help."""


def loads(table: PlayTable, tree: Tree) -> list[Load]:
    """Return the demand for every resource, highest fraction first."""
    crowd, full = table.crowd, table.plays[-1]
    edge, store, cost = tree.edge, tree.store, PLAYERS.get(tree.edge.kind, PLAYERS["nginx"])
    at_edge = crowd.rate / tree.edges
    asset, roots = table.asset_bytes, tree.middles or tree.edges
    slices = math.ceil(asset / _SLICE_BYTES)
    there = at_edge * full.stays_s
    memory = there * edge.player_bytes + crowd.players / tree.edges * edge.connection_bytes + asset
    wanted = [
        ("edges: network", at_edge * full.received / edge.bytes_per_s, tree.edges),
        ("edges: processor", at_edge * full.received * edge.cpu_s_per_byte / edge.cores, tree.edges),
        ("edges: memory", memory / edge.memory_bytes, tree.edges),
        ("store: requests", roots * slices / crowd.deadline_s / store.requests_per_s, None),
        ("store: network", roots * asset / crowd.deadline_s / store.bytes_per_s, None),
        ("players: own link", table.base_rate / crowd.access, None),
        ("players: processor", (cost.cpu_s + full.received * cost.cpu_s_per_byte) / crowd.deadline_s, None),
    ]
    if tree.middle is not None:
        fed = math.ceil(tree.edges / tree.middles) * asset / crowd.deadline_s
        wanted += [
            ("middle: network", fed / tree.middle.bytes_per_s, tree.middles),
            ("middle: processor", fed * tree.middle.cpu_s_per_byte / tree.middle.cores, tree.middles),
        ]
    found = [Load(name, share, None if have is None else math.ceil(share * have)) for name, share, have in wanted]
    return sorted(found, key=lambda load: -load.share)


def without_caches(table: PlayTable) -> float:
    """Return the GETs per second that the store would serve without caches."""
    return table.crowd.rate * table.plays[-1].requests


def fewest(table: PlayTable, tree: Tree, *, met: float = 0.999, loss: float = math.inf) -> int | None:
    """Return the minimum number of edges for a fraction ``met`` of players in time and a maximum mean loss.

    None if a million edges are insufficient: another resource is the limit.
    """

    def enough(edges: int) -> bool:
        found = flow(table, replace(tree, edges=edges))
        return found.met_share >= met and found.loss <= loss

    high = 1
    while not enough(high):
        high *= 2
        if high > 1 << 20:
            return None
    low = high // 2
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
