"""Assets in an object store: a catalog each, whose groups are ranges of spans that assets share."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NoReturn

from cachetools import TTLCache

from kvabr.store.asset import CATALOG, PROFILE, PROMPT, Asset, AssetListing, AssetVersion, FrameReader, LoadedFrame
from kvabr.store.objects.blocking import each
from kvabr.store.objects.bucket import open_objects
from kvabr.store.objects.layout import catalog_key, profile_key
from kvabr.store.objects.protocol import StoredObject
from kvabr.store.objects.reading import as_asset_errors, read_catalog
from kvabr.store.objects.spans import SpanHead, head_of, units_by_span
from kvabr.store.objects.url import split_asset
from kvabr.store.objects.writer import ObjectAssetWriter
from kvabr.types.errors import AssetError, FormatError, MissingAssetError, UsageError
from kvabr.types.units import unit_of

MAX_LISTED = 1 << 18
"""Assets of a store that are looked at."""
LOOK_EVERY_S = 5.0
_AT_ONCE = 8
_KNOWN_SPANS = 1 << 17
_FOUND_S = 600.0
"""Seconds after which a span is looked for again: it may have been lost."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ObjectAsset(Asset):
    """An asset in an object store."""

    local = False
    keeps_prompt = False

    def __init__(self, store: ObjectAssetStore, name: str, prompt: str, version: AssetVersion) -> None:
        """Read the catalog of the prompt with this digest; see `AssetStore.open`."""
        self._store, self._bucket, self._prompt = store, store.bucket, prompt
        with as_asset_errors():
            stored = read_catalog(store.bucket, prompt)
        super().__init__(store.bucket.where.below(prompt), name, version, stored.catalog)
        if self.catalog.namespace.prompt != prompt:
            raise FormatError(f"{self.location}: is the catalog of another prompt")
        try:
            stored.check(self.catalog)
        except FormatError as error:
            raise type(error)(f"{self.location}: {error}") from error
        self._stored = stored
        self._units = units_by_span(self.catalog, stored.span_groups)
        self._heads: dict[int, SpanHead] = {}

    def is_current(self) -> bool:
        """See `Asset.is_current`: what the last look at the store told."""
        return self._store.known(self.name) in (self.version, None)

    def check_parts(self) -> None:
        """See `Asset.check_parts`; spans that were found a moment ago are not looked for again."""
        with as_asset_errors():
            self._store.check_sizes(
                {key: self._head(number).total for number, key in enumerate(self._stored.keys)}, self.location
            )
        if self.catalog.profile is not None and self.catalog.profile not in self._store.profiles:
            self.profile_bytes()
            self._store.profiles.add(self.catalog.profile)

    def open_frame(self, group: int, track: str) -> FrameReader:
        key, begin, end = self._place(group, track)
        with as_asset_errors():
            data = self._bucket.get_sync(key, begin, end, limit=end - begin)
        if len(data) != end - begin:
            raise AssetError(f"{self._bucket.below(key)}: ends before group {group} of {track}; it was replaced")
        return LoadedFrame(data)

    def _read_part(self, part: str, max_bytes: int) -> bytes:
        if part == PROMPT:
            raise AssetError(f"{self.location}: object stores do not keep the token ids of prompts")
        with as_asset_errors():
            if part == CATALOG:
                return read_catalog(self._bucket, self._prompt).catalog
            if part == PROFILE:
                key = profile_key(self.catalog.profile or "")
                return bytes(self._bucket.get_sync(key, 0, max_bytes + 1, limit=max_bytes + 1))
            track, _, group = part.rpartition("/")
            key, begin, end = self._place(int(group), track)
            return bytes(self._bucket.get_sync(key, begin, end, limit=end - begin))

    def _frame_part(self, group: int, track: str) -> str:
        return f"{track}/{group}"

    def _place(self, group: int, track: str) -> tuple[str, int, int]:
        """Return where a frame is: the key of its span, and the range in it."""
        catalog = self.catalog
        _, part = catalog.spec.level_of(track)
        span = unit_of(catalog.spec, part, group, catalog.tokens).chunk // self._stored.span_groups
        return self._stored.keys[span], *self._head(span).place(track, group)

    def _head(self, span: int) -> SpanHead:
        if span not in self._heads:
            head = head_of(self.catalog, span, self._units[span], self._stored.span_groups)
            self._heads[span] = replace(head, begin=self._stored.begins[span])
        return self._heads[span]


