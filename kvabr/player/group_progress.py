"""How far one group has come: which of its layers are in flight, have arrived, or are being decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvabr.abr.view import Transfer


class GroupProgress:
    """The transfers of one group that are not in place yet.

    Layers may arrive in any order. The best track of which every layer is here is decoded, all layers at once. What it
    replaces is kept until then, in case that it proves damaged.
    """

    __slots__ = ("_stacks", "arrived", "decoding", "flying")

    def __init__(self, stacks: Mapping[str, Sequence[str]]) -> None:
        """Begin with nothing; ``stacks`` maps each track to its layers (`Ladder.stacks`)."""
        self._stacks = stacks
        self.flying: tuple[Transfer, ...] = ()  # a list of nothing is something, for the garbage collector
        self.arrived: tuple[Transfer, ...] = ()
        """What has arrived and is not being decoded yet."""
        self.decoding: tuple[Transfer, ...] = ()
        """What is being decoded in one go, from the lowest layer to the highest."""

    @property
    def idle(self) -> bool:
        """Whether nothing of the group is under way."""
        return not (self.flying or self.arrived or self.decoding)

    def top(self) -> str | None:
        """Return the track that was requested last of those under way, or None."""
        for transfers in (self.flying, self.arrived, self.decoding):
            if transfers:
                return max(transfers, key=lambda one: one.request).track
        return None

    def here(self) -> str | None:
        """Return the track that was requested last of those that have arrived, or None."""
        for transfers in (self.arrived, self.decoding):
            if transfers:
                return max(transfers, key=lambda one: one.request).track
        return None

    def decodable(self, placed: str | None) -> tuple[Transfer, ...]:
        """Return what to decode next, lowest layer first; ``placed`` is the track in place."""
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
        """Move what can be decoded to `decoding`, and return it."""
        self.decoding = self.decodable(placed)
        self.arrived = tuple(transfer for transfer in self.arrived if transfer not in self.decoding)
        return self.decoding

    def end_decoding(self) -> tuple[Transfer, ...]:
        """Take what was being decoded."""
        batch, self.decoding = self.decoding, ()
        return batch

    def land(self, transfer: Transfer) -> None:
        """Take a transfer out of the air."""
        self.flying = tuple(one for one in self.flying if one is not transfer)

    def drop(self, transfer: Transfer) -> None:
        """Forget a transfer that has arrived."""
        self.arrived = tuple(one for one in self.arrived if one is not transfer)

    def superseded(self, placed: Transfer) -> list[Transfer]:
        """Return what has arrived and is of no use once ``placed`` is in place: older, and no layer above it."""
        return [
            transfer
            for transfer in self.arrived
            if transfer.request < placed.request and placed.track not in self._stacks[transfer.track]
        ]

    def above(self, track: str) -> list[Transfer]:
        """Return the transfers that are useless without ``track``, highest first."""
        others = (*self.arrived, *self.flying)
        found = [one for one in others if one.track != track and track in self._stacks[one.track]]
        return sorted(found, key=lambda one: -len(self._stacks[one.track]))


class ProgressByGroup(dict[int, GroupProgress]):
    """The progress of the groups of which something is under way; of any other, one with nothing."""

    def __init__(self, stacks: Mapping[str, Sequence[str]]) -> None:
        """Begin without any; ``stacks`` as for `GroupProgress`."""
        super().__init__()
        self._stacks = stacks

    def __missing__(self, group: int) -> GroupProgress:
        made = self[group] = GroupProgress(self._stacks)
        return made

    def rest(self, group: int) -> None:
        """Forget a group if nothing of it is under way."""
        if group in self and self[group].idle:
            del self[group]
