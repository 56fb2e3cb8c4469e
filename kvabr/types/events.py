"""The events of a play, one dataclass each, for logs, reports and telemetry.

To add an event, write its dataclass here and emit it; all outputs handle new fields through `PlayEvent.to_json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

Limit = Literal["network", "publisher", "cpu", "kept"]
"""Limiting factor of a transfer: the path, a peer without data to send, or this process reading too slowly.

``kept``: the bytes were already in the local store.
"""


@dataclass(frozen=True, slots=True)
class PlayEvent:
    """An event of a play."""

    name: ClassVar[str] = ""
    t: float
    """Seconds after the play began."""
    late: bool = field(default=False, kw_only=True)
    """True after delivery, for upgrades."""

    def to_json(self) -> dict[str, Any]:
        """Return ``t``, ``event`` (the name) and the fields; optional ones only if set."""
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
    """Trace of a replay; QUIC library of a real play."""
    start_s: float
    policy: str
    estimator: str
    deadline_s: float
    """Seconds after ``t`` = 0."""
    engine_mode: str
    groups: int
    asset: str
    tracks: tuple[str, ...]
    track_bytes: tuple[int, ...]
    worth_playing: tuple[str, ...]
    """On the Pareto front of bytes against loss."""
    fp16_bytes: int
    """Size of the exact cache at 16 bits per element."""
    rtt_s: float | None
    """Round trip; None if unknown."""
    lookup_s: float | None = None
    """Part of the deadline spent on the lookup; None in a replay."""
    tail: int = 0
    """Tokens that the engine computes after the cache, including the question; losses apply after them."""
    tail_s: float = 0.0
    """Extra seconds of the engine call for cached ones."""


@dataclass(frozen=True, slots=True)
class LookupFailed(PlayEvent):
    """The lookup at the origin failed."""

    name: ClassVar[str] = "lookup_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class SourceLeftOut(PlayEvent):
    """A source of the play has none of the cache, or lacks tracks."""

    name: ClassVar[str] = "source_left_out"
    source: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProfileFailed(PlayEvent):
    """The codec profile did not arrive; the play continues without the tracks that need it."""

    name: ClassVar[str] = "profile_failed"
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsPublished(PlayEvent):
    """The producer of a cache during prefill has published more groups."""

    name: ClassVar[str] = "published"
    edge: int
    ends_s: float
    """Expected time of the last group, seconds after the play began; the actual time once it exists."""


@dataclass(frozen=True, slots=True)
class ProducerStopped(PlayEvent):
    """The producer of an incomplete cache has stopped."""

    name: ClassVar[str] = "producer_stopped"
    edge: int
    reason: str


@dataclass(frozen=True, slots=True)
class SoonerAlone(PlayEvent):
    """The player's engine would prefill the prompt sooner than its producer."""

    name: ClassVar[str] = "sooner_alone"
    alone_s: float
    """Seconds from now on."""
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
    """The play returned or raised; the last event in telemetry."""

    name: ClassVar[str] = "ended"
    error: str | None
    """Exception class name; None if the play returned."""
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
    """Expected, bytes per second; 0.0 if unknown."""
    lower: float
    """Lower bound, bytes per second."""
    ttfb_s: float
    """Expected seconds to the first byte of a request."""
    slack_s: float | None
    """Seconds to the deadline minus those needed for the rest; None if no rate is known."""
    alternatives: Mapping[str, float] | None
    """Track to bytes, or to the number that the policy compared."""


@dataclass(frozen=True, slots=True)
class WorkDivided(PlayEvent):
    """The policy divides the remaining work between network and engine. Times are seconds from then on."""

    name: ClassVar[str] = "division"
    first: int
    last: int
    """Group after the engine's last; equal to `first` if the engine computes none."""
    network_s: float
    engine_s: float
    play_s: float
    """If the network fetched everything."""
    compute_s: float
    """If the engine computed everything."""
    known: bool


@dataclass(frozen=True, slots=True)
class ProgressMade(PlayEvent):
    """A tick during requests: received bytes and the estimator's state."""

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
    """A passage that the origin has is computed instead of joined."""

    name: ClassVar[str] = "passage_refused"
    passage: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokensChosen(PlayEvent):
    """The order of recomputing the passages' tokens is known."""

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
    """Recomputation failed; the passages are used as joined."""

    name: ClassVar[str] = "tokens_failed"
    reason: str
