"""Lookups at an origin: its models, the catalog of an asset, and the longest cached prefix of a prompt.

Every answer is checked: the size of a catalog is limited by the prompt's groups, and it must be of the requested model
and tokens (`kvabr.types.naming.chain`). A thread parses answers in pieces, so as not to block the event loop
(`kvabr.types.records`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from kvabr.codec.base import codec
from kvabr.transfer.interface import Connection, PrefixFinder, cancel_all, read_view
from kvabr.transfer.work import decoders
from kvabr.types.catalog import MAX_CATALOG_BYTES, MAX_TRACKS, Catalog
from kvabr.types.digests import require
from kvabr.types.errors import (
    ConnectionLostError,
    ForeignError,
    FormatError,
    NotFoundError,
    RequestError,
    TransportError,
    UsageError,
)
from kvabr.types.kv import MAX_MODELS_BYTES, KVSpec, specs_from_json
from kvabr.types.live import MAX_LIVE_BYTES, LiveCatalog
from kvabr.types.naming import (
    CATALOG_TRACK,
    LIVE_PREFIX_TRACK,
    LIVE_TRACK,
    MODELS_NAMESPACE,
    MODELS_TRACK,
    PREFIX_TRACK,
    TrackNamespace,
    chain,
    next_digest,
    prefix_gap,
    prefix_track,
)
from kvabr.types.units import with_snapshots_of

_HEAD_BYTES = 256 << 10
_ENTRY_BYTES = 128
"""Maximum catalog bytes per group and track: size, loss and digest, and the group's chunk digest."""
_MIN_GROUPS = 1024
"""Groups to allow for at least: a short prompt may share a prefix with a long asset."""
_LONG = 1 << 16
"""Longer prompts are hashed in a thread: a million tokens take 20 ms."""
_TOP_PRIORITY = 0


@dataclass(frozen=True, slots=True)
class Found:
    """An asset found for a prompt."""

    catalog: Catalog
    """Catalog of the groups shared with the prompt."""
    sha256: str
    """SHA-256 of the catalog as received, in hex."""
    limited_by: str | None = None
    """Layer class that made the playable prefix shorter than the shared one, or None."""
    live: LiveCatalog | None = None
    """State of an asset still being prefilled; sizes in `catalog` are then estimates."""
    only: frozenset[str] | None = None
    """Tracks that a play may use; None: all."""

    @property
    def to_play(self) -> Catalog:
        """The catalog for a play of the whole prefix."""
        catalog = self.catalog.to_play
        return catalog if self.only is None else catalog.with_tracks(self.only)


@dataclass(frozen=True, slots=True)
class Unplayable:
    """An asset that shares a prefix with a prompt, but has no snapshot of a state to continue from there."""

    limited_by: str


def catalog_limit(groups: int) -> int:
    """Return the maximum catalog bytes to accept for a prompt of ``groups`` groups."""
    return min(MAX_CATALOG_BYTES, _HEAD_BYTES + max(groups, _MIN_GROUPS) * (MAX_TRACKS + 1) * _ENTRY_BYTES)


async def fetch_view(origin: Connection, namespace: TrackNamespace, track: str, limit: int) -> memoryview:
    """Fetch a track that has one group; concurrent calls share the download."""
    try:
        return await read_view(origin.fetch(namespace, track, priority=_TOP_PRIORITY, limit=limit))
    except ConnectionLostError:  # a dead connection may show only at this request
        if origin.closed:
            raise
        return await read_view(origin.fetch(namespace, track, priority=_TOP_PRIORITY, limit=limit))


async def fetch_models(origin: Connection) -> list[KVSpec]:
    """Return the specs of all models; errors as `AsyncClient.models`."""
    data = bytes(await fetch_view(origin, MODELS_NAMESPACE, MODELS_TRACK, MAX_MODELS_BYTES))
    try:
        return await asyncio.get_running_loop().run_in_executor(decoders(), specs_from_json, data)
    except FormatError as error:
        raise FormatError(f"the origin's list of models cannot be read ({error})") from error


async def fetch_catalog(
    origin: Connection,
    namespace: TrackNamespace,
    *,
    live: bool = False,
    limit: int = MAX_CATALOG_BYTES,
) -> Found:
    """Return the catalog of an asset by its name.

    ``live``: accept an asset still being prefilled; ``limit``: maximum bytes of the catalog of a complete one.

    Raises:
        NotFoundError: the asset does not exist, or we may not read it.
        TransportError: the catalog cannot be fetched.
        ForeignError: it is of another asset or model.
        FormatError: it is not a catalog, or has impossible values.
    """
    complete = _read(origin, namespace, CATALOG_TRACK, limit)
    found = await (_complete_or_live(origin, namespace, complete) if live else complete)
    if found.catalog.namespace != namespace:
        raise ForeignError(f"requested the catalog of {_name(namespace)}, got that of {_name(found.catalog.namespace)}")
    if (end := found.catalog.chunks[-1]) != namespace.prompt:
        raise ForeignError(
            f"the catalog of {_name(namespace)} is of another prompt: the digest of its last group is {end}"
        )
    if found.catalog.spec.model != namespace.model:
        raise ForeignError(f"the catalog of {_name(namespace)} is of the model {found.catalog.spec.model}")
    return found


