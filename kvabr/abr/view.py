"""What a policy sees of a play: catalog numbers, estimates, and what is in place or in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, TypeVar

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Catalog, Track
from kvabr.types.cost import PrefillCost


class GroupSet(MutableSet[int]):
    """Some of the groups 0 to ``groups`` - 1, ascending, with sums: no question takes longer for a longer prompt.

    A byte per group says whether it is in the set, so that the next group is found at the speed of memory.
    """

    __slots__ = ("_count", "_flags", "_sums", "_weights", "returned")

    def __init__(self, groups: int, members: Iterable[int] | None = None) -> None:
        """Begin with ``members``; None: all groups."""
        self._flags = bytearray(groups) if members is not None else bytearray(b"\1") * groups
        self._count = 0 if members is not None else groups
        self._sums: dict[str, int] = {}
        self._weights: dict[str, Sequence[int]] = {}
        self.returned: list[int] = []
        """Every group added since the beginning, once per time. Readers remember their position and read on from there,
        instead of looking at all groups again. A group may have left the set since."""
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
        """Return the least group from ``begin`` on, or None."""
        group = self._flags.find(1, begin)
        return None if group < 0 else group

    def firsts(self, count: int) -> list[int]:
        """Return the least ``count`` groups, or all."""
        found: list[int] = []
        group = self._flags.find(1)
        while group >= 0 and len(found) < count:
            found.append(group)
            group = self._flags.find(1, group + 1)
        return found

    def gap(self, begin: int) -> int:
        """Return the least group from ``begin`` on that is not in the set; the number of groups if there is none."""
        group = self._flags.find(0, begin)
        return len(self._flags) if group < 0 else group

    def last(self) -> int | None:
        """Return the greatest group, or None."""
        group = self._flags.rfind(1)
        return None if group < 0 else group

    def add(self, group: int) -> None:
        """Add a group."""
        if not self._flags[group]:
            self._flags[group] = 1
            self._count += 1
            self.returned.append(group)
            for name, weights in self._weights.items():
                self._sums[name] += weights[group]

    def discard(self, group: int) -> None:
        """Remove a group if it is in the set."""
        if self._flags[group]:
            self._flags[group] = 0
            self._count -= 1
            for name, weights in self._weights.items():
                self._sums[name] -= weights[group]

    def total(self, name: str, weights: Sequence[int]) -> int:
        """Return the sum of the members' weights; from the first call for a ``name`` on it is kept up to date."""
        if name not in self._sums:
            self._sums[name] = sum(weights[group] for group in self)
            self._weights[name] = weights
        return self._sums[name]


T = TypeVar("T")


@dataclass(slots=True)
class Transfer:
    """One request in flight."""

    request: int
    group: int
    track: str
    bytes: int
    """Size of the group's frame."""
    upgrade: bool
    """True unless it is the base of a group that was missing."""
    requested_s: float
    received: int = 0
    first_byte_s: float | None = None
    done_s: float | None = None
    priority: int = 128
    """Requested priority, 0 (most urgent) to 255."""
    source: int = 0
    """Which of the play's sources brings it."""
    local: bool = False
    """Whether it is read from the local store."""

    @property
    def remaining(self) -> int:
        """Bytes that the link has still to bring."""
        return 0 if self.local else self.bytes - self.received


