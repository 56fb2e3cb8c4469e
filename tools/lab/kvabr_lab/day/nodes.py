"""Simulates a day of agent sessions on several nodes, to measure the gain from hints and prefetching.

- Each node has an engine with a prompt cache (LRU), a store of groups (kvabr's own), a link to the origin, and one
  prefill at a time.
- A turn first uses the engine's cache. Further published groups are loaded from the node's store or over the link if
  that is faster than computing. Plays use the link in request order; prefetching uses the remaining capacity.
- A prompt is published some time after its first token; its answer is published with the next turn.
- With hints, the node of an answer (`keep`), or of the next turn (`prefetch`), fetches the published part of the prompt
  that its store does not have, and keeps it for some time. It is not known which turn is the last of a session.

The router keeps a session on its node (`sticky`), sends each turn to the node with the shortest queue (`any`), or does
so only if the session's own node is busy (`spill`). For `prefetch` it chooses the node before the next turn; `spill`
changes the choice if that node is busy at the turn.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple, get_args

from kvabr.store.lru import ByteLru
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr_lab.day.requests import TOKEN_S
from kvabr_lab.day.sessions import SessionTurn
from kvabr_lab.route import CacheSize

RouterKind = Literal["sticky", "any", "spill"]
HintKind = Literal["none", "keep", "prefetch"]
ROUTERS: tuple[RouterKind, ...] = get_args(RouterKind)
HINTS: tuple[HintKind, ...] = get_args(HintKind)
_MIN_BUSY_S = 1.0
"""Seconds of queue from which `spill` sends a turn elsewhere."""


class GroupKey(NamedTuple):
    """A group's number, and the part of a prompt in which the group ends, which identifies everything before it."""

    part: int
    group: int


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The nodes and their connections to the origin."""

    cost: PrefillCost
    cache: CacheSize
    rate: float
    """Rate of a node's link, bytes/s."""
    nodes: int = 4
    engine_tokens: int = 400_000
    store_tokens: int = 1_000_000
    keep_s: float = 600.0
    rtt_s: float = 0.02
    publish_s: float = 2.0
    """Seconds from a turn's first token until its prompt is published."""
    router: RouterKind = "sticky"
    hints: HintKind = "none"

    def __post_init__(self) -> None:
        if not (self.nodes >= 1 and self.rate > 0):
            raise UsageError(
                f"there must be at least 1 node and a rate above 0 bytes/s, got {self.nodes} and {self.rate}"
            )
        if min(self.engine_tokens, self.store_tokens, self.keep_s, self.rtt_s, self.publish_s) < 0:
            raise UsageError("sizes of engine and store, and all times, must be 0 or more")


@dataclass(slots=True)
class FleetOutcome:
    """Results of a day."""

    ttft_s: list[float] = field(default_factory=list)
    """TTFT in seconds of every turn except the first of each session."""
    link_bytes: float = 0.0
    hint_bytes: float = 0.0
    unused_bytes: float = 0.0
    """Prefetched bytes that no play of the same node used."""
    groups: int = 0
    again: int = 0
    """Number of groups that the same node had received before."""
    computed_tokens: int = 0
    known_tokens: int = 0
    hints: int = 0
    """Number of hints that caused a prefetch."""
    vain: int = 0
    """Number of hints that prefetched only groups that no play of the node used."""


class _Link:
    def __init__(self, rate: float) -> None:
        self._rate, self._busy_s, self._at_s, self._done = rate, 0.0, 0.0, 0.0
        self.ahead: deque[tuple[GroupKey, float]] = deque()

    def play(self, now: float, nbytes: float) -> float:
        self._busy_s = max(now, self._busy_s) + nbytes / self._rate
        return self._busy_s

    def sooner(self, now: float, nbytes: float) -> float:
        return max(now, self._busy_s) + nbytes / self._rate - now

    def arrived(self, now: float) -> list[tuple[GroupKey, float]]:
        self._done += self._rate * max(0.0, now - max(self._at_s, min(now, self._busy_s)))
        self._at_s = now
        found = []
        while self.ahead and self.ahead[0][1] <= self._done:
            found.append(self.ahead.popleft())
            self._done -= found[-1][1]
        if not self.ahead:
            self._done = 0.0
        return found


