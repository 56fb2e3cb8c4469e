"""What an origin has of a prompt: the catalog under a name, and the longest cached prefix. Nothing is believed unseen.

A catalog comes from the network: it is bounded, and must be of the model, and of the very tokens, that were asked for,
which the chained digests of the prompt tell (`kvabr.types.naming.chain`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from kvabr.client.executors import decoders
from kvabr.client.fetch_small import fetch_whole
from kvabr.codec.base import codec
from kvabr.quic.interface import Connection
from kvabr.types.catalog import MAX_CATALOG_BYTES, Catalog, Track
from kvabr.types.errors import ForeignError, FormatError, NotFoundError, TransportError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import CATALOG_TRACK, TrackNamespace, chain, prefix_gap, prefix_track

_SLACK_BYTES = 1 << 20
_MOST_TIMES_FP16 = 4
"""A group larger than this multiple of its exact cache, and the bytes above, is a lie that is to cost us memory."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an origin has of a prompt."""

    catalog: Catalog
    """Of the shared groups alone."""
    sha256: str
    """Of the catalog as it came, hex: what it is remembered by."""


async def fetch_catalog(origin: Connection, namespace: TrackNamespace) -> Found:
    """The catalog of an asset whose name is known.

    Raises:
        NotFoundError: there is none, or none that we may read.
        TransportError: it cannot be fetched.
        ForeignError: it is of something else.
        FormatError: it is no catalog, or promises what cannot be.
    """
    data = await fetch_whole(origin, namespace, CATALOG_TRACK, MAX_CATALOG_BYTES)
    found = await _read(data)
    if found.catalog.namespace != namespace or found.catalog.chunks[-1] != namespace.prompt:
        raise ForeignError(f"asked for the catalog of {_name(namespace)}, got that of {_name(found.catalog.namespace)}")
    if found.catalog.spec.model != namespace.model:
        raise ForeignError(f"the catalog of {_name(namespace)} is of the model {found.catalog.spec.model}")
    return found


async def find_prefix(origin: Connection, tokens: Sequence[int], spec: KVSpec, *, salt: bytes = b"") -> Found | None:
    """The asset that shares the longest prefix with a prompt, cut to what is shared; None if none shares a group.

    One round trip for a prompt of up to 321 groups, two for a longer one.

    Args:
        origin: where to ask.
        tokens: ids of the prompt.
        spec: of the model's cache.
        salt: the tenant's secret, see `kvabr.types.naming.chain`.

    Raises:
        TransportError: the origin cannot be asked.
        ForeignError: it answers with a cache of another model, or shape.
        FormatError: it answers with what is no catalog, or promises what cannot be.
    """
    digests = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
    best = await _ask(origin, digests, spec, prefix_track(digests))
    if best is None:
        return None
    shared = shared_groups(best.catalog, tokens, digests, salt)
    gap = prefix_gap(shared, len(digests)) if shared else range(0)
    if gap:
        other: Found | None = None
        with contextlib.suppress(TransportError, FormatError):  # then what is known already has to do
            other = await _ask(origin, digests, spec, prefix_track(digests, gap.start, gap.stop))
        more = 0 if other is None else shared_groups(other.catalog, tokens, digests, salt)
        if other is not None and more > shared:
            best, shared = other, more
    return replace(best, catalog=best.catalog.prefix(shared)) if shared else None


def shared_groups(catalog: Catalog, tokens: Sequence[int], digests: Sequence[str], salt: bytes = b"") -> int:
    """How many leading groups of an asset are those of a prompt; what the origin claims does not count.

    Args:
        catalog: the asset.
        tokens: ids of the prompt.
        digests: of the prompt's groups.
        salt: the tenant's secret.
    """
    shared = 0
    for ours, theirs in zip(digests, catalog.chunks, strict=False):
        if ours != theirs:
            break
        shared += 1
    spec = catalog.spec
    if shared == catalog.groups - 1 and catalog.tokens < len(tokens):
        # The asset's last group is short, and the prompt goes on: its digest is none of the prompt's own.
        begin = tokens[: catalog.tokens]
        whole = chain(begin, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
        shared += whole[-1] == catalog.chunks[-1]
    return shared


def playable(catalog: Catalog, *, profile: bool) -> Catalog:
    """The catalog with only the tracks that can be decoded here.

    Args:
        catalog: the asset.
        profile: whether its codec profile is at hand.

    Raises:
        FormatError: none of its tracks can be.
    """
    tracks: list[Track] = []
    names: set[str] = set()
    for track in catalog.tracks:
        try:
            known = codec(track.name)
        except FormatError:
            continue
        if (profile or not known.needs_profile) and (track.refines is None or track.refines in names):
            tracks.append(track)
            names.add(track.name)
    if not tracks:
        have = ", ".join(catalog.by_name)
        why = "" if profile else " without its codec profile"
        raise FormatError(f"none of the asset's tracks ({have}) can be decoded here{why}; is a codec plug-in missing?")
    return catalog if len(tracks) == len(catalog.tracks) else replace(catalog, tracks=tuple(tracks))


async def _ask(origin: Connection, digests: Sequence[str], spec: KVSpec, track: str) -> Found | None:
    namespace = TrackNamespace(spec.model, digests[0])
    try:
        data = await fetch_whole(origin, namespace, track, MAX_CATALOG_BYTES)
    except NotFoundError:
        return None
    found = await _read(data)
    if found.catalog.spec.digest() != spec.digest():
        raise ForeignError(
            f"the origin's cache is of {_title(found.catalog.spec)}, ours of {_title(spec)}: they differ in "
            f"{_differences(found.catalog.spec, spec)}, and cannot be mixed"
        )
    return found


async def _read(data: bytes) -> Found:
    """Parse and check in a thread: the catalog of a long prompt has megabytes."""
    return await asyncio.get_running_loop().run_in_executor(decoders(), _parse, data)


def _parse(data: bytes) -> Found:
    catalog = Catalog.loads(data)
    _check_sizes(catalog)
    return Found(catalog, hashlib.sha256(data).hexdigest())


def _check_sizes(catalog: Catalog) -> None:
    most = _MOST_TIMES_FP16 * catalog.spec.fp16_bytes(catalog.spec.group_tokens) + _SLACK_BYTES
    for track in catalog.tracks:
        if max(track.bytes) > most:
            raise FormatError(f"catalog: a group of {track.name} with {max(track.bytes)} bytes, no cache needs {most}")


def _name(namespace: TrackNamespace) -> str:
    return f"{namespace.model}/{namespace.prompt}"


def _title(spec: KVSpec) -> str:
    return f"{spec.model} ({spec.layers} layers, {spec.kv_heads} KV heads of {spec.head_dim}, {spec.dtype})"


def _differences(one: KVSpec, other: KVSpec) -> str:
    names = [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]
    return " and ".join(names)