class InFlight(dict[int, Transfer]):
    """Requests in flight by number, with what is true of all of them."""

    def __init__(self, floor: Sequence[int]) -> None:
        """Begin without any; ``floor``: bytes of each group on the cheapest track."""
        super().__init__()
        self._floor = floor
        self.required: dict[int, Transfer] = {}
        """Those that are no upgrades."""
        self.upgrades: dict[int, Transfer] = {}
        self.receiving: dict[int, int] = {}
        """How many have got their first byte, by source."""
        self.asked: dict[int, int] = {}
        """How many there are, by source."""
        self.left: dict[int, int] = {}
        """Bytes still to arrive, by source."""
        self.required_bytes = 0
        """Bytes still to arrive for those that are no upgrades."""
        self.required_floor = 0
        """Bytes of their groups on the cheapest track."""
        self._groups: dict[int, int] = {}
        self._tracks: dict[str, int] = {}

    @property
    def groups(self) -> AbstractSet[int]:
        """Groups of which something is in flight."""
        return self._groups.keys()

    @property
    def tracks(self) -> dict[str, int]:
        """How many there are, by track."""
        return self._tracks

    def __setitem__(self, request: int, transfer: Transfer) -> None:
        super().__setitem__(request, transfer)
        (self.upgrades if transfer.upgrade else self.required)[request] = transfer
        self._count(transfer, 1)

    def __delitem__(self, request: int) -> None:
        self.pop(request)

    def pop(self, request: int, *default: T) -> Transfer | T:
        """Remove and return a request, see `dict.pop`."""
        if request in self:
            transfer = super().pop(request)
            del (self.upgrades if transfer.upgrade else self.required)[request]
            self._count(transfer, -1)
            return transfer
        return super().pop(request, *default)

    def clear(self) -> None:
        """Remove all."""
        super().clear()
        of_sources = self.receiving, self.asked, self.left
        for counts in (self.required, self.upgrades, self._groups, self._tracks, *of_sources):
            counts.clear()
        self.required_bytes = self.required_floor = 0

    def require(self, transfer: Transfer) -> None:
        """Make a request in flight one that is no upgrade: what it was to replace is lost."""
        self.pop(transfer.request)
        transfer.upgrade = False
        self[transfer.request] = transfer

    def begun(self, transfer: Transfer, now: float) -> None:
        """Note the first byte of a request in flight."""
        transfer.first_byte_s = now
        _add(self.receiving, transfer.source, 1)

    def received(self, transfer: Transfer, nbytes: int) -> None:
        """Note further bytes of a request in flight."""
        more = -transfer.remaining
        transfer.received += nbytes
        more += transfer.remaining
        _add(self.left, transfer.source, more)
        if not transfer.upgrade:
            self.required_bytes += more

    def not_local(self, transfer: Transfer) -> None:
        """Note that the link brings a request in flight after all."""
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
        _add(self._tracks, transfer.track, by)
        _add(self.asked, transfer.source, by)
        _add(self.left, transfer.source, by * transfer.remaining)


def _add(counts: dict[Any, int], key: int | str, by: int) -> None:
    """Add to a count, and leave no zero behind."""
    if left := counts.get(key, 0) + by:
        counts[key] = left
    else:
        counts.pop(key, None)


class Settled(set[int]):
    """Groups that have arrived or are in place, with nothing in flight; and the order in which they settled."""

    def __init__(self, changes: list[int]) -> None:
        super().__init__()
        self._changes = changes
        self.history: list[int] = []
        """Every group ever added, once per time. Readers remember their position and read on from there, instead of
        scanning all groups for news. A group may have left the set since."""

    def add(self, group: int, /) -> None:
        """Mark a group as settled, possibly again."""
        super().add(group)
        self.history.append(group)
        self._changes.append(group)

    def discard(self, group: int, /) -> None:  # type: ignore[override]  # nothing else is in it
        """Mark a group as not settled."""
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
    """Groups and tracks to request, in this order. A group that comes twice gets the second track on top or instead."""
    engine: range
    """Groups that the engine computes."""


@dataclass(frozen=True, slots=True)
class Future:
    """What only a simulator can tell."""

    carried: Callable[[float], float]
    """Bytes that the link will carry in the next given seconds."""
    plan: Callable[[View], PlannedPlay]
    """The plan of a play that begins now, for policies whose class makes one (`kvabr.replay.experiment.Planner`)."""


