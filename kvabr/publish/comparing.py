"""Compares the tracks of an asset. A difference larger than a codec's loss means damage."""

from __future__ import annotations

from contextlib import suppress

import torch

from kvabr.codec.base import GroupContext, codec, names
from kvabr.codec.group import decode_group
from kvabr.store.asset import Asset
from kvabr.types.errors import FormatError
from kvabr.types.units import Unit

_EXACT = ("Raw", "BF16", "FP16", "FP8", "Int8")
_MAX_ERROR = 0.25
"""Maximum error, relative to a group's largest magnitude; FP4, the coarsest codec, loses a fifth."""


def compare_tracks(asset: Asset) -> None:
    """Decode every group on all tracks that need no profile, and compare these with the most exact track.

    Skip frames that this version cannot decode. Raise `AssetError` for an unreadable frame, `FormatError` for a track
    that differs.
    """
    catalog, known = asset.catalog, set(names())
    tracks = [each.name for each in catalog.tracks if each.name in known and not codec(each.name).needs_profile]
    exact = next((each for each in _EXACT if each in tracks), None)
    if exact is None:
        return
    tracks.remove(exact)
    for unit in catalog.units:
        with suppress(_UndecodableError):
            wanted = _decoded(asset, unit, exact)
            limit = _MAX_ERROR * float(wanted.abs().amax())
            for track in tracks:
                if (error := float((_decoded(asset, unit, track) - wanted).abs().amax())) > limit:
                    raise FormatError(
                        f"group {unit.group} of {track} differs from {exact} by {error:g}, more than this level loses "
                        f"({limit:g}); publish it again"
                    )


class _UndecodableError(Exception):
    pass


def _decoded(asset: Asset, unit: Unit, track: str) -> torch.Tensor:
    catalog = asset.catalog
    part = catalog.spec.parts[unit.part]
    first = catalog.position + unit.first
    context = GroupContext(part, first, unit.tokens, free=catalog.passage is not None)
    frame = asset.frame(unit.group, part.track_name(track))
    out = torch.empty(part.shape(unit.tokens))
    try:
        decode_group(frame, track, context, catalog.chunks[unit.chunk], unit.group, out)
    except FormatError as error:
        raise _UndecodableError from error
    return out
