"""The events of a play, one dataclass each, as logs, reports and telemetry receive them.

To add an event, write its dataclass here and emit it where it happens. JSON lines, the page, Perfetto and telemetry
pass on fields that they know nothing about: `PlayEvent.to_json` is generic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

Limit = Literal["network", "publisher", "cpu", "kept"]
"""What limited a transfer: the path, a peer that had nothing to send, or this process, which could not read faster.

``kept``: the bytes were in the local store already and say nothing about the path.
"""


@dataclass(frozen=True, slots=True)
class PlayEvent:
    """Something that happened in a play."""

    name: ClassVar[str] = ""
    """The event's name in JSON."""
    t: float
    """When it happened, seconds since the play began."""
    late: bool = field(default=False, kw_only=True)
    """Whether the cache had been handed over: an event of the upgrades that follow a play."""

    def to_json(self) -> dict[str, Any]:
        """Return ``t``, ``event`` (the name) and the fields; optional fields only where they are set."""
        values = [(one, getattr(self, one.name)) for one in fields(self)]
        needed = {one.name: value for one, value in values if one.default is MISSING}
        chosen = {one.name: value for one, value in values if one.default is not MISSING and value != one.default}
        return {"t": self.t, "event": self.name, **needed, **chosen}


Log = Callable[[PlayEvent], None]
"""Takes the events of one play, in order."""


@dataclass(frozen=True, slots=True)
class PlayCalled(PlayEvent):
    """A play was called for; its lookup begins. The first event that telemetry reports."""

    name: ClassVar[str] = "called"


@dataclass(frozen=True, slots=True)
class PlayStarted(PlayEvent):
    """The catalog is known, and the session begins."""

    name: ClassVar[str] = "start"
    trace: str
    """The trace of a replay; the QUIC library of a real play."""
    start_s: float
    """Where in the trace the play began, seconds."""
    policy: str
    estimator: str
    deadline_s: float
    """Seconds from ``t`` = 0 to the deadline."""
    engine_mode: str
    groups: int
    """Groups in the cache."""
    asset: str
    """MODEL/DIGEST."""
    tracks: tuple[str, ...]
    """All tracks, smallest first."""
    track_bytes: tuple[int, ...]
    """Bytes of each of these tracks."""
    worth_playing: tuple[str, ...]
    """The tracks on the Pareto front of bytes against loss."""
    fp16_bytes: int
    """Bytes of the exact cache at 16 bits an element."""
    rtt_s: float | None
    """Round trip, seconds; None if it is not known."""
    lookup_s: float | None = None
    """Seconds of the deadline that the lookup took; None in a replay."""
    tail: int = 0
    """Tokens that the engine computes behind the cache, with the question; the losses are those behind as many."""
    tail_s: float = 0.0
    """Seconds by which those of them that are cached make its call longer."""


@dataclass(frozen=True, slots=True)
class LookupFailed(PlayEvent):
    """The origin did not say what it has."""

    name: ClassVar[str] = "lookup_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class SourceLeftOut(PlayEvent):
    """A source of the play brings nothing of it, or not all tracks."""

    name: ClassVar[str] = "source_left_out"
    source: int
    """Which of them."""
    reason: str


@dataclass(frozen=True, slots=True)
class ProfileFailed(PlayEvent):
    """The codec profile did not come; the play goes on without the tracks that need it."""

    name: ClassVar[str] = "profile_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsPublished(PlayEvent):
    """The producer of a cache that is still being prefilled has published more of it, as far as the player knows."""

    name: ClassVar[str] = "published"
    edge: int
    """Groups that exist: the first ones."""
    ends_s: float
    """When the last group should exist, seconds since the play began; of the last one, when it did."""


@dataclass(frozen=True, slots=True)
class ProducerStopped(PlayEvent):
    """Nothing more will be published of a cache that is not complete."""

    name: ClassVar[str] = "producer_stopped"
    edge: int
    """Groups that exist: the first ones."""
    reason: str


@dataclass(frozen=True, slots=True)
class SoonerAlone(PlayEvent):
    """The engine of the player would prefill the prompt sooner than its producer publishes it."""

    name: ClassVar[str] = "sooner_alone"
    alone_s: float
    """Seconds that it would take from now on."""
    ends_s: float
    """When the last group should exist, seconds since the play began."""


@dataclass(frozen=True, slots=True)
class CacheDelivered(PlayEvent):
    """The cache was handed over."""

    name: ClassVar[str] = "deliver"
    met: bool
    """Whether the deadline was met."""
    loss: float
    """Expected loss of the cache, nats per generated token."""


@dataclass(frozen=True, slots=True)
class PlayGaveUp(PlayEvent):
    """The play ended without a cache."""

    name: ClassVar[str] = "gave_up"
    reason: str


@dataclass(frozen=True, slots=True)
class PlayEnded(PlayEvent):
    """The play returned or raised. The last event that telemetry reports."""

    name: ClassVar[str] = "ended"
    error: str | None
    """Class name of the exception; None if the play returned."""
    reason: str | None
    """Message of the exception."""


