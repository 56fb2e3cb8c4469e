"""What goes into a session and what comes out: its goal and configuration, its actions, its record and its log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, overload

from kvabr.abr.policy import Decision, Division
from kvabr.abr.view import View
from kvabr.types.errors import UsageError
from kvabr.types.events import DecisionMade, Limit, Log, PlayEvent, ProgressMade, SampleLimited, WorkDivided

# ---------------------------------------------------------------------------- goals


@dataclass(frozen=True, slots=True)
class WholeGoal:
    """The whole cache: deliver once every group is in place, or give up."""


@dataclass(frozen=True, slots=True)
class PrefixGoal:
    """The groups before the first miss, for an engine that computes everything behind them by itself (vLLM, SGLang).

    The play never waits for the engine. It ends when every group is in place, when computing the rest is sooner than
    fetching it, when nothing but the engine could still bring a group, or at the deadline.
    """


@dataclass(frozen=True, slots=True)
class UpgradeGoal:
    """Better tracks for a complete cache that is already in use."""

    tracks: tuple[str, ...]
    """Per group, the track in place, or ``recomputed``: such a group is exact enough and stays. So does a snapshot of a
    state, whatever track it is on: give ``recomputed`` for it."""
    until_s: float = math.inf
    """Seconds after which no more upgrades are wanted; infinite: until there is nothing to upgrade."""
    rate: float = 0.0
    """Rate of the link during the play before, bytes per second. It counts until the estimator knows one, since a
    policy that knows no rate requests no upgrade."""


@dataclass(frozen=True, slots=True)
class BlendGoal:
    """The whole cache of a prompt joined from passages, some tokens of which the engine computes again at the end."""

    share: float | None = None
    """Share of the passages' tokens to compute again, as far as time allows; None: what it is worth, by the fusion
    losses that the passages' catalogs tell."""
    question: int = 0
    """Tokens of the question that chooses them; 0: none, and nothing is computed again."""
    max_loss: float = math.inf
    """Expected loss, nats per generated token, above which the play is given up: the prompt is to be computed."""

    def __post_init__(self) -> None:
        if self.share is not None and not (isinstance(self.share, int | float) and 0 <= self.share <= 1):
            raise UsageError(f"a share of {self.share} of the passages' tokens; give 0 to 1")
        if self.share and not self.question:
            raise UsageError("to choose the tokens that are computed again takes a question of at least one token")
        if not self.max_loss >= 0:
            raise UsageError(f"max_loss is {self.max_loss:g}; it must be zero or more nats per token")


Goal = WholeGoal | PrefixGoal | UpgradeGoal | BlendGoal
WHOLE = WholeGoal()

# -------------------------------------------------------------------- configuration

GPU_PRICE = 1e-3
"""Default price of a second of engine time, nats per token: the engine is mostly idle."""
TIME_PRICE = 1e-3
"""Default price of a second before the first token, nats per generated token."""
MAX_TICK_S = 1.0
"""Maximum seconds between two ticks of a session, however long its deadline."""

ENGINE_PATIENCE = 2.0
"""Multiple of the time of a whole prefill that an incomplete play may take beyond its patience if it has an engine: one
that has begun, however slow, ends sooner than another one that begins after an error."""
MOST_REQUESTS = 512
"""Most requests in flight. A connection sends fewer at a time; what waits there was decided too soon, and has to
be cancelled if the play ends."""
MAX_DECODERS = 1024
"""Most threads that decode."""


def check_decoders(decoders: int) -> None:
    """Raise `UsageError` unless there are 1 to `MAX_DECODERS` decoders."""
    if not 1 <= decoders <= MAX_DECODERS:
        raise UsageError(f"decoders is {decoders}; give 1 to {MAX_DECODERS} threads that decode")


