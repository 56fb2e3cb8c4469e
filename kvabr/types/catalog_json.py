"""Reads the JSON of a catalog from an untrusted source: bounded lists of plain values, which `Catalog` checks.

A catalog may have megabytes of lists. They are read in pieces, so that other threads can run meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvabr.types.digests import BLAKE3, SHA256
from kvabr.types.errors import FormatError, VersionError
from kvabr.types.json_pieces import JsonPieces
from kvabr.types.passage import read_notes
from kvabr.types.tails import tails_from_json

SCHEMAS = {SHA256: "kvabr.catalog/1", BLAKE3: "kvabr.catalog/2"}
"""Schemas of catalogs by the kind of their groups' digests: older versions refuse a kind that they cannot check."""
PASSAGE_SCHEMA = "kvabr.catalog/3"
"""Schema of catalogs of passages, with digests of either kind: older versions would take them for prompts."""
MAX_GROUPS = 1 << 20
MAX_TRACKS = 64
_MAX_MIXES = 256
_LEAST_GROUP_BYTES = 64
"""Bytes of a catalog for one group, at least: a digest in hex."""
_WORDS = "schema", "namespace", "spec", "source", "profile", "loss_method"
_NUMBERS = "tokens", "position", "profile_bytes", "prefill"
_PLAIN = frozenset((*_WORDS, *_NUMBERS))
"""Fields of a catalog that are small."""
_AT_A_TIME = 8192
"""Values that are checked at a time, so that other threads can run in between."""
_LISTS: dict[str, set[type]] = {"bytes": {int}, "loss": {int, float}, "digests": {str}}
"""Fields of a track with a value for each group, and the types of their values."""


def all_within(values: Sequence[float], least: float, most: float) -> bool:
    """Return whether all values are numbers within bounds."""
    for first in range(0, len(values), _AT_A_TIME):
        part = values[first : first + _AT_A_TIME]
        if not (least <= min(part) and max(part) <= most and math.isfinite(sum(part))):  # a sum with a NaN is one
            return False
    return True


def schema_of(kind: str, *, passage: bool) -> str:
    """Return the schema of a catalog: of a passage, or of a prompt with digests of a kind."""
    return PASSAGE_SCHEMA if passage else SCHEMAS[kind]


def check_schema(schema: object) -> None:
    """Raise a `FormatError` if a catalog was written by another version, or is none."""
    if schema not in (every := (*SCHEMAS.values(), PASSAGE_SCHEMA)):
        known = ", ".join(map(repr, every))
        newer = str(schema).startswith("kvabr.catalog/")
        hint = "it was written by another version: upgrade kvabr" if newer else "is this a catalog?"
        kind = VersionError if newer else FormatError
        raise kind(f"catalog: schema is {str(schema)[:80]!r}, this version reads {known}; {hint}")


def read_fields(pieces: JsonPieces) -> dict[str, Any]:
    """Return the fields of a catalog's JSON; those with long lists are complete, the others plain JSON."""
    most = min(MAX_GROUPS, len(pieces) // _LEAST_GROUP_BYTES)
    value: dict[str, Any] = {}
    for name in pieces.members():
        if name == "chunks":
            value[name] = tuple(pieces.scalars({str}, most))
        elif name == "tracks":
            value[name] = tuple(_read_track(pieces, most) for _ in pieces.elements(MAX_TRACKS))
        elif name == "mixes":
            value[name] = tuple(_read_mix(pieces, most) for _ in pieces.elements(_MAX_MIXES))
        elif name == "passage":
            value[name] = read_notes(pieces)
        elif name in _PLAIN:
            value[name] = pieces.value()
            if name == "schema":
                check_schema(value[name])  # before what another version may have added
        else:
            pieces.skip()
    return value


def _read_track(pieces: JsonPieces, groups: int) -> dict[str, Any]:
    """Return the fields of `Track`; `Track.measured` as a tuple."""
    value: dict[str, Any] = {}
    for name in pieces.members():
        if name in _LISTS:
            value[name] = tuple(pieces.scalars(_LISTS[name], groups))
        elif name in {"name", "refines", "decode_s", "measured"}:
            value[name] = pieces.value()
        elif name == "tails":
            value[name] = tails_from_json(pieces.value())
        else:
            pieces.skip()
    quality = value["measured"]
    value["measured"] = None if quality is None else tuple(_quality(quality))
    value["decode_s"] = float(value["decode_s"])
    return value


def _quality(value: dict[str, Any]) -> Iterator[float | None]:
    """Yield the fields of `Quality`, of which those of the first tokens may be missing."""
    for key in ("kl", "dnll", "top1"):
        yield float(value[key])
    for key in ("kl8", "kl32"):
        yield None if value.get(key) is None else float(value[key])


def _read_mix(pieces: JsonPieces, groups: int) -> tuple[tuple[str, ...], float, float]:
    value: dict[str, Any] = {}
    for name in pieces.members():
        if name == "tracks":
            value[name] = tuple(pieces.scalars({str}, groups))
        elif name in {"predicted", "measured"}:
            value[name] = float(pieces.value())
        else:
            pieces.skip()
    return value["tracks"], value["predicted"], value["measured"]