async def _complete_or_live(origin: Connection, namespace: TrackNamespace, complete: Awaitable[Found]) -> Found:
    live = asyncio.ensure_future(_read(origin, namespace, LIVE_TRACK, MAX_LIVE_BYTES))
    try:
        return await complete
    except (TransportError, FormatError) as error:
        try:
            return await live
        except (TransportError, FormatError):
            raise error from None
    finally:
        await cancel_all([live])


async def find_prefix(
    origin: Connection,
    tokens: Sequence[int],
    spec: KVSpec,
    *,
    salt: bytes = b"",
    any_dtype: bool = False,
    live: bool = False,
) -> Found | Unplayable | None:
    """Return the asset that shares the longest prefix with a prompt, cut to the shared groups; None if there is none.

    A prompt of up to 321 groups takes one round trip to an origin, a longer one two; in an object store, the connection
    searches (`Connection.finder`). ``any_dtype`` accepts any element type. ``live`` includes assets still being
    prefilled; complete ones win ties.

    Raises:
        TransportError: the origin cannot be reached.
        ForeignError: the answer is a cache of another model or shape.
        FormatError: the answer is not a catalog, or has impossible values.
    """
    digests = await _digests(tokens, spec, salt)
    lookup = _Lookup(origin, tokens, digests, spec, salt, any_dtype=any_dtype)
    best = await (lookup.any() if live else lookup.complete())
    if best is None:
        return None
    found = best.found
    if found is None or not best.groups:
        return None if best.limited_by is None else Unplayable(best.limited_by)
    return replace(found, catalog=found.catalog.prefix(best.groups), limited_by=best.limited_by)


class _Answer(NamedTuple):
    found: Found | None
    shared: int
    groups: int
    limited_by: str | None


@dataclass(frozen=True)
class _Lookup:
    origin: Connection
    tokens: Sequence[int]
    digests: Sequence[str]
    spec: KVSpec
    salt: bytes
    any_dtype: bool = field(kw_only=True)

    async def any(self) -> _Answer | None:
        """Return the asset with the most playable groups, live or complete; the complete one wins ties."""
        tasks = [asyncio.ensure_future(self.complete()), asyncio.ensure_future(self._closest(LIVE_PREFIX_TRACK))]
        try:
            (complete,) = await asyncio.gather(tasks[0], return_exceptions=True)
            if isinstance(complete, _Answer) and complete.groups >= len(self.digests):
                return complete  # a live asset cannot have more
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await cancel_all(tasks)
        best = max((one for one in answers if isinstance(one, _Answer)), key=lambda one: one.groups, default=None)
        if best is None:
            for answer in answers:
                # A peer without support for live assets may refuse the lookup.
                if isinstance(answer, BaseException) and (answer is answers[0] or not isinstance(answer, RequestError)):
                    raise answer
        return best

    def complete(self) -> Coroutine[Any, Any, _Answer | None]:
        finder = self.origin.finder
        return self._closest(PREFIX_TRACK) if finder is None else self._found(finder)

    async def _closest(self, kind: str) -> _Answer | None:
        """Find the longest prefix on one kind of track; if its name omits digests, look again among these."""
        best = await self._ask(kind + self._names)
        shared = 0 if best is None else best.shared
        gap = prefix_gap(shared, len(self.digests), evenly=self._evenly) if shared else range(0)
        if best is not None and gap:
            between = prefix_track(self.digests, gap.start, gap.stop, evenly=self._evenly).removeprefix(PREFIX_TRACK)
            with contextlib.suppress(TransportError, FormatError):  # keep the first answer
                other = await self._ask(kind + between)
                if other is not None and other.groups > best.groups:
                    best = other
        return best

    @cached_property
    def _names(self) -> str:
        return prefix_track(self.digests, evenly=self._evenly).removeprefix(PREFIX_TRACK)

    @cached_property
    def _evenly(self) -> bool:
        return any(each.kind == "state" for each in self.spec.classes)

    async def _found(self, finder: PrefixFinder) -> _Answer | None:
        prefix = await finder.find(self.spec, self.digests, any_dtype=self.any_dtype)
        if prefix is None:
            return None
        if prefix.catalog is None:
            return _Answer(None, 0, 0, prefix.limited_by)
        catalog = await asyncio.get_running_loop().run_in_executor(decoders(), _checked, prefix.catalog)
        shared = shared_groups(catalog, self.tokens, self.digests, self.salt)
        groups, limit = catalog.playable(shared)
        return _Answer(Found(catalog, prefix.sha256), shared, groups, limit or prefix.limited_by)

    async def _ask(self, track: str) -> _Answer | None:
        spec = self.spec
        try:
            namespace = TrackNamespace(spec.model, self.digests[0])
            found = await _read(self.origin, namespace, track, catalog_limit(len(self.digests)))
        except NotFoundError:
            return None
        wanted = spec if found.catalog.every_token else with_snapshots_of(spec, found.catalog.spec)
        wanted = wanted.with_dtypes(found.catalog.spec) if self.any_dtype else wanted
        if found.catalog.spec.digest() != wanted.digest():
            raise ForeignError(
                f"the origin's cache is of {_title(found.catalog.spec)}, ours of {_title(spec)}: they differ in "
                f"{_differences(found.catalog.spec, spec)}, and cannot be mixed"
            )
        shared = shared_groups(found.catalog, self.tokens, self.digests, self.salt)
        return _Answer(found, shared, *found.catalog.playable(shared))