@dataclass(frozen=True, slots=True)
class PlayerConfig:
    """Limits and timeouts that hold for every policy."""

    min_requests: int = 2
    """Least number of requests in flight; hides the round trip."""
    first_requests: int = 4
    """Least number of requests in flight while no rate is known."""
    ahead: float = 8.0
    """No more is requested while more bytes are in flight than the link carries in this many times a round trip and a
    tick. The policies that pace themselves request a whole base at once, as far as `MOST_REQUESTS` allows."""
    least_ahead_bytes: int = 4 << 20
    """Bytes in flight up to which that does not apply: in slow start the rate says little."""
    ticks: int = 50
    """Ticks per deadline, if that is at least one a second. At a tick the session looks for transfers that are too slow
    or have stalled."""
    attempts: int = 3
    """Requests for one group on one track before that track counts as unavailable for the group."""
    give_up_after: float = 10.0
    """Deadlines after which an incomplete play ends; with an engine, some time later (`ENGINE_PATIENCE`). Replays wait
    that long to see how late a play is. For a real play `PlayOptions.patience` counts, which is 1 by default."""
    gpu_price: float = GPU_PRICE
    """Price of a second of engine time, nats per token: near zero where the engine is idle, high where other requests
    wait for it. Infinite: the engine computes only what the network will not bring in time."""
    decoders: int = 1
    """Groups that are decoded at once: the driver's decoder threads."""
    decode_ahead_s: float = 0.0
    """Seconds of decoding that each of them is given ahead. Without any, a thread that has decoded a small group waits
    for the event loop, which has more to do in that time than the thread."""
    together: bool = False
    """Whether the decoders take everything that waits at once, in a batch, as a GPU does."""
    decodes_last: bool = False
    """Whether groups stay compressed, and are decoded when the play has ended; see `View.decodes_last`."""
    time_price: float = TIME_PRICE
    """Price of a second before the first token, nats per generated token. Zero: only the deadline counts."""
    max_loss: float = math.inf
    """Expected loss above which no cache is delivered, nats per generated token: the play computes more, cuts the
    prefix, or misses the deadline. Infinite: any loss is accepted."""
    chunked: bool = False
    """Whether bytes are reported as they are read from a transport, in chunks, rather than as they flow."""
    stalled_after: float | None = None
    """Share of the deadline after which a stalled transfer is requested again; None: never."""
    silent_after: float | None = None
    """Share of the deadline. A play that is late is given up when nothing was received for that long, and for three
    times the usual time to a first byte. None: never."""

    def __post_init__(self) -> None:
        if not 1 <= self.give_up_after < math.inf:
            raise UsageError(f"patience is {self.give_up_after} deadlines; it must be at least 1, finite")
        if not self.gpu_price >= 0:
            raise UsageError(f"the price of engine time is {self.gpu_price}; it must be zero or more nats per second")
        check_decoders(self.decoders)
        if not self.max_loss >= 0:
            raise UsageError(f"max_loss is {self.max_loss:g}; it must be zero or more nats per token")
        if not 0 <= self.time_price < math.inf:
            raise UsageError(f"the price of time is {self.time_price}; it must be zero or more nats per second, finite")


# -------------------------------------------------------------------------- actions


@dataclass(slots=True)
class FetchGroup:
    """Request one group of one track."""

    request: int
    """Number of the request; every event about it names it."""
    group: int
    """The group, counted from the catalog's first (`Catalog.offset`)."""
    track: str
    bytes: int
    """Size according to the catalog. Do not read more than that."""
    priority: int
    """MoQT subscriber priority, 0 (most urgent) to 255: of the requests in flight, serve the lowest first."""
    pushed: bool = False
    """Whether the publisher sends it unasked, as the group was published during the play (`Session.published`)."""
    source: int = 0
    """Which of the play's sources is asked."""


@dataclass(slots=True)
class Cancel:
    """Stop a request, or forget what it brought. No more events about it are expected."""

    request: int


@dataclass(slots=True)
class Decode:
    """Decode what has arrived of a group into its place; answer with `Session.decoded` or `Session.refused`."""

    request: int
    """The request that brought ``track``."""
    group: int
    track: str
    below: tuple[int, ...] = ()
    """Requests that brought the layers below it which are not in place yet, lowest first."""


@dataclass(slots=True)
class Recompute:
    """Let the engine compute groups ``first`` to ``last`` - 1, all before in place; answer with `Session.computed`."""

    first: int
    last: int


@dataclass(slots=True)
class ChooseTokens:
    """Choose the tokens to compute again, while layers still come; answer with `BlendAim.tokens_chosen`."""

    question: int
    """Tokens of the question."""


