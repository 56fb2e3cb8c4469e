"""Publishes what an engine computed anyway: encodes it in the background, into a store that `kvabr serve` serves.

Nothing is measured: an engine has no time for the forward passes of `kvabr encode`. The losses are another catalog's of
the same model, laid out over the groups, and the catalog says so. What would make the engine wait is dropped.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from kvabr.codec.ac import check_class
from kvabr.codec.base import codec
from kvabr.codec.profile import Profile
from kvabr.publish.encoder import RAW, FrameEncoder, needs_raw, ordered_tracks, pointless, six
from kvabr.store.locations import Location, open_store
from kvabr.store.quota import NOT_MEASURED
from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog, Track
from kvabr.types.errors import AssetError, FormatError, KvabrError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LAYERS, chain

PLAIN_TRACKS = ("FP16", "Int8", "Int4")
"""Default tracks; the AC layers are added if there is a profile."""
CASTS = ("FP16", "BF16")
"""Tracks that take as long to decode as Raw."""

PublishVerdict = Literal["full", "known", "published", "failed"]
"""The queue was full; the cache was published before; it is published now; or it could not be written."""

_MAX_LAYER_LOSS = 0.9
"""Maximum share of a group's loss that a layer leaves, whatever the prior says."""
_LAST_GROUPS = 4
"""Number of groups at the end whose share of the loss is taken as it was."""
_EVEN_SHARE = 0.05
"""Share of the loss that is spread evenly: no group is without any."""
_NICENESS = 10
"""Added to the encoding thread's niceness, so that the engine goes first."""


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """Result of publishing one cache."""

    verdict: PublishVerdict
    bytes: int = 0
    """Of all tracks together, if it was published."""
    why: str = ""
    """Why it failed."""


