"""Small tracks of an origin: its models, the catalog of an asset, and the longest cached prefix of a prompt.

Nothing that an origin says is believed unchecked. A catalog is bounded by the prompt's own groups, and must be of the
model and of the very tokens that were asked for, which the chained digests of the prompt prove
(`kvabr.types.naming.chain`). What an origin sends is parsed in a thread, and in pieces: a thread alone does not keep a
long call from stopping the event loop (`kvabr.types.json_pieces`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvabr.client.resources import decoders
from kvabr.codec.base import codec
from kvabr.quic.interface import Connection, read_all
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, catalog_limit
from kvabr.types.errors import ConnectionLostError, ForeignError, FormatError, NotFoundError, TransportError, UsageError
from kvabr.types.kv import MAX_MODELS_BYTES, KVSpec, specs_from_json
from kvabr.types.naming import (
    CATALOG_TRACK,
    MODELS_NAMESPACE,
    MODELS_TRACK,
    TrackNamespace,
    chain,
    prefix_gap,
    prefix_track,
)
from kvabr.types.units import with_snapshots_of

_SLACK_BYTES = 1 << 20
_MAX_TIMES_FP16 = 4
"""Reject groups larger than this multiple of the exact cache plus the bytes above; a hostile catalog could exhaust
memory."""
_URGENT = 0
"""Priority of what a play waits for."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an origin has of a prompt."""

    catalog: Catalog
    """Catalog of the groups that the asset shares with the prompt."""
    sha256: str
    """SHA-256 of the catalog as the origin sent it, hex."""
    limited_by: str | None = None
    """The layer class for which less of the prompt can be played than the asset shares; None if there is none."""


async def fetch_small(origin: Connection, namespace: TrackNamespace, track: str, limit: int) -> bytes:
    """Fetch a track of one group of at most ``limit`` bytes."""
    try:
        return await read_all(origin.fetch(namespace, track, priority=_URGENT, limit=limit))
    except ConnectionLostError:  # it may have been dead for a while, and the first request finds out
        if origin.closed:
            raise
        return await read_all(origin.fetch(namespace, track, priority=_URGENT, limit=limit))


async def fetch_models(origin: Connection) -> list[KVSpec]:
    """Return the specs of all models of which we may read an asset; errors as `AsyncClient.models`."""
    data = await fetch_small(origin, MODELS_NAMESPACE, MODELS_TRACK, MAX_MODELS_BYTES)
    try:
        return await asyncio.get_running_loop().run_in_executor(decoders(), specs_from_json, data)
    except FormatError as error:
        raise FormatError(f"the origin's list of models cannot be read ({error})") from error


async def fetch_catalog(origin: Connection, namespace: TrackNamespace) -> Found:
    """Return the catalog of an asset whose name is known.

    Raises:
        NotFoundError: there is none, or none that we may read.
        TransportError: it cannot be fetched.
        ForeignError: it is of something else.
        FormatError: it is no catalog, or promises what cannot be.
    """
    found = await _read(origin, namespace, CATALOG_TRACK, MAX_CATALOG_BYTES)
    if found.catalog.namespace != namespace or found.catalog.chunks[-1] != namespace.prompt:
        raise ForeignError(f"asked for the catalog of {_name(namespace)}, got that of {_name(found.catalog.namespace)}")
    if found.catalog.spec.model != namespace.model:
        raise ForeignError(f"the catalog of {_name(namespace)} is of the model {found.catalog.spec.model}")
    return found