@dataclass(slots=True)
class RecomputeTokens:
    """Compute the passages' best tokens again, over the cache that is in place; nothing else changes it any more.

    Answer with `BlendAim.tokens_recomputed` or `BlendAim.tokens_failed`. If they are not chosen yet, do that
    first. Put those that were computed ahead into place, too.
    """

    share: float
    """Share of the passages' tokens."""
    tokens: int
    """How many these are."""
    question: int = 0
    """Tokens of the question that still has to choose them; 0: they are chosen, or being chosen."""
    passage: int | None = None
    """Only tokens of this passage, by its publisher's order, ahead of the others: the rest of the prompt still comes,
    and they are kept apart until all of it is there."""


@dataclass(slots=True)
class Deliver:
    """Hand the cache to the engine. The play is over."""

    now: float
    met: bool
    """Whether the deadline was met."""
    cut: str | None = None
    """Why a prefix play ended before every group was in place; None if every group is."""


@dataclass(slots=True)
class GiveUp:
    """The play is over, and groups are missing. At most those before the first missing one can be used."""

    now: float
    reason: str


Action = FetchGroup | Cancel | Decode | Recompute | ChooseTokens | RecomputeTokens | Deliver | GiveUp

# --------------------------------------------------------------------------- record


@dataclass(slots=True)
class GroupRecord:
    """How one group came into place; times in seconds since the play began."""

    group: int
    track: str | None = None
    """The track in place at delivery, or ``recomputed``; None if there is none."""
    bytes: int = 0
    """Bytes of the frame in place, summed over its layers."""
    requested_s: float | None = None
    first_byte_s: float | None = None
    done_s: float | None = None
    """When its last byte arrived."""
    ready_s: float | None = None
    """When it was in place, decoded or computed."""
    source: str | None = None
    """``fetched``, ``upgraded`` or ``recomputed``."""


class GroupRecords(Sequence[GroupRecord]):
    """The records of all groups of a play, each made when it is asked for: most of a long prompt may never come."""

    __slots__ = ("_groups", "_made")

    def __init__(self, groups: int) -> None:
        self._groups = range(groups)
        self._made: dict[int, GroupRecord] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, group: int) -> GroupRecord: ...
    @overload
    def __getitem__(self, group: slice) -> list[GroupRecord]: ...
    def __getitem__(self, group: int | slice) -> GroupRecord | list[GroupRecord]:
        if isinstance(group, slice):
            return [self[each] for each in self._groups[group]]
        if (made := self._made.get(group)) is None:
            number = self._groups[group]
            made = self._made.setdefault(number, GroupRecord(number))
        return made

    def track(self, group: int) -> str | None:
        """Return the track of a group, without making its record."""
        made = self._made.get(group)
        return None if made is None else made.track

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return repr(list(self))

    @property
    def missing(self) -> tuple[int, ...]:
        """Groups that are not in place, ascending."""
        ready = {group for group, record in self._made.items() if record.ready_s is not None}
        return tuple(group for group in self._groups if group not in ready)


@dataclass(slots=True)
class LiveRecord:
    """What a play learned of the producer of an asset that was still being prefilled; times as in `GroupRecord`."""

    published: int = 0
    """Groups that it had published when the play ended."""
    complete_s: float | None = None
    """When the last group was published, as far as the player knows; None if it was not."""
    stopped: str | None = None
    """Why the producer stopped before the last group; None if it did not."""
    sooner_alone_s: float | None = None
    """Seconds by which the player's own engine should have been sooner; None if it has none, or should not have."""


@dataclass(slots=True)
class BlendRecord:
    """What was computed again of a prompt joined from passages; times as in `GroupRecord`."""

    share: float = 0.0
    """Share of the passages' tokens that the question chose."""
    tokens: int = 0
    """How many these were."""
    ahead: int = 0
    """Tokens besides these that were computed in their publishers' order while the cache still came."""
    chosen_s: float | None = None
    """When the tokens were chosen; None if that was not done while the cache was still coming."""
    begun_s: float | None = None
    done_s: float | None = None
    """When they were computed and in place; None if none were."""
    fusion_loss: float | None = 0.0
    """What joining costs the cache as it was delivered, nats per generated token; None if it was not measured."""


