"""Publishes a cache during its prefill, so that players have most of it when the prefill ends.

The served asset grows as the engine hands over its cache. A group of tokens is announced once its cheapest track is
encoded; other tracks follow when no group waits for its cheapest track.
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
"""Seconds from the start of the prefill until each group of tokens is computed, or the cost model."""

_MAX_HELD = 4
"""Maximum number of units with transformed numbers in memory."""


class LivePublisher:
    """Publishes growing caches, with the queue and the threads of a `Publisher`."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        edge: Sequence[str] | None = None,
        share: float = SHARE,
        clock: Callable[[], float] = time.monotonic,
        on_announced: Callable[[PublishedFrames], object] = lambda _: None,
    ) -> None:
        """Wrap a publisher that writes to a folder; it also continues to publish finished caches.

        ``edge`` are the tracks to encode while an asset grows (default: the AC layers, which suit slow links, else
        all); other tracks follow at the end. ``share`` is the maximum delay by encoding, as a fraction of a prefill's
        time. ``on_announced`` receives every announcement, in an encoding thread. Raise `UsageError` without a folder,
        for unknown tracks, or for a share outside 0 to 1.
        """
        offer, store = publisher.offer, publisher.store
        if not isinstance(store.store, LocalStore):
            raise UsageError(f"{store.location}: caches can be published during the prefill only in a folder")
        if not 0 <= share <= 1:
            raise UsageError(f"share (delay of a prefill by encoding) must be 0 to 1, got {share}")
        self.publisher, self.store, self.clock = publisher, store.store, clock
        self.share, self.on_announced = share, on_announced
        layers = tuple(track for track in offer.tracks if track in LAYERS)
        self.edge = ordered_tracks(edge) if edge is not None else layers or offer.tracks
        if absent := [track for track in self.edge if track not in offer.tracks]:
            raise UsageError(f"edge track {absent[0]} is not published; choose from {', '.join(offer.tracks)}")
        self.costs = TrackCosts()
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
        """Announce the cache of a prompt when its prefill begins, or return why it cannot be published.

        ``pace`` has the expected times of the groups; for ``salt`` see `kvabr.types.naming.chain`; ``model`` is the
        name of a model with an adapter; ``done`` receives the outcome, in an encoding thread. Raise `UsageError` for
        invalid token ids, or if ``pace`` has another number of groups.
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
        if not claim.take():
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
        """End growing caches and close the publisher; do nothing in a forked child."""
        if not self.publisher.home.here:
            return
        for production in tuple(self._growing):
            if not production.ended:
                production.fail("the publisher is closed")
                self.publisher.wake(production)
        self.publisher.close()


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """A cache that is being computed. Thread-safe. Methods return immediately, and raise only `ForkedError`."""

    publisher: Publisher
    production: LiveProduction

    @property
    def chunks(self) -> tuple[str, ...]:
        """Chained prompt digest of every group of tokens."""
        return self.production.chunks

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self.production.tokens

    def groups(self, first_token: int, kv: torch.Tensor | Sequence[torch.Tensor], tokens: int | None = None) -> None:
        """Hand over the cache of the next tokens, from ``first_token`` on.

        ``kv`` has one tensor per layer class, [layer, K/V, head, token, dim] of any float dtype; do not change it
        afterwards. A state's tensor has the snapshots within these tokens. ``tokens`` is required only for models that
        have only states.
        """
        self.publisher.home.check()
        self.production.append(first_token, (kv,) if isinstance(kv, torch.Tensor) else kv, tokens)
        self._wake()

    def end(self) -> None:
        """End the cache. If tokens are missing, the asset is that of the shorter prompt."""
        self.publisher.home.check()
        self.production.end()
        self._wake()

    def fail(self, reason: str) -> None:
        """End the cache early; the tokens so far become the asset of a shorter prompt.

        If called after `end` or another `fail`, abandon the remaining work.
        """
        self.publisher.home.check()
        self.production.fail(reason)
        self._wake()

    def _wake(self) -> None:
        self.publisher.wake(self.production)


class TrackCosts:
    """Measured processor time of encoding, per element, by track."""

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, int]] = {}

    def add(self, track: str, seconds: float, elements: int) -> None:
        """Record one measurement."""
        before, of = self._spent.get(track, (0.0, 0))
        self._spent[track] = before + seconds, of + elements

    def of(self, track: str) -> float:
        """Return the seconds per element; 0 if unknown."""
        seconds, elements = self._spent.get(track, (0.0, 0))
        return seconds / elements if elements else 0.0


@dataclass(slots=True)
class _Pending:
    chunk: int
    index: int
    kv: torch.Tensor
    tracks: tuple[str, ...]
    encoder: GroupEncoder | None = None


class LiveProduction(Production):
    """An asset that players can play while it grows."""

    def __init__(
        self,
        publisher: LivePublisher,
        slot: Slot,
        claim: NameClaim,
        seconds: Sequence[float],
        done: Callable[[PublishOutcome], object],
    ) -> None:
        self._store, self._replaces = publisher.store, slot.replaces
        offer, tokens, position = slot.offer, slot.tokens, slot.position
        super().__init__(offer, self._make_live_writer, slot.chunks, tokens, position, done, prompt=slot.prompt)
        self._stack.callback(claim.release)
        self._costs, self._clock, self._tracks = publisher.costs, publisher.clock, publisher.edge
        self._seconds, self._key, self._began_s = tuple(seconds), new_key(), self._clock()
        self._budget, self._on_announced = EncodingBudget(publisher.share), publisher.on_announced
        self._live_writer: LiveWriter | None = None
        self._base = ""
        self._layers: deque[_Pending] = deque()
        self._late: deque[_Pending] = deque()
        self._left_out, self._encoding_s, self._idle_s = 0, 0.0, 0.0
        self._end_announced = False

    @property
    def _computed(self) -> bool:
        """True if all tokens are computed, even if the engine has not reported the end."""
        return self._ended or self._pieces.tokens == self.tokens

    def patient(self) -> bool:
        """Return True while the prefill runs and its budget is spent."""
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
        """Encode on all cores after the last token, otherwise on one."""
        with encoding_on(len(os.sched_getaffinity(0)) if self._computed else None):
            super().step()

    def _make_live_writer(self) -> AssetWriter:
        self._live_writer = LiveWriter(self._store, self.chunks[-1], force=self._replaces)
        return self._live_writer

    def _magnitudes(self) -> None:
        """Announce all tracks, or end the asset before a group that one of them cannot hold."""

    def _begin(self, frames: FrameEncoder) -> None:
        live = self._live(frames, self._tracks)
        alone = [track for track in live.catalog.tracks if track.refines is None]
        self._base = min(alone, key=lambda track: track.total_bytes).name
        assert self._live_writer is not None  # noqa: S101  # created just before
        self._live_writer.begin_live(live)

    def _live(self, frames: FrameEncoder, tracks: Sequence[str]) -> LiveCatalog:
        return LiveCatalog(self.offer.catalog(frames, expected=tracks), self._seconds, self._key)

    def _at_once(self, frames: FrameEncoder) -> int:
        del frames
        return 1

    def _encode(self, frames: FrameEncoder, chunk: int, units: Sequence[tuple[int, torch.Tensor]]) -> None:
        layers = tuple(track for track in self._tracks if track != self._base)
        late = tuple(track for track in frames.tracks if track not in self._tracks)
        for index, kv in units:
            encoder = frames.group(index, kv)
            self._make(encoder, self._base, kv.numel())
            if layers:
                held = encoder if len(self._layers) < _MAX_HELD else None
                self._layers.append(_Pending(chunk, index, kv, layers, held))
            if late:
                self._late.append(_Pending(chunk, index, kv, late))
        self._publish(frames, chunk, (self._base,), self._rest_s(layers) if layers else None)

    def _catch_up(self, frames: FrameEncoder) -> None:
        if not self._layers:
            return
        first = self._layers[0].chunk
        while self._layers and self._layers[0].chunk == first:
            self._finish(frames, self._layers.popleft())
        if not self._end_announced:
            self._publish(frames, first, [track for track in self._tracks if track != self._base], None)

    def _finish(self, frames: FrameEncoder, pending: _Pending) -> None:
        encoder = pending.encoder or frames.group(pending.index, pending.kv)
        for track in pending.tracks:
            self._make(encoder, track, pending.kv.numel())

    def _make(self, encoder: GroupEncoder, track: str, elements: int) -> None:
        began_s = time.thread_time()
        encoder.encode(track)
        self._costs.add(track, time.thread_time() - began_s, elements)

    def _rest_s(self, tracks: Sequence[str]) -> float:
        return sum(pending.kv.numel() for pending in self._layers) * sum(map(self._costs.of, tracks))

    def _news(self, frames: FrameEncoder, chunk: int) -> PublishedFrames:
        units = self._pieces.units(chunk)
        whole = all(frames.bytes[track][index] for index, _ in units for track in self._tracks)
        return PublishedFrames(self._key, chunk, 0.0, self._made(frames, chunk, frames.tracks), None if whole else 0.0)

    def _publish(self, frames: FrameEncoder, chunk: int, tracks: Collection[str], rest_s: float | None) -> None:
        made = self._made(frames, chunk, tracks)
        if self._computed and self._pieces.lag(chunk):
            self._left_out += len(made)
        ready_s = max(0.0, self._clock() - self._began_s)
        self._announce(message := PublishedFrames(self._key, chunk, ready_s, made, rest_s))
        self._on_announced(message)

    def _made(self, frames: FrameEncoder, chunk: int, tracks: Collection[str]) -> dict[str, tuple[int, str]]:
        parts = self.offer.spec.parts
        return {
            parts[unit.part].track_name(track): (frames.bytes[track][index], frames.digests[track][index])
            for index, unit in self._pieces.units(chunk)
            for track in tracks
            if frames.bytes[track][index]
        }

    def _announce(self, message: EdgeMessage) -> None:
        assert self._live_writer is not None  # noqa: S101  # `_begin` was called first
        self._live_writer.announce(message)

    def _end(self, frames: FrameEncoder, writer: AssetWriter, reason: str) -> None:
        if self._layers and not reason:
            self._catch_up(frames)
        elif not self._end_announced:
            self._end_announced = True
            self._announce(LiveEnd(self._key, reason))
        elif self._layers and not self._full_speed:
            self._catch_up(frames)
        elif self._late and not self._full_speed:
            self._finish(frames, self._late.popleft())
        elif reason:
            self._shorten(frames, reason)
        elif not self._replaces and AssetStore(self._store).has(
            self.chunks[-1]
        ):  # a producer that did not see this asset
            self.close(PublishOutcome("known"))
        else:
            self._commit(frames, writer)
            self.published = self.chunks[-1]
            self.close(self._outcome("published", total_bytes(frames), tokens=self.tokens))

    def _broken(self, why: str) -> None:
        if self._live_writer is not None and not self._end_announced:
            self._end_announced = True
            with contextlib.suppress(Exception):  # usually a full disk; followers notice that the writer is gone
                self._announce(LiveEnd(self._key, why))
        self._shorten(self._frames, why)

    def _shorten(self, frames: FrameEncoder | None, why: str) -> None:
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
        """Remove frames that were not announced, since the disk may be full."""
        for unit in frames.units:
            if unit.chunk >= self._next:
                for track in frames.tracks:
                    writer.discard(unit.group, self.offer.spec.parts[unit.part].track_name(track))


def _seconds(pace: Pace, tokens: int, spec: KVSpec) -> tuple[float, ...]:
    ends = [spec.group_range(group, tokens)[1] for group in range(spec.groups(tokens))]
    found = tuple(pace.seconds(0, end) for end in ends) if isinstance(pace, PrefillCost) else tuple(map(float, pace))
    if len(found) != len(ends) or any(not 0 <= one <= two < float("inf") for one, two in pairwise((0.0, *found))):
        raise UsageError(
            f"pace must have an ascending time from 0 for each of the {len(ends)} groups, got {len(found)} times"
        )
    return found
