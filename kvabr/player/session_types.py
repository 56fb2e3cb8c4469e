"""Inputs and outputs of a session: goals, configuration, actions, records and the event log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, overload

from kvabr.abr.ladder import Ladder
from kvabr.abr.policy import Decision, Division
from kvabr.abr.view import View
from kvabr.types.engine import EngineMode
from kvabr.types.errors import UsageError
from kvabr.types.events import (
    DecisionMade,
    Limit,
    Log,
    PlayEvent,
    PlayStarted,
    ProgressMade,
    SampleLimited,
    WorkDivided,
)

# ---------------------------------------------------------------------------- goals


@dataclass(frozen=True, slots=True)
class WholeGoal:
    """Deliver the whole cache once every group is in place, or give up."""


@dataclass(frozen=True, slots=True)
class PrefixGoal:
    """Deliver the groups before the first missing one; the engine computes the rest without kvabr (vLLM, SGLang).

    The play ends when every group is in place, when computing the rest is faster than fetching it, when only the engine
    could provide a group, or at the deadline. It never waits for the engine.
    """


@dataclass(frozen=True, slots=True)
class UpgradeGoal:
    """Fetch better tracks for a complete cache in use."""

    tracks: tuple[str, ...]
    """Track in place per group; ``recomputed`` to leave the group unchanged (exact enough, or a state snapshot)."""
    until_s: float = math.inf
    """Seconds until the play ends; infinite: until every group is on its best track."""
    rate: float = 0.0
    """Rate of the link in the previous play, in bytes per second; used until the estimator has one."""


@dataclass(frozen=True, slots=True)
class BlendGoal:
    """Deliver the whole cache of a prompt joined from passages, with some tokens recomputed."""

    share: float | None = None
    """Fraction of the passages' tokens to recompute, if time allows; None: decide by the passages' fusion losses."""
    question: int = 0
    """Number of tokens of the question, which selects the tokens to recompute."""
    max_loss: float = math.inf
    """Expected loss above which the play is given up, in nats per generated token."""

    def __post_init__(self) -> None:
        if self.share is not None and not (isinstance(self.share, int | float) and 0 <= self.share <= 1):
            raise UsageError(f"share must be 0 to 1 of the passages' tokens, got {self.share}")
        if self.share and not self.question:
            raise UsageError("question must have at least 1 token, to choose the tokens to recompute")
        if not self.max_loss >= 0:
            raise UsageError(f"max_loss must be 0 or more nats per token, got {self.max_loss:g}")


Goal = WholeGoal | PrefixGoal | UpgradeGoal | BlendGoal
WHOLE = WholeGoal()

# -------------------------------------------------------------------- configuration

GPU_PRICE = 1e-3
"""Default price of a second on a mostly idle engine, in nats per generated token."""
TIME_PRICE = 1e-3
"""Default price of a second before the first token, nats per generated token."""
MAX_TICK_S = 1.0
"""Maximum seconds between two ticks."""

ENGINE_PATIENCE = 2.0
"""Extra time for an incomplete play with an engine, in full prefills: waiting for a slow prefill is faster than
starting again after an error."""
MAX_REQUESTS = 512
"""Maximum requests in flight. A connection sends fewer at a time; the others are decided earlier than necessary."""
MAX_DECODERS = 1024


def check_decoders(decoders: int) -> None:
    """Raise `UsageError` unless there are 1 to `MAX_DECODERS` decoders."""
    if not 1 <= decoders <= MAX_DECODERS:
        raise UsageError(f"decoders must be 1 to {MAX_DECODERS}, got {decoders}")


@dataclass(frozen=True, slots=True)
class PlayerConfig:
    """Limits and timeouts for every policy."""

    min_requests: int = 2
    """Minimum requests in flight, to hide the round trip."""
    first_requests: int = 4
    """Minimum requests in flight while the rate is unknown."""
    ahead: float = 8.0
    """Requests pause while more bytes are in flight than the link carries in this many round trips and ticks. Applies
    to policies that pace themselves and request a whole base, up to `MAX_REQUESTS`."""
    min_ahead_bytes: int = 4 << 20
    """Bytes in flight below which `ahead` does not apply, since the rate says little in slow start."""
    ticks: int = 50
    """Ticks per deadline, but at least one per second; each looks for slow or stalled transfers."""
    attempts: int = 3
    """Attempts per group and track, after which the track is unavailable."""
    give_up_after: float = 10.0
    """Time limit of an incomplete play, in deadlines; longer with an engine (`ENGINE_PATIENCE`). Replays wait that long
    to measure lateness; real plays use `PlayOptions.patience`, 1 by default."""
    gpu_price: float = GPU_PRICE
    """Price of a second of engine time, nats per generated token: near zero if the engine is idle, high if other
    requests wait. Infinite: compute only groups that the network cannot deliver in time."""
    decoders: int = 1
    """Number of groups decoded at once."""
    decode_ahead_s: float = 0.0
    """Seconds of decoding work queued per thread, to bridge delays of the event loop."""
    together: bool = False
    """True: the decoders take all waiting groups in one batch, as a GPU does."""
    decodes_last: bool = False
    """True: groups stay compressed until the play ends; see `View.decodes_last`."""
    time_price: float = TIME_PRICE
    """Price of a second before the first token, nats per generated token. Zero: only the deadline counts."""
    max_loss: float = math.inf
    """Maximum expected loss of a delivered cache, nats per generated token. To stay below it, the play computes more,
    cuts the prefix, or misses the deadline."""
    chunked: bool = False
    """True: bytes are reported in chunks read from a transport, rather than as they flow."""
    stalled_after: float | None = None
    """Fraction of the deadline after which a stalled transfer is requested again; None: never."""
    silent_after: float | None = None
    """Fraction of the deadline, but at least three usual times to first byte, after which a late, silent play is given
    up. None: never."""

    def __post_init__(self) -> None:
        if not 1 <= self.give_up_after < math.inf:
            raise UsageError(f"patience must be at least 1 deadline and finite, got {self.give_up_after}")
        if not self.gpu_price >= 0:
            raise UsageError(f"the price of engine time must be 0 or more nats per second, got {self.gpu_price}")
        check_decoders(self.decoders)
        if not self.max_loss >= 0:
            raise UsageError(f"max_loss must be 0 or more nats per token, got {self.max_loss:g}")
        if not 0 <= self.time_price < math.inf:
            raise UsageError(f"the price of time must be 0 or more nats per second and finite, got {self.time_price}")


# -------------------------------------------------------------------------- actions


@dataclass(slots=True)
class FetchGroup:
    """Request one group of one track."""

    request: int
    group: int
    """Index of the group, counted from the catalog's first (`Catalog.offset`)."""
    track: str
    bytes: int
    """Size in the catalog; do not read more."""
    priority: int
    """MoQT subscriber priority, 0 (most urgent) to 255: serve requests in ascending order."""
    pushed: bool = False
    """True: the publisher sends it without a request, because the play is live (`Session.published`)."""
    source: int = 0


