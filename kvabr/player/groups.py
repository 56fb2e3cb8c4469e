"""The groups of a play: their stages, the policy's view of them, and the order and time of decoding.

A group's `Stage` follows from its layers, the track in place, and the engine's queue. `Groups.restage` updates it, and
the sets that policies and planners read.

The `DecodeQueue` decodes missing groups first, and groups that the policy will replace last. A group with more layers
in flight waits briefly, so that they are decoded together, unless time is short or an engine needs everything before
its own groups.

Decoding time (`DecodeRates`) is a latency per batch plus seconds per group. A CPU decodes groups one by one without
latency; a GPU decodes all received groups together. Every decoded group corrects the seconds of all tracks of its
family.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from statistics import median

from kvabr.abr.view import GroupSet, Transfer, View
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.session_types import GroupRecords
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import UsageError


class Stage(IntEnum):
    """Stage of a group; up to `LEFT`, it has no independently decodable layer."""

    UNPUBLISHED = 0
    MISSING = 1
    REQUESTED = 2
    LEFT = 3
    """Assigned to the engine; may also be in flight."""
    COMPUTING = 4
    ARRIVED = 5
    """Its base has arrived."""
    PLACED = 6
    """In place; upgrades may be in flight."""
    COMPUTED = 7


TRANSITIONS: Mapping[Stage, Sequence[Stage]] = {
    Stage.UNPUBLISHED: (Stage.MISSING, Stage.REQUESTED, Stage.LEFT),
    Stage.MISSING: (Stage.REQUESTED, Stage.LEFT),
    Stage.REQUESTED: (Stage.ARRIVED, Stage.MISSING, Stage.LEFT),
    Stage.LEFT: (Stage.COMPUTING, Stage.MISSING, Stage.REQUESTED, Stage.ARRIVED, Stage.UNPUBLISHED),
    Stage.COMPUTING: (Stage.COMPUTED, Stage.MISSING, Stage.ARRIVED, Stage.PLACED, Stage.UNPUBLISHED),
    Stage.ARRIVED: (Stage.PLACED, Stage.MISSING, Stage.REQUESTED, Stage.LEFT, Stage.COMPUTING),
    Stage.PLACED: (Stage.COMPUTING,),
    Stage.COMPUTED: (),
}
"""Possible next stages. Groups fall back after a failure or cancellation, or if the engine fails."""


class GroupProgress:
    """The transfers of one group that are not in place yet.

    The best track whose layers have all arrived is decoded in one batch. Layers that it replaces are kept until then,
    in case it is damaged.
    """

    __slots__ = ("_loss", "_stacks", "arrived", "decoding", "flying")

    def __init__(self, stacks: Mapping[str, Sequence[str]], loss: Callable[[int, str], float]) -> None:
        """``stacks``: layers of each track (`Ladder.stacks`); ``loss``: that of a group on a track (`View.loss`)."""
        self._stacks, self._loss = stacks, loss
        self.flying: tuple[Transfer, ...] = ()  # empty tuples are not tracked by the garbage collector
        self.arrived: tuple[Transfer, ...] = ()
        self.decoding: tuple[Transfer, ...] = ()

    @property
    def idle(self) -> bool:
        """True if no transfer of the group is in progress."""
        return not (self.flying or self.arrived or self.decoding)

    def has(self, tracks: Container[str]) -> bool:
        """Return True if any of these tracks has arrived or is being decoded."""
        return any(transfer.track in tracks for transfer in (*self.arrived, *self.decoding))

    def top(self) -> str | None:
        """Return the last requested track, first of those in flight, or None."""
        for transfers in (self.flying, self.arrived, self.decoding):
            if transfers:
                return max(transfers, key=lambda one: one.request).track
        return None

    def here(self) -> str | None:
        """Return the last requested track that has arrived, or None."""
        for transfers in (self.arrived, self.decoding):
            if transfers:
                return max(transfers, key=lambda one: one.request).track
        return None

    def decodable(self, placed: str | None) -> tuple[Transfer, ...]:
        """Return the layers to decode next, lowest first: of a track that refines the present one, or is better."""
        if not self.arrived or placed == RECOMPUTED:
            return ()
        below = self.decoding[-1].track if self.decoding else placed
        here = {transfer.track: transfer for transfer in self.arrived}
        for top in sorted(self.arrived, key=lambda one: (self._loss(one.group, one.track), -one.request)):
            layers = self._stacks[top.track]
            if below in layers:
                layers = layers[layers.index(below) + 1 :]
            elif below is not None and self._loss(top.group, top.track) >= self._loss(top.group, below):
                continue  # the first layers of a stack may be worse than another track in place
            if all(layer in here for layer in layers):
                return tuple(here[layer] for layer in layers)
        return ()

    def begin_decoding(self, placed: str | None) -> tuple[Transfer, ...]:
        """Move the decodable layers to `decoding`, and return them."""
        self.decoding = self.decodable(placed)
        self.arrived = tuple(transfer for transfer in self.arrived if transfer not in self.decoding)
        return self.decoding

    def end_decoding(self) -> tuple[Transfer, ...]:
        """Remove and return the decoded batch."""
        batch, self.decoding = self.decoding, ()
        return batch

    def land(self, transfer: Transfer) -> None:
        """Remove a transfer from those in flight."""
        self.flying = tuple(one for one in self.flying if one is not transfer)

    def drop(self, transfer: Transfer) -> None:
        """Remove a transfer that has arrived."""
        self.arrived = tuple(one for one in self.arrived if one is not transfer)

    def superseded(self, placed: Transfer) -> list[Transfer]:
        """Return received layers that ``placed`` makes useless: requested earlier, and not refining it."""
        return [
            transfer
            for transfer in self.arrived
            if transfer.request < placed.request and placed.track not in self._stacks[transfer.track]
        ]

    def above(self, track: str) -> list[Transfer]:
        """Return the transfers that need ``track`` below them, highest first."""
        others = (*self.arrived, *self.flying)
        found = [one for one in others if one.track != track and track in self._stacks[one.track]]
        return sorted(found, key=lambda one: -len(self._stacks[one.track]))


class Groups(dict[int, GroupProgress]):
    """The groups of a play; maps groups with transfers to their progress."""

    def __init__(self, view: View, records: GroupRecords) -> None:
        super().__init__()
        self._view, self._records, self._bases = (
            view,
            records,
            frozenset(t.name for t in view.catalog.tracks if t.refines is None),
        )
        self.engine: ComputeQueue | None = None
        self._stages = bytearray([Stage.MISSING]) * view.groups
        self.absent = GroupSet(view.groups)
        """Groups that have not arrived and are not being computed; they may be in flight."""
        self.in_place = 0

    def __missing__(self, group: int) -> GroupProgress:
        made = self[group] = GroupProgress(self._view.ladder.stacks, self._view.loss)
        return made

    @property
    def complete(self) -> bool:
        """True if every group is in place."""
        return self.in_place == self._view.groups

    def rest(self, group: int) -> None:
        """Delete the progress of a group without transfers."""
        if group in self and self[group].idle:
            del self[group]

    def here(self, group: int) -> str | None:
        """Return the track of a group that is received or in place, or None."""
        return self[group].here() or self._records[group].track

    def stage(self, group: int) -> Stage:
        """Return the stage of a group."""
        return Stage(self._stages[group])

    def restage(self, groups: Iterable[int]) -> None:
        """Update the stages of groups after a change."""
        view, stages, engine = self._view, self._stages, self.engine
        for group in groups:
            before, stage = stages[group], self._found(group)
            if stage == before:
                continue
            stages[group] = stage
            if (stage <= Stage.LEFT) != (before <= Stage.LEFT):
                absent = stage <= Stage.LEFT
                (self.absent.add if absent else self.absent.discard)(group)
                if engine is not None:
                    engine.absent(group, absent=absent)
            if stage == Stage.MISSING:
                view.missing_groups.add(group)
            elif before == Stage.MISSING:
                view.missing_groups.discard(group)
        while view.solid < view.groups and stages[view.solid] >= Stage.PLACED:
            view.solid += 1

    def _found(self, group: int) -> Stage:
        engine, placed, progress = self.engine, self._records.track(group), self.get(group)
        if placed == RECOMPUTED:
            return Stage.COMPUTED
        if engine is not None and engine.computes(group):
            return Stage.COMPUTING
        if placed is not None:
            return Stage.PLACED
        if progress is not None and progress.has(self._bases):
            return Stage.ARRIVED
        if engine is not None and engine.takes(group):
            return Stage.LEFT
        if progress is not None and progress.flying:
            return Stage.REQUESTED
        return Stage.MISSING if group < self._view.edge else Stage.UNPUBLISHED

    def settle(self, group: int) -> None:
        """Mark a received group as upgradable in the view, unless it has transfers in flight."""
        if self.stage(group) in (Stage.ARRIVED, Stage.PLACED) and not self[group].flying:
            self._view.settled.add(group)

    def fall_back(self, group: int) -> None:
        """Update the view after a loss: the group keeps its best track in flight, received or in place."""
        view, progress = self._view, self[group]
        self.restage((group,))
        stage = self.stage(group)
        if stage in (Stage.COMPUTING, Stage.COMPUTED):
            view.track_of[group] = RECOMPUTED
            return
        top = view.track_of[group] = progress.top() or self._records[group].track
        if stage <= Stage.LEFT:
            for transfer in progress.flying:
                if transfer.upgrade and transfer.track in self._bases:
                    view.in_flight.require(transfer)
        elif top is not None:
            self.settle(group)


_WINDOW = 9
"""Number of decoded groups per correction; their median tolerates four delayed ones."""
_MAX_LOG = math.log(1024)
"""Larger log ratios are clipped: a clock jumped, or a process slept."""


def family(track: str) -> str:
    """Return a track's family, whose tracks share a decoder: the name up to the first hyphen."""
    return track.partition("-")[0]