class Publisher:
    """Encodes and publishes caches one after the other, in a thread of its own."""

    def __init__(
        self,
        location: Location,
        spec: KVSpec,
        *,
        prior: Catalog,
        tracks: Sequence[str] | None = None,
        profile: Profile | None = None,
        queue: int = 4,
        max_bytes: int | None = None,
        source: str = "",
    ) -> None:
        """Open the store, and start.

        Args:
            location: store that assets go to, a folder or a URL; each asset is named by its prompt digest.
            spec: of the caches.
            prior: catalog that losses and decode times are taken from, best of the same model.
            tracks: names, all in the prior but for Raw, which loses nothing; None: FP16, Int8, Int4, with a profile the
                AC layers; and for a cache that the engine has quantised, Raw in the place of what has no fewer bits;
                with states in float32, Raw.
            profile: codec profile of the model, for tracks that need it; `ForeignError` if it is of another.
            queue: caches that may wait or be worked on; each is held in memory.
            max_bytes: bound on what engines publish there, see `kvabr.store.quota`; None: no bound.
            source: what the caches are, in words, for the catalogs.
        """
        if tracks is None:
            plain = (*((RAW,) if needs_raw(spec) else ()), *PLAIN_TRACKS, *(LAYERS if profile is not None else ()))
            tracks = [track for track in plain if track not in pointless(spec)]
        self._tracks = ordered_tracks(tracks)
        for track in self._tracks:
            if codec(track).needs_profile:
                check_class(spec, track)
            if codec(track).needs_profile and profile is None:
                raise UsageError(f"track {track} needs a codec profile of {spec.model}: `kvabr calibrate` makes one")
            if track not in prior.by_name and track != RAW:
                raise UsageError(f"what track {track} loses is not known: the prior catalog does not have it")
        if profile is not None:
            profile.check(spec)
        self._spec, self._prior, self._source = spec, prior, source
        self._store = open_store(location, create=True)
        self._quota = None if max_bytes is None else self._store.quota(max_bytes)
        self._profile = profile
        self._free = threading.BoundedSemaphore(queue)
        self._known: set[str] = set()
        """Assets that are being published."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "kvabr-publish", initializer=_be_nice)
        self._closed = False

    def reserve(self, tokens: Sequence[int], salt: bytes = b"") -> Slot | PublishVerdict:
        """Return a slot for a cache of these tokens, or why there is none. Quick: the cache need not exist yet.

        ``salt`` is a tenant's secret, see `kvabr.types.naming.chain`. Raises `UsageError` unless these are token ids.
        """
        spec = self._spec
        chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
        return self.reserve_named(chunks, len(tokens))

    def reserve_named(self, chunks: Sequence[str], tokens: int, position: int | None = 0) -> Slot | PublishVerdict:
        """As `reserve`, for other digests of groups, 64 hex digits each; the last one names the asset.

        ``position`` is that of the first token in the prompt. If it is None, it is not known, and the tracks are left
        out that need a profile: they undo the rotary embedding.
        """
        name = chunks[-1]
        with self._lock:
            # Published assets are looked up each time: one that was removed since may be published again.
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
        return Slot(self, tuple(chunks), tokens, position)

    def close(self) -> None:
        """Publish what waits, and end."""
        self._closed = True
        self._thread.shutdown(wait=True)

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self._known.discard(slot.chunks[-1])
        self._free.release()

    def _begin(self, slot: Slot, kv: Sequence[torch.Tensor], done: Callable[[PublishOutcome], object]) -> None:
        def work() -> None:
            try:
                outcome = PublishOutcome("published", self._publish(slot, kv))
            except KvabrError as error:
                outcome = PublishOutcome("failed", why=str(error))
            except Exception as error:  # noqa: BLE001  # a full disk, no memory: the engine goes on
                outcome = PublishOutcome("failed", why=repr(error))
            finally:
                self._give_back(slot)
            done(outcome)

        try:
            self._thread.submit(work)
        except RuntimeError:
            self._give_back(slot)
            done(PublishOutcome("failed", why="the publisher is closed"))

    def _publish(self, slot: Slot, kv: Sequence[torch.Tensor]) -> int:
        chunks = slot.chunks
        with self._store.writer(chunks[-1]) as writer:
            tracks, position = self._tracks, slot.position or 0
            if slot.position is None:
                tracks = tuple(track for track in tracks if not codec(track).needs_profile)
            frames = FrameEncoder(self._spec, chunks, slot.tokens, tracks, self._profile, writer, position=position)
            frames.encode(kv)
            writer.commit(self._catalog(frames))
        if self._quota is not None:
            self._quota.make_room(chunks[-1])
        return sum(sum(sizes) for sizes in frames.bytes.values())

    def _catalog(self, frames: FrameEncoder) -> Catalog:
        spec, prior = self._spec, self._prior
        own, others = spec.largest, prior.spec.largest
        larger = (own.elements_per_token * own.rows) / (others.elements_per_token * others.rows)
        losses: dict[str, tuple[float, ...]] = {}
        for track in frames.tracks:
            losses[track] = self._losses(frames, track)
            if (base := codec(track).refines) is not None:
                # By themselves, a layer's losses may seem to make a group worse, and would then never be used.
                pairs = zip(losses[track], losses[base], strict=True)
                losses[track] = tuple(min(loss, _MAX_LAYER_LOSS * below) for loss, below in pairs)
        return frames.catalog(
            losses,
            {track: self._of_prior(track).decode_s * larger for track in frames.tracks},
            loss_method=f"{NOT_MEASURED}: those of {prior.tokens} tokens under {prior.spec.model}, from the end",
            source=self._source,
            prefill=prior.prefill if prior.spec.model == spec.model else None,
        )

    def _of_prior(self, name: str) -> Track:
        """Return the prior's track of a name; of Raw one without a loss, which takes as long as casting."""
        if name in self._prior.by_name:
            return self._prior.track(name)
        cast = next((self._prior.track(each) for each in CASTS if each in self._prior.by_name), self._prior.tracks[0])
        return replace(cast, loss=(0.0,) * len(cast.loss))

    def _losses(self, frames: FrameEncoder, track: str) -> tuple[float, ...]:
        """Return what every unit loses on a track: class by class if the prior has the same classes."""
        spec, prior, theirs = self._spec, self._prior, self._of_prior(track).loss
        if len(spec.classes) == 1 or prior.spec.names != spec.names:
            return frames.spread(expected_losses(theirs, len(frames.chunks)))
        losses = [0.0] * len(frames.units)
        for part, only in enumerate(spec.classes):
            own = [index for index, unit in enumerate(frames.units) if unit.part == part]
            given = [loss for loss, unit in zip(theirs, prior.units, strict=True) if unit.part == part]
            if only.kind == "state":
                made: Sequence[float] = [given[-1]] * len(own)  # a prompt needs one of them
            elif only.kind in ("full", "latent"):
                made = expected_losses(given, len(own))
            else:  # what a group of a window loses depends on its distance from the end
                made = [0.0] * (len(own) - len(given)) + given[-len(own) :]
            for index, loss in zip(own, made, strict=True):
                losses[index] = loss
        return tuple(losses)


