"""Prompts made of passages for engines that compute whatever they are not given behind a prefix (vLLM).

Such an engine cannot compute a text between two passages, nor single tokens of them. What it can be given is joined
without a gap, from where its own cache ends (`Catalog.run`), and goes to `AsyncClient.play_prefix`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from kvabr.client.lookup import Found, find_prefix
from kvabr.client.passages import find_passages
from kvabr.transfer.interface import Connection
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, TransportError
from kvabr.types.joined import join, joinable
from kvabr.types.kv import KVSpec
from kvabr.types.passage import Exact, Part, Passage, check_movable, check_parts


async def find_joined(
    origin: Connection,
    parts: Sequence[Part],
    spec: KVSpec,
    *,
    salt: bytes = b"",
    max_loss: float = math.inf,
    any_dtype: bool = False,
    refused: Callable[[Passage, str], None] = lambda *_: None,
) -> Found | None:
    """Return what an origin has of the passages of a prompt, and of the text that begins it, joined; None: no passages.

    The text that begins the prompt is looked up as a prompt of its own. It may lack tokens at its end, and any part may
    be missing: nobody has these groups (`Catalog.computed`), and `Catalog.run` says what can be played.

    Args:
        origin: whom to ask.
        parts: the prompt.
        spec: of the model.
        salt: the tenant's secret.
        max_loss: most that joining may be expected to cost, nats per generated token; the passages behind are left out.
        any_dtype: accept caches whose element type is not the spec's, as long as they are of one type.
        refused: told why a passage that the origin may have is left out.

    Raises:
        FormatError: the model can have no passages, or what was found cannot be joined.
        UsageError: these are no parts of a prompt.
        TransportError: the origin has nothing, and could not be asked for everything.
    """
    check_movable(spec)
    whole = check_parts(parts)
    lead = list(takewhile(lambda part: isinstance(part, Exact), whole))
    beginning, rest = tuple(token for part in lead for token in part.ids), whole[len(lead) :]
    passages = [part for part in rest if isinstance(part, Passage)]
    opening, found = await asyncio.gather(
        _find_opening(origin, beginning, spec, salt, any_dtype=any_dtype),
        find_passages(origin, passages, spec, salt=salt, any_dtype=any_dtype, refused=refused),
        return_exceptions=True,
    )
    if isinstance(opening, BaseException):
        raise opening
    if isinstance(found, BaseException):
        if opening is None or not isinstance(found, TransportError | FormatError):
            raise found
        return opening
    usable = joinable({passage: one.catalog for passage, one in found.items()}, max_loss, refused)
    own = next((catalog.spec for catalog in usable.values()), spec)
    for passage in [passage for passage, catalog in usable.items() if catalog.spec.digest() != own.digest()]:
        refused(passage, f"its element type is not that of the others, {own.summary}")
        del usable[passage]
    within = rest[: _within(rest, usable, max_loss, refused)]
    begun = _fitting(opening, usable, own)
    parts = [Exact(beginning), *within] if beginning else within
    catalog = join(parts, usable, own, None if begun is None else begun.catalog)
    if catalog is None:
        return opening
    told = "".join(one.sha256 for one in (begun, *found.values()) if one is not None)
    return Found(catalog, hashlib.sha256(told.encode()).hexdigest())


async def _find_opening(
    origin: Connection, tokens: Sequence[int], spec: KVSpec, salt: bytes, *, any_dtype: bool
) -> Found | None:
    """Return what the origin has of the text that begins a prompt; without it there may still be passages."""
    if not tokens:
        return None
    try:
        found = await find_prefix(origin, tokens, spec, salt=salt, any_dtype=any_dtype)
    except (TransportError, FormatError):
        return None
    return found if isinstance(found, Found) else None


def _fitting(opening: Found | None, usable: Mapping[Passage, Catalog], spec: KVSpec) -> Found | None:
    """Return the cache of the text that begins a prompt if it can be played together with these passages."""
    if opening is None or opening.catalog.spec.digest() != spec.digest():
        return None
    profiles = {each.profile for each in (opening.catalog, *usable.values())} - {None}
    tracks = [{track.name for track in each.tracks if track.refines is None} for each in usable.values()]
    own = {track.name for track in opening.catalog.tracks if track.refines is None}
    return opening if len(profiles) < 2 and own.intersection(*tracks) else None


def _within(
    parts: Sequence[Part], usable: Mapping[Passage, Catalog], max_loss: float, refused: Callable[[Passage, str], None]
) -> int:
    """Return how many parts come before the passage with which joining would cost more than the limit."""
    total = 0.0
    for number, part in enumerate(parts):
        catalog = usable.get(part) if isinstance(part, Passage) else None
        notes = None if catalog is None else catalog.passage
        total += (None if notes is None else notes.fusion_loss(0.0)) or 0.0
        if total > max_loss:
            assert isinstance(part, Passage)  # noqa: S101  # nothing else costs anything
            refused(
                part, f"with it, joining is expected to lose {total:.3g} nats per token, and max_loss is {max_loss:g}"
            )
            return number
    return len(parts)
