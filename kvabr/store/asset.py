"""Published caches: what an asset consists of, and what a store of assets must provide.

An asset has `catalog.json` (`kvabr.types.catalog`), `profile.safetensors` (codec side information, if a track needs
it), a frame per group and track, and `prompt.json` (token ids of prompt and continuation, for recompute and
verification; never served). Whatever is read is checked against the catalog before it is believed.

To add a kind of store, implement `AssetStore`, `AssetWriter` and a subclass of `Asset`, and register a URL scheme in
`kvabr.store.locations`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Protocol, Self

from msgspec import Meta

from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog
from kvabr.types.digests import TITLES, digest_of, has_digest
from kvabr.types.errors import (
    AssetError,
    ForeignError,
    FormatError,
    KvabrError,
    NotFoundError,
    TransportError,
    VersionError,
)
from kvabr.types.naming import chain, prefix_key
from kvabr.types.passage import passage_chain
from kvabr.types.records import decode, read_schema

CATALOG = "catalog.json"
PROFILE = "profile.safetensors"
PROMPT = "prompt.json"

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
_PROMPT_SCHEMA = "kvabr.prompt/1"
_MAX_PROMPT_BYTES = 64 << 20
_AGAIN = "encode the asset again"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids that an asset was made from."""

    tokens: tuple[TokenId, ...]
    """The prompt, whose cache the asset is."""
    continuation: tuple[TokenId, ...]
    """The tokens that followed; the loss of a cache is measured on them."""
    seal: str | None = None
    """Ties a salted prompt to its asset, see `sealed`."""

    def sealed(self, name: str) -> Prompt:
        """Return this prompt tied to ``name``, the last chained digest, which needs the salt that is not kept."""
        return replace(self, seal=self._seal(name))

    def is_sealed_for(self, name: str) -> bool:
        """Return whether the seal is the one that `sealed` makes for ``name`` and these token ids."""
        return self.seal == self._seal(name)

    def _seal(self, name: str) -> str:
        parts = [name.encode()] + [struct.pack(f"<{len(ids)}I", *ids) for ids in (self.tokens, self.continuation)]
        return hashlib.sha256(
            b"kvabr.seal/1\0" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        ).hexdigest()

    def dumps(self) -> str:
        """Return the prompt as JSON text."""
        value = {"schema": _PROMPT_SCHEMA, "tokens": list(self.tokens), "continuation": list(self.continuation)}
        return json.dumps(value if self.seal is None else {**value, "seal": self.seal})

    @classmethod
    def loads(cls, text: str | bytes) -> Prompt:
        """Parse what `dumps` returned.

        Raises `FormatError` if it is not such JSON, another version, or ids that are not token ids.
        """
        data = text.encode(errors="replace") if isinstance(text, str) else text
        read_schema(data, "prompt", _PROMPT_SCHEMA)
        return decode(data, cls, "prompt")


@dataclass(frozen=True, slots=True)
class AssetVersion:
    """Identifies one version of an asset; found without reading it."""

    tag: str
    """Opaque, like an ETag: another tag means another version."""
    modified_ns: int
    """When it was published, nanoseconds since 1970; of two assets with one name the newer is served."""


class FrameReader(ABC):
    """The bytes of one frame: in memory, or in a file that stays open until this is closed."""

    size: int
    """Bytes of the frame."""
    files: int = 0
    """Descriptors that this keeps open."""

    @abstractmethod
    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``begin`` to ``end``, both within the frame; `AssetError` if they cannot be read any more."""

    def close(self) -> None:  # noqa: B027  # only files need it
        """Stop reading. May be called twice."""


class LoadedFrame(FrameReader):
    """A frame in memory."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.size = data, len(data)

    def read(self, begin: int, end: int) -> memoryview:
        return self.data[begin:end]