class DecodeRates:
    """Seconds to decode a full group of each track. Not thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        measured: Mapping[str, float] | None = None,
        latencies: Mapping[str, float] | None = None,
    ) -> None:
        """Start with the times in the catalog.

        ``measured``: seconds to check and decode each further full group of a batch, by track; ``latencies``:
        additional seconds per batch, by family. Raises `UsageError` for impossible times.
        """
        self._latencies = dict(latencies or {})
        for name, seconds in self._latencies.items():
            if not 0 <= seconds < math.inf:
                raise UsageError(
                    f"the latency of a {name} batch must be 0 or more seconds and finite, got {seconds}; measure again"
                )
        self._table = {track.name: track.decode_s for track in catalog.tracks}
        for track, seconds in (measured or {}).items():
            if not 0 < seconds < math.inf:
                raise UsageError(
                    f"the decode time of {track} must be positive and finite, got {seconds} s; measure again"
                )
            if track in self._table:
                self._table[track] = float(seconds)
        self._observed: dict[str, deque[float]] = {}
        """Logarithms of observed over expected seconds, by family."""
        self._known: dict[str, float] = {}
        """Corrections by family, until the next observation."""

    def seconds(self, track: str) -> float:
        """Return the seconds to decode a full group; 0.0 if unknown."""
        return self._table[track] * self.correction(track)

    def latency(self, track: str) -> float:
        """Return the additional seconds per batch."""
        return self._latencies.get(family(track), 0.0)

    def correction(self, track: str) -> float:
        """Return the ratio of observed to expected decoding times."""
        kind = family(track)
        if (known := self._known.get(kind)) is None:
            # A machine that is slow for one family is probably slow for all.
            observed = self._observed.get(kind) or [median(other) for other in self._observed.values()] or [0.0]
            known = self._known[kind] = math.exp(median(observed))
        return known

    def observe(self, track: str, share: float, seconds: float) -> None:
        """Record the time to decode a group up to ``track``; ignore impossible times, as after a clock change.

        ``share``: the group's tokens as a fraction of a full group; ``seconds``: of one thread, without batch latency.
        """
        if not (0 < seconds < math.inf and share > 0):
            return
        self._known.clear()
        expected = self._table[track] * share
        if expected <= 0:
            self._table[track] = seconds / share / self.correction(track)
            return
        log = min(_MAX_LOG, max(-_MAX_LOG, math.log(seconds / expected)))
        self._observed.setdefault(family(track), deque([0.0], maxlen=_WINDOW)).append(log)


class SharedDecodeRate:
    """Decode rates of a play that shares the decoders with others."""

    def __init__(self, rates: DecodeRates, plays: Callable[[], int]) -> None:
        """``plays`` returns the number of plays, including this one."""
        self._rates, self._plays = rates, plays

    def seconds(self, track: str) -> float:
        """Return the seconds to decode a full group, if the decoders are shared equally."""
        return self._rates.seconds(track) * self._plays()

    def latency(self, track: str) -> float:
        """See `DecodeRates.latency`."""
        return self._rates.latency(track)

    def observe(self, track: str, share: float, seconds: float) -> None:
        """``seconds`` excludes waiting for other plays."""
        self._rates.observe(track, share, seconds)


_WAIT_SHARE, _MAX_WAIT_S = 0.05, 0.25
"""Maximum wait for a group's other layers, as a fraction of the deadline and in seconds."""
_MAX_WAIT_FACTOR = 4.0
"""Multiple of this wait beyond which later requests do not extend it."""
_MAX_INSPECTED = 64

