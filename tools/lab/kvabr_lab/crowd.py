"""A crowd: very many players of one asset behind a tree of caches, as a fluid.

Nobody can play a million sessions one by one, and none of them is special. Their sum is computed as a flow: in small
steps of time, all players who are at a machine share what it carries, and none gets more than its own link. How long a
player stays, and what it has then, is read from a table of real plays: the policy's own session over constant rates.
In the end some players are drawn, and the policy plays them over exactly the rates that the flow had for them.

All bytes and rates in here are the model's own; an asset stands for a larger model's by a factor on its bytes.
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
"""Groups of tokens that one object of a bucket holds."""
_LOOKUP_GETS = 15
"""GETs of a lookup besides one for each full span: 5 for offers, and 9 to 11 for pointers, as measured."""
_LEAST_RANGES = 9
"""Ranges in which players were seen to fetch a small cache: the first ones are short, because the rate is not known."""
_SLICE_BYTES = 1 << 20
"""Bytes that a cache fetches and keeps in one piece."""
_STEPS = 50
"""Steps of the flow in one deadline."""
_MOST_DEADLINES = 100_000
"""Longest time in which players come, in deadlines."""
_MOST_ACCESS = 1.25e12
"""Fastest link of a player, bytes per second."""
_RATES = 20
"""Constant rates in the table of plays."""


@dataclass(frozen=True, slots=True)
class CacheMachine:
    """What one machine of a kind carries."""

    kind: str
    bytes_per_s: float
    """What its network card carries."""
    cores: int
    cpu_s_per_byte: float
    """Seconds of one core for a byte sent."""
    cpu_s_per_group: float
    """Seconds of one core for a group on one level, in addition."""
    connection_bytes: float
    """Memory of an open connection."""
    player_bytes: float
    """Memory of a player that is being served, in addition."""
    memory_bytes: float

    @property
    def carries(self) -> float:
        """Bytes per second that it sends at most, in one large piece."""
        return min(self.bytes_per_s, self.cores / self.cpu_s_per_byte)

    def serving(self, group_bytes: float) -> CacheMachine:
        """Return what this machine is for groups of ``group_bytes``: their cost is that of their bytes from here on."""
        each = self.cpu_s_per_byte + self.cpu_s_per_group / group_bytes
        return replace(self, cpu_s_per_byte=each, cpu_s_per_group=0.0)


_GBIT, _GB, _KIB, _GIB = 1.25e8, 1e9, 1024.0, 1024.0**3
MACHINES = {
    "nginx": CacheMachine("nginx", 90 * _GBIT, 16, 0.10 / _GB, 0.0, 0.4 * _KIB, 64 * _KIB, 64 * _GIB),
    "nginx-tls": CacheMachine("nginx-tls", 90 * _GBIT, 16, 0.89 / _GB, 0.0, 40 * _KIB, 64 * _KIB, 64 * _GIB),
    "relay": CacheMachine("relay", 90 * _GBIT, 1, 2.9 / _GB, 1.3e-3, 120 * _KIB, 700 * _KIB, 16 * _GIB),
}
"""Kinds of caches: 16 cores and a card of 100 Gbit/s; `kvabr relay` is one process on one core. Processor time and
memory were measured on loopback; that of a group only for relays, it is part of the bytes' for the others."""


@dataclass(frozen=True, slots=True)
class PlayerCost:
    """Seconds of one core that a player takes besides decoding."""

    cpu_s: float
    """To look up, decide and end."""
    cpu_s_per_byte: float
    """To receive and check."""


PLAYERS = {
    "nginx": PlayerCost(0.064, 0.95 / _GB),
    "nginx-tls": PlayerCost(0.064, 1.8 / _GB),
    "relay": PlayerCost(0.064, 3.2 / _GB),
}
"""By the kind of their edge; measured on loopback with small caches (the first), and with FP16 in large groups."""


@dataclass(frozen=True, slots=True)
class BucketModel:
    """What an object store carries."""

    bytes_per_s: float = 100 * _GBIT
    requests_per_s: float = 5500.0
    """GETs a second under one prefix; 5,500 is what S3 promises."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Players of one asset."""

    players: int = 1_000_000
    within_s: float = 60.0
    """They come evenly in this time."""
    access: float = 1e9 / 8
    """Bytes per second of each player's own link."""
    deadline_s: float = 1.0
    rtt_s: float = 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.players <= 10**9:
            raise UsageError(f"{self.players} players: give 1 to a thousand million")
        check_rtt(self.rtt_s)
        most = {"deadline": MAX_DEADLINE_S, "within": _MOST_DEADLINES * self.deadline_s, "access": _MOST_ACCESS}
        for name, limit in most.items():
            value = getattr(self, name if name == "access" else f"{name}_s")
            if not 0 < value <= limit:
                raise UsageError(f"{name} of {value:g}: must be a positive number, at most {limit:g}")

    @property
    def rate(self) -> float:
        """Players that come in a second."""
        return self.players / self.within_s


@dataclass(frozen=True, slots=True)
class Tree:
    """Caches between the players and the store: players are at edges, edges at middle caches, if there are any."""

    edge: CacheMachine
    edges: int
    middle: CacheMachine | None = None
    middles: int = 0
    store: BucketModel = field(default_factory=BucketModel)

    def __post_init__(self) -> None:
        if self.edges < 1 or self.middles < 0 or (self.middle is None) != (self.middles == 0):
            raise UsageError("a tree of caches has at least one edge, and as many middle caches as are named")

    @property
    def fill_rate(self) -> float:
        """Bytes per second in which an edge gets what it has not, when all of them ask at once."""
        if self.middle is None:
            return min(self.edge.carries, self.store.bytes_per_s / self.edges)
        per_middle = math.ceil(self.edges / self.middles)
        return min(self.edge.carries, self.middle.carries / per_middle, self.store.bytes_per_s / self.middles)


