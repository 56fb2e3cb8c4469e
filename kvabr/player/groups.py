"""The stage of each group in a play, and the policy's view of it.

A group's `Stage` follows from its layers, the track in place, and the engine's queue. `Groups.restage` updates it, and
the sets that policies and planners read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from enum import IntEnum

from kvabr.abr.view import GroupSet, Transfer, View
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.session_types import GroupRecords
from kvabr.types.catalog import RECOMPUTED


class Stage(IntEnum):
    """Stage of a group; up to `LEFT` it has no independently decodable layer."""

    UNPUBLISHED = 0
    MISSING = 1
    REQUESTED = 2
    LEFT = 3
    """Left to the engine; may be in flight too."""
    COMPUTING = 4
    ARRIVED = 5
    """Its base has arrived."""
    PLACED = 6
    """Upgrades may be in flight."""
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
"""Possible next stages. Failed or cancelled groups fall back, as do those of a failed engine."""


class GroupProgress:
    """The transfers of one group that are not in place yet.

    The best track with all layers received is decoded in one batch. Layers that it replaces are kept until then, in
    case it proves damaged.
    """

    __slots__ = ("_stacks", "arrived", "decoding", "flying")

    def __init__(self, stacks: Mapping[str, Sequence[str]]) -> None:
        """``stacks`` maps each track to its layers (`Ladder.stacks`)."""
        self._stacks = stacks
        self.flying: tuple[Transfer, ...] = ()  # empty tuples are not tracked by the garbage collector
        self.arrived: tuple[Transfer, ...] = ()
        self.decoding: tuple[Transfer, ...] = ()

    @property
    def idle(self) -> bool:
        """True if no transfer of the group is in progress."""
        return not (self.flying or self.arrived or self.decoding)

    def has(self, tracks: Container[str]) -> bool:
        """Return whether any of these tracks has arrived or is being decoded."""
        return any(transfer.track in tracks for transfer in (*self.arrived, *self.decoding))

    def top(self) -> str | None:
        """Return the last requested track in transfer, or None."""
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
        """Return the layers to decode next, lowest first."""
        if not self.arrived:
            return ()
        below = self.decoding[-1].track if self.decoding else placed
        here = {transfer.track: transfer for transfer in self.arrived}
        for top in sorted(self.arrived, key=lambda one: -one.request):
            layers = self._stacks[top.track]
            needed = layers[layers.index(below) + 1 :] if below in layers else layers
            if all(layer in here for layer in needed):
                return tuple(here[layer] for layer in needed)
        return ()

    def begin_decoding(self, placed: str | None) -> tuple[Transfer, ...]:
        """Move the decodable layers to `decoding`, and return them."""
        self.decoding = self.decodable(placed)
        self.arrived = tuple(transfer for transfer in self.arrived if transfer not in self.decoding)
        return self.decoding

    def end_decoding(self) -> tuple[Transfer, ...]:
        """Take the decoded batch."""
        batch, self.decoding = self.decoding, ()
        return batch

    def land(self, transfer: Transfer) -> None:
        """Remove a transfer from those in flight."""
        self.flying = tuple(one for one in self.flying if one is not transfer)

    def drop(self, transfer: Transfer) -> None:
        """Forget a transfer that has arrived."""
        self.arrived = tuple(one for one in self.arrived if one is not transfer)

    def superseded(self, placed: Transfer) -> list[Transfer]:
        """Return received layers that ``placed`` makes useless: older, and not above it."""
        return [
            transfer
            for transfer in self.arrived
            if transfer.request < placed.request and placed.track not in self._stacks[transfer.track]
        ]

    def above(self, track: str) -> list[Transfer]:
        """Return transfers useless without ``track``, highest first."""
        others = (*self.arrived, *self.flying)
        found = [one for one in others if one.track != track and track in self._stacks[one.track]]
        return sorted(found, key=lambda one: -len(self._stacks[one.track]))


class Groups(dict[int, GroupProgress]):
    """A play's groups; maps groups with transfers to their progress."""

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
        """Groups that have not arrived and are not being computed; may be in flight."""
        self.in_place = 0

    def __missing__(self, group: int) -> GroupProgress:
        made = self[group] = GroupProgress(self._view.ladder.stacks)
        return made

    @property
    def complete(self) -> bool:
        """True if every group is in place."""
        return self.in_place == self._view.groups

    def rest(self, group: int) -> None:
        """Forget the progress of an idle group."""
        if group in self and self[group].idle:
            del self[group]

    def here(self, group: int) -> str | None:
        """Return the track of a group, received or in place."""
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
        """Mark a group as upgradable in the view, unless more of it is in flight."""
        if self.stage(group) in (Stage.ARRIVED, Stage.PLACED) and not self[group].flying:
            self._view.settled.add(group)

    def fall_back(self, group: int) -> None:
        """Update the view after a loss: the group keeps the best track in place or received."""
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
