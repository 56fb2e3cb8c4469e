"""Publishes what an engine computed anyway: encodes it in the background, into a store that `kvabr serve` serves.

Nothing is measured, see `kvabr.publish.offer`. What would make the engine wait is dropped.
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
from kvabr.publish.encoding_threads import calm_down, encoding_thread, hurry
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
from kvabr.types.errors import AssetError, FormatError, UsageError, may_pass
from kvabr.types.home import HomeProcess
from kvabr.types.kv import KVSpec
from kvabr.types.media import MediaTokens
from kvabr.types.naming import chain
from kvabr.types.passage import PassageNotes, passage_chain

_log = logging.getLogger(__name__)

_MAX_GROUPS = 1 << 18
"""Groups whose assets are remembered, by their digests: some 60 MB."""

__all__ = ["PublishOutcome", "PublishVerdict", "Publisher", "Slot", "read_profile", "with_heads", "with_layers"]


class Publisher:
    """Encodes and publishes caches in threads of its own, group by group."""

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
            max_bytes: bound on what engines publish in a folder, see `kvabr.store.quota`; None: no bound.
            source: what the caches are, in words, for the catalogs.
            digest: kind of the groups' digests, see `kvabr.types.digests`.
            keep_tokens: keep the token ids of prompts without salt beside their assets, for KV events
                (`kvabr.telemetry.kv_events`); stores that many read keep none.
        """
        if queue < 1:
            raise UsageError(f"a queue for {queue} caches; it must have room for one")
        self.offer = TrackOffer(spec, prior=prior, tracks=tracks, profile=profile, source=source, digest=digest)
        """The tracks."""
        self.store = open_store(location)
        self._folder = self.store.store if isinstance(self.store.store, LocalStore) else None
        if keep_tokens and self._folder is None:
            raise UsageError(f"{location}: object stores keep no token ids of prompts; only folders do")
        try:
            self.store.prepare()
        except AssetError as error:
            if not may_pass(error):
                raise
            _log.warning("kvabr: %s; nothing is published until it answers", error)  # each asset's writer tries again
        self._quota: FolderQuota | None = None
        if max_bytes is not None:
            if self._folder is None:
                raise UsageError(
                    f"{location}: an engine cannot keep an object store within {max_bytes:,} bytes, since many publish "
                    "there; leave the bound out, and give the bucket a lifecycle rule"
                )
            self._quota = FolderQuota(self._folder, max_bytes)
        self._sound = SoundAssets(self.store)
        self._lookup = PublishedLookup(self.store.has, self._touch, sound=self._sound.look)
        self._free = threading.BoundedSemaphore(queue)
        self._known: set[str] = set()
        """Assets that are being published."""
        self._longest: LRUCache[str, str] = LRUCache(_MAX_GROUPS)
        """By the digest of a group, the longest asset with it that was published here."""
        self._lock = threading.Lock()
        self.home = HomeProcess("the publisher")
        """The process that has its threads."""
        self._thread, self._patient_thread = encoding_thread(), encoding_thread(patient=True)
        self._closed, self._keep_tokens = False, keep_tokens
        self.not_finite = 0
        """Caches that were refused because a number is NaN or infinite."""

    def reserve(self, tokens: Sequence[int], salt: bytes = b"", model: str | None = None) -> Slot | PublishVerdict:
        """Return a slot for a cache of these tokens, or why there is none; the cache need not exist yet.

        Takes half a second at most, for a store that does not answer ("failed").

        ``salt`` is a tenant's secret, see `kvabr.types.naming.chain`. ``model`` is the name of the model with an
        adapter, whose caches have the same shape; None: without one. Raises `UsageError` unless these are token ids.
        """
        spec, model = self.offer.spec, model or self.offer.spec.model
        chunks = chain(tokens, model=model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
        slot = self.reserve_named(chunks, len(tokens))
        if not isinstance(slot, Slot):
            return slot
        # Tokens alone would name the prompt without its salt, adapter or pictures to who is told of them.
        plain = not salt and model == spec.model and not isinstance(tokens, MediaTokens)
        return replace(slot, model=model, prompt=Prompt(tuple(tokens), ()) if self._keep_tokens and plain else None)

    def reserve_passage(self, tokens: Sequence[int], notes: PassageNotes, salt: bytes = b"") -> Slot | PublishVerdict:
        """As `reserve`, for a passage; its cache has keys before rotation, float32 (`kvabr.publish.passages`).

        ``notes`` are what the catalog says of it. Raises `FormatError` if the model can have no passages, or none with
        these notes.
        """
        spec = self.offer.spec
        notes.check(spec, len(tokens))
        names = {"model": spec.model, "tokenizer": spec.tokenizer}
        chunks = passage_chain(tokens, **names, group_tokens=spec.group_tokens, salt=salt)
        slot = self.reserve_named(chunks, len(tokens))
        return replace(slot, passage=notes) if isinstance(slot, Slot) else slot

    def reserve_named(self, chunks: Sequence[str], tokens: int, position: int | None = 0) -> Slot | PublishVerdict:
        """As `reserve`, for other digests of groups, 64 hex digits each; the last one names the asset.

        ``position`` is that of the first token in the prompt. If it is None, it is not known, and the tracks are left
        out that need a profile: they undo the rotary embedding.
        """
        self.home.check()
        if not chunks:
            raise UsageError("a cache to publish has at least one token; this one has none")
        name = chunks[-1]
        with self._lock:
            if name in self._known:
                return "known"
            longer = self._longest.get(name, name)
        # Published assets are looked up each time: one that was removed since may be published again.
        published = self._lookup.ask(longer)
        if published is False and longer != name:
            published = self._lookup.ask(name)
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
        """Have the encoding thread compute what its first group would otherwise wait for."""
        self.home.check()
        self._thread.submit(self.offer.prepare)

    def close(self) -> None:
        """Publish what waits, and end; in a forked child do nothing."""
        if not self.home.here:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._patient_thread.shutdown(wait=True)
        self.store.close()

    def _touch(self, name: str) -> None:
        """Note that an asset was computed again."""
        if self._quota is not None:
            self._quota.touch(name)

    def _give_back(self, name: str) -> None:
        with self._lock:
            self._known.discard(name)
        self._free.release()

    def _fill(self, slot: Slot, kv: Sequence[torch.Tensor], done: Callable[[PublishOutcome], object]) -> None:
        self.home.check()
        writer = partial(self.store.writer, slot.chunks[-1], force=slot.replaces)
        begun = partial(self._begun, slot.chunks) if slot.passage is None and slot.position == 0 else None
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

    def _begun(self, chunks: Sequence[str]) -> tuple[Asset, int] | None:
        """Return the asset published here that shares the most groups with a prompt, and how many; None: there is none.

        So a conversation that goes on turn by turn is encoded once.
        """
        if self._folder is None:
            return None  # to read groups from a bucket takes longer than to encode them
        with self._lock:
            found = ((self._longest.get(chunks[shared - 1]), shared) for shared in range(len(chunks), 0, -1))
            name, shared = next((pair for pair in found if pair[0] is not None), (None, 0))
        return None if name is None else (self.store.open(name), shared)

    def wake(self, production: Production) -> None:
        """Have an encoding thread go on with a cache, if there is anything to do."""
        with production.lock:
            if not production.has_work():
                return
            patient = production.patient()
            if production.stepping:
                if production.patient_thread is not None and not patient:
                    hurry(production.patient_thread)  # others wait for what it has begun
                return
            if production.waits_for in (patient, False):
                return
            production.waits_for = patient  # if it waited for the patient thread, that will find it gone
        try:
            self._submit(production, patient)
        except RuntimeError:
            production.close(PublishOutcome("failed", why="the publisher is closed"))
            self._over(production)

    def _submit(self, production: Production, patient: bool) -> None:
        (self._patient_thread if patient else self._thread).submit(self._work, production, patient)

    def _work(self, production: Production, patient: bool) -> None:
        """Do one step of a cache, and let the others have theirs before the next."""
        with production.lock:
            if production.waits_for is not patient:
                return
            production.waits_for, production.stepping = None, True
            if patient:
                production.patient_thread = threading.get_native_id()
                calm_down()
        while True:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            production.step()
            production.spent(time.thread_time() - cpu_s, time.monotonic() - began_s, patient=patient)
            if production.outcome is not None:
                self._over(production)
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
            except RuntimeError:  # the publisher is being closed: finish it here
                with production.lock:
                    production.waits_for, production.stepping = None, True
            else:
                return

    def _over(self, production: Production) -> None:
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
        self._give_back(production.chunks[-1])
        production.done(outcome)


@dataclass(frozen=True, slots=True)
class Slot:
    """A reserved place for one cache: `fill` it or `leave` it."""

    publisher: Publisher
    chunks: tuple[str, ...]
    tokens: int
    position: int | None = 0
    """See `Publisher.reserve_named`."""
    passage: PassageNotes | None = None
    """Of a passage, see `Publisher.reserve_passage`."""
    model: str | None = None
    """See `Publisher.reserve`."""
    replaces: bool = False
    """Whether it takes the place of a damaged asset."""
    prompt: Prompt | None = None
    """The token ids, if they are kept beside the asset."""

    @property
    def offer(self) -> TrackOffer:
        """The tracks."""
        return self.publisher.offer if self.model is None else self.publisher.offer.named(self.model)

    def fill(self, kv: torch.Tensor | tuple[torch.Tensor, ...], done: Callable[[PublishOutcome], object]) -> None:
        """Publish a cache, [layer, K/V, head, token, dim] of any float dtype, which must not change any more.

        Of several layer classes, ``kv`` is a tensor each. ``done`` is called with the outcome, in its thread.
        """
        self.publisher._fill(self, (kv,) if isinstance(kv, torch.Tensor) else kv, done)  # noqa: SLF001  # its own

    def leave(self) -> None:
        """Give the place back: there is no cache after all."""
        self.publisher._give_back(self.chunks[-1])  # noqa: SLF001  # its own


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Return the codec profile in a file; raise `AssetError` if it cannot be read, `FormatError` if it is none."""
    try:
        with Path(path).open("rb") as file:
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
