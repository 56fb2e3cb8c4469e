"""Publishes a cache while it is being computed, so that players have most of it when the prefill ends.

An engine begins with the tokens alone and hands over their cache as it is computed; what `kvabr serve` serves grows
with it (`kvabr.store.live_folder`). A group of tokens is told of as soon as its cheapest track is encoded. Its other
tracks follow, with news of their own, when no group waits for its cheapest one. So if encoding lags behind the engine
it is they that come later, possibly only after the last token.

Encoding delays the engine by no more than a small share of its time (`kvabr.publish.encoding_threads`): beyond that it
takes idle processor time, and after the last token all that it can get.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvabr.codec.threads import encoding_on
from kvabr.publish.encoder import ordered_tracks
from kvabr.publish.encoding_threads import SHARE, EncodingBudget
from kvabr.publish.frames import FrameEncoder, GroupEncoder
from kvabr.publish.production import Production, PublishOutcome, PublishVerdict, total_bytes
from kvabr.publish.publisher import Publisher, Slot
from kvabr.store.asset_store import AssetStore
from kvabr.store.asset_writer import AssetWriter
from kvabr.store.files import NameClaim
from kvabr.store.live import LiveWriter, new_key
from kvabr.store.local import LocalStore
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.live import EdgeMessage, LiveCatalog, LiveEnd, PublishedFrames, published_catalog
from kvabr.types.naming import LAYERS

Pace = Sequence[float] | PrefillCost
"""When groups of tokens will have been computed: seconds since the beginning for each, or what a prefill costs."""

_MOST_HELD = 4
"""Units whose transformed numbers are kept until their further tracks are made."""


class LivePublisher:
    """Publishes caches that can be played while they grow, in the queue and the thread of a `Publisher`."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        edge: Sequence[str] | None = None,
        share: float = SHARE,
        clock: Callable[[], float] = time.monotonic,
        on_told: Callable[[PublishedFrames], object] = lambda _: None,
    ) -> None:
        """Take a publisher into a folder, which goes on publishing finished caches, too.

        Args:
            publisher: says which tracks there are.
            edge: tracks that are made while an asset grows; the others are made at the end. None: the AC layers if they
                are among the tracks, as they are what a link that is slower than the prefill can carry; else all.
            share: of the time of a prefill, by which encoding may delay it where all processors are busy.
            clock: seconds.
            on_told: called with all news, in an encoding thread.

        Raises:
            UsageError: its store is no folder, the tracks of the edge are not among all, or the share is none.
        """
        offer, store = publisher.offer, publisher.store
        if not isinstance(store.store, LocalStore):
            raise UsageError(f"{store.location}: only what lies in a folder can be played while it grows")
        if not 0 <= share <= 1:
            raise UsageError(f"encoding may delay a prefill by a share of it from 0 to 1, not {share}")
        self.publisher, self.store, self.clock = publisher, store.store, clock
        self.share, self.on_told = share, on_told
        layers = tuple(track for track in offer.tracks if track in LAYERS)
        self.edge = ordered_tracks(edge) if edge is not None else layers or offer.tracks
        """Tracks that are made while an asset grows."""
        if absent := [track for track in self.edge if track not in offer.tracks]:
            raise UsageError(f"track {absent[0]} cannot be made while a cache grows: it is none of the publisher's")
        self.costs = TrackCosts()
        """What encoding takes here."""
        self._growing: set[LiveProduction] = set()
        publisher.prepare()

    def begin(
        self,
        tokens: Sequence[int],
        *,
        pace: Pace,
        salt: bytes = b"",
        model: str | None = None,
        done: Callable[[PublishOutcome], object] = lambda _outcome: None,
    ) -> LiveSlot | PublishVerdict:
        """Announce the cache of a prompt whose prefill begins now; return why not if it cannot be published.

        Args:
            tokens: ids of the prompt.
            pace: when its groups will have been computed.
            salt: a tenant's secret, see `kvabr.types.naming.chain`.
            model: the name of the model with an adapter; None: without one.
            done: called with the outcome, in an encoding thread.

        Raises:
            UsageError: these are no token ids, or the pace is not that of their groups.
        """
        slot = self.publisher.reserve(tokens, salt, model)
        if not isinstance(slot, Slot):
            return slot
        try:
            seconds = _seconds(pace, slot.tokens, self.publisher.offer.spec)
        except UsageError:
            slot.leave()
            raise
        claim = NameClaim(self.store.folder / slot.chunks[-1])
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
        """End what is still growing, and close the publisher; in a forked child do nothing."""
        if not self.publisher.home.here:
            return
        for production in tuple(self._growing):
            if not production.ended:
                production.fail("the publisher is closed")
                self.publisher.wake(production)
        self.publisher.close()


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """A cache that is being computed. All methods return at once, and may be called from any thread.

    They raise `ForkedError` in a forked child, and nothing else: what is wrong with a cache, or with the store, is told
    by the outcome.
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
        self.publisher.home.check()
        self.production.append(first_token, (kv,) if isinstance(kv, torch.Tensor) else kv, tokens)
        self._wake()

    def end(self) -> None:
        """Say that this was all; if tokens are missing, the asset is that of the shorter prompt."""
        self.publisher.home.check()
        self.production.end()
        self._wake()

    def fail(self, reason: str) -> None:
        """Say that no more tokens come. What was handed over becomes the asset of a shorter prompt.

        After `end`, or another `fail`: leave the rest of the work. What was published so far is the asset.
        """
        self.publisher.home.check()
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
        """Handle one measurement."""
        before, of = self._spent.get(track, (0.0, 0))
        self._spent[track] = before + seconds, of + elements

    def of(self, track: str) -> float:
        """Return the seconds per element; 0 if they are not known."""
        seconds, elements = self._spent.get(track, (0.0, 0))
        return seconds / elements if elements else 0.0


@dataclass(slots=True)
class _PutOff:
    """Tracks of a unit that are still to be made."""

    chunk: int
    """The group of tokens that the unit ends with."""
    index: int
    kv: torch.Tensor
    tracks: tuple[str, ...]
    encoder: GroupEncoder | None = None
    """The one that made its cheapest track, which knows the rest half; None: begin anew."""


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
        self._store, self._replaces = publisher.store, slot.replaces
        offer, tokens, position = slot.offer, slot.tokens, slot.position
        super().__init__(offer, self._make_live_writer, slot.chunks, tokens, position, done, prompt=slot.prompt)
        self._stack.callback(claim.release)
        self._costs, self._clock, self._tracks = publisher.costs, publisher.clock, publisher.edge
        self._seconds, self._key, self._began_s = tuple(seconds), new_key(), self._clock()
        self._budget, self._on_told = EncodingBudget(publisher.share), publisher.on_told
        self._live_writer: LiveWriter | None = None
        self._base = ""
        self._layers: deque[_PutOff] = deque()
        """Further tracks of the edge, of groups that were told of."""
        self._late: deque[_PutOff] = deque()
        """The other tracks."""
        self._left_out, self._encoding_s, self._idle_s = 0, 0.0, 0.0
        self._over = False
        """Whether the end was told."""

    @property
    def _computed(self) -> bool:
        """Whether the prefill is over; the engine may say so a little later than it hands over the last tokens."""
        return self._ended or self._pieces.tokens == self.tokens

    def patient(self) -> bool:
        """See `Production.patient`: once the budget is spent, until the last token is there."""
        return not self._computed and not self._budget.allows(self._clock() - self._began_s)

    def spent(self, cpu_s: float, wall_s: float, *, patient: bool) -> None:
        if self._computed:
            return
        self._encoding_s += cpu_s
        if patient:
            self._idle_s += cpu_s
        else:
            self._budget.spend(cpu_s, wall_s)

    def has_work(self) -> bool:
        return super().has_work() or (self.outcome is None and bool(self._layers))

    def step(self) -> None:
        """See `Production.step`; after the last token on all cores."""
        with encoding_on(len(os.sched_getaffinity(0)) if self._computed else None):
            super().step()

    def _make_live_writer(self) -> AssetWriter:
        self._live_writer = LiveWriter(self._store, self.chunks[-1], force=self._replaces)
        return self._live_writer

    def _magnitudes(self) -> None:
        """Announce all tracks: the asset ends before a group that one of them does not hold."""

    def _begin(self, frames: FrameEncoder) -> None:
        live = self._live(frames, self._tracks)
        alone = [track for track in live.catalog.tracks if track.refines is None]
        self._base = min(alone, key=lambda track: track.total_bytes).name
        assert self._live_writer is not None  # noqa: S101  # made a moment ago
        self._live_writer.begin_live(live)

    def _live(self, frames: FrameEncoder, tracks: Sequence[str]) -> LiveCatalog:
        return LiveCatalog(self.offer.catalog(frames, expected=tracks), self._seconds, self._key)

    def _at_once(self, frames: FrameEncoder) -> int:
        del frames
        return 1  # it is told of at once

    def _encode(self, frames: FrameEncoder, chunk: int, units: Sequence[tuple[int, torch.Tensor]]) -> None:
        layers = tuple(track for track in self._tracks if track != self._base)
        late = tuple(track for track in frames.tracks if track not in self._tracks)
        for index, kv in units:
            encoder = frames.group(index, kv)
            self._make(encoder, self._base, kv.numel())
            if layers:
                held = encoder if len(self._layers) < _MOST_HELD else None
                self._layers.append(_PutOff(chunk, index, kv, layers, held))
            if late:
                self._late.append(_PutOff(chunk, index, kv, late))
        self._publish(frames, chunk, (self._base,), self._rest_s(layers) if layers else None)

    def _catch_up(self, frames: FrameEncoder) -> None:
        if not self._layers:
            return
        first = self._layers[0].chunk
        while self._layers and self._layers[0].chunk == first:
            self._finish(frames, self._layers.popleft())
        if not self._over:
            self._publish(frames, first, [track for track in self._tracks if track != self._base], None)

    def _finish(self, frames: FrameEncoder, put_off: _PutOff) -> None:
        """Make what was put off."""
        encoder = put_off.encoder or frames.group(put_off.index, put_off.kv)
        for track in put_off.tracks:
            self._make(encoder, track, put_off.kv.numel())

    def _make(self, encoder: GroupEncoder, track: str, elements: int) -> None:
        began_s = time.thread_time()
        encoder.encode(track)
        self._costs.add(track, time.thread_time() - began_s, elements)

    def _rest_s(self, tracks: Sequence[str]) -> float:
        """Return the seconds after which all that was put off should be made: these tracks."""
        return sum(put_off.kv.numel() for put_off in self._layers) * sum(map(self._costs.of, tracks))

    def _news(self, frames: FrameEncoder, chunk: int) -> PublishedFrames:
        """Return news of all frames of a group of tokens that are made."""
        units = self._pieces.units(chunk)
        whole = all(frames.bytes[track][index] for index, _ in units for track in self._tracks)
        return PublishedFrames(self._key, chunk, 0.0, self._made(frames, chunk, frames.tracks), None if whole else 0.0)

    def _publish(self, frames: FrameEncoder, chunk: int, tracks: Collection[str], rest_s: float | None) -> None:
        """Tell of these tracks of a group of tokens."""
        made = self._made(frames, chunk, tracks)
        if self._computed and self._pieces.lag(chunk):
            self._left_out += len(made)
        ready_s = max(0.0, self._clock() - self._began_s)
        self._tell(message := PublishedFrames(self._key, chunk, ready_s, made, rest_s))
        self._on_told(message)

    def _made(self, frames: FrameEncoder, chunk: int, tracks: Collection[str]) -> dict[str, tuple[int, str]]:
        """Return the frames of a group of tokens that are made, of some tracks, by their published names."""
        parts = self.offer.spec.parts
        return {
            parts[unit.part].track_name(track): (frames.bytes[track][index], frames.digests[track][index])
            for index, unit in self._pieces.units(chunk)
            for track in tracks
            if frames.bytes[track][index]
        }

    def _tell(self, message: EdgeMessage) -> None:
        assert self._live_writer is not None  # noqa: S101  # `_begin` came first
        self._live_writer.tell(message)

    def _end(self, frames: FrameEncoder, writer: AssetWriter, reason: str) -> None:
        if self._layers and not reason:
            self._catch_up(frames)
        elif not self._over:
            self._over = True
            self._tell(LiveEnd(self._key, reason))
        elif self._layers and not self._hurry:
            self._catch_up(frames)
        elif self._late and not self._hurry:
            self._finish(frames, self._late.popleft())
        elif reason:
            self._shorten(frames, reason)
        elif not self._replaces and AssetStore(self._store).has(
            self.chunks[-1]
        ):  # a producer that did not see this one
            self.close(PublishOutcome("known"))
        else:
            self._commit(frames, writer)
            self.published = self.chunks[-1]
            self.close(self._outcome("published", total_bytes(frames), tokens=self.tokens))

    def _broken(self, why: str) -> None:
        if self._live_writer is not None and not self._over:
            self._over = True
            with contextlib.suppress(Exception):  # a full disk, as a rule: then followers see that the writer is gone
                self._tell(LiveEnd(self._key, why))
        self._shorten(self._frames, why)

    def _shorten(self, frames: FrameEncoder | None, why: str) -> None:
        """Make what was published the asset of a shorter prompt, if it can be."""
        size = tokens = 0
        if frames is not None and self._live_writer is not None:
            with contextlib.suppress(Exception):
                self._discard(self._live_writer, frames)
                live = self._live(frames, frames.tracks)
                catalog = published_catalog(live, [self._news(frames, chunk) for chunk in range(self._next)])
                if catalog is not None and not AssetStore(self._store).has(catalog.namespace.prompt):
                    self._live_writer.commit(catalog)
                    self.published, tokens = catalog.namespace.prompt, catalog.tokens
                    size = sum(track.total_bytes for track in catalog.tracks)
        self.close(self._outcome("failed", size, why, tokens))

    def _outcome(self, verdict: PublishVerdict, size: int, why: str = "", tokens: int = 0) -> PublishOutcome:
        return PublishOutcome(verdict, size, why, tokens, self._left_out, self._encoding_s, self._idle_s)

    def _discard(self, writer: LiveWriter, frames: FrameEncoder) -> None:
        """Remove the frames of a group that was not told: the disk may be full."""
        for unit in frames.units:
            if unit.chunk >= self._next:
                for track in frames.tracks:
                    writer.discard(unit.group, self.offer.spec.parts[unit.part].track_name(track))


def _seconds(pace: Pace, tokens: int, spec: KVSpec) -> tuple[float, ...]:
    """Return when each group of tokens should be there."""
    ends = [spec.group_range(group, tokens)[1] for group in range(spec.groups(tokens))]
    found = tuple(pace.seconds(0, end) for end in ends) if isinstance(pace, PrefillCost) else tuple(map(float, pace))
    if len(found) != len(ends) or any(not 0 <= one <= two < float("inf") for one, two in pairwise((0.0, *found))):
        raise UsageError(f"the pace of a prefill is a time for each of its {len(ends)} groups, ascending from zero")
    return found
