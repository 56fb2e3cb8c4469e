"""Plays a session against the link model in a small event loop with the trace as its clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvabr.player.goals.blend import BlendAim
from kvabr.player.session import Session
from kvabr.player.session_types import (
    Action,
    Cancel,
    ChooseTokens,
    Decode,
    Deliver,
    FetchGroup,
    GiveUp,
    PlayRecord,
    Recompute,
    RecomputeTokens,
)
from kvabr.replay.link import Capacity
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.joined import joined_passages

EPSILON = 1e-9
_COMPLETE_BYTES = 0.5
"""A flow is complete if fewer bytes than this are missing."""


@dataclass(slots=True, eq=False)
class _Flow:
    request: int
    size: float
    priority: int
    opens_s: float
    closes_s: float = float("inf")
    """Time when a cancelled flow stops using capacity, seconds."""
    received: float = 0.0
    reported: int = 0
    seen: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class LinkUse:
    """Bytes of the link that did not contribute to the delivered cache."""

    ghost_bytes: float = 0.0
    """Bytes transferred for cancelled requests."""
    waiting_bytes: float = 0.0
    """Bytes that the link could have carried before the deadline, but did not while requests were in flight."""
    cut_bytes: float = 0.0
    """Bytes received for requests that were in flight at the end of the play."""
    cut_reported_bytes: int = 0
    """The part of `cut_bytes` that was reported to the session, which counts it as wasted."""


class Machine:
    """The decoders and the engine of one play."""

    def __init__(
        self,
        session: Session,
        catalog: Catalog,
        cost: PrefillCost | None,
        decode_scale: float,
        decoders: int,
        decode_latency_s: float = 0.0,
    ) -> None:
        self._latency_s, self._now = decode_latency_s, 0.0
        self._batch: list[tuple[int, float]] = []
        """Requests that wait for the next batch, with their seconds of decoding."""
        self._session, self._catalog, self._cost, self._decode_scale = session, catalog, cost, decode_scale
        self._decoders = [0.0] * decoders
        self._decoding: list[tuple[float, int, int, float]] = []
        """Heap of groups being decoded: end, order of the action, request, seconds of decoding."""
        self._decodes = 0
        self._engine: list[tuple[float, Recompute | ChooseTokens | RecomputeTokens]] = []

    def begin(self, action: Decode | Recompute | ChooseTokens | RecomputeTokens, now: float) -> None:
        """Begin an action of the session. Batches begin in `next_s`, when all simultaneous requests are known."""
        self._now = now
        if not isinstance(action, Decode):
            begins_s = max([now, *(end for end, _ in self._engine)])
            self._engine.append((begins_s + self._engine_s(action), action))
            return
        track = self._catalog.by_name[action.track]
        share = self._catalog.share(action.group)
        seconds = track.decode_s * share * self._decode_scale
        if self._latency_s:
            self._batch.append((action.request, seconds))
            return
        end = max(now, heappop(self._decoders)) + seconds
        heappush(self._decoders, end)
        heappush(self._decoding, (end, self._decodes, action.request, seconds))
        self._decodes += 1

    def _engine_s(self, action: Recompute | ChooseTokens | RecomputeTokens) -> float:
        cost, tokens = self._cost, self._catalog.tokens
        assert cost is not None  # noqa: S101  # sessions without a cost model never recompute
        if isinstance(action, Recompute):
            first, last = map(self._catalog.tokens_before, (action.first, action.last))
            return cost.seconds(first, last - first)
        look_s = cost.seconds(tokens, action.question) if action.question else 0.0
        if isinstance(action, ChooseTokens):
            return look_s
        if action.passage is not None:
            tokens = joined_passages(self._catalog)[action.passage].end
        return look_s + (cost.seconds(tokens - action.tokens, action.tokens) if action.tokens else 0.0)

    def _begin_batch(self) -> None:
        if self._batch and self._decoders[0] <= self._now + EPSILON:
            end = self._now + self._latency_s + sum(seconds for _, seconds in self._batch)
            self._decoders[0] = end
            for request, seconds in self._batch:
                heappush(self._decoding, (end, self._decodes, request, seconds))
                self._decodes += 1
            self._batch.clear()

    def next_s(self) -> float:
        """Return the time of the next completion, seconds; infinite if there is none."""
        self._begin_batch()
        decoded_s = self._decoding[0][0] if self._decoding else math.inf
        return min(decoded_s, self._engine[0][0]) if self._engine else decoded_s

    def report(self, now: float) -> None:
        """Report everything that is completed by ``now`` to the session."""
        self._now = now
        while self._decoding and self._decoding[0][0] <= now + EPSILON:
            _, _, request, seconds = heappop(self._decoding)
            self._session.decoded(request, now, seconds)
        while self._engine and self._engine[0][0] <= now + EPSILON:
            _, action = self._engine.pop(0)
            if isinstance(action, Recompute):
                self._session.computed(action.first, action.last, now)
            elif isinstance(aim := self._session.aim, BlendAim):
                if isinstance(action, ChooseTokens):
                    aim.tokens_chosen(now)
                else:
                    aim.tokens_recomputed(now, ahead=action.passage is not None)


class _Pipe:
    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.coming: deque[_Flow] = deque()
        """Flows that wait for their first byte, earliest first."""
        self._open: list[tuple[int, int, _Flow]] = []
        """Heap of the other flows by priority and order of request; may contain completed flows."""
        self.served: _Flow | None = None

    def push(self, flow: _Flow) -> None:
        """Add a flow that can receive its first byte immediately."""
        heappush(self._open, (flow.priority, flow.request, flow))

    def first(self, now: float) -> _Flow | None:
        """Return the open flow that uses the capacity now: lowest priority number, then earliest request."""
        coming, opened = self.coming, self._open
        while coming and coming[0].opens_s <= now + EPSILON:
            self.push(coming.popleft())
        while opened:
            flow = opened[0][2]
            if flow.received < flow.size - _COMPLETE_BYTES and flow.closes_s > now + EPSILON:
                return flow
            heappop(opened)
        return None

    def next_s(self, now: float, then: float) -> float:
        """Return the time of the next change on the link, not after ``then``."""
        served = self.served
        if served is not None:
            # Aim a quarter of a byte short, so that a rounding error cannot move the end past an outage.
            least = served.size - served.received
            then = min(then, served.closes_s, self.capacity.when(now, max(0.0, least - 0.25)))
        for flow in self.coming:
            if flow.opens_s >= then:
                break
            if served is None or flow.priority < served.priority:
                return flow.opens_s
        return then


class Simulator:
    """Drives one `Session` over one `Capacity`, or over one per source."""

    def __init__(
        self,
        session: Session,
        catalog: Catalog,
        capacity: Capacity,
        *,
        rtt_s: float,
        first_byte_s: float = 0.0,
        cost: PrefillCost | None = None,
        decode_scale: float = 1.0,
        decoders: int = 1,
        decode_latency_s: float = 0.0,
        published_s: Sequence[float] = (),
    ) -> None:
        """Prepare a play; `run` starts it.

        ``first_byte_s`` is the processing time of a request at both ends; ``decode_latency_s`` is as in
        `kvabr.replay.experiment.ReplayOptions`; ``published_s`` are the publication times of a live asset's groups,
        ascending.
        """
        self._published_s = [time_s + rtt_s / 2 for time_s in published_s]
        """Times when the player is informed of each group, and its base starts to arrive."""
        self._published = 0
        self._session, self._rtt_s = session, rtt_s
        self._pipes = [_Pipe(link) for link in capacity.links]
        self._first_byte_s = rtt_s + first_byte_s
        self._flows: dict[int, tuple[_Flow, _Pipe]] = {}
        self._machine = Machine(session, catalog, cost, decode_scale, decoders, decode_latency_s)
        self.use = LinkUse()

    def run(self) -> PlayRecord:
        """Play to the end.

        Raises:
            PolicyError: the session's policy raised it.
        """
        session = self._session
        now = 0.0
        session.start(now)
        self._obey(now)
        while not session.over:
            for pipe in self._pipes:
                pipe.served = pipe.first(now)
            then = self._next(now)
            self._carry(now, then)
            now = then
            self._report(now)
            self._obey(now)
        return session.record

    def _obey(self, now: float) -> None:
        actions = self._session.actions()
        if actions and isinstance(actions[-1], Deliver | GiveUp):
            self._close(actions)
        for action in actions:
            if isinstance(action, FetchGroup):
                flow = _Flow(action.request, action.bytes, action.priority, now + self._first_byte_s)
                pipe = self._pipes[action.source]
                self._flows[action.request] = flow, pipe
                if action.pushed:
                    flow.opens_s = now
                    pipe.push(flow)
                else:
                    pipe.coming.append(flow)
            elif isinstance(action, Decode | Recompute | ChooseTokens | RecomputeTokens):
                self._machine.begin(action, now)
            elif isinstance(action, Cancel) and (found := self._flows.pop(action.request, None)) is not None:
                cut, _ = found
                cut.cancelled = True
                cut.closes_s = now + self._rtt_s
                if cut.opens_s >= cut.closes_s - EPSILON:
                    cut.size = 0.0

    def _close(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Cancel) and (found := self._flows.get(action.request)) is not None:
                self.use.cut_bytes += found[0].received
                self.use.cut_reported_bytes += found[0].reported

    def _next(self, now: float) -> float:
        then = self._session.next_timer()
        assert then is not None  # noqa: S101  # the play is not over yet
        then = min(then, self._machine.next_s(), *self._published_s[self._published : self._published + 1])
        for pipe in self._pipes:
            then = pipe.next_s(now, then)
        return max(then, now)

    def _carry(self, now: float, then: float) -> None:
        if then <= now:
            return
        for pipe in self._pipes:
            if (served := pipe.served) is not None:
                carried = pipe.capacity.between(now, then)
                served.received = min(served.size, served.received + carried)
                if served.cancelled:
                    self.use.ghost_bytes += carried
            elif self._flows:
                until = min(then, self._session.view.deadline_s)
                if until > now:
                    self.use.waiting_bytes += pipe.capacity.between(now, until)

    def _report(self, now: float) -> None:
        session = self._session
        timer = session.next_timer()
        due = timer is not None and timer <= now + EPSILON
        for pipe in self._pipes:
            self._report_transfers(now, pipe, due=due)
        self._machine.report(now)
        while self._published < len(self._published_s) and self._published_s[self._published] <= now + EPSILON:
            self._published += 1
            session.published(self._published, now)
        if due:
            session.timer(now)

    def _report_transfers(self, now: float, pipe: _Pipe, *, due: bool) -> None:
        session, served, following = self._session, pipe.served, pipe.first(now)
        # The first byte of the next flow follows directly after the last byte of the previous one.
        for flow in (served, following):
            if flow is None or flow.seen or flow.cancelled:
                continue
            if flow.received > 0 or (flow is following and pipe.capacity.rate(now) > 0):
                flow.seen = True
                session.first_byte(flow.request, now)
        if due:
            for flow, where in self._flows.values():
                if flow.received and flow is not served and where is pipe:
                    self._report_progress(flow, now)
        if served is not None and not served.cancelled:
            if served.received >= served.size - _COMPLETE_BYTES:
                del self._flows[served.request]
                session.done(served.request, now)
            elif due or following is not served:  # report progress of a flow interrupted by a more urgent one
                self._report_progress(served, now)

    def _report_progress(self, flow: _Flow, now: float) -> None:
        flow.reported = int(flow.received)
        self._session.progress(flow.request, flow.reported, now)