_MAX_HANDED = 32
_MAX_DIRECT_SHARE = 0.2
"""Fraction of a decoder's queue. Groups that take less are decoded at once, even if they may be replaced."""
_RECHECK_SHARE = 0.125
"""Fraction of the maximum wait after which deferred groups are inspected again."""

Kind = tuple[bool, bool]
"""Two flags: the group is in place; it has transfers in flight."""


class DecodeQueue:
    """The groups of one play that can be decoded."""

    def __init__(
        self, view: View, progress: Mapping[int, GroupProgress], ahead_s: float = 0.0, *, together: bool = False
    ) -> None:
        """``ahead_s`` and ``together``: see `PlayerConfig`."""
        self._view, self._progress, self._ahead_s, self._together = view, progress, ahead_s, together
        self._waiting: dict[int, int] = {}
        self._placed = bytearray(view.groups)
        self._heaps: dict[Kind, list[tuple[int, int, int]]] = {
            (placed, flying): [] for placed in (False, True) for flying in (False, True)
        }
        """Heaps of (order, group, arrival number); entries become stale when the group changes."""
        self._aside: dict[Kind, list[tuple[int, int, int]]] = {kind: [] for kind in self._heaps}
        self._aside_for, self._aside_s = 0, 0.0
        """Number of calls (`View.keeps`), and the time, until deferred entries are inspected again."""
        self._arrivals = 0
        self._counted: list[tuple[str, ...]] = [()] * view.groups
        self._tracks: dict[str, int] = {}
        """Number of batches to decode, by their top track; includes groups in place if decoding is last."""
        self._handed: dict[int, float] = {}
        self._handed_s = 0.0
        self.decoding: dict[int, Transfer] = {}
        view.undecoded, view.decoding = self._waiting, self.decoding

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def update(self, group: int, placed: str | None) -> None:
        """Update a group whose received or decoding layers have changed."""
        progress = self._progress[group]
        stacked = progress.decodable(placed)
        tops = tuple(batch[-1].track for batch in (progress.decoding, stacked) if batch)
        if self._view.decodes_last and placed is not None:
            tops = (placed,)
        if tops != self._counted[group]:
            for tracks, by in ((self._counted[group], -1), (tops, 1)):
                for track in tracks:
                    self._tracks[track] = self._tracks.get(track, 0) + by
            self._counted[group] = tops
        self._placed[group] = placed is not None
        if not stacked:
            self._waiting.pop(group, None)
        else:
            if group not in self._waiting:
                self._arrivals += 1
                self._waiting[group] = self._arrivals
            self.moved(group)
        self.reckon()

    def moved(self, group: int) -> None:
        """Requeue a waiting group whose transfers in flight have changed."""
        if (number := self._waiting.get(group)) is not None and not self._progress[group].decoding:
            place = group if self._view.front_first else number
            heappush(self._heaps[self._kind(group)], (place, group, number))

    @property
    def busy(self) -> bool:
        """True if the decoders have enough work."""
        jobs, decoders = len(self._handed), self._view.decoders
        return (
            not self._together
            and jobs >= decoders
            and (jobs >= _MAX_HANDED * decoders or self._handed_s >= self._ahead_s * decoders)
        )

    def begin(self, group: int, placed: str | None) -> tuple[Transfer, ...]:
        """Start decoding a group, and return its layers, lowest first."""
        batch = self._progress[group].begin_decoding(placed)
        top = batch[-1]
        del self._waiting[group]
        self._handed[top.request] = self._view.decode_s(top.track)
        self._handed_s += self._handed[top.request]
        self.decoding.update((transfer.request, transfer) for transfer in batch)
        return batch

    def end(self, request: int) -> tuple[Transfer, ...]:
        """Return the batch of a request, after decoding or a failure."""
        if (transfer := self.decoding.get(request)) is None:
            return ()
        batch = self._progress[transfer.group].end_decoding()
        for one in batch:
            del self.decoding[one.request]
        self._handed_s = max(0.0, self._handed_s - self._handed.pop(batch[-1].request))
        return batch

    def reckon(self) -> None:
        """Recompute the decode backlog in the view."""
        view = self._view
        if view.decodes_last:
            least_s = view.decode_s(view.ladder.cheapest)
            more = ((view.decode_s(track) - least_s, count) for track, count in self._tracks.items())
            view.decode_backlog_s = sum(max(0.0, each) * count for each, count in more) / view.decoders
            return
        waiting = [(track, count) for track, count in self._tracks.items() if count]
        seconds = sum(count * view.decode_s(track) for track, count in waiting)
        batch_s = max((view.decode_latency_s(track) for track, _ in waiting), default=0.0)
        view.decode_backlog_s = seconds / view.decoders + batch_s

    def next(self, now: float, *, urgent: bool, engine: bool, will_replace: Callable[[int], bool]) -> int | None:
        """Return the group to decode next, or None.

        ``urgent``: decoding must start now to be in time; ``engine``: an engine needs all groups before its own.
        """
        if urgent or self._aside_for == 0 or now >= self._aside_s:
            self._look_again(now)
        else:
            self._aside_for -= 1
        for placed in (False, True):
            at_once = urgent or (engine and not placed)

            def settled(group: int, first: bool = not placed) -> bool:
                return urgent or (first and self._decodes_at_once(group)) or not will_replace(group)

            def waited(group: int, first: bool = not placed, at_once: bool = at_once) -> bool:
                if not urgent and any(transfer.local for transfer in self._progress[group].flying):
                    return False  # the local store delivers the layers above soon
                return at_once or (first and self._decodes_at_once(group)) or self._waited(group, now)

            for flying, suits in ((False, settled), (True, waited)):
                if (found := self._first((placed, flying), suits)) is not None:
                    return found
        later = (self._replaced(placed) for placed in (False, True))
        return next((group for group in later if group is not None), None)

    def _look_again(self, now: float) -> None:
        for kind, entries in self._aside.items():
            for entry in entries:
                heappush(self._heaps[kind], entry)
            entries.clear()
        self._aside_for, self._aside_s = self._view.keeps, now + _RECHECK_SHARE * self._longest_s

    def _first(self, kind: Kind, suits: Callable[[int], bool]) -> int | None:
        heap, aside = self._heaps[kind], self._aside[kind]
        for _ in range(_MAX_INSPECTED):
            while heap and not self._counts(heap[0], kind):
                heappop(heap)
            if not heap:
                break
            if suits(heap[0][1]):
                return heap[0][1]
            aside.append(heappop(heap))
        return None

    def _replaced(self, placed: bool) -> int | None:
        kind = placed, False
        return next((entry[1] for entry in self._aside[kind] if self._counts(entry, kind)), None)

    def _counts(self, entry: tuple[int, int, int], kind: Kind) -> bool:
        _, group, number = entry
        here = self._waiting.get(group) == number and self._kind(group) == kind
        return here and not self._progress[group].decoding and self._view.track_of[group] != RECOMPUTED

    def _kind(self, group: int) -> Kind:
        return bool(self._placed[group]), bool(self._progress[group].flying)

    def _decodes_at_once(self, group: int) -> bool:
        limit_s = _MAX_DIRECT_SHARE * self._ahead_s
        return limit_s > 0 and self._view.decode_s(self._progress[group].arrived[-1].track) <= limit_s

    @property
    def _longest_s(self) -> float:
        return min(_WAIT_SHARE * self._view.deadline_s, _MAX_WAIT_S)

    def _waited(self, group: int, now: float) -> bool:
        longest_s, progress = self._longest_s, self._progress[group]
        received_s = min(one.done_s or 0.0 for one in progress.arrived)
        if progress.arrived[-1].track not in self._view.ladder.stacks[progress.flying[-1].track]:
            return (
                now - received_s >= _MAX_WAIT_FACTOR * longest_s
            )  # layers in flight replace it, so decoding it would be wasted
        requested_s = max(one.requested_s for one in progress.flying)
        return now - max(received_s, min(requested_s, received_s + _MAX_WAIT_FACTOR * longest_s)) >= longest_s