@dataclass(frozen=True, slots=True)
class RatePlay:
    """What one play over one rate came to."""

    rate: float
    stays_s: float
    """Until the cache was delivered, or the play given up."""
    received: float
    """Bytes."""
    loss: float
    """Nats per generated token."""
    met: bool
    groups: int
    """Groups that were fetched, counted on each level."""
    requests: int
    """GETs at a store: ranges of spans, and the lookup."""


class PlayTable:
    """Plays of an asset by the real policy, at constant rates and over given ones."""

    def __init__(
        self, catalog: Catalog, crowd: Crowd, *, scale: float = 1.0, policy: str = DEFAULT, decoders: int = 8
    ) -> None:
        """Play the asset at some rates up to that of the players' own links.

        Args:
            catalog: of the asset.
            crowd: deadline, round trip, and own links of its players.
            scale: bytes of the model's cache over those of the catalog's.
            policy: name of the policy.
            decoders: threads of a player that decode.
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
        """Bytes of all that players of this policy fetch."""
        used = max(play.received for play in self.plays)
        return float(used)

    @property
    def base_rate(self) -> float:
        """The least of the rates at which a play meets its deadline; infinite if none does."""
        return min((play.rate for play in self.plays if play.met), default=math.inf)

    @property
    def group_bytes(self) -> float:
        """Mean bytes of a group on one level, as players fetch them over their own links."""
        full = self.plays[-1]
        return max(1.0, full.received / max(1, full.groups))

    def play(self, rates: Sequence[float], step_s: float) -> RatePlay:
        """Play once over rates of ``step_s`` seconds each, bytes per second, the last of which goes on."""
        times = tuple(step_s * index for index in range(len(rates)))
        floor = 1e-3 * max(rates)
        scaled = tuple(max(rate, floor) / self.scale for rate in rates)
        # A trace wraps at its end: the last rate lasts for as long as any play may.
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
            + max(spans * len(levels), _LEAST_RANGES, math.ceil(received / _SLICE_BYTES)),
        )

    def _levels(self, track: str) -> list[str]:
        """Return a track and those that it refines."""
        levels, name = list[str](), track if track in self.catalog.by_name else None
        while name is not None:
            levels.append(name)
            name = self.catalog.by_name[name].refines
        return levels

    def stays_s(self, rates: Floats) -> Floats:
        """Return how long players stay at constant rates, seconds."""
        stays = np.array([play.stays_s for play in self.plays])
        return self._at(rates, stays)

    def loss(self, rates: Floats) -> Floats:
        """Return the loss of plays at constant rates, nats per generated token."""
        losses = np.array([play.loss for play in self.plays])
        return self._at(rates, losses)

    def _at(self, rates: Floats, values: Floats) -> Floats:
        found: Floats = np.interp(np.log(np.maximum(rates, 1e-9)), self._rates, values)
        return found


@dataclass(frozen=True)
class Flow:
    """What the players of one edge got."""

    step_s: float
    shares: Floats
    """Bytes per second of each player who is there, by step."""
    active: Floats
    """Players who are there, by step."""
    losses: Floats
    """Loss of those who came in a step."""
    met: NDArray[np.bool_]
    """Whether those who came in a step had a complete cache by their deadline."""

    @property
    def loss(self) -> float:
        """Mean over all players, nats per generated token."""
        return float(self.losses.mean())

    @property
    def met_share(self) -> float:
        """Share of players who met their deadline."""
        return float(self.met.mean())


def flow(table: PlayTable, tree: Tree) -> Flow:
    """Compute what all players of one edge get; edges are alike."""
    crowd, step_s = table.crowd, table.crowd.deadline_s / _STEPS
    coming = math.ceil(crowd.within_s / step_s)
    each = crowd.players / tree.edges / coming
    got, ages = np.zeros(coming), np.zeros(coming)
    first = last = step = 0
    gone = np.zeros(coming, dtype=bool)
    shares, active, limit = [], [], coming + 20 * _STEPS
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
    met = (ages <= crowd.deadline_s * (1 + 1 / _STEPS)) & gone
    return Flow(step_s, np.array(shares), np.array(active), table.loss(means), met)


def drawn(table: PlayTable, found: Flow, players: int, seed: int) -> Iterator[RatePlay]:
    """Yield the plays of some players, by the policy itself over the rates that the flow had."""
    draw = random.Random(seed)  # noqa: S311  # not for secrets
    coming = len(found.losses)
    for _ in range(players):
        start = draw.randrange(coming)
        yield table.play(found.shares[start : start + 12 * _STEPS].tolist() or [table.crowd.access], found.step_s)


@dataclass(frozen=True, slots=True)
class Load:
    """How much of a resource is wanted if every player's own link is the limit."""

    resource: str
    share: float
    """Of what there is; more than 1 breaks."""
    machines: int | None
    """How many of its kind would do; None where more do not help."""


def loads(table: PlayTable, tree: Tree) -> list[Load]:
    """Return what the players want of every resource, what breaks first in front."""
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
    """Return the GETs per second that the players would make at the store themselves."""
    return table.crowd.rate * table.plays[-1].requests


def fewest(table: PlayTable, tree: Tree, *, met: float = 0.999, loss: float = math.inf) -> int | None:
    """Return the fewest edges with which a share of players is in time, and the mean loss is low enough.

    None if no number of edges up to a million is enough: then something else is the limit.
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
