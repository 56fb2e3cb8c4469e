"""The state of a play as policies read it: catalog numbers, estimates, and groups in place or in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSet, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Catalog, Track
from kvabr.types.cost import PrefillCost

_EXCESS_LOSS_PRICE = 10.0
"""Cost of exceeding `View.max_loss`, nats per token; more than a play without a cache costs."""


class GroupSet(MutableSet[int]):
    """A subset of the groups 0 to ``groups`` - 1, ascending, with sums of weights that need no scan.

    One byte per group marks members, so that searches are as fast as memory.
    """

    __slots__ = ("_count", "_flags", "_sums", "_weights", "returned")

    def __init__(self, groups: int, members: Iterable[int] | None = None) -> None:
        """Start with ``members``; None: all groups."""
        self._flags = bytearray(groups) if members is not None else bytearray(b"\1") * groups
        self._count = 0 if members is not None else groups
        self._sums: dict[str, int] = {}
        self._weights: dict[str, Sequence[int]] = {}
        self.returned: list[int] = []
        """Every group ever added, in order and with repeats. Instead of scanning all groups, readers remember their
        position and continue from there. A group may have left the set since."""
        for group in members or ():
            self._count += not self._flags[group]
            self._flags[group] = 1

    def __contains__(self, group: object) -> bool:
        return isinstance(group, int) and 0 <= group < len(self._flags) and bool(self._flags[group])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return compress(range(len(self._flags)), self._flags)

    def __reversed__(self) -> Iterator[int]:
        group = self._flags.rfind(1)
        while group >= 0:
            yield group
            group = self._flags.rfind(1, 0, group)

    def __repr__(self) -> str:
        return f"GroupSet({list(self)})"

    def first(self, begin: int = 0) -> int | None:
        """Return the first group from ``begin`` on, or None."""
        group = self._flags.find(1, begin)
        return None if group < 0 else group

    def gap(self, begin: int) -> int:
        """Return the first group from ``begin`` on that is not in the set, or the number of groups."""
        group = self._flags.find(0, begin)
        return len(self._flags) if group < 0 else group

    def last(self) -> int | None:
        """Return the last group, or None."""
        group = self._flags.rfind(1)
        return None if group < 0 else group

    def add(self, group: int) -> None:
        if not self._flags[group]:
            self._flags[group] = 1
            self._count += 1
            self.returned.append(group)
            for name, weights in self._weights.items():
                self._sums[name] += weights[group]

    def discard(self, group: int) -> None:
        if self._flags[group]:
            self._flags[group] = 0
            self._count -= 1
            for name, weights in self._weights.items():
                self._sums[name] -= weights[group]

    def total(self, name: str, weights: Sequence[int]) -> int:
        """Return the sum of the members' weights, cached by ``name`` and list, and updated with every change."""
        if self._weights.get(name) is not weights:
            self._sums[name] = sum(weights[group] for group in self)
            self._weights[name] = weights
        return self._sums[name]


MAX_PARTS = 64
"""Maximum number of parts into which a decision divides a long prompt; more groups are scanned less often."""


@dataclass(slots=True)
class Transfer:
    """One request in flight."""

    request: int
    group: int
    track: str
    bytes: int
    """Size of the group's frame."""
    upgrade: bool
    """True if a track of the group is in place or requested before; False for the base of a missing group."""
    requested_s: float
    received: int = 0
    first_byte_s: float | None = None
    done_s: float | None = None
    priority: int = 128
    """Requested priority, 0 (most urgent) to 255."""
    source: int = 0
    """Index of the source that sends it."""
    local: bool = False
    """True if it is read from the local store."""

    @property
    def remaining(self) -> int:
        """Bytes that the link must still deliver."""
        return 0 if self.local else self.bytes - self.received


