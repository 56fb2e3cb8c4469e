"""Publishes what an engine computed anyway: encodes it in the background, into a folder that `kvabr serve` serves.

Nothing is measured: an engine that serves has no time for the forward passes that `kvabr encode` spends on that. The
losses in the catalog are those of another catalog of the same model, stretched over the groups there are, and the
catalog says so. Whatever would make the engine wait is dropped instead, and counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvabr.codec.base import codec
from kvabr.codec.profile import Profile
from kvabr.publish.frames import FrameBook, ordered_tracks
from kvabr.store.locations import Location, open_store
from kvabr.store.quota import NOT_MEASURED
from kvabr.types.catalog import Catalog, Track
from kvabr.types.errors import KvabrError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LAYERS, TrackNamespace, chain

PLAIN_TRACKS = ("FP16", "Int8", "Int4")
"""Tracks that are published unless others are named; the AC layers are added if there is a profile."""

Verdict = Literal["full", "known", "published", "failed"]
"""What became of a cache: others waited, it is there already, it is there now, or it could not be written."""

_LAYER_GAIN = 0.9
"""Share of a group's loss that a layer leaves at most, whatever a prior says."""
_KIND = 10
"""By how much the encoding thread is nicer than the engine's: it takes what the engine leaves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cache that was offered."""

    verdict: Verdict
    bytes: int = 0
    """Of all tracks together, if it was published."""
    why: str = ""
    """If it failed."""


class Publisher:
    """Takes caches, and publishes one after the other in a thread of its own."""

    def __init__(
        self,
        root: Location,
        spec: KVSpec,
        *,
        prior: Catalog,
        tracks: Sequence[str] | None = None,
        profile: Profile | None = None,
        queue: int = 4,
        most_bytes: int | None = None,
        source: str = "",
    ) -> None:
        """Make the folder, and start.

        Args:
            root: store that assets go to, a folder or a URL; each is named by its prompt digest.
            spec: of the caches.
            prior: where losses and decode times are taken from; best of the same model.
            tracks: names of the tracks; None: FP16, Int8, Int4, and with a profile the AC layers.
            profile: codec profile of the model, for tracks that need it.
            queue: caches that may wait or be worked on; each is held in memory.
            most_bytes: what engines publish there takes at most, see `kvabr.store.quota`; None: no bound.
            source: what the caches are, in words, for the catalogs.

        Raises:
            UsageError: a track needs a profile, or the prior knows nothing of it; or the folder cannot be made.
            ForeignError: the profile is of another model.
        """
        if tracks is None:
            tracks = (*PLAIN_TRACKS, *(LAYERS if profile is not None else ()))
        self._tracks = ordered_tracks(tracks)
        for track in self._tracks:
            if codec(track).needs_profile and profile is None:
                raise UsageError(f"track {track} needs a codec profile of {spec.model}: `kvabr calibrate` makes one")
            if track not in prior.by_name:
                raise UsageError(f"what track {track} loses is not known: the prior catalog does not have it")
        if profile is not None:
            profile.check(spec)
        self._spec, self._prior, self._source = spec, prior, source
        self._store = open_store(root, create=True)
        self._quota = None if most_bytes is None else self._store.quota(most_bytes)
        needed = any(codec(track).needs_profile for track in self._tracks)
        self._profile = profile if needed else None
        self._profile_bytes = b"" if self._profile is None else self._profile.to_bytes()
        self._free = threading.BoundedSemaphore(queue)
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "kvabr-publish", initializer=_be_kind)
        self._closed = False

    def reserve(self, tokens: Sequence[int], salt: bytes = b"") -> Slot | Verdict:
        """A place for a cache, or why there is none. Quick; the cache itself need not be at hand yet.

        Args:
            tokens: ids of the cache's tokens.
            salt: a tenant's secret, see `kvabr.types.naming.chain`.

        Raises:
            UsageError: what are no token ids.
        """
        spec = self._spec
        chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
        return self.reserve_named(chunks, len(tokens))

    def reserve_named(self, chunks: Sequence[str], tokens: int) -> Slot | Verdict:
        """As `reserve`, where the digests are not those of token ids.

        Args:
            chunks: a digest for each group, 64 hex digits; the last one names the asset.
            tokens: of the cache.
        """
        name = chunks[-1]
        with self._lock:
            # What is being published, or was by this process; a folder that was removed since may come again.
            if name in self._known:
                return "known"
            try:
                if self._store.version(name) is not None:
                    if self._quota is not None:
                        self._quota.touch(name)
                    return "known"
            except KvabrError:  # a share that is gone, a folder that must not be entered: the engine goes on
                return "failed"
            if self._closed or not self._free.acquire(blocking=False):
                return "full"
            self._known.add(name)
        return Slot(self, tuple(chunks), tokens)

    def close(self) -> None:
        """Publish what waits, and end."""
        self._closed = True
        self._thread.shutdown(wait=True)

    # -------------------------------------------------------------- internals

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self._known.discard(slot.chunks[-1])
        self._free.release()

    def _begin(self, slot: Slot, kv: torch.Tensor, done: Callable[[Outcome], object]) -> None:
        def work() -> None:
            try:
                outcome = Outcome("published", self._publish(slot, kv))
            except KvabrError as error:
                outcome = Outcome("failed", why=str(error))
            except Exception as error:  # noqa: BLE001  # a full disk, no memory: the engine goes on
                outcome = Outcome("failed", why=repr(error))
            finally:
                self._give_back(slot)
            done(outcome)

        try:
            self._thread.submit(work)
        except RuntimeError:
            self._give_back(slot)
            done(Outcome("failed", why="the publisher is closed"))

    def _publish(self, slot: Slot, kv: torch.Tensor) -> int:
        spec, chunks = self._spec, slot.chunks
        with self._store.writer(chunks[-1]) as writer:
            book = FrameBook(
                spec, chunks, slot.tokens, self._tracks, self._profile, put=writer.frame, get=writer.read_frame
            )
            book.encode(kv, lambda _done, _all: None)
            if self._profile is not None:
                writer.profile(self._profile_bytes)
            writer.commit(self._catalog(book, slot))
        if self._quota is not None:
            self._quota.make_room(chunks[-1])
        return sum(sum(sizes) for sizes in book.bytes.values())

    def _catalog(self, book: FrameBook, slot: Slot) -> Catalog:
        spec, prior, groups = self._spec, self._prior, len(slot.chunks)
        larger = spec.elements_per_token / prior.spec.elements_per_token
        losses: dict[str, tuple[float, ...]] = {}
        for track in self._tracks:
            losses[track] = stretched(prior.track(track).loss, groups)
            if (base := codec(track).refines) is not None:
                # Stretched by itself a layer may seem to make a group worse, and would then not be put in place.
                pairs = zip(losses[track], losses[base], strict=True)
                losses[track] = tuple(min(loss, _LAYER_GAIN * below) for loss, below in pairs)
        return Catalog(
            namespace=TrackNamespace(spec.model, slot.chunks[-1]),
            spec=spec,
            tokens=slot.tokens,
            chunks=slot.chunks,
            tracks=tuple(
                Track(
                    name=track,
                    bytes=tuple(book.bytes[track]),
                    loss=losses[track],
                    digests=tuple(book.digests[track]),
                    refines=codec(track).refines,
                    decode_s=float(f"{prior.track(track).decode_s * larger:.6g}"),
                )
                for track in self._tracks
            ),
            profile=None if self._profile is None else self._profile.digest,
            profile_bytes=len(self._profile_bytes),
            prefill=prior.prefill if prior.spec.model == spec.model else None,
            loss_method=f"{NOT_MEASURED}: those of {prior.tokens} tokens under {prior.spec.model}, stretched",
            source=self._source,
        )