@dataclass(slots=True)
class Cancel:
    """Stop a request, or discard its data; it causes no further events."""

    request: int


@dataclass(slots=True)
class Decode:
    """Decode a group's layers into place; answer with `Session.decoded` or `Session.refused`."""

    request: int
    group: int
    track: str
    below: tuple[int, ...] = ()
    """Requests of the lower layers that are not in place yet, lowest first."""


@dataclass(slots=True)
class Recompute:
    """Compute groups ``first`` to ``last`` - 1; answer with `Session.computed`."""

    first: int
    last: int


@dataclass(slots=True)
class ChooseTokens:
    """Choose the tokens to recompute while layers still arrive; answer with `BlendAim.tokens_chosen`."""

    question: int


@dataclass(slots=True)
class RecomputeTokens:
    """Recompute the passages' most important tokens over the cache, which no longer changes.

    Choose the tokens first if necessary, and put tokens computed ahead into place. Answer with
    `BlendAim.tokens_recomputed` or `BlendAim.tokens_failed`.
    """

    share: float
    tokens: int
    question: int = 0
    """Number of tokens of the question if the tokens are still to be chosen, else 0."""
    passage: int | None = None
    """Compute only tokens of this passage, in its publisher's order, and store them separately until the prompt is
    complete."""


@dataclass(slots=True)
class Deliver:
    """Hand over the cache; the play is over."""

    now: float
    met: bool
    cut: str | None = None
    """Why a prefix is shorter, or None."""


@dataclass(slots=True)
class GiveUp:
    """End the play with groups missing; only groups before the first missing one can be used."""

    now: float
    reason: str


Action = FetchGroup | Cancel | Decode | Recompute | ChooseTokens | RecomputeTokens | Deliver | GiveUp

# --------------------------------------------------------------------------- record


@dataclass(slots=True)
class GroupRecord:
    """History of one group; times in seconds since the play began."""

    group: int
    track: str | None = None
    """Track at delivery, ``recomputed``, or None."""
    bytes: int = 0
    requested_s: float | None = None
    first_byte_s: float | None = None
    done_s: float | None = None
    ready_s: float | None = None
    """When it was in place, decoded or computed."""
    source: str | None = None
    """``fetched``, ``upgraded`` or ``recomputed``."""


class GroupRecords(Sequence[GroupRecord]):
    """Records of all groups, created on access: most groups of a long prompt may never arrive."""

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
        """Return a group's track without creating its record."""
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
    """Facts about the producer of an asset still being prefilled; times as in `GroupRecord`."""

    published: int = 0
    complete_s: float | None = None
    """When the last group was published, if the play saw it."""
    stopped: str | None = None
    """Why the producer stopped early, or None."""
    sooner_alone_s: float | None = None
    """Seconds by which the player's own engine would have been faster, or None."""


