"""Encodes a cache into frames, and lists them in a catalog."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from kvabr.codec import gpu
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.group import (
    check_holds,
    check_shape,
    cut,
    decode_group,
    encode_payload,
    framed,
    holds,
    largest,
    payload_of,
)
from kvabr.codec.profile import Profile
from kvabr.codec.threads import CORES
from kvabr.store.asset import Asset, FrameStore
from kvabr.store.pages import page_kind
from kvabr.types.catalog import Catalog, Level, Quality, Track
from kvabr.types.digests import SHA256, digest_of, unknown
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import PassageNotes
from kvabr.types.tails import TailLoss
from kvabr.types.units import cache_length, units_of

_TIMED_GROUPS = 5
_TOKENS_PER_FINER, _MAX_FINER = 128, 4
"""One in this many prompt tokens is stored with higher precision, at the prompt's end; and their maximum number."""
_MAX_BATCH, _MAX_BATCH_ELEMENTS = 32, 1 << 28
"""Maximum groups per batch on a GPU, and maximum elements, at about 16 bytes each."""


@dataclass(slots=True)
class MemoryFrames:
    """A `FrameStore` in memory, for measurements."""

    frames: dict[tuple[int, str], bytes] = field(default_factory=dict)
    profile_data: bytes | None = None

    def begin(self, spec: KVSpec, chunks: Sequence[str] = (), kind: str = "") -> None:
        pass

    def frame(self, group: int, track: str, frame: bytes, digest: str) -> None:
        del digest
        self.frames[group, track] = frame

    def read_frame(self, group: int, track: str) -> bytes:
        return self.frames[group, track]

    def profile(self, data: bytes) -> None:
        self.profile_data = data