class Slot:
    """A place for one cache: `fill` it, or `leave` it."""

    def __init__(self, publisher: Publisher, chunks: tuple[str, ...], tokens: int) -> None:
        self._publisher, self.chunks, self.tokens = publisher, chunks, tokens

    def fill(self, kv: torch.Tensor, done: Callable[[Outcome], object]) -> None:
        """Publish a cache.

        Args:
            kv: [layer, K/V, head, token, dim], any float dtype; not to be changed any more.
            done: told what became of it, on the publishing thread.
        """
        self._publisher._begin(self, kv, done)  # noqa: SLF001  # its own

    def leave(self) -> None:
        """There is no cache after all."""
        self._publisher._give_back(self)  # noqa: SLF001  # its own


def stretched(losses: Sequence[float], groups: int) -> tuple[float, ...]:
    """Losses of as many groups as are wanted, from those of others: the same in all, and distributed alike.

    What a whole cache loses does not grow with its length much, and how it is spread does not change: the first groups
    and the last matter most. So the first loss is the first one's, and the others are read off by relative place.
    """
    total, count = sum(losses), len(losses)
    shape = []
    for group in range(groups):
        place = group * (count - 1) / max(1, groups - 1)
        low = min(int(place), count - 1)
        high = min(low + 1, count - 1)
        shape.append(losses[low] + (losses[high] - losses[low]) * (place - low))
    scale = total / sum(shape) if sum(shape) > 0 else 0.0
    return tuple(float(f"{scale * each:.6g}") for each in shape)


def with_heads(spec: KVSpec, heads: range) -> KVSpec:
    """The spec of some heads' cache alone, under a name of its own; the spec itself if these are all."""
    if len(heads) == spec.kv_heads:
        return spec
    return replace(spec, model=f"{spec.model}+heads{heads.start}-{heads.stop - 1}", kv_heads=len(heads))


def _be_kind() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: as everyone else, then
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _KIND)