@dataclass(slots=True)
class BlendRecord:
    """Recomputed tokens of a joined prompt; times as in `GroupRecord`."""

    share: float = 0.0
    """Fraction of the passages' tokens that were chosen by the question."""
    tokens: int = 0
    ahead: int = 0
    """Number of additional tokens computed ahead, in their publishers' order."""
    chosen_s: float | None = None
    """When the tokens were chosen, if before the cache was complete."""
    begun_s: float | None = None
    done_s: float | None = None
    """When the tokens were in place."""
    fusion_loss: float | None = 0.0
    """Loss from joining, in nats per generated token; None if not measured."""


@dataclass(slots=True)
class PlayRecord:
    """Record of one play."""

    groups: Sequence[GroupRecord]
    delivered_s: float | None = None
    """None if given up."""
    met: bool = False
    bytes_fetched: int = 0
    bytes_held_up: dict[str, int] = field(default_factory=dict)
    """Bytes whose rate the network did not limit, by the limit: ``publisher`` or ``cpu``."""
    bytes_wasted: int = 0
    """Bytes of cancelled, failed, replaced and undecoded transfers."""
    damaged: list[tuple[int, str, str]] = field(default_factory=list)
    """Damaged frames, one entry per arrival: group, track, and fault."""
    failed: int = 0
    """Failed requests: not found, refused, or lost with a connection."""
    bytes_undecoded: int = 0
    """Bytes not decoded when the play ended."""
    tokens_recomputed: int = 0
    recompute_s: float = 0.0
    tail: int = 0
    """Tokens at the end of the cache that the engine computed with the question, in `tail_s` additional seconds."""
    tail_s: float = 0.0
    abandoned: int = 0
    """Transfers cancelled as late."""
    cut: str | None = None
    """Why a prefix is shorter, or None."""
    used: int | None = None
    """Number of groups used of a cut prefix; None: all before the first missing one."""
    gave_up: str | None = None
    """Why the play was given up, or None."""
    gave_up_late: bool = False
    """True if it was given up after its deadline."""
    late_for_loss: bool = False
    """True if a complete cache was late because its loss exceeded `PlayerConfig.max_loss`."""
    live: LiveRecord | None = None
    blend: BlendRecord | None = None
    steps: list[tuple[str, int, int | str]] = field(default_factory=list)
    """Placed groups, in order: ("fetch", group, track) or ("compute", first, last). Used to verify a replay."""
    division: Division | None = None
    """Division of work between network and engine, and the expected result: the first one at a known rate, else the
    last."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Groups that are not in place, ascending."""
        if isinstance(self.groups, GroupRecords):
            return self.groups.missing
        return tuple(group.group for group in self.groups if group.ready_s is None)


P = ParamSpec("P")


class EventLog:
    """Passes events to the listener, if there is one."""

    __slots__ = ("_divided", "_log", "_view")

    def __init__(self, log: Log | None, view: View) -> None:
        self._log, self._view = log, view
        self._divided: tuple[int, int, bool] | None = None

    def emit(self, event: Callable[P, PlayEvent], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit an event, given its class and fields."""
        if self._log is not None:
            self._log(event(*args, **kwargs))

    def progress(self, now: float, received: int) -> None:
        """Emit received bytes and estimates, if requests are in flight."""
        view = self._view
        if self._log is not None and view.in_flight:
            self._log(ProgressMade(now, received, view.rate, view.lower_bound, self._slack()))

    def limited(self, by: Limit, rate: float, now: float, *, fed: bool) -> None:
        """Emit a throughput sample (bytes per second) that was limited ``by`` something other than the network."""
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
        """Emit a decision with its inputs; ``track``: the requested layer."""
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
        """Record the latest division of work, or the first one at a known rate; emit every change."""
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


def opening(
    ladder: Ladder,
    *,
    trace: str,
    policy: str,
    estimator: str,
    deadline_s: float,
    mode: EngineMode,
    rtt_s: float | None,
    start_s: float = 0.0,
    lookup_s: float | None = None,
    tail_s: float = 0.0,
) -> PlayStarted:
    """Return the first event of a play's log; see `PlayStarted` for the fields."""
    catalog = ladder.catalog
    tracks = sorted(catalog.tracks, key=lambda track: track.total_bytes)
    return PlayStarted(
        0.0,
        trace=trace,
        start_s=start_s,
        policy=policy,
        estimator=estimator,
        deadline_s=deadline_s,
        engine_mode=mode,
        groups=catalog.groups,
        asset=f"{catalog.namespace.model}/{catalog.namespace.prompt}",
        tracks=tuple(track.name for track in tracks),
        track_bytes=tuple(track.total_bytes for track in tracks),
        worth_playing=ladder.names,
        fp16_bytes=catalog.fp16_bytes,
        rtt_s=rtt_s,
        lookup_s=lookup_s,
        tail=catalog.tail,
        tail_s=tail_s,
    )
