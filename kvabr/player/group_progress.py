"""How far one group has come: which of its layers are in flight, have arrived, or are being decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvabr.abr.view import Transfer


class GroupProgress:
    """The transfers of one group that are not in place yet, each list from the lowest layer to the highest.

    Layers may arrive in any order. What has arrived is decoded from the bottom, as many layers as are complete at once.
    """

    __slots__ = ("_stacks", "arrived", "decode_s", "decoding", "flying")

    def __init__(self, stacks: Mapping[str, Sequence[str]]) -> None:
        """Begin with nothing; ``stacks`` maps each track to its layers (`Ladder.stacks`)."""
        self._stacks = stacks
        self.flying: list[Transfer] = []
        self.arrived: list[Transfer] = []
        """What has arrived and is not being decoded yet."""
        self.decoding: list[Transfer] = []
        """What is being decoded, in one go."""
        self.decode_s = 0.0
        """Seconds of decoding that the group counts for in the backlog."""

    def top(self) -> str | None:
        """Return the best track under way, or None."""
        for transfers in (self.flying, self.arrived, self.decoding):
            if transfers:
                return transfers[-1].track
        return None

    def arrive(self, transfer: Transfer) -> list[Transfer]:
        """Note that a transfer has arrived; return what it makes useless: layers of a stack that it replaces."""
        self.flying.remove(transfer)
        useless = []
        if len(self._stacks[transfer.track]) == 1:
            useless = [other for other in self.arrived if transfer.track not in self._stacks[other.track]]
        self.arrived = [other for other in self.arrived if other not in useless]
        self.arrived.append(transfer)
        self.arrived.sort(key=lambda one: len(self._stacks[one.track]))
        return useless

    def decodable(self, placed: str | None) -> list[Transfer]:
        """Return what can be decoded on top of the track in ``placed``: everything up to the first layer that lacks."""
        found: list[Transfer] = []
        below = self.decoding[-1].track if self.decoding else placed
        for transfer in self.arrived:
            layers = self._stacks[transfer.track]
            if len(layers) > 1 and layers[-2] != below:
                break
            found.append(transfer)
            below = transfer.track
        return found

    def begin_decoding(self, placed: str | None) -> list[Transfer]:
        """Move what can be decoded to `decoding`, and return it."""
        self.decoding = self.decodable(placed)
        self.arrived = self.arrived[len(self.decoding) :]
        return self.decoding

    def above(self, track: str) -> list[Transfer]:
        """Return the transfers that are useless without ``track``, highest first."""
        others = (*self.arrived, *self.flying)
        found = [one for one in others if one.track != track and track in self._stacks[one.track]]
        return sorted(found, key=lambda one: -len(self._stacks[one.track]))
