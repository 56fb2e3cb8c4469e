"""What a policy may see of a play: numbers of the catalog, estimates, and what is in place or under way."""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost


@dataclass(slots=True)
class Transfer:
    """One request in flight."""

    request: int
    group: int
    track: str
    bytes: int
    """Size of the group's frame."""
    upgrade: bool
    """True if the group is already in place at another track."""
    requested_s: float
    received: int = 0
    first_byte_s: float | None = None
    done_s: float | None = None
    priority: int = 128
    """0 (most urgent) to 255, as it was asked for."""

    @property
    def remaining(self) -> int:
        """Bytes still to come."""
        return self.bytes - self.received


class Settled(set[int]):
    """Groups in place with nothing under way for them, and the order in which they came to be so."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []
        """Every group that was ever added, again each time: who remembers how far he has read need not look through
        all groups to find what is new. A group may have left the set since."""

    def add(self, group: int, /) -> None:
        """A group is settled, for the first time or once more."""
        super().add(group)
        self.history.append(group)


@dataclass(frozen=True, slots=True)
class Future:
    """What is known of the link in a simulator; see `View.oracle`."""

    carried: Callable[[float], float]
    """Bytes that the link will carry in the next so many seconds."""
    first_byte_s: float
    """Seconds that a request waits for its first byte on a link that is free."""

    def __call__(self, seconds: float) -> float:
        """As `carried`."""
        return self.carried(seconds)


class View:
    """The play as a policy sees it. The player keeps it up to date; a policy only reads it."""

    __slots__ = (
        "catalog",
        "cost",
        "deadline_s",
        "decode_backlog_s",
        "engine_backlog_s",
        "front_first",
        "gpu_price",
        "in_flight",
        "ladder",
        "lower_bound",
        "missing_groups",
        "now",
        "oracle",
        "outstanding_bytes",
        "rate",
        "settled",
        "track_of",
        "ttfb_s",
    )

    def __init__(
        self,
        ladder: Ladder,
        deadline_s: float,
        *,
        cost: PrefillCost | None = None,
        front_first: bool = False,
        gpu_price: float = 0.0,
        oracle: Callable[[float], float] | None = None,
    ) -> None:
        self.ladder: Ladder = ladder
        """The tracks worth playing, and the steps between them."""
        self.catalog: Catalog = ladder.catalog
        self.deadline_s: float = deadline_s
        """The TTFT deadline, seconds after the play began."""
        self.now: float = 0.0
        """Seconds since the play began."""
        self.rate: float = 0.0
        """Expected rate, bytes per second; 0.0 until the first bytes arrive."""
        self.lower_bound: float = 0.0
        """A rate that the link should exceed most of the time, bytes per second; 0.0 until the first bytes arrive."""
        self.ttfb_s: float = 0.0
        """Seconds that a request waits for its first byte."""
        self.outstanding_bytes: int = 0
        """Bytes still to come of all requests in flight."""
        self.decode_backlog_s: float = 0.0
        """Seconds of decoding that wait for, or run on, the decoder."""
        self.engine_backlog_s: float = 0.0
        """Seconds until the engine is done with what it computes now and with what it was left for good."""
        self.track_of: list[str | None] = [None] * ladder.catalog.groups
        """Per group, the track that is in place or arriving; ``recomputed`` if the engine computes it; or None."""
        self.settled: Settled = Settled()
        """Groups in place with nothing under way for them: those that may be upgraded."""
        self.in_flight: dict[int, Transfer] = {}
        """Requests in flight, by request number."""
        self.oracle: Callable[[float], float] | None = oracle
        """In a simulator: bytes that the link will carry in the next so many seconds. None in a real play."""
        self.cost: PrefillCost | None = cost
        """What the engine's prefill costs; None if nothing can be recomputed."""
        self.front_first: bool = front_first
        """Whether the earliest groups are needed first: there is an engine, and it must compute all behind a miss."""
        self.gpu_price: float = gpu_price
        """Nats per token that a second of the engine's time is worth to others."""
        self.missing_groups: dict[int, None] = dict.fromkeys(range(ladder.catalog.groups))
        """What `missing` shows; the player keeps it."""

    @property
    def missing(self) -> KeysView[int]:
        """Groups that are neither in place, nor under way, nor left to the engine; in ascending order."""
        return self.missing_groups.keys()

    @property
    def groups(self) -> int:
        """Groups in the asset."""
        return self.catalog.groups

    @property
    def time_left(self) -> float:
        """Seconds to the deadline; 0.0 once it has passed."""
        return max(0.0, self.deadline_s - self.now)

    def first_missing(self) -> int | None:
        """The earliest of `missing`, or None if every group is in place or under way."""
        return next(iter(self.missing_groups), None)

    def bytes(self, group: int, track: str) -> int:
        """Size of one group on one track."""
        return self.catalog.by_name[track].bytes[group]

    def loss(self, group: int, track: str) -> float:
        """Expected loss of one group on one track, nats per generated token."""
        return self.catalog.by_name[track].loss[group]

    def recompute_s(self, group: int) -> float:
        """Seconds until the engine could have computed one group more; infinite if the play has no engine."""
        if self.cost is None:
            return float("inf")
        alone = self.cost.seconds(group * self.catalog.spec.group_tokens, self.catalog.group_tokens(group))
        return self.engine_backlog_s + alone

    def decode_s(self, track: str) -> float:
        """Seconds to decode one group of a track."""
        return self.catalog.by_name[track].decode_s

    def budget_bytes(self, rate: float, decode_s: float = 0.0) -> float:
        """Bytes of new requests that would be in place by the deadline at ``rate``, beside those in flight.

        Args:
            rate: bytes per second to reckon with: `rate`, or `lower_bound` where the play must commit.
            decode_s: seconds to decode what arrives last.
        """
        wait = 0.0 if self.in_flight else self.ttfb_s
        return rate * (self.time_left - decode_s - wait) - self.outstanding_bytes

    def best_track(self, group: int, max_bytes: float) -> str:
        """The track of least loss whose group has at most ``max_bytes``; the cheapest if none has."""
        chosen = self.ladder.cheapest
        for track in self.ladder.tracks:
            if track.bytes[group] <= max_bytes:
                chosen = track.name
        return chosen

    def slack_s(self) -> float:
        """Time left to the deadline less the time that the rest needs: the buffer of this player, in seconds.

        The rest is what is in flight plus every missing group at the cheapest track, at the lower bound of the rate.
        Negative infinity while no rate is known and something is missing.
        """
        need = self.outstanding_bytes + self.floor_bytes()
        if not need:
            return self.deadline_s - self.now - self.decode_backlog_s
        if self.lower_bound <= 0:
            return float("-inf")
        wait = 0.0 if self.in_flight else self.ttfb_s
        return self.deadline_s - self.now - wait - need / self.lower_bound - self.decode_s(self.ladder.cheapest)

    def floor_bytes(self) -> int:
        """Bytes of every missing group at the cheapest track."""
        sizes = self.ladder.tracks[0].bytes
        return sum(sizes[group] for group in self.missing_groups)


class Timeline:
    """The timeline of one play. Rates are bytes per second, times are seconds."""

    def __init__(self, view: View) -> None:
        self.names = view.ladder.names
        """The tracks that are worth playing, cheapest first."""
        self.rates = tuple(track.total_bytes / view.deadline_s for track in view.ladder.tracks)
        """The rate of each, bytes per second."""
        self.segment_s = view.deadline_s / view.groups
        """A group's share of the deadline."""

    def arrived(self, view: View) -> int:
        """Groups that have arrived, or that the engine takes."""
        return view.groups - len(view.missing_groups) - len(view.in_flight)

    def level_s(self, view: View) -> float:
        """How far the play is ahead, seconds: what the players call the buffer level; never below 0."""
        return max(0.0, self.arrived(view) * self.segment_s - view.now)

    def carried(self, rate: float) -> int:
        """Index of the best track that a rate carries; 0 if it carries none."""
        return max((index for index, needed in enumerate(self.rates) if needed <= rate), default=0)