def finer_tokens(tokens: int) -> int:
    """Return the number of a cache's last tokens that AC tracks store with higher precision."""
    return max(1, min(tokens // _TOKENS_PER_FINER, _MAX_FINER))


def finer_in(first: int, end: int, tokens: int, limit: int | None = None) -> int:
    """Return how many of the `finer_tokens` are from ``first`` to ``end``."""
    limit = finer_tokens(tokens) if limit is None else limit
    return max(0, min(end - tokens + limit, end - first))


class FrameEncoder:
    """Encodes one cache into frames, reads them back, and times their decoding."""

    def __init__(
        self,
        spec: KVSpec,
        chunks: Sequence[str],
        tokens: int,
        tracks: Sequence[str],
        profile: Profile | None,
        store: FrameStore,
        *,
        position: int = 0,
        passage: PassageNotes | None = None,
        digest: str = SHA256,
        finer_end: bool = False,
    ) -> None:
        """Prepare to encode ``tokens`` tokens with chained prompt digests ``chunks``.

        ``tracks`` are ordered as by `ordered_tracks`; ``profile`` is ignored unless one of them needs it. ``store``
        keeps the frames; ``digest`` is the kind of their digests. ``position`` is the number of tokens before the
        cache, or the position at which `decode` places a passage. ``passage`` has the notes of a passage, with
        unrotated keys. ``finer_end`` stores the last tokens with higher precision, for players without a tail; the last
        group is then no longer valid for longer prompts.
        """
        self.digest = digest
        self.spec, self.chunks, self.tokens, self.tracks = spec, tuple(chunks), tokens, tuple(tracks)
        self.units = units_of(spec, tokens)
        self._profile = profile if needs_profile(tracks) else None
        self._store, self._position, self._passage = store, position, passage
        self._finer_end = finer_end
        self.bytes: dict[str, list[int]] = {track: [0] * len(self.units) for track in tracks}
        self.digests: dict[str, list[str]] = {track: [unknown(digest)] * len(self.units) for track in tracks}
        self.outliers: dict[str, int] = dict.fromkeys(tracks, 0)
        """Number of separately stored tokens by track, see `Codec.outliers`."""
        levels = [Level(track, refines=codec(track).refines) for track in tracks]
        digest_of_profile = None if self._profile is None else self._profile.digest
        plain = passage is None and not position and not finer_end
        store.begin(spec, self.chunks, page_kind(spec, levels, digest_of_profile, digest) if plain else "")

    def encode(
        self, cache: Sequence[torch.Tensor], progress: Callable[[int, int], None] = lambda _done, _all: None
    ) -> None:
        """Encode every group on every track, groups in order.

        ``cache`` has one tensor per layer class, [layer, K/V, head, token, dim]; a state's tensor has the rows of its
        snapshots in place of tokens.
        """
        for tensor, part in zip(cache, self.spec.parts, strict=True):
            due = part.shape(cache_length(part, self.tokens))
            if part.only.kind == "state" and tuple(tensor.shape) != due:
                raise FormatError(
                    f"{self.spec.model}: cannot encode {part.summary}: got the shape {tuple(tensor.shape)}, expected "
                    f"{due}"
                )
        self.write_profile()
        total = len(self.units) * len(self.tracks)
        units = ((group, cut(cache, unit, self.spec)) for group, unit in enumerate(self.units))
        for group, encoder in enumerate(self.encoders(units)):
            for index, track in enumerate(self.tracks):
                encoder.encode(track)
                progress(group * len(self.tracks) + index + 1, total)

    @property
    def together(self) -> int:
        """Number of groups to encode in one batch on a GPU."""
        largest = max(part.group_tokens * part.elements_per_token for part in self.spec.parts)
        return max(1, min(_MAX_BATCH, _MAX_BATCH_ELEMENTS // largest))

    def encoders(self, groups: Iterable[tuple[int, torch.Tensor]]) -> Iterator[GroupEncoder]:
        """Yield encoders of groups (units); groups on a GPU are first prepared in batches."""
        left = iter(groups)
        for group, kv in left:
            some = [self.group(group, kv)]
            if gpu.runs_on(kv.device):
                some += [self.group(*each) for each in islice(left, self.together - 1)]
                _prepare([encoder for encoder in some if gpu.runs_on(encoder.kv.device)], self.tracks)
            while some:
                yield some.pop(0)  # frees each group once encoded

    def write_profile(self) -> None:
        """Write the codec profile, if a track needs it."""
        if self._profile is not None:
            self._store.profile(self._profile.to_bytes())

    def group(self, group: int, kv: torch.Tensor) -> GroupEncoder:
        """Return an encoder for one group (unit), [layer, K/V, head, token, dim]."""
        return GroupEncoder(self, self._store, group, kv, replace(self._context(group), memo={}))

    def take_over(self, asset: Asset, group: int, store: FrameStore) -> bool:
        """Copy a group's frames on all tracks from another estimated asset; return False if the group differs.

        Raise `AssetError` or `FormatError` for missing or damaged frames, before writing any frame.
        """
        catalog = asset.catalog
        same = self.spec.even_groups and catalog.estimated and catalog.spec.digest() == self.spec.digest()
        same = (
            same
            and catalog.digest_kind == self.digest
            and catalog.chunks[group : group + 1] == self.chunks[group : group + 1]
        )
        if not same or catalog.profile != (None if self._profile is None else self._profile.digest):
            return False
        if any(track not in catalog.by_name for track in self.tracks):
            return False
        frames = [asset.frame(group, track) for track in self.tracks]
        for track, frame in zip(self.tracks, frames, strict=True):
            self.bytes[track][group], self.digests[track][group] = len(frame), catalog.track(track).digests[group]
            store.frame(group, track, bytes(frame), self.digests[track][group])
        return True

    def decode(self, group: int, track: str, out: torch.Tensor) -> None:
        """Decode one group of one track into ``out``, [layer, K/V, head, token, dim]."""
        frame, below = self._read(group, track)
        unit = self.units[group]
        decode_group(frame, track, self._context(group), self.chunks[unit.chunk], unit.group, out, below)

    def decode_seconds(self, track: str) -> float:
        """Return the median processor time, in seconds, to check and decode a full group on one thread."""
        threads = torch.get_num_threads()
        sizes = [unit.tokens * self.spec.parts[unit.part].elements_per_token for unit in self.units]
        groups = [group for group, size in enumerate(sizes) if size == max(sizes)][:_TIMED_GROUPS]
        first = self._context(groups[0])
        out = torch.empty(first.spec.shape(first.tokens), dtype=first.spec.torch_dtype)
        times = []
        torch.set_num_threads(1)
        try:
            self.decode(groups[0], track, out)  # builds the tables, which a player has built by then
            for group in groups:
                frame, below = self._read(group, track)
                context, digest, unit = self._context(group), self.digests[track][group], self.units[group]
                with CORES.all_taken():
                    start = time.process_time()
                    chunk = self.chunks[unit.chunk]
                    decode_group(frame, track, context, chunk, unit.group, out, below, digest=digest)
                    times.append(time.process_time() - start)
        finally:
            torch.set_num_threads(threads)
        return statistics.median(times)

    def spread(self, losses: Sequence[float]) -> tuple[float, ...]:
        """Divide the loss of each token group among its units, in proportion to their size."""
        sizes = [unit.tokens * self.spec.parts[unit.part].elements_per_token for unit in self.units]
        whole = [0] * len(self.chunks)
        for unit, size in zip(self.units, sizes, strict=True):
            whole[unit.chunk] += size
        return tuple(
            losses[unit.chunk] * (size / whole[unit.chunk]) for unit, size in zip(self.units, sizes, strict=True)
        )

    def catalog(
        self,
        loss: Mapping[str, Sequence[float]],
        decode_s: Mapping[str, float],
        *,
        measured: Mapping[str, Quality] | None = None,
        tails: Mapping[str, Sequence[TailLoss]] | None = None,
        expected: Mapping[str, Sequence[int]] | None = None,
        **facts: Any,
    ) -> Catalog:
        """Return the catalog of the tracks in ``loss``, with ``facts`` as further fields.

        ``expected`` gives the sizes of a cache that is not encoded yet.
        """
        listed = [track for track in self.tracks if track in loss]
        profile = self._profile if needs_profile(listed) else None
        return Catalog(
            namespace=TrackNamespace(self.spec.model, self.chunks[-1]),
            spec=self.spec,
            tokens=self.tokens,
            position=0 if self._passage is not None else self._position,
            passage=self._passage,
            chunks=self.chunks,
            tracks=tuple(
                Track(
                    name=track,
                    bytes=tuple((self.bytes if expected is None else expected)[track]),
                    loss=tuple(map(six, loss[track])),
                    digests=tuple(self.digests[track])
                    if expected is None
                    else (unknown(self.digest),) * len(self.units),
                    refines=codec(track).refines,
                    decode_s=six(decode_s[track]),
                    measured=None if measured is None else measured[track],
                    tails=tuple(
                        TailLoss(n, six(share), six(spread)) for n, share, spread in (tails or {}).get(track, ())
                    ),
                )
                for track in listed
            ),
            profile=None if profile is None else profile.digest,
            profile_bytes=0 if profile is None else len(profile.to_bytes()),
            **facts,
        )

    def _read(self, group: int, track: str) -> tuple[bytes | memoryview, list[memoryview]]:
        unit, part = self.units[group], self._context(group).spec
        names = [part.track_name(name) for name in (*_bases(track), track)]
        *below, frame = (self._store.read_frame(unit.group, name) for name in names)
        return frame, [payload_of(each) for each in below]

    def _context(self, group: int) -> GroupContext:
        unit = self.units[group]
        part, place = self.spec.parts[unit.part], self._position + unit.first
        if self._passage is not None:
            return GroupContext(part, unit.first, unit.tokens, self._profile, free=True, at=place)
        finer = finer_in(unit.first, unit.first + unit.tokens, self.tokens) if self._finer_end else 0
        return GroupContext(part, place, unit.tokens, self._profile, finer=finer)


class GroupEncoder:
    """Encodes one group on its tracks, each after its base; results that tracks share are computed once."""

    def __init__(
        self, frames: FrameEncoder, store: FrameStore, group: int, kv: torch.Tensor, context: GroupContext
    ) -> None:
        check_shape(kv, context, f"group {group}: cannot encode")
        self._frames, self._store, self._group, self.context = frames, store, group, context
        self.kv, self._largest = kv, largest(kv, context.spec, context.first_token)
        self._payloads: dict[str, bytes] = {}

    def encode(self, track: str) -> None:
        """Encode the group on a track, unless `make` did, and write the frame."""
        frames, unit, name = self._frames, self._frames.units[self._group], self.context.spec.track_name
        if track not in self._payloads:
            self.make(track)
        payload = self._payloads[track]
        frame = framed(payload, track, self.context, frames.chunks[unit.chunk], unit.group)
        digest = digest_of(frame, frames.digest)
        self._store.frame(unit.group, name(track), frame, digest)
        frames.outliers[track] += codec(track).outliers(memoryview(payload), self.context)
        frames.bytes[track][self._group], frames.digests[track][self._group] = len(frame), digest

    def make(self, track: str) -> None:
        """Encode the group on a track without writing it; raise `FormatError` if the track cannot hold its numbers."""
        check_holds(track, self.context.spec, self._largest)
        unit, name = self._frames.units[self._group], self.context.spec.track_name
        for lower in _bases(track):
            if lower not in self._payloads:
                made = self._store.read_frame(unit.group, name(lower))
                self._payloads[lower] = bytes(payload_of(made))
        below = [self._payloads[lower] for lower in _bases(track)]
        self._payloads[track] = encode_payload(self.kv, track, self.context, below)


def _prepare(groups: Sequence[GroupEncoder], tracks: Sequence[str]) -> None:
    """Encode groups on GPUs in one batch, on a low-priority stream that starts after the current stream."""
    for device in {group.kv.device for group in groups}:
        own = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if own is not None:
            own.wait_stream(torch.cuda.current_stream(device))
        some = [group for group in groups if group.kv.device == device]
        with nullcontext() if own is None else torch.cuda.stream(own):
            for track in tracks:
                with suppress(torch.OutOfMemoryError):  # too little memory: encode them singly
                    codec(track).prepare([(group.kv, group.context) for group in some])
                for group in some:
                    group.make(track)


def needs_profile(tracks: Sequence[str]) -> bool:
    """Return True if any of these tracks needs a codec profile."""
    return any(codec(track).needs_profile for track in tracks)


def holding_tracks(tracks: Sequence[str], spec: KVSpec, magnitudes: Sequence[float]) -> tuple[str, ...]:
    """Return the tracks that can hold a cache and have usable bases; raise `FormatError` if there are none.

    ``magnitudes`` has the largest magnitude of each layer class.
    """
    pairs = tuple(zip(spec.parts, magnitudes, strict=True))
    kept = {track for track in tracks if all(holds(track, part, limit) for part, limit in pairs)}
    if not kept:
        for track in tracks:
            for part, limit in pairs:
                check_holds(track, part, limit)
    return tuple(track for track in tracks if kept.issuperset((track, *_bases(track))))


def _bases(track: str) -> list[str]:
    below: list[str] = []
    lower = codec(track).refines
    while lower is not None:
        below.insert(0, lower)
        lower = codec(lower).refines
    return below


def six(value: float) -> float:
    """Return a float rounded to six significant digits."""
    return float(f"{value:.6g}")