@dataclass(slots=True, eq=False)
class View:
    """The play as a policy sees it. The player updates it; policies only read it."""

    ladder: Ladder
    """The tracks worth playing, and the steps between them."""
    deadline_s: float
    """The TTFT deadline, in seconds since the play began."""
    cost: PrefillCost | None = None
    """Prefill cost of the engine; None if nothing can be recomputed."""
    front_first: bool = False
    """Whether the earliest groups are needed first: the engine must recompute everything behind a miss."""
    prefix: bool = False
    """Whether a play delivers a prefix: then the engine takes what is in place as it is."""
    in_order: bool = False
    """Whether an idle engine has work on groups in place, once everything before them is in place, too."""
    gpu_price: float = 0.0
    """Price of a second of engine time, in nats per token."""
    time_price: float = 0.0
    """Price of a second before the first token, in nats per generated token."""
    max_loss: float = float("inf")
    """Expected loss above which no cache is delivered, nats per generated token; infinite: any is."""
    decoders: int = 1
    """Groups that are decoded at the same time."""
    oracle: Future | None = None
    """The future, in a simulator. None in a real play."""
    decode_seconds: Callable[[str], float] | None = None
    """Seconds to decode a full group of a track on this machine; None: as the catalog says."""
    decode_latency: Callable[[str], float] | None = None
    """Seconds that decoding a batch takes besides; None: none."""
    decodes_last: bool = False
    """Whether everything is decoded only once the play has ended: then `deadline_s` leaves time for the cheapest track,
    and `decode_backlog_s` is what the tracks in place take longer than that."""
    catalog: Catalog = field(init=False)
    groups: int = field(init=False)
    """Number of groups in the asset."""
    keeps: int = field(init=False)
    """For how many decisions a policy keeps what it has worked out by looking at every group; 0 up to 64 groups. So a
    decision costs the same whatever the length of the prompt, and what is kept is off by a 64th of it at most."""
    now: float = 0.0
    """Seconds since the play began."""
    rate: float = 0.0
    """Expected rate, bytes per second; 0.0 until the first bytes arrive."""
    lower_bound: float = 0.0
    """Rate that the link should exceed most of the time, bytes per second; 0.0 until the first bytes arrive."""
    told_rate: float = 0.0
    """Rate that earlier plays told, bytes per second; 0.0: none."""
    growing: bool = False
    """Whether the link is in slow start: its rate still grows from sample to sample."""
    ttfb_s: float = 0.0
    """Seconds from a request to its first byte."""
    outstanding_bytes: int = 0
    """Bytes still to arrive for all requests in flight."""
    decode_backlog_s: float = 0.0
    """Seconds of decoding that are queued or running."""
    undecoded: dict[int, int] = field(default_factory=dict)
    """Groups of which something has arrived and waits to be decoded, in the order of arrival; each with its place."""
    engine_backlog_s: float = 0.0
    """Seconds until the engine has finished everything it was given."""
    in_flight: InFlight = field(init=False)
    """Requests in flight, by request number."""
    settled: Settled = field(init=False)
    """Groups that have arrived or are in place, with nothing in flight for them; these can be upgraded."""
    unavailable: AbstractSet[tuple[int, str]] = frozenset()
    """Groups and tracks on which they have failed too often, for example because every copy was damaged; and those that
    a producer has left out, or has not encoded yet."""
    added: int = 0
    """How often tracks were added to groups that existed without them; these have settled again, if they had before."""
    edge: int = field(init=False)
    """Groups that exist, the first ones: all of them, unless the cache is still being prefilled."""
    ends_s: float = 0.0
    """When the last group should exist, seconds since the play began; 0.0 if all did from the start."""
    late_s: float = 0.0
    """Seconds by which the producer is late with the next group, if that is more than a group takes; otherwise 0.0."""
    ready_s: Callable[[int], float] | None = None
    """Returns when a group should exist, seconds since the play began; None: all do."""
    track_of: list[str | None] = field(init=False)
    """Track of each group that is in place or arriving; ``recomputed`` if the engine computes it; None if missing."""
    changes: list[int] = field(default_factory=list)
    """Every group whose track, or whether it has settled, may have changed, once per time; see `Settled.history`."""
    solid: int = 0
    """All groups before this one are in place."""
    missing_groups: GroupSet = field(init=False)
    """Groups that exist and are neither in place, nor in flight, nor left to the engine; the player updates it."""

    def __post_init__(self) -> None:
        self.catalog = self.ladder.catalog
        self.groups = self.edge = self.catalog.groups
        self.keeps = (self.groups - 1) // 64
        self.track_of, self.settled = TrackOf(self.groups, self.changes), Settled(self.changes)
        self.missing_groups = GroupSet(self.groups)
        self.in_flight = InFlight(self.ladder.tracks[0].bytes)

    @property
    def missing(self) -> AbstractSet[int]:
        """Groups that exist and are neither in place, nor in flight, nor left to the engine; ascending."""
        return self.missing_groups

    @property
    def time_left(self) -> float:
        """Seconds to the deadline; 0.0 once it has passed."""
        return max(0.0, self.deadline_s - self.now)

    @property
    def coming(self) -> bool:
        """Whether groups are still to be published; their base is then pushed."""
        return self.edge < self.groups

    @property
    def arrived(self) -> bool:
        """Whether every group has arrived on some track, or is left to the engine."""
        return not self.missing_groups and not self.coming and not self.in_flight.required

    @property
    def tail(self) -> int:
        """Tokens that the engine computes behind the cache with the question: the losses are those behind as many."""
        return self.catalog.tail

    def first_missing(self) -> int | None:
        """Return the earliest missing group, or None if there is none."""
        return self.missing_groups.first()

    def bytes(self, group: int, track: str) -> int:
        """Return the size of one group on one track."""
        return self.catalog.by_name[track].bytes[group]

    def loss(self, group: int, track: str) -> float:
        """Return the expected loss of one group on one track, in nats per generated token."""
        return self.catalog.by_name[track].loss[group]

    def recompute_s(self, group: int) -> float:
        """Return the seconds until the engine could finish one more group; infinite without an engine."""
        if self.cost is None:
            return float("inf")
        begin, end = map(self.catalog.tokens_before, (group, group + 1))
        alone = self.cost.seconds(begin, end - begin)
        return self.engine_backlog_s + alone

    def decode_s(self, track: str) -> float:
        """Return the seconds to decode one more full group of a track in a batch, with the layers below it."""
        if self.decode_seconds is not None:
            return self.decode_seconds(track)
        return self.catalog.by_name[track].decode_s

    def decode_latency_s(self, track: str) -> float:
        """Return the seconds that decoding a batch takes besides those of its groups, see `decode_s`."""
        return 0.0 if self.decode_latency is None else self.decode_latency(track)

    def decoded_by(self, arrives_s: float, decoded_s: float) -> float:
        """Return when what arrives by then can be decoded, if what is decoded before takes ``decoded_s``."""
        return arrives_s + decoded_s if self.decodes_last else max(arrives_s, decoded_s)

    def last_decode_s(self, track: str) -> float:
        """Return the seconds from the arrival of the last group, on a track, until it is in place."""
        if self.decodes_last:
            return 0.0  # the deadline leaves time for it
        return self.decode_latency_s(track) + self.decode_s(track)

    def budget_bytes(self, rate: float, decode_s: float = 0.0) -> float:
        """Return how many bytes of new requests would be in place by the deadline.

        Args:
            rate: assumed bytes per second: `rate`, or `lower_bound` if the play must commit.
            decode_s: seconds to decode what arrives last.
        """
        wait = 0.0 if self.in_flight else self.ttfb_s
        return rate * (self.time_left - decode_s - wait) - self.outstanding_bytes

    def layers(self, track: str, current: str | None) -> tuple[str, ...]:
        """Return the layers that ``track`` needs above ``current``, lowest first; all if it does not refine it."""
        layers = self.ladder.stacks[track]
        return layers[layers.index(current) + 1 :] if current in layers else layers

    def extends(self, group: int, track: str) -> bool:
        """Return whether a track adds layers to the one that is in flight for a group."""
        current = self.track_of[group]
        return current != track and current in self.ladder.stacks[track] and group in self.in_flight.groups

    def best_track(self, group: int, max_bytes: float) -> str:
        """Return the track of least loss with at most ``max_bytes`` for this group; the cheapest track if none fits."""
        chosen = self.ladder.cheapest
        for track in self.ladder.tracks:
            if track.bytes[group] <= max_bytes:
                chosen = track.name
        return chosen

    def soonest_track(self) -> str:
        """Return the cheapest track, or a dearer one if its faster decoding completes the missing groups sooner."""
        cheapest, left = self.ladder.tracks[0], len(self.missing_groups)

        def seconds(track: Track) -> float:
            network = track.total_bytes / self.groups * left / self.rate
            decoded_s = self.decode_backlog_s + self.decode_s(track.name) * left / self.decoders
            return max(network, decoded_s) + self.decode_latency_s(track.name)

        if self.rate <= 0 or seconds(cheapest) <= self.time_left:
            return cheapest.name
        return min(self.ladder.tracks, key=seconds).name

    def slack_s(self) -> float:
        """Return the time left to the deadline minus the time that the rest needs: this player's buffer, in seconds.

        The rest is what is in flight plus every missing group on the cheapest track, at the lower bound of the rate.
        Negative infinity while no rate is known and something is missing.
        """
        need = self.outstanding_bytes + self.floor_bytes()
        if not need:
            return self.deadline_s - self.now - self.decode_backlog_s
        if self.lower_bound <= 0:
            return float("-inf")
        wait = 0.0 if self.in_flight else self.ttfb_s
        return self.deadline_s - self.now - wait - need / self.lower_bound - self.last_decode_s(self.ladder.cheapest)

    def base_s(self) -> float:
        """Return the seconds in which all groups should be in place on some track; infinite where that is not known."""
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

    def flying_decode_s(self) -> float:
        """Return the seconds that one thread takes to decode what is in flight."""
        return sum(count * self.decode_s(track) for track, count in self.in_flight.tracks.items())