class Asset(ABC):
    """One version of a published cache, read from a store. Assets compare by identity."""

    local = True
    """Whether `open_frame` returns at once. A server reads frames of other stores in threads."""
    keeps_prompt = True
    """Whether this kind of store keeps the token ids of prompts."""

    def __init__(self, location: str, name: str, version: AssetVersion, catalog_data: bytes) -> None:
        """Parse the catalog.

        Args:
            location: path or URL of the asset, which `kvabr.store.locations.open_asset` opens.
            name: in its store, with slashes; "." for a store that is a single asset.
            version: found before the catalog was read.
            catalog_data: the catalog's bytes; `FormatError` if it is damaged, or of a newer version.
        """
        self.location, self.name, self.version = location, name, version
        try:
            self.catalog = Catalog.loads(catalog_data)
        except FormatError as error:
            raise type(error)(f"{location}/{CATALOG}: {error}") from error
        self.catalog_sha256 = hashlib.sha256(catalog_data).hexdigest()
        self.catalog_size = len(catalog_data)

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether this is still the published version, at once: a remote store tells what it knew last."""

    @abstractmethod
    def check_parts(self) -> None:
        """Check that everything the catalog names exists with the right size, and the profile with the right digest.

        Frames are not read: players check their digests.

        Raises `AssetError` for parts, `FormatError` for the profile.
        """

    def check_frames(self) -> None:
        """Read all frames, and check them against the catalog; errors as `frame`. Takes long."""
        for track in self.catalog.published.values():
            for group in range(len(track.bytes)):
                self.frame(group, track.name)

    @abstractmethod
    def open_frame(self, group: int, track: str) -> FrameReader:
        """Open a frame of a published track, checked for its size but not for its digest.

        Raises `AssetError` if the frame cannot be read, or has not the catalog's size.
        """

    @abstractmethod
    def _read_part(self, part: str, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` + 1 bytes of the catalog, profile, prompt, or a frame; raise `AssetError`."""

    @abstractmethod
    def _frame_part(self, group: int, track: str) -> str:
        """Return the name of a frame, for `_read_part` and for error messages."""

    @cached_property
    def prefix_keys(self) -> tuple[bytes, ...]:
        """The part of each group's digest that the name of a lookup carries; `FormatError` if one is no digest."""
        return tuple(map(prefix_key, self.catalog.chunks))

    def catalog_bytes(self) -> bytes:
        """Return the catalog's bytes; `AssetError` if the catalog is gone, or is no longer the one of this version."""
        data = self._read_part(CATALOG, self.catalog_size)
        if hashlib.sha256(data).hexdigest() != self.catalog_sha256:
            raise AssetError(f"{self.location}/{CATALOG}: no longer the file that was checked")
        return data

    def profile_bytes(self) -> bytes | None:
        """Return the codec profile's bytes; None if no track needs a profile.

        Raises `AssetError` if the profile is missing, `FormatError` if it is not the one that the catalog names.
        """
        expected, size = self.catalog.profile, self.catalog.profile_bytes
        if expected is None:
            return None
        where = f"{self.location}/{PROFILE}"
        if size > MAX_PROFILE_BYTES:
            raise FormatError(f"{where}: a profile of {size} bytes is more than any model needs")
        data = _sized(self._read_part(PROFILE, size), size, where)
        if hashlib.sha256(data).hexdigest() != expected:
            raise FormatError(f"{where}: not the profile that the catalog names (SHA-256 differs); {_AGAIN}")
        return data

    def frame(self, group: int, track: str) -> bytes:
        """Return the frame of one group on one track, as they are published, checked against the catalog.

        Raises:
            AssetError: the frame is missing.
            FormatError: it is truncated, too long, or damaged; or there is no such track.
            ForeignError: it is the frame of another group or track of this asset.
        """
        offer = self.catalog.published_track(track)
        if not 0 <= group < len(offer.bytes):
            raise IndexError(f"group {group} is outside an asset of {len(offer.bytes)} groups")
        part = self._frame_part(group, track)
        where = f"{self.location}/{part}"
        try:
            data = _sized(self._read_part(part, offer.bytes[group]), offer.bytes[group], where)
        except FormatError:
            # A swapped frame has, as a rule, another size: "swapped" says more than "truncated".
            self._refuse_swapped(group, track)
            raise
        if not has_digest(offer.digests[group], data):
            self._refuse_swapped(group, track)
            title = TITLES[self.catalog.digest_kind]
            raise FormatError(f"{where}: damaged, its {title} is not the one in the catalog; {_AGAIN}")
        return data

    def prompt(self) -> Prompt:
        """Return the token ids of the prompt and of what followed it; `FormatError` if it is damaged or another's.

        Raises `AssetError` if the prompt is missing, as in an asset that was fetched.
        """
        where = f"{self.location}/{PROMPT}"
        try:
            data = self._read_part(PROMPT, _MAX_PROMPT_BYTES)
        except AssetError as error:
            raise AssetError(f"{error}; only a publisher's asset has it") from error
        if len(data) > _MAX_PROMPT_BYTES:
            raise FormatError(f"{where}: larger than a prompt may be ({_MAX_PROMPT_BYTES} bytes)")
        try:
            prompt = Prompt.loads(data)
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        if not self._is_ours(prompt):
            raise FormatError(f"{where}: not the prompt that the catalog's digests name; {_AGAIN}")
        return prompt

    def has_prompt(self) -> bool:
        """Return whether the token ids are there; those of what an engine published, or of a copy, are not."""
        try:
            self._read_part(PROMPT, 0)
        except AssetError as error:
            return not isinstance(error.__cause__, FileNotFoundError)
        return True

    def _is_ours(self, prompt: Prompt) -> bool:
        spec, tokens = self.catalog.spec, prompt.tokens
        if len(tokens) != self.catalog.tokens:
            return False
        if prompt.seal is not None:
            # The digests are salted, and the salt is not kept here.
            return prompt.is_sealed_for(self.catalog.namespace.prompt)
        named = chain if self.catalog.passage is None else passage_chain
        digests = named(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
        return tuple(digests) == self.catalog.chunks

    def _refuse_swapped(self, group: int, track: str) -> None:
        """Raise if the frame is a good one of another place in this asset."""
        part, largest = self._frame_part(group, track), max(max(each.bytes) for each in self.catalog.tracks)
        try:
            digest = digest_of(self._read_part(part, largest), self.catalog.digest_kind)
        except AssetError:
            return
        for other in self.catalog.published.values():
            if digest in other.digests:
                place = other.digests.index(digest)
                raise ForeignError(
                    f"{self.location}/{part}: this is group {place} of {other.name}, not group {group} of {track}; "
                    f"files were swapped, {_AGAIN}"
                )


class FrameStore(Protocol):
    """Keeps frames while they are made and measured."""

    def frame(self, group: int, track: str, frame: bytes) -> None:
        """Write the frame of one group on one track, as they are published."""

    def read_frame(self, group: int, track: str) -> bytes:
        """Read back what `frame` wrote."""

    def profile(self, data: bytes) -> None:
        """Write the codec profile, if a track needs one."""


class AssetWriter(FrameStore, Protocol):
    """Writes one asset; a context manager. Leaving it without `commit` leaves nothing behind.

    All methods raise `AssetError` if the store refuses, for instance because the disk is full.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def location(self) -> str:
        """Path or URL of the asset; without the name that only its catalog gives it, of its store."""

    def prompt(self, prompt: Prompt) -> None:
        """Write the token ids."""

    def commit(self, catalog: Catalog) -> None:
        """Write the catalog, and publish the asset in one step; if this raises, an older one is untouched."""


@dataclass(frozen=True, slots=True)
class AssetListing:
    """The assets of a store."""

    versions: dict[str, AssetVersion]
    """By name."""
    complete: bool
    """False if the store holds more than was looked at."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """By name, the folders that cannot be looked into, and why: they may be assets, or have some."""


class AssetStore(Protocol):
    """Assets by name. Names are relative paths with slashes; a store that is a single asset calls it "."."""

    @property
    def location(self) -> str:
        """Path or URL."""

    @property
    def look_every_s(self) -> float:
        """Seconds that a server should leave between two looks for new assets, at least."""

    def prepare(self) -> None:
        """Make the store if it does not exist, and check that assets can be written there.

        Raises `UsageError` or `AssetError`.
        """

    def list(self) -> AssetListing:
        """Find all assets without reading them; `AssetError` if the store cannot be reached."""

    def version(self, name: str) -> AssetVersion | None:
        """Return the version of an asset, None if there is none; `AssetError` if the store cannot be reached."""

    def open(self, name: str = ".") -> Asset:
        """Open an asset; only its catalog is read, `FormatError` if that is damaged or of a newer version.

        Raises `AssetError` if there is no such asset.
        """

    def writer(self, name: str = ".", *, force: bool = False) -> AssetWriter:
        """Return a writer for an asset, which replaces what is there only by ``force``; nothing is created yet.

        Raises `AssetError` if something else than an asset is there, `UsageError` if an asset needs ``force``.
        """

    def close(self) -> None:
        """Let go of connections; asking for something opens others."""


def is_damage(error: KvabrError) -> bool:
    """Return whether an asset that failed a check is damaged; else it cannot be read here or now, and may be good."""
    if isinstance(error, VersionError):
        return False
    cause = error.__cause__
    if isinstance(cause, OSError):
        return isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return not isinstance(cause, TransportError) or isinstance(cause, NotFoundError)


def _sized(data: bytes, size: int, where: str) -> bytes:
    if len(data) < size:
        raise FormatError(f"{where}: truncated, {len(data)} of {size} bytes; {_AGAIN}, or copy it again")
    if len(data) > size:
        raise FormatError(f"{where}: longer than the {size} bytes that the catalog says; {_AGAIN}")
    return data
