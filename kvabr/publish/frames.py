"""All frames of one cache: encode every group on every track, read them back, time their decoding."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvabr.codec.base import GroupContext, codec, names
from kvabr.codec.group import clean, decode_group, encode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec

TIMED_GROUPS = 5
"""Groups whose decoding is timed, of which the median counts."""

ON_REQUEST = ("FP4",)
"""Levels that are made only if they are named: Int4 is as small and loses half as much."""


def ordered_tracks(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The tracks to make, each after the one that it refines; for None all that there are but `ON_REQUEST`.

    Raises:
        FormatError: there is no such codec.
        UsageError: a track refines one that is not wanted, or is wanted twice.
    """
    if wanted is None:
        wanted = [name for name in names() if name not in ON_REQUEST]
    if len(set(wanted)) != len(wanted) or not wanted:
        raise UsageError("name at least one track, and each only once")
    out: list[str] = []
    rest = list(wanted)
    while rest:
        ready = [name for name in rest if codec(name).refines is None or codec(name).refines in out]
        if not ready:
            raise UsageError(f"track {rest[0]} refines {codec(rest[0]).refines}: name that one as well")
        out.append(ready[0])
        rest.remove(ready[0])
    return tuple(out)


class FrameBook:
    """The frames of one cache, wherever they are kept."""

    def __init__(
        self,
        spec: KVSpec,
        chunks: Sequence[str],
        tokens: int,
        tracks: Sequence[str],
        profile: Profile | None,
        *,
        put: Callable[[int, str, bytes], None],
        get: Callable[[int, str], bytes],
    ) -> None:
        """Prepare an empty book.

        Args:
            spec: the cache's spec.
            chunks: chained prompt digest of every group.
            tokens: tokens in the cache.
            tracks: names of the tracks, see `ordered_tracks`.
            profile: side information, for the tracks that need it.
            put: keeps ``(group, track, frame)``.
            get: returns the frame of ``(group, track)``.
        """
        self.spec, self.chunks, self.tokens, self.tracks = spec, tuple(chunks), tokens, tuple(tracks)
        self._profile, self._put, self._get = profile, put, get
        self.bytes: dict[str, list[int]] = {track: [] for track in tracks}
        self.digests: dict[str, list[str]] = {track: [] for track in tracks}
        self.aside: dict[str, int] = dict.fromkeys(tracks, 0)
        """Tokens that a track has whole because they are too unusual to code, see `kvabr.codec.base.Codec.aside`."""
        self.replaced = 0
        """Numbers of the cache that were NaN, infinite or beyond FP16, see `kvabr.codec.group.clean`."""

    def encode(self, cache: torch.Tensor, progress: Callable[[int, int], None]) -> None:
        """Encode every group of ``cache``, [layer, K/V, head, token, dim], on every track, groups in order."""
        total = len(self.chunks) * len(self.tracks)
        for group, chunk in enumerate(self.chunks):
            context = replace(self._context(group), memo={})
            end = context.first_token + context.tokens
            kv, replaced = clean(cache[:, :, :, context.first_token : end])
            self.replaced += replaced
            made: dict[str, bytes] = {}
            for index, track in enumerate(self.tracks):
                below = [bytes(payload_of(made[name])) for name in _below(track)]
                frame = encode_group(kv, track, context, chunk, group, below)
                made[track] = frame
                self._put(group, track, frame)
                self.aside[track] += codec(track).aside(payload_of(frame), context)
                self.bytes[track].append(len(frame))
                self.digests[track].append(hashlib.sha256(frame).hexdigest())
                progress(group * len(self.tracks) + index + 1, total)

    def decode(self, group: int, track: str, out: torch.Tensor) -> None:
        """Decode one group of one track into ``out``, [layer, K/V, head, token, dim]."""
        frame = self._get(group, track)
        below = [payload_of(self._get(group, name)) for name in _below(track)]
        decode_group(frame, track, self._context(group), self.chunks[group], group, out, below)

    def decode_seconds(self, track: str) -> float:
        """Median seconds that one thread takes to check and decode a full group of a track, as a player does.

        Processor time, so that other work on the publisher's machine does not count.
        """
        threads = torch.get_num_threads()
        full = [group for group in range(len(self.chunks)) if self._context(group).tokens == self.spec.group_tokens]
        groups = (full or [0])[:TIMED_GROUPS]
        out = torch.empty(self.spec.shape(self._context(groups[0]).tokens), dtype=self.spec.torch_dtype)
        times = []
        torch.set_num_threads(1)
        try:
            self.decode(groups[0], track, out)  # first use builds tables that a player would have by then
            for group in groups:
                frame = self._get(group, track)
                below = [payload_of(self._get(group, name)) for name in _below(track)]
                context, digest = self._context(group), self.digests[track][group]
                start = time.process_time()
                decode_group(frame, track, context, self.chunks[group], group, out, below, digest=digest)
                times.append(time.process_time() - start)
        finally:
            torch.set_num_threads(threads)
        return statistics.median(times)

    def _context(self, group: int) -> GroupContext:
        first, last = self.spec.group_range(group, self.tokens)
        return GroupContext(self.spec, first, last - first, self._profile)


def _below(track: str) -> list[str]:
    """Names of the tracks that a track refines, base first."""
    below: list[str] = []
    lower = codec(track).refines
    while lower is not None:
        below.insert(0, lower)
        lower = codec(lower).refines
    return below
