"""Schemes: ways to compress a whole cache.

Sizes include every byte that a reader needs, such as frames and scales, but not the profile, which is fetched once.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

import kvabr
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.publish.encoder import own_profile
from kvabr.publish.frames import finer_in
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec

_CHUNK = "00" * 32
"""Prompt digest for frames, which is not checked."""


@dataclass(frozen=True, slots=True)
class Coded:
    """A cache after coding."""

    nbytes: int
    cache: torch.Tensor | None
    """[layer, K/V, head, token, dim]; None if only the size was requested."""


class Scheme(ABC):
    """A way to compress a cache at one rate."""

    name: str
    family: str
    group_tokens: int

    @property
    @abstractmethod
    def key(self) -> str:
        """Key that covers all inputs of the result except the cache."""

    @abstractmethod
    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Encode a cache; decode it unless only the size is needed.

        ``cache`` is [layer, K/V, head, token, dim] in half precision, and is not modified.
        """


def groups(tokens: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield each group's first token, and the token after its last."""
    for first in range(0, tokens, each):
        yield first, min(first + each, tokens)


class TrackScheme(Scheme):
    """A track of kvabr, including the tracks that it refines."""

    def __init__(
        self,
        track: str,
        spec: KVSpec,
        profile: Profile | None = None,
        *,
        group_tokens: int | None = None,
        label: str = "",
        family: str = "",
        free: bool = False,
        end: str = "",
        finer: int | None = None,
    ) -> None:
        """Choose the codecs.

        Args:
            track: The codec.
            spec: Spec of the caches; layer classes are coded separately.
            profile: Profile for codecs that need one.
            group_tokens: Tokens per group; None: as in the spec.
            label: Suffix of the name, to distinguish profiles.
            family: Name of the curve; empty: the track's name.
            free: True if caches are position-free (`kvabr.codec.base.GroupContext.free`).
            end: Codec of the last group, if different.
            finer: Number of last tokens that AC tracks store with higher precision; None: as published.
        """
        self._tracks, self._end = track_chain(track), track_chain(end or track)
        self._needs = any(codec(name).needs_profile for name in (*self._tracks, *self._end))
        if self._needs and profile is None:
            raise UsageError(f"{track} needs a profile: make one with `kvabr calibrate`, and give it with --profile F")
        self.group_tokens = group_tokens or spec.group_tokens
        self._spec = replace(spec, group_tokens=self.group_tokens)
        self._free, self._finer = free, finer
        self._profile = None
        if self._needs and profile is not None:
            profile.check(spec)
            self._profile = profile
        self._origin = "" if profile is None or not self._needs else profile.digest
        self.name = f"{track}{'' if finer is None else f'={finer}'}{', end ' if end else ''}{end}{label}"
        self.family = family or track

    @property
    def key(self) -> str:
        """Codecs, profile, group size, and the digest of the codecs' sources."""
        free = "|free" if self._free else ""
        end = "" if self._end == self._tracks else f"|{self._end[-1]}"
        finer = "" if self._finer is None else f"|={self._finer}"
        return f"{self._tracks[-1]}|{self._origin}|{self.group_tokens}|{sources('codec')}{free}{end}{finer}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Encode like an origin and decode like a player."""
        out = torch.empty_like(cache) if decode else None
        nbytes = 0
        for part, kv in zip(self._spec.parts, by_class(cache, self._spec), strict=True):
            made = torch.empty_like(kv) if decode else None
            nbytes += self._code(kv, part, made)
            if out is not None and made is not None:
                out[list(part.only.layers)] = made
        return Coded(nbytes, out)

    def _code(self, kv: torch.Tensor, part: KVSpec, out: torch.Tensor | None) -> int:
        nbytes, tokens = 0, kv.shape[3]
        limit = 0 if self._free else self._finer
        for index, (first, end) in enumerate(groups(tokens, self.group_tokens)):
            finer = finer_in(first, end, tokens, limit)
            context = GroupContext(part, first, end - first, self._profile, self._free, finer=finer, memo={})
            group = kv[:, :, :, first:end]
            frames: list[bytes] = []
            tracks = self._end if end == tokens else self._tracks
            for track in tracks:
                below = [bytes(payload_of(frame)) for frame in frames]
                frames.append(encode_group(group, track, context, _CHUNK, index, below))
            nbytes += sum(map(len, frames))
            if out is not None:
                views = [payload_of(frame) for frame in frames[:-1]]
                decode_group(frames[-1], tracks[-1], context, _CHUNK, index, out[:, :, :, first:end], views)
        return nbytes


def by_class(cache: torch.Tensor, spec: KVSpec) -> tuple[torch.Tensor, ...]:
    """Return one tensor per layer class; all classes have the same shape."""
    return tuple(cache[list(each.layers)] if len(spec.classes) > 1 else cache for each in spec.classes)


class OwnTrack(Scheme):
    """A track with tables that are estimated from the cache itself and sent with it, for models without a profile."""

    def __init__(self, track: str, spec: KVSpec, *, group_tokens: int | None = None) -> None:
        self._track, self._spec = track, spec
        self.name, self.family = f"{track} (own tables)", "AC, own tables"
        self.group_tokens = group_tokens or spec.group_tokens

    @property
    def key(self) -> str:
        """Track, group size, and the digest of the codecs' sources."""
        return f"own|{self._track}|{self.group_tokens}|{sources('codec')}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Encode and decode like `TrackScheme`; the size includes the profile."""
        profile = own_profile(self._spec, by_class(cache, self._spec))
        coded = TrackScheme(self._track, self._spec, profile, group_tokens=self.group_tokens).code(cache, decode=decode)
        return Coded(coded.nbytes + len(profile.to_bytes()), coded.cache)


def track_chain(track: str) -> tuple[str, ...]:
    """Return a track and all tracks below it, base first."""
    names = [track]
    while (lower := codec(names[0]).refines) is not None:
        names.insert(0, lower)
    return tuple(names)


@cache
def sources(package: str) -> str:
    """Return 8 hex digits that change with a package's sources, so that results of older sources are not reused."""
    digest = hashlib.sha256()
    folder = Path(next(iter(kvabr.__path__))) / package
    for path in sorted(path for ending in ("py", "c", "h") for path in folder.rglob(f"*.{ending}")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def tracks_to_measure(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the named tracks, or all known ones.

    Raises:
        UsageError: A track is named twice.
        FormatError: A track has no codec.
    """
    wanted = list(known if names is None else names)
    if len(set(wanted)) != len(wanted):
        raise UsageError("give each track only once")
    for name in wanted:
        codec(name)
    return wanted