@dataclass(frozen=True, slots=True)
class Slot:
    """A reserved place for one cache: `fill` it or `leave` it."""

    publisher: Publisher
    chunks: tuple[str, ...]
    tokens: int
    position: int | None = 0
    """See `Publisher.reserve_named`."""

    def fill(self, kv: torch.Tensor | tuple[torch.Tensor, ...], done: Callable[[PublishOutcome], object]) -> None:
        """Publish a cache, [layer, K/V, head, token, dim] of any float dtype, which must not change any more.

        Of several layer classes, ``kv`` is a tensor each. ``done`` is called with the outcome, in its thread.
        """
        self.publisher._begin(self, (kv,) if isinstance(kv, torch.Tensor) else kv, done)  # noqa: SLF001  # its own

    def leave(self) -> None:
        """Give the place back: there is no cache after all."""
        self.publisher._give_back(self)  # noqa: SLF001  # its own


def expected_losses(losses: Sequence[float], groups: int) -> tuple[float, ...]:
    """Return the losses of ``groups`` groups from those of another cache: the same sum, distributed as may be expected.

    The loss of a whole cache hardly grows with its length. Most of it lies in the last groups and in the first. Which
    groups matter between them depends on the text.
    """
    total, last = sum(losses), min(_LAST_GROUPS, len(losses) - 1, groups - 1)
    made = [total / groups] * groups
    if last > 0 and total > 0:
        ends, between = sum(losses[-last:]) + losses[0], groups - last - 1
        if between:
            made = [losses[0], *[(total - ends) / between] * between, *losses[-last:]]
        elif ends > 0:
            made = [total / ends * each for each in (losses[0], *losses[-last:])]
    return tuple(six((1 - _EVEN_SHARE) * each + _EVEN_SHARE * total / groups) for each in made)


def read_profile(path: Path) -> Profile:
    """Return the codec profile in a file; raise `AssetError` if it cannot be read, `FormatError` if it is none."""
    try:
        with path.open("rb") as file:
            return Profile.from_bytes(file.read(MAX_PROFILE_BYTES + 1))
    except OSError as error:
        raise AssetError(f"{path}: cannot be read ({error.strerror}); `kvabr calibrate` makes a profile") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def with_heads(spec: KVSpec, heads: range | Sequence[range]) -> KVSpec:
    """Return the spec of the cache of some heads, under a name of its own; the spec itself if these are all.

    Of several layer classes, ``heads`` is a range for each.
    """
    parts = (heads,) * len(spec.classes) if isinstance(heads, range) else tuple(heads)
    if all(len(part) == one.heads for part, one in zip(parts, spec.classes, strict=True)):
        return spec
    told = ",".join(dict.fromkeys(f"{part.start}-{part.stop - 1}" for part in parts))
    classes = tuple(one.of_heads(part) for part, one in zip(parts, spec.classes, strict=True))
    return replace(spec, classes=classes, model=f"{spec.model}+heads{told}")


def with_layers(spec: KVSpec, layers: range) -> KVSpec:
    """Return the spec of the cache of some consecutive layers, numbered from 0, under a name of its own.

    The spec itself if these are all. A class that has none of them is left out.
    """
    if layers == range(1 + max(each.layers[-1] for each in spec.classes)):
        return spec
    own = [one for each in spec.classes if (one := each.of_layers(layers)) is not None]
    classes = tuple(sorted(own, key=lambda one: (one.layers[0], one.role)))
    return replace(spec, classes=classes, model=f"{spec.model}+layers{layers.start}-{layers.stop - 1}")


def _be_nice() -> None:
    with contextlib.suppress(OSError, AttributeError):  # threads have no priority of their own except on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
