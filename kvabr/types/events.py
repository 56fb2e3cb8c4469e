"""The events of a play, one dataclass each, for logs, reports and telemetry.

To add an event, write its dataclass here and emit it; all outputs handle new fields through `PlayEvent.to_json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

Limit = Literal["network", "publisher", "cpu", "kept"]
"""What limited a transfer: the network path, a peer without data to send, or this process, which reads too slowly.

``kept``: the bytes were already in the local store.
"""


@dataclass(frozen=True, slots=True)
class PlayEvent:
    """An event of a play."""

    name: ClassVar[str] = ""
    t: float
    """Seconds after the play began."""
    late: bool = field(default=False, kw_only=True)
    """True for events after delivery, in upgrades."""

    def to_json(self) -> dict[str, Any]:
        """Return ``t``, ``event`` (the event's name) and the fields; optional fields only if they are set."""
        values = [(one, getattr(self, one.name)) for one in fields(self)]
        needed = {one.name: value for one, value in values if one.default is MISSING}
        chosen = {one.name: value for one, value in values if one.default is not MISSING and value != one.default}
        return {"t": self.t, "event": self.name, **needed, **chosen}


Log = Callable[[PlayEvent], None]


@dataclass(frozen=True, slots=True)
class PlayCalled(PlayEvent):
    """A play was called and its lookup begins; the first event in telemetry."""

    name: ClassVar[str] = "called"


@dataclass(frozen=True, slots=True)
class PlayStarted(PlayEvent):
    """The catalog is known, and the session begins."""

    name: ClassVar[str] = "start"
    trace: str
    """Name of a replay's trace; the QUIC library of a real play."""
    start_s: float
    policy: str
    estimator: str
    deadline_s: float
    """Deadline in seconds after ``t`` = 0."""
    engine_mode: str
    groups: int
    asset: str
    tracks: tuple[str, ...]
    track_bytes: tuple[int, ...]
    worth_playing: tuple[str, ...]
    """Tracks on the Pareto front of bytes against loss."""
    fp16_bytes: int
    """Size of the exact cache in bytes at 16 bits per element."""
    rtt_s: float | None
    """Round trip time in seconds; None if unknown."""
    lookup_s: float | None = None
    """Seconds of the deadline spent on the lookup; None in a replay."""
    tail: int = 0
    """Tokens that the engine computes after the cache, including the question. Losses are those after these tokens."""
    tail_s: float = 0.0
    """Additional seconds of the engine call, because it computes cached tokens."""


@dataclass(frozen=True, slots=True)
class LookupFailed(PlayEvent):
    """The lookup at the origin failed."""

    name: ClassVar[str] = "lookup_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class SourceLeftOut(PlayEvent):
    """A source does not have the cache, or not all tracks, and is not used."""

    name: ClassVar[str] = "source_left_out"
    source: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProfileFailed(PlayEvent):
    """The codec profile was not received; the play continues without tracks that need it."""

    name: ClassVar[str] = "profile_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsPublished(PlayEvent):
    """The producer of a cache during prefill has published further groups."""

    name: ClassVar[str] = "published"
    edge: int
    ends_s: float
    """Expected time of the last group, in seconds after the play began; the actual time once it is published."""


@dataclass(frozen=True, slots=True)
class ProducerStopped(PlayEvent):
    """The producer stopped before the cache was complete."""

    name: ClassVar[str] = "producer_stopped"
    edge: int
    reason: str


@dataclass(frozen=True, slots=True)
class SoonerAlone(PlayEvent):
    """The player's engine would complete the prefill of the prompt before its producer."""

    name: ClassVar[str] = "sooner_alone"
    alone_s: float
    """Time that the player's engine would take, in seconds."""
    ends_s: float
    """Expected time of the last group, seconds after the play began."""


@dataclass(frozen=True, slots=True)
class CacheDelivered(PlayEvent):
    """The cache was delivered."""

    name: ClassVar[str] = "deliver"
    met: bool
    loss: float


@dataclass(frozen=True, slots=True)
class PlayGaveUp(PlayEvent):
    """The play ended without a cache."""

    name: ClassVar[str] = "gave_up"
    reason: str


@dataclass(frozen=True, slots=True)
class PlayEnded(PlayEvent):
    """The play returned or raised an error; the last event in telemetry."""

    name: ClassVar[str] = "ended"
    error: str | None
    """Name of the exception's class; None if the play returned."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class DecisionMade(PlayEvent):
    """The policy decided, or the player planned recomputation (``kind`` = ``plan``)."""

    name: ClassVar[str] = "decision"
    kind: str
    """``fetch``, ``upgrade``, ``recompute``, ``wait``, ``finish``, ``deliver`` or ``plan``."""
    group: int | None
    track: str | None
    request: int | None
    reason: str
    rate: float
    """Expected rate in bytes per second; 0.0 if unknown."""
    lower: float
    """Lower bound of the rate in bytes per second."""
    ttfb_s: float
    """Expected seconds to the first byte of a request."""
    slack_s: float | None
    """Seconds to the deadline minus the seconds needed for the rest; None if the rate is unknown."""
    alternatives: Mapping[str, float] | None
    """By track, the bytes, or the number that the policy compared."""


@dataclass(frozen=True, slots=True)
class WorkDivided(PlayEvent):
    """The policy divides the remaining work between network and engine. Times are in seconds after this event."""

    name: ClassVar[str] = "division"
    first: int
    last: int
    """Group after the engine's last group; equal to `first` if the engine computes none."""
    network_s: float
    engine_s: float
    play_s: float
    """Time if the network fetched everything."""
    compute_s: float
    """Time if the engine computed everything."""
    known: bool


@dataclass(frozen=True, slots=True)
class ProgressMade(PlayEvent):
    """A regular update during requests: received bytes, and the estimator's state."""

    name: ClassVar[str] = "progress"
    received: int
    rate: float
    lower: float
    slack_s: float | None


@dataclass(frozen=True, slots=True)
class SampleLimited(PlayEvent):
    """A throughput sample was not limited by the network."""

    name: ClassVar[str] = "limited"
    by: Limit
    rate: float
    fed: bool


@dataclass(frozen=True, slots=True)
class FirstByteReceived(PlayEvent):
    """The first byte of a request arrived."""

    name: ClassVar[str] = "first_byte"
    request: int


@dataclass(frozen=True, slots=True)
class TransferEvent(PlayEvent):
    """An event of one request."""

    request: int
    group: int
    track: str


@dataclass(frozen=True, slots=True)
class RequestSent(TransferEvent):
    """A group was requested."""

    name: ClassVar[str] = "request"
    bytes: int
    source: int = 0


@dataclass(frozen=True, slots=True)
class RequestDone(TransferEvent):
    """The last byte of a request arrived."""

    name: ClassVar[str] = "done"
    bytes: int


@dataclass(frozen=True, slots=True)
class RequestCancelled(TransferEvent):
    """The player cancelled a request."""

    name: ClassVar[str] = "cancel"
    received: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestFailed(TransferEvent):
    """A request failed in transfer or decoding."""

    name: ClassVar[str] = "failed"
    received: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDecoded(TransferEvent):
    """A group is decoded and in place."""

    name: ClassVar[str] = "decoded"


@dataclass(frozen=True, slots=True)
class RecomputeEvent(PlayEvent):
    """An event of recomputing groups ``first`` to ``last`` - 1."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RecomputeStarted(RecomputeEvent):
    """The engine started to compute groups."""

    name: ClassVar[str] = "recompute_start"


@dataclass(frozen=True, slots=True)
class RecomputeDone(RecomputeEvent):
    """The computed groups are in place."""

    name: ClassVar[str] = "recompute_done"


@dataclass(frozen=True, slots=True)
class RecomputeFailed(RecomputeEvent):
    """The engine failed; the session does not use it again."""

    name: ClassVar[str] = "recompute_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class PassageRefused(PlayEvent):
    """A passage is computed instead of joined, although the origin has it."""

    name: ClassVar[str] = "passage_refused"
    passage: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokensChosen(PlayEvent):
    """The order in which the passages' tokens will be recomputed is known."""

    name: ClassVar[str] = "tokens_chosen"


@dataclass(frozen=True, slots=True)
class TokensStarted(PlayEvent):
    """The engine started to recompute some tokens of passages."""

    name: ClassVar[str] = "tokens_start"
    tokens: int
    share: float
    reason: str


@dataclass(frozen=True, slots=True)
class TokensDone(PlayEvent):
    """The recomputed tokens are in place."""

    name: ClassVar[str] = "tokens_done"
    tokens: int


@dataclass(frozen=True, slots=True)
class TokensFailed(PlayEvent):
    """Recomputation failed; the passages are used without it."""

    name: ClassVar[str] = "tokens_failed"
    reason: str
