"""Publishes an asset: frames first, the catalog last. Existing objects are never written again.

If several publishers write the same page, the first wins, and the others refer to its frames. If a publisher ends
before it writes its catalog, `kvabr store rm --unreferenced` or a lifecycle rule removes its objects.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Self

from kvabr.store.asset import as_asset_errors
from kvabr.store.local import LocalStore
from kvabr.store.names import (
    CATALOGS,
    MAX_MODELS,
    PAGE_GROUPS,
    catalog_name,
    has_states,
    model_name,
    pack_groups,
    pack_name,
    page_name,
    place,
    profile_name,
    prompt_name,
)
from kvabr.store.pages import MAX_PAGE_BYTES, Page, pages_of, with_pages
from kvabr.store.prompt import Prompt
from kvabr.store.removing import objects_of
from kvabr.store.store import Store, exists
from kvabr.types.catalog import Catalog, Track
from kvabr.types.errors import AssetError, FormatError, NotFoundError, TransportError, UsageError
from kvabr.types.kv import MAX_MODELS_BYTES, KVSpec, specs_from_json

_MAX_PUTS, _MAX_PUT_BYTES = 32, 256 << 20
"""Maximum number and bytes of concurrent writes."""


class AssetWriter:
    """Writes one asset; a context manager. Frames may be read back before `commit`.

    All methods raise `AssetError` if the store reports an error, such as a full disk.
    """

    def __init__(self, store: Store, prompt: str | None, *, force: bool = False, live: bool = False) -> None:
        self.store, self._prompt, self._force, self._live = store, prompt, force, live
        self._spec: KVSpec | None = None
        self._kind = ""
        self._chunks: Sequence[str] = ()
        self._packs: dict[str, int] = {}
        self._sizes: dict[str, dict[int, int]] = {}
        self._digests: dict[str, dict[int, str]] = {}
        self._open: dict[tuple[str, int], dict[int, bytes | memoryview]] = {}
        """Frames of incomplete packs, by published track and pack number."""
        self._shared: dict[int, Page | None] = {}
        """Pages of another asset with the same prefix, by number; None: there is no such page."""
        self._puts: deque[tuple[Future[bool], int]] = deque()
        self._put_bytes = 0
        self._profile = b""
        self._token_ids: Prompt | None = None
        self._fresh = False
        self._entered = False
        self.catalog: Catalog | None = None
        """The written catalog, including frames taken over from other assets; None before `commit`."""
        self.published = False
        """True if the store has this writer's catalog; False if another writer was first."""

    @property
    def location(self) -> str:
        """Path or URL of the asset; before a catalog names the asset, that of the store."""
        return self.store.url if self._prompt is None else self.store.where(self._prompt)

    def __enter__(self) -> Self:
        self._entered = True
        self._fresh = isinstance(self.store, LocalStore) and not self.store.folder.exists()
        return self

    def __exit__(self, *_: object) -> None:
        for put, _size in self._puts:
            put.cancel()
        self._puts.clear()
        self._open.clear()
        self._entered = False
        if self._fresh and isinstance(self.store, LocalStore) and not (self.store.folder / CATALOGS).exists():
            shutil.rmtree(self.store.folder, ignore_errors=True)  # no asset was written

    def begin(self, spec: KVSpec, chunks: Sequence[str] = (), kind: str = "") -> None:
        """Describe the asset: its spec, and the chained prompt digests of its groups.

        Groups that the store has in pages of this ``kind`` (`page_kind`) are not written again. An empty kind disables
        this.
        """
        self._spec, self._chunks, self._kind = spec, chunks, "" if has_states(spec) else kind

    def frame(self, group: int, track: str, frame: bytes | memoryview, digest: str) -> None:
        """Write the frame of a group on a published track; ``digest`` is that of the frame."""
        self._check_entered()
        if self._shares(group):
            return
        pack = self._pack(track, len(frame))
        self._sizes.setdefault(track, {})[group] = len(frame)
        self._digests.setdefault(track, {})[group] = digest
        waiting = self._open.setdefault((track, group // pack), {})
        waiting[group] = frame
        if len(waiting) == pack:
            self._write_pack(track, group // pack)

    def read_frame(self, group: int, track: str) -> memoryview:
        """Return a frame that was written, or that the store already had."""
        page = self._shares(group)
        if page is not None:
            found = page.place(track, group)
        else:
            pack = self._packs[track]
            if (waiting := self._open.get((track, group // pack), {}).get(group)) is not None:
                return memoryview(waiting)
            numbers = [
                at for at in range(group - group % pack, group - group % pack + pack) if at in self._sizes[track]
            ]
            sizes, digests = ([values[track][at] for at in numbers] for values in (self._sizes, self._digests))
            found = place(numbers[0], sizes, digests, pack, group)  # type: ignore[arg-type]
            self._wait(0)
        assert found is not None  # noqa: S101  # it was written before
        with as_asset_errors():
            return self.store.blocked(
                self.store.get(found.name, found.first, found.last, limit=found.last - found.first)
            )

    def profile(self, data: bytes) -> None:
        """Write the codec profile."""
        self._profile = data

    def prompt(self, prompt: Prompt) -> None:
        """Write the token ids; only folders store them."""
        self._token_ids = prompt

    def commit(self, catalog: Catalog) -> None:
        """Write the catalog, unless another publisher has written one for this prompt meanwhile."""
        self._check_entered()
        prompt = catalog.namespace.prompt
        if self._prompt not in (None, prompt) and not self._live:
            raise UsageError(f"this is the writer of {self._prompt}, not of {prompt}")
        with as_asset_errors():
            if (
                self._prompt is None
                and not self._force
                and self.store.blocked(exists(self.store, catalog_name(prompt)))
            ):
                raise UsageError(f"{self.store.where(prompt)}: this asset already exists; add --force to replace it")
        for track, number in list(self._open):
            self._write_pack(track, number)
        with as_asset_errors():
            self._commit(catalog, prompt)
        self._prompt = prompt

    # -------------------------------------------------------------- internals

    def _commit(self, catalog: Catalog, prompt: str) -> None:
        if catalog.profile is not None:
            if hashlib.sha256(self._profile).hexdigest() != catalog.profile:
                raise UsageError("the written profile is not the one that the catalog names")
            self._put(profile_name(catalog.profile), self._profile)
        if isinstance(self.store, LocalStore) and self._token_ids is not None:
            name = prompt_name(prompt)
            self.store.blocked(self.store.delete([name]))
            self.store.blocked(self.store.put_new(name, self._token_ids.dumps().encode()))
        put_model(self.store, catalog.spec)
        pages = [self._shared.get(number) or page for number, page in enumerate(pages_of(self._packed(catalog)))]
        self._wait(0)
        if isinstance(self.store, LocalStore) and self._live:
            self.store.flush(objects_of(self._packed(catalog)))
        if catalog.passage is None:
            pages = self._put_pages(catalog, pages)
        self.catalog = with_pages(self._packed(catalog), pages)
        made = self.catalog.dumps().encode()
        if self._force:
            self.store.blocked(self.store.delete([catalog_name(prompt)]))
        self.published = self.store.blocked(self.store.put_new(catalog_name(prompt), made))

    def _put_pages(self, catalog: Catalog, pages: Sequence[Page]) -> list[Page]:
        states, found = has_states(catalog.spec), list[Page]()
        for page in pages:
            end = page is pages[-1] and states
            own = page.dumps()
            last = page_name(page.chunks[-1], end=end)
            if self._force:
                self.store.blocked(self.store.delete([last]))
            if not self.store.blocked(self.store.put_new(last, own)):
                page = self._winner(last, page)  # noqa: PLW2901
                own = page.dumps()
            rest = page.chunks if end else page.chunks[:-1]
            for chunk in rest:
                self._put(page_name(chunk), own)
            found.append(page)
        self._wait(0)
        return found

    def _winner(self, name: str, own: Page) -> Page:
        try:
            found = Page.loads(self.store.blocked(self.store.get(name, limit=MAX_PAGE_BYTES)))
        except (NotFoundError, FormatError):
            return own
        alike = found.kind == own.kind and found.chunks == own.chunks and found.position == own.position
        same_packs = [level.packs for level in found.levels] == [level.packs for level in own.levels]
        return found if alike and same_packs and found.tracks[0].first == own.tracks[0].first else own

    def _packed(self, catalog: Catalog) -> Catalog:
        spec, entries = catalog.spec, [page for page in self._shared.values() if page is not None]
        if not self._packs and not entries:
            return catalog

        def packed(track: Track) -> Track:
            packs = tuple(self._packs.get(part.track_name(track.name), 1) for part in spec.parts)
            return replace(track, packs=packs if max(packs) > 1 else ())

        made = replace(catalog, tracks=tuple(map(packed, catalog.tracks)))
        if not entries:
            return made
        listed = {page.first // PAGE_GROUPS: page for page in entries}
        # Groups taken from the store have the sizes and digests of its pages.
        tracks = []
        for track in made.tracks:
            sizes, digests, loss = list(track.bytes), list(track.digests), list(track.loss)
            for number, page in listed.items():
                taken, own = page.by_name[track.name], slice(number * PAGE_GROUPS, (number + 1) * PAGE_GROUPS)
                sizes[own], digests[own], loss[own] = taken.bytes, taken.digests, taken.loss
            tracks.append(replace(track, bytes=tuple(sizes), digests=tuple(digests), loss=tuple(loss)))
        return replace(made, tracks=tuple(tracks))

    def _pack(self, track: str, size: int) -> int:
        if track not in self._packs:
            spec = self._spec
            state = spec is not None and spec.parts[spec.level_of(track)[1]].only.kind == "state"
            self._packs[track] = 1 if self._live or state or spec is None else pack_groups(size)
        return self._packs[track]

    def _shares(self, group: int) -> Page | None:
        """Return the store's page with a group, or None; only caches with a single layer class share pages."""
        number = group // PAGE_GROUPS
        chunks = self._chunks[number * PAGE_GROUPS : (number + 1) * PAGE_GROUPS]
        if not self._kind or self._force or self._live or len(chunks) < PAGE_GROUPS:
            return None
        if number not in self._shared:
            self._shared[number] = self._look(number, chunks)
        return self._shared[number]

    def _look(self, number: int, chunks: Sequence[str]) -> Page | None:
        if number and self._shared.get(number - 1) is None:
            return None  # the prefixes differ
        try:
            page = Page.loads(self.store.blocked(self.store.get(page_name(chunks[-1]), limit=MAX_PAGE_BYTES)))
        except (TransportError, FormatError):
            return None
        if page.kind != self._kind or page.chunks != tuple(chunks) or not page.whole:
            return None
        packs = {track.name: page.pack_of(track.name) for track in page.tracks}
        if number and packs != self._packs:
            return None
        try:  # a lifecycle rule may already have removed its frames
            if not self.store.blocked(exists(self.store, min(page.base_objects))):
                return None
        except TransportError:
            return None
        self._packs = packs
        return page

    def _write_pack(self, track: str, number: int) -> None:
        waiting = self._open.pop((track, number))
        groups = sorted(waiting)
        digests = [self._digests[track][group] for group in groups]
        frames = [waiting[group] for group in groups]
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        name = pack_name(digests)
        if self._force:
            with as_asset_errors():
                self.store.blocked(self.store.delete([name]))  # the existing object may be damaged
        with as_asset_errors():
            self._put(name, data)

    def _put(self, name: str, data: bytes | memoryview) -> None:
        self._wait(_MAX_PUT_BYTES - len(data))
        self._puts.append((self.store.started(self.store.put_new(name, data)), len(data)))
        self._put_bytes += len(data)

    def _wait(self, most_bytes: int) -> None:
        while self._puts and (self._put_bytes > most_bytes or len(self._puts) >= _MAX_PUTS or most_bytes <= 0):
            put, size = self._puts.popleft()
            self._put_bytes -= size
            with as_asset_errors():
                put.result()

    def _check_entered(self) -> None:
        if not self._entered:
            raise UsageError("an asset must be written inside the with statement of its writer")


def put_model(store: Store, spec: KVSpec) -> None:
    """Write a model's spec, unless the store has it; raise `AssetError` if the store has too many models."""
    text = json.dumps({"models": [spec.to_json()]}).encode()
    for number in range(MAX_MODELS):
        name = model_name(number)
        if store.blocked(store.put_new(name, text)):
            return
        try:
            known = specs_from_json(bytes(store.blocked(store.get(name, limit=MAX_MODELS_BYTES))))
        except (FormatError, NotFoundError):
            continue
        if [found.digest() for found in known] == [spec.digest()]:
            return
    raise AssetError(f"{store.url}: has {MAX_MODELS} models, the maximum of a store; publish into another prefix")
