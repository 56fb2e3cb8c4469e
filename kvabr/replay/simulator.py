"""Plays a session against the link model: a small event loop whose clock is the trace."""

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
"""Seconds that two events at the same time may be apart by rounding."""
_WHOLE = 0.5
"""A flow that lacks fewer bytes than this is complete."""


@dataclass(slots=True, eq=False)
class _Flow:
    request: int
    size: float
    priority: int
    opens_s: float
    """When its first byte can come."""
    closes_s: float = float("inf")
    """When a cancelled flow stops taking capacity."""
    received: float = 0.0
    told: int = 0
    """Bytes reported to the session."""
    seen: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class LinkUse:
    """Link bytes that are not part of the delivered cache; they explain why it is no better."""

    ghost_bytes: float = 0.0
    """Bytes that the link carried for cancelled requests."""
    waiting_bytes: float = 0.0
    """Bytes that the link could have carried by the deadline while it served none of the requests in flight."""
    cut_bytes: float = 0.0
    """Bytes received of requests that were in flight when the play ended."""
    cut_told_bytes: int = 0
    """Bytes of `cut_bytes` that were reported to the session, which counts them as wasted."""


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
        """Begin idle; the arguments are those of `Simulator`."""
        self._latency_s, self._now = decode_latency_s, 0.0
        self._batch: list[tuple[int, float]] = []
        """What waits for the next batch, if there are any: request, and seconds of decoding."""
        self._session, self._catalog, self._cost, self._decode_scale = session, catalog, cost, decode_scale
        self._decoders = [0.0] * decoders
        """Heap of the times at which the decoders have finished everything they were given."""
        self._decoding: list[tuple[float, int, int, float]] = []
        """Heap of the groups being decoded: when that ends, order of the action, request, seconds of decoding."""
        self._decodes = 0
        self._engine: list[tuple[float, Recompute | ChooseTokens | RecomputeTokens]] = []
        """What the engine does, one after the other, and when each ends."""

    def begin(self, action: Decode | Recompute | ChooseTokens | RecomputeTokens, now: float) -> None:
        """Begin what the session asks for; a batch once it has asked for all of it."""
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
        """Return the seconds that the engine takes for an action."""
        cost, tokens = self._cost, self._catalog.tokens
        assert cost is not None  # noqa: S101  # a session without a cost model asks for no recompute
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
        """Decode everything that waits together, if the device is idle."""
        if self._batch and self._decoders[0] <= self._now + EPSILON:
            end = self._now + self._latency_s + sum(seconds for _, seconds in self._batch)
            self._decoders[0] = end
            for request, seconds in self._batch:
                heappush(self._decoding, (end, self._decodes, request, seconds))
                self._decodes += 1
            self._batch.clear()

    def next_s(self) -> float:
        """Return when something is done next, seconds; infinite if nothing is being done."""
        self._begin_batch()
        decoded_s = self._decoding[0][0] if self._decoding else math.inf
        return min(decoded_s, self._engine[0][0]) if self._engine else decoded_s

    def tell(self, now: float) -> None:
        """Report to the session what is done by ``now``."""
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
    """The link of one source, and the flows on it."""

    def __init__(self, capacity: Capacity) -> None:
        """Begin without flows."""
        self.capacity = capacity
        self.coming: deque[_Flow] = deque()
        """Flows whose first byte cannot come yet, the earliest first."""
        self._open: list[tuple[int, int, _Flow]] = []
        """Heap of the others by priority and order of request; it may hold completed flows."""
        self.served: _Flow | None = None
        """The open flow that gets the capacity now."""

    def push(self, flow: _Flow) -> None:
        """Take a flow whose first byte can come at once."""
        heappush(self._open, (flow.priority, flow.request, flow))

    def first(self, now: float) -> _Flow | None:
        """Return the open flow that gets the capacity now: lowest priority number, then first requested."""
        coming, opened = self.coming, self._open
        while coming and coming[0].opens_s <= now + EPSILON:
            self.push(coming.popleft())
        while opened:
            flow = opened[0][2]
            if flow.received < flow.size - _WHOLE and flow.closes_s > now + EPSILON:
                return flow
            heappop(opened)
        return None

    def next_s(self, now: float, then: float) -> float:
        """Return when something changes on the link next, ``then`` at the latest."""
        served = self.served
        if served is not None:
            # Aim a quarter of a byte short, so that a rounding error cannot put the end behind an outage.
            least = served.size - served.received
            then = min(then, served.closes_s, self.capacity.when(now, max(0.0, least - 0.25)))
        for flow in self.coming:
            if flow.opens_s >= then:
                break
            if served is None or flow.priority < served.priority:
                return flow.opens_s
        return then