class InFlight(dict[int, Transfer]):
    """Requests in flight by request number, with totals."""

    def __init__(self, floor: Sequence[int]) -> None:
        """Start empty; ``floor``: bytes of each group on the cheapest track."""
        super().__init__()
        self._floor = floor
        self.required: dict[int, Transfer] = {}
        """Requests that are not upgrades."""
        self.upgrades: dict[int, Transfer] = {}
        self.receiving: dict[int, int] = {}
        """Number of requests that have received their first byte, by source."""
        self.requests_by_source: dict[int, int] = {}
        """Number of requests, by source."""
        self.left: dict[int, int] = {}
        """Bytes still to arrive, by source."""
        self.required_bytes = 0
        """Bytes still to arrive for requests that are not upgrades."""
        self.required_floor = 0
        """Bytes of the groups of these requests on the cheapest track."""
        self._groups: dict[int, int] = {}

    @property
    def groups(self) -> AbstractSet[int]:
        """Groups with a request in flight."""
        return self._groups.keys()

    def __setitem__(self, request: int, transfer: Transfer) -> None:
        super().__setitem__(request, transfer)
        (self.upgrades if transfer.upgrade else self.required)[request] = transfer
        self._count(transfer, 1)

    def __delitem__(self, request: int) -> None:
        self.pop(request)

    def pop(self, request: int, default: None = None) -> Transfer | None:  # type: ignore[override]  # None, not an error
        if (transfer := super().pop(request, default)) is not None:
            del (self.upgrades if transfer.upgrade else self.required)[request]
            self._count(transfer, -1)
        return transfer

    def clear(self) -> None:
        super().clear()
        of_sources = self.receiving, self.requests_by_source, self.left
        for counts in (self.required, self.upgrades, self._groups, *of_sources):
            counts.clear()
        self.required_bytes = self.required_floor = 0

    def require(self, transfer: Transfer) -> None:
        """Turn an upgrade into a required request, since the group in place was lost."""
        self.pop(transfer.request)
        transfer.upgrade = False
        self[transfer.request] = transfer

    def begun(self, transfer: Transfer, now: float) -> None:
        """Record the first byte of a request."""
        transfer.first_byte_s = now
        _add(self.receiving, transfer.source, 1)

    def received(self, transfer: Transfer, nbytes: int) -> None:
        """Record further bytes of a request."""
        more = -transfer.remaining
        transfer.received += nbytes
        more += transfer.remaining
        _add(self.left, transfer.source, more)
        if not transfer.upgrade:
            self.required_bytes += more

    def not_local(self, transfer: Transfer) -> None:
        """Record that a request uses the link after all, not the local store."""
        self.pop(transfer.request)
        transfer.local = False
        self[transfer.request] = transfer

    def _count(self, transfer: Transfer, by: int) -> None:
        if transfer.first_byte_s is not None:
            _add(self.receiving, transfer.source, by)
        if not transfer.upgrade:
            self.required_bytes += by * transfer.remaining
            self.required_floor += by * self._floor[transfer.group]
        _add(self._groups, transfer.group, by)
        _add(self.requests_by_source, transfer.source, by)
        _add(self.left, transfer.source, by * transfer.remaining)


def _add(counts: dict[int, int], key: int, by: int) -> None:
    if left := counts.get(key, 0) + by:
        counts[key] = left
    else:
        counts.pop(key, None)


class Settled(set[int]):
    """Groups in place or arrived, with no request in flight, and the order in which they settled."""

    def __init__(self, changes: list[int]) -> None:
        super().__init__()
        self._changes = changes
        self.history: list[int] = []
        """Every group ever added, in order and with repeats, see `GroupSet.returned`."""

    def add(self, group: int, /) -> None:
        super().add(group)
        self.history.append(group)
        self._changes.append(group)

    def discard(self, group: int, /) -> None:  # type: ignore[override]  # only groups are in it
        super().discard(group)
        self._changes.append(group)


class TrackOf(list[str | None]):
    """The track of each group, see `View.track_of`."""

    def __init__(self, groups: int, changes: list[int]) -> None:
        super().__init__([None] * groups)
        self._changes = changes

    def __setitem__(self, group: int, track: str | None) -> None:  # type: ignore[override]  # no slices
        super().__setitem__(group, track)
        self._changes.append(group)


class PlannedPlay(NamedTuple):
    """A whole play, planned in advance."""

    requests: tuple[tuple[int, str], ...]
    """Groups and tracks to request, in order; a second track of a group adds layers or replaces the first."""
    engine: range
    """Groups that the engine computes."""


@dataclass(frozen=True, slots=True)
class Future:
    """The future of a play, which only a simulator has."""

    carried: Callable[[float], float]
    """Returns the bytes that the link will carry in a number of seconds from now."""
    plan: Callable[[View], PlannedPlay]
    """Plans a play that begins now, if the policy can (`kvabr.replay.experiment.Planner`)."""