def _chain(tokens: Sequence[int], spec: KVSpec, salt: bytes) -> list[str]:
    return chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)


async def _digests(tokens: Sequence[int], spec: KVSpec, salt: bytes) -> list[str]:
    if len(tokens) <= _LONG:
        return _chain(tokens, spec, salt)
    return await asyncio.get_running_loop().run_in_executor(decoders(), _chain, tokens, spec, salt)


def shared_groups(catalog: Catalog, tokens: Sequence[int], digests: Sequence[str], salt: bytes = b"") -> int:
    """Return the number of leading groups shared by an asset and a prompt; 0 for a passage."""
    if catalog.passage is not None:
        return 0
    pairs = zip(digests, catalog.chunks, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    spec = catalog.spec
    if shared == len(catalog.chunks) - 1 and catalog.tokens < len(tokens):
        # The asset's short last group has a digest that the longer prompt lacks.
        last = tokens[shared * spec.group_tokens : catalog.tokens]
        digest = next_digest(digests[shared - 1], last) if shared else _chain(last, spec, salt)[0]
        shared += digest == catalog.chunks[-1]
    return shared


async def check_tokens(catalog: Catalog, tokens: Sequence[int], salt: bytes) -> None:
    """Raise `UsageError` unless the tokens are exactly those of the asset, or if the asset is a passage."""
    spec, name = catalog.spec, catalog.namespace
    if catalog.passage is not None:
        raise UsageError(f"{name.prompt[:12]}... is a passage; play it as a part of a prompt")
    ours = await _digests(tokens, spec, salt)
    if len(tokens) != catalog.tokens or shared_groups(catalog, tokens, ours) < len(catalog.chunks):
        raise UsageError(f"the given tokens are not those of {name.model}/{name.prompt}")


def playable(catalog: Catalog, *, profile: bool, why: str = "") -> Catalog:
    """Return the catalog with tracks that can be decoded here; raise `FormatError` with ``why`` if none can."""
    tracks: set[str] = set()
    for track in catalog.tracks:
        try:
            needs_profile = _needs_profile(track.name)
        except FormatError:
            continue
        if (profile or not needs_profile) and (track.refines is None or track.refines in tracks):
            tracks.add(track.name)
    if not tracks:
        have = ", ".join(catalog.by_name)
        if profile:
            raise FormatError(f"none of the asset's tracks ({have}) can be decoded here; is a codec plug-in missing?")
        reason = f": {why}" if why else ""
        raise FormatError(f"none of the asset's tracks ({have}) can be decoded here without its codec profile{reason}")
    return catalog.with_tracks(tracks)


@cache
def _needs_profile(track: str) -> bool:
    return codec(track).needs_profile


async def _read(origin: Connection, namespace: TrackNamespace, track: str, limit: int) -> Found:
    parse = _parse_live if track.startswith((LIVE_TRACK, LIVE_PREFIX_TRACK)) else _parse
    data = bytes(await fetch_view(origin, namespace, track, limit))
    return await asyncio.get_running_loop().run_in_executor(decoders(), parse, data)


def _parse(data: bytes) -> Found:
    return Found(_checked(Catalog.loads(data)), hashlib.sha256(data).hexdigest())


def _parse_live(data: bytes) -> Found:
    live = LiveCatalog.loads(data)
    catalog = _checked(live.catalog)
    return Found(catalog, hashlib.sha256(data).hexdigest(), live=live)


def _checked(catalog: Catalog) -> Catalog:
    require(catalog.digest_kind)
    catalog.check_frame_sizes()
    return catalog


def _name(namespace: TrackNamespace) -> str:
    return f"{namespace.model}/{namespace.prompt}"


def _title(spec: KVSpec) -> str:
    return f"{spec.model} ({spec.summary})"


def _differences(one: KVSpec, other: KVSpec) -> str:
    ours, theirs = one.to_json(), other.to_json()
    found = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if one.names == other.names and found == ["classes"]:
        found = []
        for name, mine, yours in zip(one.names, ours["classes"], theirs["classes"], strict=True):
            unlike = [field for field in {**mine, **yours} if mine.get(field) != yours.get(field)]
            found += [f"{field} of the class {name}" for field in unlike]
    return " and ".join(found)
