"""Schedules GETs for byte ranges of a store's objects: adjoining ranges merged, the most urgent first.

No I/O, no clock. Rules:

1. Up to `GETS` run at a time. More would only fill the link's queue, where urgent bytes then wait.
2. The most urgent piece goes first. Waiting pieces that adjoin it join its GET, up to `MAX_BYTES`, if they are of the
   same kind: needed, needed on a dearer track, or an upgrade (`kvabr.player.requests`).
3. Waiting pieces are divided among the GETs that may start.
4. A spare GET is reserved for pieces needed more than those being received. Its connection is open, so its bytes arrive
   soonest even while bytes of a cancelled GET fill the link.
5. A GET is cancelled once none of its remaining pieces is wanted. A short rest is received to its end instead, without
   counting against `GETS`: only then does an HTTP/1.1 connection stay open, and a new one costs round trips.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvabr.player.requests import DEARER_PRIORITY, UPGRADE_PRIORITY
from kvabr.transfer.interface import GroupTransfer

GETS, SPARE_GETS = 4, 1
MAX_BYTES = 1 << 20
"""Maximum bytes of a GET of several pieces."""
MIN_BYTES = 64 << 10
"""Pieces of up to this many bytes together are not divided among GETs."""
KEEP_BYTES = 256 << 10
"""Maximum unwanted bytes to receive so that the connection stays open; about as many arrive after a cancelled GET at
100 Mbit/s."""
_UNWANTED = 3
_MAX_RESTS = 4
"""Maximum number of GETs without a wanted piece that are received to their end."""


@dataclass(eq=False, slots=True)
class Piece:
    """A range of an object that a transfer waits for."""

    key: str
    begin: int
    """Offset of the first missing byte."""
    end: int
    priority: int
    number: int = 0
    """Order among pieces of equal priority."""
    group: GroupTransfer | None = field(default=None, repr=False)
    """The transfer that waits for it."""
    transfer: RangeTransfer | None = field(default=None, repr=False)
    """The GET that receives it, if any."""
    wanted: bool = True

    @property
    def kind(self) -> int:
        """0: needed, 1: needed on a dearer track, 2: an upgrade."""
        return (self.priority >= DEARER_PRIORITY) + (self.priority >= UPGRADE_PRIORITY)


@dataclass(eq=False, slots=True)
class RangeTransfer:
    """One GET, of one or several adjoining pieces."""

    key: str
    begin: int
    end: int
    pieces: list[Piece] = field(repr=False)
    """Remaining pieces in order; those that are no longer wanted are received and dropped."""
    spare: bool
    at: int = 0

    @property
    def kind(self) -> int:
        """Kind of the most urgent remaining piece, or `_UNWANTED`."""
        return min((piece.kind for piece in self.pieces if piece.wanted), default=_UNWANTED)

    def take(self, part: memoryview) -> list[tuple[Piece, memoryview]]:
        """Split received bytes, which must not pass `end`, among the wanted pieces."""
        taken = []
        while part:
            piece = self.pieces[0]
            count = min(len(part), piece.end - self.at)
            if piece.wanted:
                piece.begin += count
                taken.append((piece, part[:count]))
            self.at += count
            part = part[count:]
            if self.at == piece.end:
                del self.pieces[0]
                piece.transfer = None
        return taken


class RangeScheduler:
    """Assigns the wanted pieces of one store to GETs."""

    def __init__(self, gets: int = GETS, spare: int = SPARE_GETS) -> None:
        self._gets, self._spare = gets, spare
        self._waiting: dict[Piece, None] = {}
        self._busy: set[RangeTransfer] = set()
        self._rests: dict[RangeTransfer, None] = {}
        self._wanted = 0

    def want(self, key: str, begin: int, end: int, priority: int, group: GroupTransfer | None = None) -> Piece:
        """Add the bytes ``begin`` to ``end`` - 1 (at least one) of an object, for `due`."""
        piece = Piece(key, begin, end, priority, self._wanted, group)
        self._wanted += 1
        self._waiting[piece] = None
        return piece

    def cancel(self, piece: Piece) -> RangeTransfer | None:
        """Drop a piece; return a GET to cancel, or None.

        After cancelling it, call `ended`, and let the pieces that it returns wait `again`.
        """
        piece.wanted = False
        self._waiting.pop(piece, None)
        transfer = piece.transfer
        if transfer is None:
            return None
        following = next((each for each in transfer.pieces if each.wanted), None)
        if following is not None:
            return transfer if following.begin - transfer.at > KEEP_BYTES else None
        if transfer.end - transfer.at > KEEP_BYTES:
            return transfer
        self._busy.discard(transfer)
        self._rests[transfer] = None
        return next(iter(self._rests)) if len(self._rests) > _MAX_RESTS else None

    def due(self) -> list[RangeTransfer]:
        """Return the GETs to start now."""
        begun = []
        while self._waiting:
            first = min(self._waiting, key=lambda piece: (piece.priority, piece.number))
            transfer = self._begin(first)
            if transfer is None:
                break
            begun.append(transfer)
        return begun

    def ended(self, transfer: RangeTransfer) -> list[Piece]:
        """Remove an ended GET, and return its incomplete wanted pieces, for `again`."""
        self._busy.discard(transfer)
        self._rests.pop(transfer, None)
        left = [piece for piece in transfer.pieces if piece.wanted]
        for piece in transfer.pieces:
            piece.transfer = None
        transfer.pieces = []
        return left

    def again(self, piece: Piece) -> None:
        """Let a piece wait for its missing bytes; it keeps its order among equal priorities."""
        self._waiting[piece] = None

    # -------------------------------------------------------------- internals

    def _begin(self, first: Piece) -> RangeTransfer | None:
        free = self._gets - sum(not transfer.spare for transfer in self._busy)
        spare = free <= 0
        if spare:
            others = self._spare - sum(transfer.spare for transfer in self._busy)
            if others <= 0 or all(transfer.kind <= first.kind for transfer in self._busy):
                return None
        same_kind = [piece for piece in self._waiting if piece.kind == first.kind]
        total = sum(piece.end - piece.begin for piece in same_kind)
        max_bytes = min(MAX_BYTES, max(MIN_BYTES, -(-total // max(1, free))))
        pieces = _adjoining(first, same_kind, max_bytes)
        transfer = RangeTransfer(first.key, pieces[0].begin, pieces[-1].end, pieces, spare, pieces[0].begin)
        for piece in pieces:
            del self._waiting[piece]
            piece.transfer = transfer
        self._busy.add(transfer)
        return transfer


def _adjoining(first: Piece, same_kind: list[Piece], left_bytes: int) -> list[Piece]:
    own = [piece for piece in same_kind if piece.key == first.key and piece is not first]
    following, before = {piece.begin: piece for piece in own}, {piece.end: piece for piece in own}
    pieces, left_bytes = [first], left_bytes - (first.end - first.begin)
    while (piece := following.get(pieces[-1].end)) is not None and piece.end - piece.begin <= left_bytes:
        pieces.append(piece)
        left_bytes -= piece.end - piece.begin
    while (piece := before.get(pieces[0].begin)) is not None and piece.end - piece.begin <= left_bytes:
        pieces.insert(0, piece)
        left_bytes -= piece.end - piece.begin
    return pieces