@dataclass(slots=True, eq=False)
class View:
    """The state of a play. The player updates it; policies only read it."""

    ladder: Ladder
    """The useful tracks, and the steps between them."""
    deadline_s: float
    """TTFT deadline, seconds since the play began."""
    cost: PrefillCost | None = None
    """Prefill cost of the engine; None: there is no engine."""
    front_first: bool = False
    """True if the engine must recompute everything after the first missing group."""
    prefix: bool = False
    """True if the play delivers a prefix, and the engine accepts the groups in place as they are."""
    in_order: bool = False
    """True if an idle engine can process groups in place once all earlier ones are in place."""
    gpu_price: float = 0.0
    """Price of a second of engine time, nats per generated token."""
    time_price: float = 0.0
    """Price of a second before the first token, nats per generated token."""
    max_loss: float = float("inf")
    """Maximum expected loss of a delivered cache, nats per generated token; infinite: no limit."""
    decoders: int = 1
    """Number of groups decoded in parallel."""
    oracle: Future | None = None
    """The future, in a simulator; None in a real play."""
    decode_seconds: Callable[[str], float] | None = None
    """Returns the seconds to decode a full group of a track on this machine; None: use the catalog."""
    decode_latency: Callable[[str], float] | None = None
    """Returns the constant seconds per decoded batch; None: 0."""
    decodes_last: bool = False
    """True if decoding starts only after the play. Then `deadline_s` allows for decoding the cheapest track, and
    `decode_backlog_s` is the extra time of the tracks in place."""
    catalog: Catalog = field(init=False)
    groups: int = field(init=False)
    """Number of groups in the asset."""
    keeps: int = field(init=False)
    """Number of decisions that reuse a scan of all groups; 0 for up to 64 groups. Keeps decisions cheap for long
    prompts: the scan is outdated by at most 1/64 of the groups."""
    now: float = 0.0
    """Seconds since the play began."""
    rate: float = 0.0
    """Expected rate, bytes per second; 0.0 until the first bytes arrive."""
    lower_bound: float = 0.0
    """Rate that the link should usually exceed, bytes per second; 0.0 until the first bytes arrive."""
    prior_rate: float = 0.0
    """Rate observed by earlier plays, bytes per second; 0.0 if unknown."""
    full: bool = False
    """True if no further request can be sent now; the policy may only give the engine work."""
    prior_own: bool = False
    """True if this client has measured `prior_rate`; False if a server may only have announced it."""
    growing: bool = False
    """True in slow start: the rate still grows from sample to sample."""
    ttfb_s: float = 0.0
    """Seconds from a request to its first byte."""
    outstanding_bytes: int = 0
    """Bytes still to arrive for all requests in flight."""
    margin_s: float = 0.0
    """Seconds of slack: everything that must end by the deadline starts this much earlier."""
    decode_backlog_s: float = 0.0
    """Seconds of decoding queued or running."""
    undecoded: dict[int, int] = field(default_factory=dict)
    """Groups with data that waits for decoding, each with its position in order of arrival."""
    decoding: Mapping[int, Transfer] = field(default_factory=dict)
    """Requests whose data is being decoded, by request number."""
    engine_backlog_s: float = 0.0
    """Seconds until the engine has finished all its work."""
    in_flight: InFlight = field(init=False)
    """Requests in flight, by request number."""
    settled: Settled = field(init=False)
    """Groups that have arrived or are in place, with no request in flight; they can be upgraded."""
    unavailable: AbstractSet[tuple[int, str]] = frozenset()
    """Pairs (group, track) that failed too often, for example because all copies are damaged; or that a producer
    omitted or has not encoded yet."""
    added: int = 0
    """Number of times that tracks were added to existing groups; settled groups have then settled again."""
    edge: int = field(init=False)
    """Number of groups published so far; all groups unless the cache is still being prefilled."""
    ends_s: float = 0.0
    """When the last group should be published, in seconds since the play began; 0.0 if all were published before."""
    late_s: float = 0.0
    """Seconds by which the producer's next group is late; 0.0 if less than a group takes."""
    ready_s: Callable[[int], float] | None = None
    """Returns when a group should be published, in seconds since the play began; None: all are published."""
    track_of: list[str | None] = field(init=False)
    """Track of each group, in place or in flight; ``recomputed`` if assigned to the engine; None if missing."""
    changes: list[int] = field(default_factory=list)
    """Every group that may have changed its track or settled, in order; see `Settled.history`."""
    solid: int = 0
    """All groups before this one are in place."""
    missing_groups: GroupSet = field(init=False)
    """Published groups that are neither in place, in flight, nor assigned to the engine; updated by the player."""

    def __post_init__(self) -> None:
        self.catalog = self.ladder.catalog
        self.groups = self.edge = self.catalog.groups
        self.keeps = (self.groups - 1) // MAX_PARTS
        self.track_of, self.settled = TrackOf(self.groups, self.changes), Settled(self.changes)
        self.missing_groups = GroupSet(self.groups)
        self.in_flight = InFlight(self.ladder.tracks[0].bytes)

    @property
    def missing(self) -> AbstractSet[int]:
        """See `missing_groups`; ascending."""
        return self.missing_groups

    @property
    def time_left(self) -> float:
        """Seconds to the deadline; 0.0 once it has passed."""
        return max(0.0, self.deadline_s - self.now)

    @property
    def coming(self) -> bool:
        """True if groups are still unpublished; their base will be pushed."""
        return self.edge < self.groups

    @property
    def arrived(self) -> bool:
        """True if every group has arrived on some track or is assigned to the engine."""
        return not self.missing_groups and not self.coming and not self.in_flight.required

    @property
    def tail(self) -> int:
        """Number of tokens computed after the cache, with the question; losses apply after them."""
        return self.catalog.tail

    def first_missing(self) -> int | None:
        """Return the earliest missing group, or None if there is none."""
        return self.missing_groups.first()

    def bytes(self, group: int, track: str) -> int:
        """Return the size of one group on one track."""
        return self.catalog.by_name[track].bytes[group]

    def loss(self, group: int, track: str) -> float:
        """Return the expected loss of one group on one track, nats per generated token."""
        return self.catalog.by_name[track].loss[group]

    def decode_s(self, track: str) -> float:
        """Return the seconds to decode one more full group of a track in a batch, with its lower layers."""
        if self.decode_seconds is not None:
            return self.decode_seconds(track)
        return self.catalog.by_name[track].decode_s

    def decode_latency_s(self, track: str) -> float:
        """Return the constant seconds per decoded batch, see `decode_s`."""
        return 0.0 if self.decode_latency is None else self.decode_latency(track)

    def last_decode_s(self, track: str) -> float:
        """Return the seconds from the arrival of the last group on a track until it is in place."""
        if self.decodes_last:
            return 0.0  # the deadline allows for it
        return self.decode_latency_s(track) + self.decode_s(track)

    def budget_bytes(self, rate: float, decode_s: float = 0.0) -> float:
        """Return the number of further bytes that would be in place by the deadline.

        ``rate``: bytes per second: `rate`, or `lower_bound` if the play must commit; ``decode_s``: seconds to decode
        the last arrival.
        """
        wait = 0.0 if self.in_flight else self.ttfb_s
        return rate * (self.time_left - decode_s - wait) - self.outstanding_bytes

    def layers(self, track: str, current: str | None) -> tuple[str, ...]:
        """Return the layers that ``track`` needs above ``current``, lowest first; all if it does not refine it."""
        layers = self.ladder.stacks[track]
        return layers[layers.index(current) + 1 :] if current in layers else layers

    def extends(self, group: int, track: str) -> bool:
        """Return True if a track adds layers to the one in flight for a group."""
        current = self.track_of[group]
        return current != track and current in self.ladder.stacks[track] and group in self.in_flight.groups

    def best_track(self, group: int, max_bytes: float) -> str:
        """Return the track of least loss within ``max_bytes`` for this group; the cheapest track if none fits."""
        chosen = self.ladder.cheapest
        for track in self.ladder.tracks:
            if track.bytes[group] <= max_bytes:
                chosen = track.name
        return chosen

    def soonest_track(self) -> str:
        """Return the cheapest track, or a larger one if it decodes faster and completes the missing groups sooner."""
        cheapest, left = self.ladder.tracks[0], len(self.missing_groups)

        def seconds(track: Track) -> float:
            network = track.total_bytes / self.groups * left / self.rate
            decoded_s = self.decode_backlog_s + self.decode_s(track.name) * left / self.decoders
            return max(network, decoded_s) + self.decode_latency_s(track.name)

        if self.rate <= 0 or seconds(cheapest) <= self.time_left:
            return cheapest.name
        return min(self.ladder.tracks, key=seconds).name

    def slack_s(self) -> float:
        """Return the time left minus the time to complete the base, in seconds: the buffer of this player.

        The base is all requests in flight plus every missing group on the cheapest track, at the lower bound of the
        rate. Returns negative infinity if the rate is unknown and groups are missing.
        """
        need = self.outstanding_bytes + self.floor_bytes()
        if not need:
            return self.deadline_s - self.now - self.decode_backlog_s
        if self.lower_bound <= 0:
            return float("-inf")
        wait = 0.0 if self.in_flight else self.ttfb_s
        return self.deadline_s - self.now - wait - need / self.lower_bound - self.last_decode_s(self.ladder.cheapest)

    def base_s(self) -> float:
        """Return the seconds until all groups should be in place on some track; infinite if unknown."""
        need = self.in_flight.required_bytes + self.floor_bytes()
        if not need and not self.coming:
            return self.decode_backlog_s
        if self.rate <= 0 or self.coming:
            return float("inf")
        wait = 0.0 if self.in_flight else self.ttfb_s
        return wait + need / self.rate + self.last_decode_s(self.ladder.cheapest)

    def floor_bytes(self) -> int:
        """Return the bytes of all missing groups on the cheapest track."""
        return self.missing_bytes(self.ladder.tracks[0])

    def missing_bytes(self, track: Track) -> int:
        """Return the bytes of all missing groups on one track."""
        return self.missing_groups.total(track.name, track.bytes)


def excess(lost: Any, view: View) -> Any:
    """Return the cost of a loss, or an array of losses, above `View.max_loss`; it outweighs all other costs."""
    if view.max_loss == float("inf"):
        return 0.0
    over = lost - view.max_loss
    return (over > 0.0) * _EXCESS_LOSS_PRICE * (1.0 + over / max(view.max_loss, _EXCESS_LOSS_PRICE**-1))