class _Node:
    def __init__(self, shape: FleetShape, clock: _Clock) -> None:
        size, each = shape.cache.group_tokens, shape.cache.per_token * shape.cache.group_tokens
        room = int(shape.store_tokens * shape.cache.per_token)
        self.link = _Link(shape.rate)
        self.engine: ByteLru[GroupKey, int] = ByteLru(shape.engine_tokens, lambda _: size)
        self.store: ByteLru[GroupKey, int] = ByteLru(room, int, clock=clock)
        self.each = int(each)
        self.free_s = 0.0
        self.fetched: set[GroupKey] = set()
        self.unused: dict[GroupKey, int] = {}
        """Prefetched groups that were not used yet, each with its hint; they may already be evicted."""
        self.coming: dict[GroupKey, tuple[float, int]] = {}
        """Pending prefetches, each with its expiry and hint."""


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Nodes and the turns of a day."""

    def __init__(self, turns: Sequence[SessionTurn], shape: FleetShape) -> None:
        self._turns, self._shape, self._clock = turns, shape, _Clock()
        self._nodes = [_Node(shape, self._clock) for _ in range(shape.nodes)]
        self._published: set[GroupKey] = set()
        self._at: dict[int, tuple[_Node, int]] = {}
        """Node, and last turn, of each session."""
        self._planned: dict[int, _Node] = {}
        """Node of each session's next turn, if decided."""
        self._numbers = count()
        self._events: list[tuple[float, int, str, int]] = []
        self._following: dict[int, list[int]] = {}
        self._followed: set[int] = set()
        self._useful: set[int] = set()
        self._made = FleetOutcome()

    def run(self) -> FleetOutcome:
        """Play the day."""
        for number, turn in enumerate(self._turns):
            if turn.at_s is not None:
                self._later(turn.at_s, "turn", number)
            elif turn.after is not None:
                self._following.setdefault(turn.after, []).append(number)
        while self._events:
            now, _, what, number = heapq.heappop(self._events)
            self._clock.now = now
            turn = self._turns[number]
            if what == "turn":
                self._turn(number, turn, now)
            elif what == "published":
                self._published.update(self._groups(turn))
            else:
                self._hint(number, turn, now)
        made = self._made
        made.unused_bytes = float(sum(len(node.unused) * node.each for node in self._nodes))
        made.hints, made.vain = len(self._followed), len(self._followed - self._useful)
        return made

    def _later(self, at_s: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what, number))

    def _groups(self, turn: SessionTurn) -> list[GroupKey]:
        size, found, end = self._shape.cache.group_tokens, list[GroupKey](), 0
        for part, length in turn.parts:
            end += length
            found += [GroupKey(part, group) for group in range(len(found), end // size)]
        return found

    def _place(self, turn: SessionTurn) -> _Node:
        shortest = min(self._nodes, key=lambda node: (node.free_s, -len(node.engine)))
        own, _ = self._at.get(turn.session, (None, 0))
        own = self._planned.get(turn.session, own)
        if own is None or (self._shape.router == "any" and turn.session not in self._planned):
            return shortest
        return shortest if self._shape.router == "spill" and own.free_s > self._clock.now + _MIN_BUSY_S else own

    def _turn(self, number: int, turn: SessionTurn, now: float) -> None:
        shape, made = self._shape, self._made
        node = self._place(turn)
        self._planned.pop(turn.session, None)
        self._arrive(node, now)
        groups, size = self._groups(turn), shape.cache.group_tokens
        most = max(0, (turn.tokens - 1) // size)  # an engine computes at least one token
        here = next((at for at, key in enumerate(groups[:most]) if key not in node.engine), most)
        there = here
        while there < most and (groups[there] in node.store or groups[there] in self._published):
            there += 1
        missing = [key for key in groups[here:there] if key not in node.store]
        compute_s = shape.cost.seconds(here * size, turn.tokens - here * size)
        rest_s = shape.cost.seconds(there * size, turn.tokens - there * size)
        nbytes = len(missing) * node.each
        fetch_s = shape.rtt_s + (there - here) * size * shape.cache.decode_s
        if missing:
            fetch_s += shape.rtt_s + node.link.sooner(now, nbytes)
        waits_s = max(0.0, node.free_s - now)
        if there > here and max(fetch_s, waits_s) + rest_s < waits_s + compute_s:
            self._use(node, groups[here:there], missing, now)
            begin, work_s, first = max(now + fetch_s, node.free_s), rest_s, there
        else:
            begin, work_s, first = now + waits_s, compute_s, here
            made.known_tokens += size * (there - here)
        made.computed_tokens += turn.tokens - first * size
        node.free_s = begin + work_s
        ttft_s = node.free_s - now
        if turn.after is not None or turn.session in self._at:
            made.ttft_s.append(ttft_s)
        for key in groups:
            node.engine.add(key, 0)
            node.engine.get(key)
        self._at[turn.session] = node, number
        end_s = now + ttft_s + TOKEN_S * turn.answer[1]
        self._later(now + ttft_s + shape.publish_s, "published", number)
        if shape.hints != "none":
            self._later(max(end_s, now + ttft_s + shape.publish_s), "hint", number)
        for following in self._following.get(number, ()):
            self._later(end_s + self._turns[following].gap_s, "turn", following)

    def _use(self, node: _Node, wanted: list[GroupKey], missing: list[GroupKey], now: float) -> None:
        made, taken = self._made, set(missing)
        if missing:
            node.link.play(now, len(missing) * node.each)
            node.link.ahead = deque(one for one in node.link.ahead if one[0] not in taken)
        self._fetched(node, missing)
        for key in wanted:
            node.coming.pop(key, None)
            if key not in taken and (hint := node.unused.pop(key, None)) is not None:
                self._useful.add(hint)
            node.store.add(key, node.each)
            node.store.get(key)
        made.link_bytes += len(missing) * node.each

    def _fetched(self, node: _Node, keys: Sequence[GroupKey]) -> None:
        self._made.groups += len(keys)
        self._made.again += len(node.fetched.intersection(keys))
        node.fetched.update(keys)

    def _arrive(self, node: _Node, now: float) -> None:
        for key, nbytes in node.link.arrived(now):
            until_s, hint = node.coming.pop(key)
            self._fetched(node, [key])
            self._made.link_bytes += nbytes
            self._made.hint_bytes += nbytes
            node.unused[key] = hint
            self._followed.add(hint)
            node.store.add(key, node.each)
            if until_s > now:
                node.store.keep([key], until_s)

    def _hint(self, number: int, turn: SessionTurn, now: float) -> None:
        node, newest = self._at[turn.session]
        if newest != number:
            return
        if self._shape.hints == "prefetch":
            node = self._planned[turn.session] = self._place(turn)
        self._arrive(node, now)
        groups, until_s = self._groups(turn), now + self._shape.keep_s
        node.store.keep(groups, until_s)
        ahead = [key for key in groups if key in self._published and key not in node.store and key not in node.coming]
        for key in ahead:
            node.coming[key] = until_s, number
            node.link.ahead.append((key, node.each))