async def find_prefix(
    origin: Connection, tokens: Sequence[int], spec: KVSpec, *, salt: bytes = b"", any_dtype: bool = False
) -> Found | None:
    """Return the asset that shares the longest prefix with a prompt, cut to the shared groups; None if there is none.

    A prompt of up to 321 groups takes one round trip, a longer one two. With ``any_dtype`` the cache's element type
    need not be the spec's.

    Raises:
        TransportError: the origin cannot be asked.
        ForeignError: it answers with a cache of another model, or shape.
        FormatError: it answers with what is no catalog, or promises what cannot be.
    """
    digests = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
    best = await _ask(origin, digests, spec, prefix_track(digests), any_dtype=any_dtype)
    if best is None:
        return None
    shared = shared_groups(best.catalog, tokens, digests, salt)
    groups, limit = best.catalog.playable(shared)
    gap = prefix_gap(shared, len(digests)) if shared else range(0)
    if gap:
        with contextlib.suppress(TransportError, FormatError):  # then what is known already has to do
            track = prefix_track(digests, gap.start, gap.stop)
            other = await _ask(origin, digests, spec, track, any_dtype=any_dtype)
            if other is not None:
                more, bound = other.catalog.playable(shared_groups(other.catalog, tokens, digests, salt))
                if more > groups:
                    best, groups, limit = other, more, bound
    return replace(best, catalog=best.catalog.prefix(groups), limited_by=limit) if groups else None


def shared_groups(catalog: Catalog, tokens: Sequence[int], digests: Sequence[str], salt: bytes = b"") -> int:
    """Return how many leading groups of an asset are those of a prompt, whose digests are given."""
    pairs = zip(digests, catalog.chunks, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    spec = catalog.spec
    if shared == len(catalog.chunks) - 1 and catalog.tokens < len(tokens):
        # The asset's last group is short, and the prompt goes on: its digest is none of the prompt's own.
        begin = tokens[: catalog.tokens]
        whole = chain(begin, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
        shared += whole[-1] == catalog.chunks[-1]
    return shared


def check_tokens(catalog: Catalog, tokens: Sequence[int], salt: bytes) -> None:
    """Raise `UsageError` unless the tokens are those of an asset."""
    spec, name = catalog.spec, catalog.namespace
    ours = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
    if len(tokens) != catalog.tokens or shared_groups(catalog, tokens, ours) < len(catalog.chunks):
        raise UsageError(f"the tokens given are not those of {name.model}/{name.prompt}")


def playable(catalog: Catalog, *, profile: bool) -> Catalog:
    """Return the catalog with only the tracks that can be decoded here, with its codec profile or without.

    Raises:
        FormatError: there is no such track.
    """
    tracks: set[str] = set()
    for track in catalog.tracks:
        try:
            known = codec(track.name)
        except FormatError:
            continue
        if (profile or not known.needs_profile) and (track.refines is None or track.refines in tracks):
            tracks.add(track.name)
    if not tracks:
        have = ", ".join(catalog.by_name)
        why = "" if profile else " without its codec profile"
        raise FormatError(f"none of the asset's tracks ({have}) can be decoded here{why}; is a codec plug-in missing?")
    return catalog.with_tracks(tracks)


async def _ask(
    origin: Connection, digests: Sequence[str], spec: KVSpec, track: str, *, any_dtype: bool
) -> Found | None:
    try:
        found = await _read(origin, TrackNamespace(spec.model, digests[0]), track, catalog_limit(len(digests)))
    except NotFoundError:
        return None
    wanted = with_snapshots_of(spec, found.catalog.spec)
    wanted = wanted.with_dtypes(found.catalog.spec) if any_dtype else wanted
    if found.catalog.spec.digest() != wanted.digest():
        raise ForeignError(
            f"the origin's cache is of {_title(found.catalog.spec)}, ours of {_title(spec)}: they differ in "
            f"{_differences(found.catalog.spec, spec)}, and cannot be mixed"
        )
    return found


async def _read(origin: Connection, namespace: TrackNamespace, track: str, limit: int) -> Found:
    data = await fetch_small(origin, namespace, track, limit)
    return await asyncio.get_running_loop().run_in_executor(decoders(), _parse, data)


def _parse(data: bytes) -> Found:
    catalog = Catalog.loads(data)
    most = _MAX_TIMES_FP16 * catalog.spec.fp16_bytes(catalog.spec.group_tokens) + _SLACK_BYTES
    for track in catalog.tracks:
        if max(track.bytes) > most:
            raise FormatError(f"catalog: a group of {track.name} with {max(track.bytes)} bytes, no cache needs {most}")
    return Found(catalog, hashlib.sha256(data).hexdigest())


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