@dataclass(slots=True)
class PlayRecord:
    """Record of a whole play."""

    groups: Sequence[GroupRecord]
    delivered_s: float | None = None
    """When the cache was handed over; None if the play was given up."""
    met: bool = False
    """Whether it was handed over by the deadline."""
    bytes_fetched: int = 0
    """Bytes received, useful or not."""
    bytes_held_up: dict[str, int] = field(default_factory=dict)
    """Bytes received that the network did not limit, by what limited them: ``publisher`` or ``cpu``."""
    bytes_wasted: int = 0
    """Bytes of cancelled, failed and replaced transfers, and of those that were not decoded in time."""
    damaged: list[tuple[int, str, str]] = field(default_factory=list)
    """Frames that came and could not be used: group, track, and what was wrong; one each time that it came."""
    failed: int = 0
    """Requests for groups that failed: not there, refused, or lost with a connection."""
    bytes_undecoded: int = 0
    """Bytes that had arrived and were not decoded when the play ended."""
    tokens_recomputed: int = 0
    recompute_s: float = 0.0
    """Seconds of engine time."""
    tail: int = 0
    """Tokens of the cache that the engine computed with the question, in `tail_s` seconds more."""
    tail_s: float = 0.0
    abandoned: int = 0
    """Transfers cancelled because they would have been late."""
    cut: str | None = None
    """Why a prefix play ended before every group was in place; None if every group is, or for another goal."""
    used: int | None = None
    """Groups that are used of a prefix that was cut: what is behind, though it be in place, the engine computes. None:
    all before the first one that is missing."""
    gave_up: str | None = None
    """Why the play was given up."""
    late_for_loss: bool = False
    """Whether a complete cache missed the deadline since it lost more than `PlayerConfig.max_loss`."""
    live: LiveRecord | None = None
    """None if the asset was complete when the play began."""
    blend: BlendRecord | None = None
    """None unless the prompt is joined from passages."""
    steps: list[tuple[str, int, int | str]] = field(default_factory=list)
    """What came into place, in order: ("fetch", group, track) or ("compute", first, last). Used to verify a replay."""
    division: Division | None = None
    """How the work was divided between network and engine as soon as the rate was known, else at last, and what was
    expected of that; None without an engine, or if the policy does not weigh that. Later it may be divided anew."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Groups that are not in place, ascending."""
        if isinstance(self.groups, GroupRecords):
            return self.groups.missing
        return tuple(group.group for group in self.groups if group.ready_s is None)


P = ParamSpec("P")


class EventLog:
    """Passes events to the listener. Every method returns at once if there is none."""

    __slots__ = ("_divided", "_log", "_view")

    def __init__(self, log: Log | None, view: View) -> None:
        self._log, self._view = log, view
        self._divided: tuple[int, int, bool] | None = None

    def emit(self, event: Callable[P, PlayEvent], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit an event, given its class and fields."""
        if self._log is not None:
            self._log(event(*args, **kwargs))

    def progress(self, now: float, received: int) -> None:
        """Emit the bytes received in all and the current estimates, if requests are in flight."""
        view = self._view
        if self._log is not None and view.in_flight:
            self._log(ProgressMade(now, received, view.rate, view.lower_bound, self._slack()))

    def limited(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """Emit a throughput sample that the network did not limit; ``rate`` in bytes per second."""
        self.emit(SampleLimited, now, by, rate, fed)

    def decision(
        self,
        decision: Decision,
        now: float,
        *,
        request: int | None = None,
        kind: str | None = None,
        track: str | None = None,
    ) -> None:
        """Emit a decision with everything that it was based on; ``track``: the layer of it that a request is for."""
        if self._log is None:
            return
        view, others = self._view, decision.alternatives
        self._log(
            DecisionMade(
                now,
                kind or decision.kind,
                decision.group,
                track or decision.track,
                request,
                decision.reason,
                rate=view.rate,
                lower=view.lower_bound,
                ttfb_s=view.ttfb_s,
                slack_s=self._slack(),
                alternatives=None if others is None else dict(others),
            )
        )

    def divided(self, division: Division | None, record: PlayRecord, now: float) -> None:
        """Note how the work is divided: for the record until the rate is known, and as an event where it is new."""
        if division is None:
            return
        if record.division is None or not record.division.known:
            record.division = division
        if self._divided != (new := (division.first, division.last, division.known)):
            self._divided = new
            self.emit(WorkDivided, now, *division[1:])

    def _slack(self) -> float | None:
        slack = self._view.slack_s()
        return None if slack == float("-inf") else slack