class ObjectAssetStore:
    """An `AssetStore`: all assets of one tenant. Each is named by its prompt digest, 64 hex digits.

    A URL whose last part is such a digest is a store of that asset alone.
    """

    look_every_s = LOOK_EVERY_S

    def __init__(self, url: str) -> None:
        """Take a URL, see `kvabr.store.objects.url`; nothing is asked for yet."""
        where, self._only = split_asset(url)
        self.bucket = open_objects(str(where))
        self.profiles: set[str] = set()
        """SHA-256 of the profiles that were checked."""
        self._sizes: TTLCache[str, int] = TTLCache(_KNOWN_SPANS, _FOUND_S)
        """Bytes of the spans that were found lately, by key."""
        self._known: dict[str, AssetVersion] = {}

    @property
    def location(self) -> str:
        """The store's URL."""
        return self.bucket.url if self._only is None else self.bucket.where.below(self._only)

    def prepare(self) -> None:
        """See `AssetStore.prepare`: publishers rely on conditional writes."""
        with as_asset_errors():
            self.bucket.probe_sync()

    def list(self) -> AssetListing:
        """See `AssetStore.list`; raises `AssetError` if the store does not answer, or does not let us list."""
        if self._only is not None:
            version = self.version(".")
            return AssetListing({} if version is None else {".": version}, complete=True)
        versions: dict[str, AssetVersion] = {}
        with as_asset_errors():
            for info in self.bucket.list_sync("a/"):
                name = info.key.removeprefix("a/")
                if _DIGEST.fullmatch(name):
                    versions[name] = _version(info)
                if len(versions) >= MAX_LISTED:
                    break
        self._known = dict(versions)
        return AssetListing(versions, complete=len(versions) < MAX_LISTED)

    def version(self, name: str) -> AssetVersion | None:
        prompt = self._only if name == "." else name
        if prompt is None or not _DIGEST.fullmatch(prompt):
            return None
        with as_asset_errors():
            info = self.bucket.head_sync(catalog_key(prompt))
        if info is None:
            self._known.pop(name, None)
            return None
        self._known[name] = _version(info)
        return self._known[name]

    def known(self, name: str) -> AssetVersion | None:
        """Return the version of an asset that the last look found."""
        return self._known.get(name)

    def open(self, name: str = ".") -> ObjectAsset:
        """See `AssetStore.open`; a store that has only one asset may be opened like that asset."""
        if name == "." and self._only is None:
            name = self._sole()
        version = self.version(name)
        if version is None:
            self._missing(name)
        return ObjectAsset(self, name, self._only if name == "." and self._only else name, version)

    def writer(self, name: str = ".", *, force: bool = False) -> ObjectAssetWriter:
        """See `AssetStore.writer`; without a name, the asset takes that of its prompt. Checks the store once."""
        prompt = self._only if name == "." else name
        if prompt is not None and not _DIGEST.fullmatch(prompt):
            raise UsageError(f"{self.location}: assets in object stores are named by their prompt digest, not {name!r}")
        self.prepare()
        if prompt is not None and not force and self.version(name) is not None:
            raise UsageError(f"{self.bucket.where.below(prompt)}: this asset exists; add --force to replace it")
        return ObjectAssetWriter(self.bucket, prompt, force=force)

    def close(self) -> None:
        self.bucket.close()

    def check_sizes(self, sizes: dict[str, int], what: str) -> None:
        """Raise `AssetError` unless spans of these keys and sizes exist; those found lately count as found."""
        todo = [key for key, size in sizes.items() if self._sizes.get(key) != size]
        if not todo:
            return
        found = dict(zip(todo, each(_AT_ONCE, self.bucket.head_sync, todo), strict=True))
        for key, info in found.items():
            if info is None:
                raise AssetError(f"{what}: {self.bucket.below(key)} is missing; publish the asset again")
            if info.size != sizes[key]:
                raise AssetError(f"{what}: {self.bucket.below(key)} has {info.size} bytes, not {sizes[key]}")
        self._sizes.update({key: sizes[key] for key in todo})

    def _sole(self) -> str:
        names = sorted(self.list().versions)
        if len(names) == 1:
            return names[0]
        if not names:
            raise MissingAssetError(f"{self.location}: no such asset: the store is empty")
        some = ", ".join(name[:16] + "..." for name in names[:3])
        raise AssetError(
            f"{self.location}: has {len(names)} assets ({some}); name one: {self.bucket.where.below('DIGEST')}"
        )

    def _missing(self, name: str) -> NoReturn:
        raise MissingAssetError(f"{self.location if name == '.' else self.bucket.where.below(name)}: no such asset")


def _version(info: StoredObject) -> AssetVersion:
    return AssetVersion(info.etag, int(info.modified_s * 1e9))