class Simulator:
    """Drives one `Session` over one `Capacity`, or over one for each of its sources."""

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
        """Prepare a play; nothing happens before `run`.

        Args:
            session: a fresh session.
            catalog: the session's catalog.
            capacity: the link, or several.
            rtt_s: round trip, seconds.
            first_byte_s: seconds that both ends need to handle a request.
            cost: what the engine's prefill costs; None for no engine.
            decode_scale: factor for the catalog's decode times.
            decoders: threads that decode, each a group at a time.
            decode_latency_s: seconds that decoding a batch takes besides those of its groups, on a device that decodes
                all that waits together; 0: groups are decoded one by one.
            published_s: when each group of a live asset is published, ascending, seconds; empty: all are.
        """
        self._published_s = [time_s + rtt_s / 2 for time_s in published_s]
        """When the player hears of each group, and its base begins to arrive."""
        self._heard = 0
        self._session, self._rtt_s = session, rtt_s
        self._pipes = [_Pipe(link) for link in capacity.links]
        self._first_byte_s = rtt_s + first_byte_s
        self._flows: dict[int, tuple[_Flow, _Pipe]] = {}
        """Requests whose progress is reported to the session, by number."""
        self._machine = Machine(session, catalog, cost, decode_scale, decoders, decode_latency_s)
        self.use = LinkUse()
        """Accounts for the link's bytes."""

    def run(self) -> PlayRecord:
        """Play to the end.

        Raises:
            PolicyError: from the session's policy.
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
            self._tell(now)
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
        """Count what was in flight when the play ended."""
        for action in actions:
            if isinstance(action, Cancel) and (found := self._flows.get(action.request)) is not None:
                self.use.cut_bytes += found[0].received
                self.use.cut_told_bytes += found[0].told

    def _next(self, now: float) -> float:
        """Return the time of the next event."""
        then = self._session.next_timer()
        assert then is not None  # noqa: S101  # the play is not over
        then = min(then, self._machine.next_s(), *self._published_s[self._heard : self._heard + 1])
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

    def _tell(self, now: float) -> None:
        """Report to the session what has happened by ``now``."""
        session = self._session
        timer = session.next_timer()
        due = timer is not None and timer <= now + EPSILON
        for pipe in self._pipes:
            self._tell_transfers(now, pipe, due=due)
        self._machine.tell(now)
        while self._heard < len(self._published_s) and self._published_s[self._heard] <= now + EPSILON:
            self._heard += 1
            session.published(self._heard, now)
        if due:
            session.timer(now)

    def _tell_transfers(self, now: float, pipe: _Pipe, *, due: bool) -> None:
        session, served, following = self._session, pipe.served, pipe.first(now)
        # The first bytes of the next flow come right after the last of the one before.
        for flow in (served, following):
            if flow is None or flow.seen or flow.cancelled:
                continue
            if flow.received > 0 or (flow is following and pipe.capacity.rate(now) > 0):
                flow.seen = True
                session.first_byte(flow.request, now)
        if due:
            for flow, where in self._flows.values():
                if flow.received and flow is not served and where is pipe:
                    self._tell_progress(flow, now)
        if served is not None and not served.cancelled:
            if served.received >= served.size - _WHOLE:
                del self._flows[served.request]
                session.done(served.request, now)
            elif due or following is not served:  # what a more urgent one interrupts is reported by then
                self._tell_progress(served, now)

    def _tell_progress(self, flow: _Flow, now: float) -> None:
        flow.told = int(flow.received)
        self._session.progress(flow.request, flow.told, now)
