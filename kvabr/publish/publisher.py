"""Publishes caches that an engine computed, in the background, with estimated losses (`kvabr.publish.offer`).

If encoding is too slow, caches are dropped rather than delaying the engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from cachetools import LRUCache

from kvabr.codec.profile import Profile
from kvabr.publish.encoding_threads import encoding_thread, restore_priority, yield_priority
from kvabr.publish.offer import TrackOffer
from kvabr.publish.production import Production, PublishOutcome, PublishVerdict
from kvabr.publish.published_lookup import PublishedLookup, SoundAssets
from kvabr.store.asset import Asset
from kvabr.store.local import LocalStore
from kvabr.store.locations import Location, open_store
from kvabr.store.prompt import Prompt
from kvabr.store.quota import FolderQuota
from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog
from kvabr.types.digests import SHA256
from kvabr.types.errors import AssetError, FormatError, HomeProcess, UsageError, may_pass
from kvabr.types.kv import KVSpec
from kvabr.types.media import MediaTokens
from kvabr.types.naming import chain
from kvabr.types.passage import PassageNotes, passage_chain

_log = logging.getLogger(__name__)

_MAX_GROUPS = 1 << 18
"""Maximum group digests to remember, about 60 MB."""

__all__ = ["PublishOutcome", "PublishVerdict", "Publisher", "Slot", "read_profile", "with_heads", "with_layers"]


class Publisher:
    """Encodes and publishes caches group by group, in its own threads."""

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
        digest: str = SHA256,
        keep_tokens: bool = False,
    ) -> None:
        """Open the store (a folder or a URL) and start the threads.

        Losses and decode times are estimated from ``prior``, ideally a catalog of the same model. ``tracks`` are tracks
        of ``prior``, or Raw. The default is FP16, Int8, Int4, and with a profile the AC layers; Raw replaces larger
        tracks for a quantised cache and for float32 states. At most ``queue`` caches wait or are being encoded, all in
        memory. ``max_bytes`` limits engine assets in a folder, see `kvabr.store.quota`. ``keep_tokens`` stores the
        token ids of prompts without salt, for KV events; folders only. Raise `ForeignError` if the profile is for
        another model.
        """
        if queue < 1:
            raise UsageError(f"queue must be at least 1, got {queue}")
        self.offer = TrackOffer(spec, prior=prior, tracks=tracks, profile=profile, source=source, digest=digest)
        self.store = open_store(location)
        self._folder = self.store.store if isinstance(self.store.store, LocalStore) else None
        if keep_tokens and self._folder is None:
            raise UsageError(f"{location}: keep_tokens needs a folder, because object stores do not store token ids")
        try:
            self.store.prepare()
        except AssetError as error:
            if not may_pass(error):
                raise
            _log.warning(
                "kvabr: %s; publishing starts when the store answers", error
            )  # the writer of each asset tries again
        self._quota: FolderQuota | None = None
        if max_bytes is not None:
            if self._folder is None:
                raise UsageError(
                    f"{location}: max_bytes={max_bytes} needs a folder; give the bucket a lifecycle rule instead"
                )
            self._quota = FolderQuota(self._folder, max_bytes)
        self._sound = SoundAssets(self.store)
        self._lookup = PublishedLookup(self.store.has, self._touch, sound=self._sound.look)
        self._free = threading.BoundedSemaphore(queue)
        self._known: set[str] = set()
        self._longest: LRUCache[str, str] = LRUCache(_MAX_GROUPS)
        self._lock = threading.Lock()
        self.home = HomeProcess("the publisher")
        self._thread, self._patient_thread = encoding_thread(), encoding_thread(patient=True)
        self._closed, self._keep_tokens = False, keep_tokens
        self.not_finite = 0
        """Number of caches refused because of NaN or infinity."""

    def reserve(self, tokens: Sequence[int], salt: bytes = b"", model: str | None = None) -> Slot | PublishVerdict:
        """Return a slot for a future cache of these tokens, or why there is none; block for at most half a second.

        ``salt`` is a tenant's secret, see `kvabr.types.naming.chain`; ``model`` is the name of a model with an adapter.
        Raise `UsageError` for invalid token ids.
        """
        spec, model = self.offer.spec, model or self.offer.spec.model
        chunks = chain(tokens, model=model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
        slot = self.reserve_named(chunks, len(tokens))
        if not isinstance(slot, Slot):
            return slot
        # Tokens with salt, adapter or pictures have another name.
        plain = not salt and model == spec.model and not isinstance(tokens, MediaTokens)
        return replace(slot, model=model, prompt=Prompt(tuple(tokens), ()) if self._keep_tokens and plain else None)

    def reserve_passage(self, tokens: Sequence[int], notes: PassageNotes, salt: bytes = b"") -> Slot | PublishVerdict:
        """Reserve a slot for a passage, with float32 keys before rotation (`kvabr.publish.passages`).

        Raise `FormatError` if the model cannot have such passages.
        """
        spec = self.offer.spec
        notes.check(spec, len(tokens))
        names = {"model": spec.model, "tokenizer": spec.tokenizer}
        chunks = passage_chain(tokens, **names, group_tokens=spec.group_tokens, salt=salt)
        slot = self.reserve_named(chunks, len(tokens))
        return replace(slot, passage=notes) if isinstance(slot, Slot) else slot

    def reserve_named(self, chunks: Sequence[str], tokens: int, position: int | None = 0) -> Slot | PublishVerdict:
        """Reserve a slot by group digests, 64 hex digits each; the last digest is the asset's name.

        A ``position`` of None (unknown) excludes tracks with a profile, which undo the rotary embedding.
        """
        self.home.check()
        if not chunks:
            raise UsageError("a cache must have at least 1 token, got 0")
        name = chunks[-1]
        with self._lock:
            if name in self._known:
                return "known"
            longer = self._longest.get(name, name)
        # Look up every time: removed assets may be published again.
        published = self._lookup.exists(longer)
        if published is False and longer != name:
            published = self._lookup.exists(name)
        if published is None:
            return "failed"
        if published:
            return "known"
        with self._lock:
            if name in self._known:
                return "known"
            if self._closed or not self._free.acquire(blocking=False):
                return "full"
            self._known.add(name)
        return Slot(self, tuple(chunks), tokens, position, replaces=self._sound.is_damaged(name))

    def prepare(self) -> None:
        """Compute the tables for encoding in advance, instead of with the first group."""
        self.home.check()
        self._thread.submit(self.offer.prepare)

    def close(self) -> None:
        """Publish all waiting caches, then end; do nothing in a forked child."""
        if not self.home.here:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._patient_thread.shutdown(wait=True)
        self.store.close()

    def _touch(self, name: str) -> None:
        if self._quota is not None:
            self._quota.touch(name)

    def _release(self, name: str) -> None:
        with self._lock:
            self._known.discard(name)
        self._free.release()

    def _fill(self, slot: Slot, kv: Sequence[torch.Tensor], done: Callable[[PublishOutcome], object]) -> None:
        self.home.check()
        writer = partial(self.store.writer, slot.chunks[-1], force=slot.replaces)
        begun = partial(self._published_prefix, slot.chunks) if slot.passage is None and slot.position == 0 else None
        made = Production(
            slot.offer,
            writer,
            slot.chunks,
            slot.tokens,
            slot.position,
            done,
            passage=slot.passage,
            prompt=slot.prompt,
            begun=begun,
        )
        made.append(0, kv, slot.tokens)
        made.end()
        self.wake(made)

    def _published_prefix(self, chunks: Sequence[str]) -> tuple[Asset, int] | None:
        """Return the local asset with the longest common prefix, and the number of common groups, to copy these."""
        if self._folder is None:
            return None  # reading groups from a bucket is slower than encoding again
        with self._lock:
            found = ((self._longest.get(chunks[shared - 1]), shared) for shared in range(len(chunks), 0, -1))
            name, shared = next((pair for pair in found if pair[0] is not None), (None, 0))
        return None if name is None else (self.store.open(name), shared)

    def wake(self, production: Production) -> None:
        """Schedule the next step of a cache that has work."""
        with production.lock:
            if not production.has_work():
                return
            patient = production.patient()
            if production.stepping:
                if production.patient_thread is not None and not patient:
                    restore_priority(production.patient_thread)
                return
            if production.waits_for in (patient, False):
                return
            production.waits_for = patient  # invalidates an entry in the patient thread's queue
        try:
            self._submit(production, patient)
        except RuntimeError:
            production.close(PublishOutcome("failed", why="the publisher is closed"))
            self._finished(production)

    def _submit(self, production: Production, patient: bool) -> None:
        (self._patient_thread if patient else self._thread).submit(self._work, production, patient)

    def _work(self, production: Production, patient: bool) -> None:
        with production.lock:
            if production.waits_for is not patient:
                return
            production.waits_for, production.stepping = None, True
            if patient:
                production.patient_thread = threading.get_native_id()
                yield_priority()
        while True:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            production.step()
            production.spent(time.thread_time() - cpu_s, time.monotonic() - began_s, patient=patient)
            if production.outcome is not None:
                self._finished(production)
                return
            with production.lock:
                production.patient_thread = None
                if not production.has_work():
                    production.stepping = False
                    return
                wanted = production.patient()
                production.waits_for, production.stepping = wanted, False
            try:
                self._submit(production, wanted)
            except RuntimeError:
                with production.lock:
                    production.waits_for, production.stepping = None, True
            else:
                return

    def _finished(self, production: Production) -> None:
        outcome = production.outcome
        assert outcome is not None  # noqa: S101  # the only reason to call this
        if outcome.not_finite:
            with self._lock:
                self.not_finite += 1
            _log.warning("kvabr: %s", outcome.why)
        if self._quota is not None and production.published is not None:
            self._quota.make_room(production.published)
        if production.published is not None and production.covers_beginnings:
            with self._lock:
                self._longest.update((chunk, production.chunks[-1]) for chunk in production.chunks)
        if outcome.tokens:
            self._sound.replaced(production.chunks[-1])
        self._release(production.chunks[-1])
        production.done(outcome)


@dataclass(frozen=True, slots=True)
class Slot:
    """A reservation for one cache: call `fill` or `leave`."""

    publisher: Publisher
    chunks: tuple[str, ...]
    tokens: int
    position: int | None = 0
    passage: PassageNotes | None = None
    model: str | None = None
    replaces: bool = False
    """True if the cache replaces a damaged asset."""
    prompt: Prompt | None = None

    @property
    def offer(self) -> TrackOffer:
        return self.publisher.offer if self.model is None else self.publisher.offer.named(self.model)

    def fill(self, kv: torch.Tensor | tuple[torch.Tensor, ...], done: Callable[[PublishOutcome], object]) -> None:
        """Publish a cache, one tensor [layer, K/V, head, token, dim] per layer class; do not change it afterwards.

        ``done`` receives the outcome, in an encoding thread.
        """
        self.publisher._fill(self, (kv,) if isinstance(kv, torch.Tensor) else kv, done)  # noqa: SLF001  # its own

    def leave(self) -> None:
        """Release the reservation without using it."""
        self.publisher._release(self.chunks[-1])  # noqa: SLF001  # its own


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a codec profile; raise `AssetError` or `FormatError`."""
    try:
        with Path(path).open("rb") as file:
            return Profile.from_bytes(file.read(MAX_PROFILE_BYTES + 1))
    except OSError as error:
        raise AssetError(f"{path}: cannot be read ({error.strerror}); make a profile with `kvabr calibrate`") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def with_heads(spec: KVSpec, heads: range | Sequence[range]) -> KVSpec:
    """Return the spec, with the same name, of a cache of some heads; the spec itself if these are all heads.

    ``heads`` has one range per layer class, or is one range for all.
    """
    parts = (heads,) * len(spec.classes) if isinstance(heads, range) else tuple(heads)
    if all(len(part) == one.heads for part, one in zip(parts, spec.classes, strict=True)):
        return spec
    suffix = ",".join(dict.fromkeys(f"{part.start}-{part.stop - 1}" for part in parts))
    classes = tuple(one.of_heads(part) for part, one in zip(parts, spec.classes, strict=True))
    return replace(spec, classes=classes, model=f"{spec.model}+heads{suffix}")


def with_layers(spec: KVSpec, layers: range) -> KVSpec:
    """Return the spec, with the same name, of the first layers of a cache; the spec itself if these are all layers."""
    if layers == range(1 + max(each.layers[-1] for each in spec.classes)):
        return spec
    own = [one for each in spec.classes if (one := each.of_layers(layers)) is not None]
    classes = tuple(sorted(own, key=lambda one: (one.layers[0], one.role)))
    return replace(spec, classes=classes, model=f"{spec.model}+layers{layers.start}-{layers.stop - 1}")
