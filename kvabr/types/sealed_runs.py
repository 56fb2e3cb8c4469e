"""What the groups of a sealed asset lose, sealed run by run, so that a store can cut and share runs without a key.

A run has `kvabr.types.naming.LOOKUP_RUN` groups of tokens, as a span of a bucket has. Its box is bound to its place in
a prompt, the tracks and the codec profile, and not to what follows: the same run of a longer prompt fits as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOKUP_RUN
from kvabr.types.records import decode
from kvabr.types.sealing import AssetKey, boxed, unboxed
from kvabr.types.tails import Loss, Tails
from kvabr.types.units import Unit

_MAX_BYTES = 4 << 20
"""Bytes of what a box has; a run has at most some 2,000 losses on each of 64 tracks."""


class _Track(Struct):
    """What is sealed of one level."""

    loss: dict[str, tuple[int, tuple[Loss, ...]]]
    """By published track, one per layer class: the number of the run's first unit there, and the loss of each."""
    tails: Tails = ()


class _Run(Struct):
    tracks: tuple[_Track, ...]


@dataclass(frozen=True)
class SealedRuns:
    """The runs of one asset."""

    spec: KVSpec
    profile: str | None
    position: int
    levels: Sequence[tuple[str, str | None]]
    """Name of each level, and of the one that it refines."""
    chunks: Sequence[str]
    units: Sequence[Unit]

    def seal(
        self, key: AssetKey, losses: Sequence[Sequence[float]], tails: Sequence[Sequence[Sequence[float]]]
    ) -> tuple[str, ...]:
        """Return a box for each run, from the losses of each unit and the tails, by level."""
        runs: list[list[dict[str, Any]]] = [
            [{"loss": {}, "tails": own} for own in tails] for _ in range(0, len(self.chunks), LOOKUP_RUN)
        ]
        for index, unit in enumerate(self.units):
            for (name, _), own, track in zip(self.levels, losses, runs[unit.chunk // LOOKUP_RUN], strict=True):
                published = self.spec.parts[unit.part].track_name(name)
                track["loss"].setdefault(published, (unit.group, []))[1].append(own[index])
        texts = (json.dumps({"tracks": tracks}, separators=(",", ":")) for tracks in runs)
        return tuple(boxed(key, text, self._bound(number)) for number, text in enumerate(texts))

    def open(self, key: AssetKey, boxes: Sequence[str]) -> list[dict[str, Any]]:
        """Return ``loss`` and ``tails`` of each level as plain values. Boxes may have more than these units.

        Raises:
            SealedError: a box was sealed with another key, or is of another run.
            FormatError: it lacks a group.
        """
        if len(boxes) != -(-len(self.chunks) // LOOKUP_RUN):
            raise FormatError(f"catalog: {len(boxes)} sealed runs, of {len(self.chunks)} groups")
        runs = [self.open_run(key, number, box) for number, box in enumerate(boxes)]
        whole = len(self.chunks) % LOOKUP_RUN == 0  # as a rule the last run of an asset, which tails are of, is not
        found = []
        for level, (name, _) in enumerate(self.levels):
            loss = [_loss(runs[unit.chunk // LOOKUP_RUN][level], self._name(name, unit), unit) for unit in self.units]
            found.append({"loss": loss, "tails": [list(tail) for tail in runs[-1][level].tails] if whole else []})
        return found

    def open_run(self, key: AssetKey, number: int, box: str) -> tuple[_Track, ...]:
        """Return what is in the box of one run; errors as `open`."""
        tracks = decode(unboxed(key, box, self._bound(number), _MAX_BYTES), _Run, "catalog, sealed run").tracks
        if len(tracks) != len(self.levels):
            raise FormatError("catalog: a sealed run is of other tracks")
        return tracks

    def _name(self, level: str, unit: Unit) -> str:
        return self.spec.parts[unit.part].track_name(level)

    def _bound(self, number: int) -> bytes:
        place = self.profile, self.position, number, self.chunks[number * LOOKUP_RUN]
        what = [self.spec.digest().hex(), *place, list(self.levels)]
        return b"kvabr.run/1\0" + hashlib.sha256(json.dumps(what).encode()).digest()


def _loss(track: _Track, published: str, unit: Unit) -> float:
    first, losses = track.loss.get(published, (0, ()))
    if not 0 <= unit.group - first < len(losses):
        raise FormatError(f"catalog: a sealed run lacks group {unit.group} of {published}")
    return losses[unit.group - first]