@dataclass(frozen=True, slots=True)
class DecisionMade(PlayEvent):
    """The policy decided, or the player planned what to recompute (``kind`` = ``plan``)."""

    name: ClassVar[str] = "decision"
    kind: str
    """``fetch``, ``upgrade``, ``recompute``, ``wait``, ``finish``, ``deliver`` or ``plan``."""
    group: int | None
    track: str | None
    request: int | None
    """The request that the decision led to."""
    reason: str
    rate: float
    """Expected rate, bytes per second; 0.0 while it is not known."""
    lower: float
    """Lower bound of the rate, bytes per second."""
    ttfb_s: float
    """Expected time to the first byte of a request, seconds."""
    slack_s: float | None
    """Time left to the deadline minus the time that the rest needs, seconds; None while no rate is known."""
    alternatives: Mapping[str, float] | None
    """What else was on offer: track to bytes, or to whatever number the policy compared."""


@dataclass(frozen=True, slots=True)
class WorkDivided(PlayEvent):
    """The policy divides the rest of the work anew between network and engine. Times are seconds from then on."""

    name: ClassVar[str] = "division"
    first: int
    """The first group that the engine is to compute."""
    last: int
    """The group behind the last one; equal: it computes none."""
    network_s: float
    """Until the network should have brought its part."""
    engine_s: float
    """Until the engine should be done with its own."""
    play_s: float
    """Until everything would be in place if the network brought it all."""
    compute_s: float
    """The same if the engine computed it all."""
    known: bool
    """Whether the rate of the link was known."""


@dataclass(frozen=True, slots=True)
class ProgressMade(PlayEvent):
    """A tick while requests are in flight: bytes so far, and what the estimator makes of them."""

    name: ClassVar[str] = "progress"
    received: int
    """Bytes received in all."""
    rate: float
    """Expected rate, bytes per second."""
    lower: float
    """Lower bound of the rate, bytes per second."""
    slack_s: float | None
    """As in `DecisionMade`."""


@dataclass(frozen=True, slots=True)
class SampleLimited(PlayEvent):
    """Something other than the network limited a throughput sample."""

    name: ClassVar[str] = "limited"
    by: Limit
    rate: float
    """Rate of the sample, bytes per second."""
    fed: bool
    """Whether the estimator was given the sample."""


@dataclass(frozen=True, slots=True)
class FirstByteReceived(PlayEvent):
    """The first byte of a request came."""

    name: ClassVar[str] = "first_byte"
    request: int


@dataclass(frozen=True, slots=True)
class TransferEvent(PlayEvent):
    """Something that happened to one request."""

    request: int
    """Number of the request within the play."""
    group: int
    track: str


@dataclass(frozen=True, slots=True)
class RequestSent(TransferEvent):
    """A group was requested."""

    name: ClassVar[str] = "request"
    bytes: int
    """Size of the group's frame, from the catalog."""
    source: int = 0
    """Which of the play's sources is asked."""


@dataclass(frozen=True, slots=True)
class RequestDone(TransferEvent):
    """The last byte of a request came."""

    name: ClassVar[str] = "done"
    bytes: int


@dataclass(frozen=True, slots=True)
class RequestCancelled(TransferEvent):
    """The player cancelled a request."""

    name: ClassVar[str] = "cancel"
    received: int
    """Bytes that had come by then."""
    reason: str


@dataclass(frozen=True, slots=True)
class RequestFailed(TransferEvent):
    """A request failed on its way or in the decoder."""

    name: ClassVar[str] = "failed"
    received: int
    """Bytes that had come by then."""
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDecoded(TransferEvent):
    """A group is decoded and in place."""

    name: ClassVar[str] = "decoded"


@dataclass(frozen=True, slots=True)
class RecomputeEvent(PlayEvent):
    """Something that happened to a recomputation of groups ``first`` to ``last`` - 1."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RecomputeStarted(RecomputeEvent):
    """The engine began to compute groups."""

    name: ClassVar[str] = "recompute_start"


@dataclass(frozen=True, slots=True)
class RecomputeDone(RecomputeEvent):
    """The engine computed groups, and they are in place."""

    name: ClassVar[str] = "recompute_done"


@dataclass(frozen=True, slots=True)
class RecomputeFailed(RecomputeEvent):
    """The engine failed; the session does not use it again."""

    name: ClassVar[str] = "recompute_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class PassageRefused(PlayEvent):
    """A passage that the origin has is computed instead of joined."""

    name: ClassVar[str] = "passage_refused"
    passage: str
    """Its digest."""
    reason: str


@dataclass(frozen=True, slots=True)
class TokensChosen(PlayEvent):
    """It is known which tokens of the prompt's passages are worth computing again."""

    name: ClassVar[str] = "tokens_chosen"


@dataclass(frozen=True, slots=True)
class TokensStarted(PlayEvent):
    """The engine began to compute some tokens of passages again."""

    name: ClassVar[str] = "tokens_start"
    tokens: int
    share: float
    """Of the passages' tokens."""
    reason: str


@dataclass(frozen=True, slots=True)
class TokensDone(PlayEvent):
    """They are computed and in place."""

    name: ClassVar[str] = "tokens_done"
    tokens: int


@dataclass(frozen=True, slots=True)
class TokensFailed(PlayEvent):
    """They were not computed, and the passages are used as they were joined."""

    name: ClassVar[str] = "tokens_failed"
    reason: str
