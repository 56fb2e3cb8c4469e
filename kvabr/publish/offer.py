"""The tracks of an engine's publisher, and catalogs with estimated losses.

An engine has no time for the measurements of `kvabr encode`. Losses, decode times and expected sizes are those of
another catalog, the *prior* (ideally of the same model), spread over the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from kvabr.codec.base import codec
from kvabr.codec.columns import check_class
from kvabr.codec.profile import Profile
from kvabr.data.profiles import rebound
from kvabr.publish.encoder import RAW, needs_raw, ordered_tracks, redundant_tracks
from kvabr.publish.frames import FrameEncoder, holding_tracks, six
from kvabr.store.asset import FrameStore
from kvabr.types.catalog import Catalog, Track
from kvabr.types.digests import SHA256, check_kind
from kvabr.types.errors import UsageError
from kvabr.types.kv import ITEM_BYTES, KVSpec
from kvabr.types.naming import LAYERS
from kvabr.types.passage import PassageNotes

PLAIN_TRACKS = ("FP16", "Int8", "Int4")
CASTS = ("FP16", "BF16")
"""Tracks that decode as fast as Raw."""

_MAX_LAYER_LOSS = 0.9
_LAST_GROUPS = 4
_EVEN_SHARE = 0.05
"""Fraction of the loss that is spread evenly over the groups."""
_MAX_NAMED = 64
_FRAME_BYTES = 256


class TrackOffer:
    """The tracks of one model's caches, and their estimates."""

    def __init__(
        self,
        spec: KVSpec,
        *,
        prior: Catalog,
        tracks: Sequence[str] | None,
        profile: Profile | None,
        source: str,
        digest: str = SHA256,
    ) -> None:
        if tracks is None:
            plain = (*((RAW,) if needs_raw(spec) else ()), *PLAIN_TRACKS, *(LAYERS if profile is not None else ()))
            tracks = [track for track in plain if track not in redundant_tracks(spec)]
        self.tracks = ordered_tracks(tracks)
        for track in self.tracks:
            if codec(track).needs_profile:
                check_class(spec, track)
            if codec(track).needs_profile and profile is None:
                raise UsageError(
                    f"track {track} needs a codec profile of {spec.model}: make one with `kvabr calibrate`"
                )
            if track not in prior.by_name and track != RAW:
                raise UsageError(
                    f"the loss of track {track} is unknown: the prior catalog has only {', '.join(prior.by_name)}"
                )
        if profile is not None:
            profile.check(spec)
        self.spec, self.prior, self.profile, self._source = spec, prior, profile, source
        self.digest = check_kind(digest)
        self._named: dict[str, TrackOffer] = {}

    def named(self, model: str) -> TrackOffer:
        """Return this offer for the model with an adapter."""
        if model == self.spec.model:
            return self
        if model not in self._named:
            made = copy(self)
            made.spec = replace(self.spec, model=model)
            if self.profile is not None:
                theirs = replace(self.profile.spec, model=model)
                made.profile = Profile.from_bytes(rebound(self.profile.to_bytes(), self.profile.spec, theirs))
            while len(self._named) >= _MAX_NAMED:
                self._named.pop(next(iter(self._named)), None)
            self._named[model] = made
        return self._named[model]

    def prepare(self) -> None:
        """Compute the matrices of the AC tracks, which takes a second."""
        if self.profile is not None and any(codec(track).needs_profile for track in self.tracks):
            for part in self.spec.parts:
                self.profile.of(part).analysis.prepare()

    def encoder(
        self,
        chunks: Sequence[str],
        tokens: int,
        store: FrameStore,
        position: int | None = 0,
        passage: PassageNotes | None = None,
        magnitudes: Sequence[float] | None = None,
    ) -> FrameEncoder:
        """Return an encoder of one cache.

        A ``position`` of None excludes tracks with a profile. Tracks that cannot hold the ``magnitudes`` are excluded.
        """
        tracks = self.tracks
        if position is None:
            tracks = tuple(track for track in tracks if not codec(track).needs_profile)
        if magnitudes is not None:
            tracks = holding_tracks(tracks, self.spec, magnitudes)
        return FrameEncoder(
            self.spec,
            chunks,
            tokens,
            tracks,
            self.profile,
            store,
            position=position or 0,
            passage=passage,
            digest=self.digest,
        )

    def catalog(self, frames: FrameEncoder, expected: Sequence[str] | None = None) -> Catalog:
        """Return the catalog of encoded frames, or of the ``expected`` tracks of a cache that will be encoded."""
        spec, prior = self.spec, self.prior
        own, others = spec.largest, prior.spec.largest
        larger = (own.elements_per_token * own.rows) / (others.elements_per_token * others.rows)
        losses: dict[str, tuple[float, ...]] = {}
        for track in frames.tracks if expected is None else expected:
            losses[track] = self._losses(frames, track)
            if (base := codec(track).refines) is not None:
                # A layer that appeared to make a group worse would never be used.
                pairs = zip(losses[track], losses[base], strict=True)
                losses[track] = tuple(min(loss, _MAX_LAYER_LOSS * below) for loss, below in pairs)
        return frames.catalog(
            losses,
            {track: self._of_prior(track).decode_s * larger for track in losses},
            loss_method=f"not measured: those of {prior.tokens} tokens under {prior.spec.model}, from the end",
            estimated=True,
            source=self._source,
            tails={track: self._of_prior(track).tails for track in losses},
            prefill=prior.prefill if prior.spec.model == spec.model else None,
            expected=None if expected is None else {track: self._sizes(frames, track) for track in expected},
        )

    def _of_prior(self, name: str) -> Track:
        if name in self.prior.by_name:
            return self.prior.track(name)
        cast = next((self.prior.track(each) for each in CASTS if each in self.prior.by_name), self.prior.tracks[0])
        return replace(cast, loss=(0.0,) * len(cast.loss))

    def _losses(self, frames: FrameEncoder, track: str) -> tuple[float, ...]:
        spec, prior, theirs = self.spec, self.prior, self._of_prior(track).loss
        if len(spec.classes) == 1 or prior.spec.names != spec.names:
            return frames.spread(expected_losses(theirs, len(frames.chunks)))
        losses = [0.0] * len(frames.units)
        for part, only in enumerate(spec.classes):
            own = [index for index, unit in enumerate(frames.units) if unit.part == part]
            given = [loss for loss, unit in zip(theirs, prior.units, strict=True) if unit.part == part]
            if only.kind == "state":
                made: Sequence[float] = [given[-1]] * len(own)  # a prompt needs one snapshot
            elif only.kind in ("full", "latent"):
                made = expected_losses(given, len(own))
            else:  # in a window, the loss depends on the distance from the end
                made = [0.0] * (len(own) - len(given)) + given[-len(own) :]
            for index, loss in zip(own, made, strict=True):
                losses[index] = loss
        return tuple(losses)

    def _sizes(self, frames: FrameEncoder, track: str) -> list[int]:
        spec, prior = self.spec, self.prior
        alike = len(spec.classes) > 1 and prior.spec.names == spec.names
        rates = [self._rate(track, part if alike else None) for part in range(len(spec.classes))]
        return [
            _FRAME_BYTES + round(unit.tokens * spec.parts[unit.part].elements_per_token * rates[unit.part])
            for unit in frames.units
        ]

    def _rate(self, track: str, part: int | None) -> float:
        prior = self.prior
        if track not in prior.by_name:
            return float(max(ITEM_BYTES[each.dtype] for each in self.spec.classes))
        total = elements = 0
        for group, size in enumerate(prior.track(track).bytes):
            unit = prior.unit(group)
            if part is None or unit.part == part:
                total += size
                elements += unit.tokens * prior.spec.parts[unit.part].elements_per_token
        return total / elements


def expected_losses(losses: Sequence[float], groups: int) -> tuple[float, ...]:
    """Return estimated losses for ``groups`` groups, from the losses of another cache and with the same sum.

    The loss of a cache hardly grows with its length, and is mostly in its last groups and the first.
    """
    total, last = sum(losses), min(_LAST_GROUPS, len(losses) - 1, groups - 1)
    made = [total / groups] * groups
    if last > 0 and total > 0:
        ends, between = sum(losses[-last:]) + losses[0], groups - last - 1
        if between:
            made = [losses[0], *[(total - ends) / between] * between, *losses[-last:]]
        elif ends > 0:
            made = [total / ends * each for each in (losses[0], *losses[-last:])]
    return tuple(six((1 - _EVEN_SHARE) * each + _EVEN_SHARE * total / groups) for each in made)
