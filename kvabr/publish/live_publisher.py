"""Publishes a cache while it is being computed, so that players have most of it when the prefill ends.

An engine begins with the tokens alone and hands over their cache as it is computed; what `kvabr serve` serves grows
with it (`kvabr.store.live_folder`). Every group of tokens is told once, with the frames that were made. If encoding
lags behind the engine, the dearest tracks of a group are left out of that, never the cheapest one, and made at the end,
when nobody waits for them: the asset that stays is complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from kvabr.codec.base import codec
from kvabr.publish.encoder import FrameEncoder, ordered_tracks
from kvabr.publish.production import Production, PublishOutcome, PublishVerdict, total_bytes
from kvabr.publish.publisher import Publisher, Slot
from kvabr.store.asset import CATALOG, AssetWriter
from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.files import NameClaim
from kvabr.store.live_folder import LiveFolderWriter, new_key
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.live import EdgeMessage, LiveCatalog, LiveEnd, PublishedFrames, published_catalog
from kvabr.types.naming import LAYERS

Pace = Sequence[float] | PrefillCost
"""When groups of tokens will have been computed: seconds since the beginning for each, or what a prefill costs."""


class LivePublisher:
    """Publishes caches that can be played while they grow, in the queue and the thread of a `Publisher`."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        edge: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a publisher into a folder, which goes on publishing finished caches, too.

        Args:
            publisher: says which tracks there are.
            edge: tracks that are made while an asset grows; the others are made at the end. None: the AC layers if they
                are among the tracks, as they are what a link that is slower than the prefill can carry; else all.
            clock: seconds.

        Raises:
            UsageError: its store is no folder, or the tracks of the edge are not among all.
        """
        offer, store = publisher.offer, publisher.store
        if not isinstance(store, FolderAssetStore):
            raise UsageError(f"{store.location}: only what lies in a folder can be played while it grows")
        self.publisher, self.root, self.clock = publisher, store.root, clock
        layers = tuple(track for track in offer.tracks if track in LAYERS)
        self.edge = ordered_tracks(edge) if edge is not None else layers or offer.tracks
        """Tracks that are made while an asset grows."""
        if absent := [track for track in self.edge if track not in offer.tracks]:
            raise UsageError(f"track {absent[0]} cannot be made while a cache grows: it is none of the publisher's")
        self.costs = TrackCosts()
        """What encoding takes here."""
        self._growing: set[LiveProduction] = set()

    def begin(
        self,
        tokens: Sequence[int],
        *,
        pace: Pace,
        salt: bytes = b"",
        done: Callable[[PublishOutcome], object] = lambda _outcome: None,
    ) -> LiveSlot | PublishVerdict:
        """Announce the cache of a prompt whose prefill begins now; return why not if it cannot be published.

        Args:
            tokens: ids of the prompt.
            pace: when its groups will have been computed.
            salt: a tenant's secret, see `kvabr.types.naming.chain`.
            done: called with the outcome, in the encoding thread.

        Raises:
            UsageError: these are no token ids, or the pace is not that of their groups.
        """
        slot = self.publisher.reserve(tokens, salt)
        if not isinstance(slot, Slot):
            return slot
        try:
            seconds = _seconds(pace, slot.tokens, self.publisher.offer.spec)
        except UsageError:
            slot.leave()
            raise
        claim = NameClaim(self.root / slot.chunks[-1])
        if not claim.take():  # by another process, or another publisher of this one
            slot.leave()
            return "known"

        def over(outcome: PublishOutcome) -> None:
            self._growing.discard(made)
            done(outcome)

        made = LiveProduction(self, slot, claim, seconds, over)
        self._growing.add(made)
        self.publisher.wake(made)
        return LiveSlot(self.publisher, made)

    def close(self) -> None:
        """End what is still growing, and close the publisher."""
        for production in tuple(self._growing):
            if not production.ended:
                production.fail("the publisher is closed")
                self.publisher.wake(production)
        self.publisher.close()


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """A cache that is being computed. All methods return at once, and may be called from any thread.

    They do not raise: what is wrong with a cache, or with the store, is told by the outcome.
    """

    publisher: Publisher
    production: LiveProduction

    @property
    def chunks(self) -> tuple[str, ...]:
        """Chained prompt digest of every group of tokens."""
        return self.production.chunks

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.production.tokens

    def groups(self, first_token: int, kv: torch.Tensor | Sequence[torch.Tensor], tokens: int | None = None) -> None:
        """Hand over the cache of the next tokens, any number of them, from ``first_token`` on.

        Args:
            first_token: number of tokens handed over before.
            kv: [layer, K/V, head, token, dim] of any float dtype, which must not change any more; of several layer
                classes a tensor each. That of a state has the snapshots behind some of these tokens
                (`kvabr.types.units.snapshot_ends`) one behind the other, possibly none.
            tokens: their number, where it cannot be seen: of a model that has only states.
        """
        self.production.append(first_token, (kv,) if isinstance(kv, torch.Tensor) else kv, tokens)
        self._wake()

    def end(self) -> None:
        """Say that this was all; if tokens are missing, the asset is that of the shorter prompt."""
        self.production.end()
        self._wake()

    def fail(self, reason: str) -> None:
        """Say that no more tokens come. What was handed over becomes the asset of a shorter prompt.

        After `end`, or another `fail`: leave the rest of the work. What was published so far is the asset.
        """
        self.production.fail(reason)
        self._wake()

    def _wake(self) -> None:
        self.publisher.wake(self.production)


class TrackCosts:
    """What encoding takes: processor time per element, by track."""

    def __init__(self) -> None:
        """Begin without knowing any."""
        self._spent: dict[str, tuple[float, int]] = {}

    def add(self, track: str, seconds: float, elements: int) -> None:
        """Take one measurement."""
        before, of = self._spent.get(track, (0.0, 0))
        self._spent[track] = before + seconds, of + elements

    def of(self, track: str) -> float:
        """Return the seconds per element; 0 if they are not known."""
        seconds, elements = self._spent.get(track, (0.0, 0))
        return seconds / elements if elements else 0.0

    def within(self, tracks: Sequence[str], share: float, base: str) -> tuple[str, ...]:
        """Return the tracks that can be made in a share of the time for all: ``base``, and then the cheapest ones."""
        if share >= 1:
            return tuple(tracks)
        left = share * sum(map(self.of, tracks)) - self.of(base)
        chosen = {base}
        while True:
            ready = [track for track in tracks if track not in chosen and codec(track).refines in (None, *chosen)]
            cheapest = min(ready, key=self.of, default=None)
            if cheapest is None or self.of(cheapest) > left:
                return tuple(track for track in tracks if track in chosen)
            chosen.add(cheapest)
            left -= self.of(cheapest)


class LiveProduction(Production):
    """An asset that is played while it is made."""

    def __init__(
        self,
        publisher: LivePublisher,
        slot: Slot,
        claim: NameClaim,
        seconds: Sequence[float],
        done: Callable[[PublishOutcome], object],
    ) -> None:
        """Begin; ``seconds`` says when each group of tokens should be published."""
        self._path = publisher.root / slot.chunks[-1]
        offer = publisher.publisher.offer
        super().__init__(offer, self._live_writer, slot.chunks, slot.tokens, slot.position, done)
        self._stack.callback(claim.release)
        self._costs, self._clock, self._tracks = publisher.costs, publisher.clock, publisher.edge
        self._seconds, self._key, self._began_s = tuple(seconds), new_key(), self._clock()
        self._folder: LiveFolderWriter | None = None
        self._base = ""
        self._late: list[tuple[int, torch.Tensor, tuple[str, ...]]] = []
        """Groups (units) with tracks that are to be made at the end."""
        self._left_out = 0
        self._over = False
        """Whether the end was told."""

    def _live_writer(self) -> AssetWriter:
        self._folder = LiveFolderWriter(self._path)
        return self._folder

    def _begin(self, frames: FrameEncoder) -> None:
        live = self._live(frames, self._tracks)
        alone = [track for track in live.catalog.tracks if track.refines is None]
        self._base = min(alone, key=lambda track: track.total_bytes).name
        assert self._folder is not None  # noqa: S101  # made a moment ago
        self._folder.begin(live)

    def _live(self, frames: FrameEncoder, tracks: Sequence[str]) -> LiveCatalog:
        return LiveCatalog(self.offer.catalog(frames, expected=tracks), self._seconds, self._key)

    def _encode(self, frames: FrameEncoder, chunk: int, units: Sequence[tuple[int, torch.Tensor]], lag: int) -> None:
        tracks = self._costs.within(self._tracks, 1 / (1 + lag), self._base)
        self._left_out += (len(self._tracks) - len(tracks)) * len(units)
        rest = tuple(track for track in frames.tracks if track not in tracks)
        for index, kv in units:
            encoder = frames.group(index, kv)
            for track in tracks:
                began_s = time.thread_time()
                encoder.encode(track)
                self._costs.add(track, time.thread_time() - began_s, kv.numel())
            if rest:
                self._late.append((index, kv, rest))
        self._tell(self._news(frames, chunk))

    def _news(self, frames: FrameEncoder, chunk: int) -> PublishedFrames:
        """Return the news of a group of tokens: all frames that are made of it."""
        parts = self.offer.spec.parts
        made = {
            parts[unit.part].track_name(track): (frames.bytes[track][index], frames.digests[track][index])
            for index, unit in self._pieces.units(chunk)
            for track in frames.tracks
            if frames.bytes[track][index]
        }
        return PublishedFrames(self._key, chunk, max(0.0, self._clock() - self._began_s), made)

    def _tell(self, message: EdgeMessage) -> None:
        assert self._folder is not None  # noqa: S101  # `_begin` came first
        self._folder.tell(message)

    def _end(self, frames: FrameEncoder, writer: AssetWriter, reason: str) -> None:
        if not self._over:
            self._over = True
            self._tell(LiveEnd(self._key, reason))
        elif self._late and not self._hurry:
            index, kv, tracks = self._late.pop(0)
            encoder = frames.group(index, kv)
            for track in tracks:
                encoder.encode(track)
        elif reason:
            self._shorten(frames, reason)
        elif (self._path / CATALOG).exists():  # a producer that could not see this one
            self.close(PublishOutcome("known"))
        else:
            writer.commit(self.offer.catalog(frames))
            self.published = self.chunks[-1]
            told = PublishOutcome("published", total_bytes(frames), tokens=self.tokens, left_out=self._left_out)
            self.close(told)

    def _broken(self, why: str) -> None:
        if self._folder is not None and not self._over:
            self._over = True
            with contextlib.suppress(Exception):  # a full disk, as a rule: then followers see that the writer is gone
                self._tell(LiveEnd(self._key, why))
        self._shorten(self._frames, why)

    def _shorten(self, frames: FrameEncoder | None, why: str) -> None:
        """Make what was published the asset of a shorter prompt, if it can be."""
        size = tokens = 0
        if frames is not None and self._folder is not None:
            with contextlib.suppress(Exception):
                self._discard(self._folder, frames)
                live = self._live(frames, frames.tracks)
                catalog = published_catalog(live, [self._news(frames, chunk) for chunk in range(self._next)])
                path = self._path if catalog is None else Path(self._path.parent, catalog.namespace.prompt)
                if catalog is not None and not path.exists():
                    self._folder.commit(catalog, path)
                    self.published, tokens = path.name, catalog.tokens
                    size = sum(track.total_bytes for track in catalog.tracks)
        told = PublishOutcome("failed", size, why, tokens=tokens, left_out=self._left_out)
        self.close(told)

    def _discard(self, folder: LiveFolderWriter, frames: FrameEncoder) -> None:
        """Remove the frames of a group that was not told: the disk may be full."""
        for unit in frames.units:
            if unit.chunk >= self._next:
                for track in frames.tracks:
                    folder.discard(unit.group, self.offer.spec.parts[unit.part].track_name(track))


def _seconds(pace: Pace, tokens: int, spec: KVSpec) -> tuple[float, ...]:
    """Return when each group of tokens should be there."""
    ends = [spec.group_range(group, tokens)[1] for group in range(spec.groups(tokens))]
    found = tuple(pace.seconds(0, end) for end in ends) if isinstance(pace, PrefillCost) else tuple(map(float, pace))
    if len(found) != len(ends) or any(not 0 <= one <= two < float("inf") for one, two in pairwise((0.0, *found))):
        raise UsageError(f"the pace of a prefill is a time for each of its {len(ends)} groups, ascending from zero")
    return found
