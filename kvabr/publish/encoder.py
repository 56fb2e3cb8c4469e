"""Publishes a cache: run the model over a prompt, encode every group on every track, measure what each costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from kvabr.codec.base import GroupContext, codec, names
from kvabr.codec.columns import check_class, has_ac
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import clean, cut, decode_group, encode_group, largest_number, payload_of
from kvabr.codec.profile import Profile, joined
from kvabr.codec.threads import CORES
from kvabr.publish.model import ScoringEngine
from kvabr.publish.quality import MAX_PASSES, Reference, measure_mixes, measure_quality, sample_mixes
from kvabr.store.asset import FrameStore, Prompt
from kvabr.types.catalog import Catalog, Mix, Quality, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.digests import SHA256, digest_of, unknown
from kvabr.types.engine import Engine, prefill_classes, time_prefills
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import cache_length, snapshot_ends, units_of

Progress = Callable[[str, int, int], None]
"""Called with a stage, its steps done, and its steps in all."""

STAGES = ("prefill", "encode", "time", "measure", "mix")
"""Stages of `publish`, in order; the steps of ``prefill`` are tokens."""

ON_REQUEST = ("FP4",)
"""Tracks that are made only if they are named: Int4 is as small and loses half as much."""

RAW = "Raw"
"""The track that keeps what the engine has; made by default where no other does, see `needs_raw`."""

NO_SMALLER = ("FP16", "BF16", "FP8", "Int8")
"""Tracks with no fewer bits than a quantised cache has; of those they are made only if they are named."""

_TIMED_GROUPS = 5
"""Groups whose decoding is timed; the median counts."""

_PREFILL_TOKENS = 512
"""Tokens computed at a time: large enough for the matrix units, small enough to show progress."""

_OWN_CLASSES = 16
"""Classes of rows in a profile that is estimated from one asset and travels with it."""

_FP16_MAX = 65504.0


@dataclass(slots=True)
class MemoryFrames:
    """A `FrameStore` for measurements that leave nothing behind."""

    frames: dict[tuple[int, str], bytes] = field(default_factory=dict)
    profile_data: bytes | None = None

    def frame(self, group: int, track: str, frame: bytes) -> None:
        """See `FrameStore.frame`."""
        self.frames[group, track] = frame

    def read_frame(self, group: int, track: str) -> bytes:
        """See `FrameStore.read_frame`."""
        return self.frames[group, track]

    def profile(self, data: bytes) -> None:
        """See `FrameStore.profile`."""
        self.profile_data = data


def ordered_tracks(wanted: Sequence[str] | None, spec: KVSpec | None = None) -> tuple[str, ...]:
    """Return the tracks to make, each after the one that it refines; for None all that exist but `ON_REQUEST`.

    `RAW` is among them where nothing else is exact.

    Those that need a profile are left out if there are none for the layer classes of ``spec``.

    Raises `FormatError` if there is no such codec, `UsageError` if one is wanted twice, or without what it refines.
    """
    if wanted is None:
        ac = spec is None or has_ac(spec)
        left_out = (*ON_REQUEST, *pointless(spec))
        wanted = [name for name in names() if name not in left_out and (ac or not codec(name).needs_profile)]
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
        digest: str = SHA256,
    ) -> None:
        """Prepare to encode.

        Args:
            spec: the cache's spec.
            chunks: chained prompt digest of every group.
            tokens: tokens in the cache.
            tracks: names of the tracks, see `ordered_tracks`.
            profile: side information; it is kept only if a track needs it.
            store: keeps the frames.
            position: tokens of the prompt that come before the cache.
            digest: kind of the frames' digests, see `kvabr.types.digests`.
        """
        self.digest = digest
        self.spec, self.chunks, self.tokens, self.tracks = spec, tuple(chunks), tokens, tuple(tracks)
        self.units = units_of(spec, tokens)
        self._profile = profile if needs_profile(tracks) else None
        self._store, self._position = store, position
        self.bytes: dict[str, list[int]] = {track: [0] * len(self.units) for track in tracks}
        """Size of every frame, by track and group; 0: it is not made yet."""
        self.digests: dict[str, list[str]] = {track: [unknown(digest)] * len(self.units) for track in tracks}
        """Digest of every frame, by track and group."""
        self.aside: dict[str, int] = dict.fromkeys(tracks, 0)
        """Tokens that a track stores uncoded because they are too unusual, see `kvabr.codec.base.Codec.aside`."""
        self.replaced = 0
        """Numbers of the cache that were NaN, infinite or beyond FP16, see `kvabr.codec.group.clean`."""

    def encode(
        self, cache: Sequence[torch.Tensor], progress: Callable[[int, int], None] = lambda _done, _all: None
    ) -> None:
        """Encode every group of a cache on every track, groups in order.

        ``cache`` is a tensor per layer class, [layer, K/V, head, token, dim] of all tokens; that of a state holds its
        snapshots one behind the other, with rows in the place of tokens (`kvabr.types.units.cache_length`).
        """
        for tensor, part in zip(cache, self.spec.parts, strict=True):
            due = part.shape(cache_length(part, self.tokens))
            if part.only.kind == "state" and tuple(tensor.shape) != due:
                raise FormatError(
                    f"{self.spec.model}: cannot encode {part.summary} of {tuple(tensor.shape)}, not {due}"
                )
        self.write_profile()
        total = len(self.units) * len(self.tracks)
        for group, unit in enumerate(self.units):
            encoder = self.group(group, cut(cache, unit, self.spec))
            for index, track in enumerate(self.tracks):
                encoder.encode(track)
                progress(group * len(self.tracks) + index + 1, total)

    def write_profile(self) -> None:
        """Write the codec profile, if a track needs it."""
        if self._profile is not None:
            self._store.profile(self._profile.to_bytes())

    def group(self, group: int, kv: torch.Tensor) -> GroupEncoder:
        """Begin to encode one group (unit), [layer, K/V, head, token, dim], of any track that is not made yet."""
        return GroupEncoder(self, self._store, group, kv, replace(self._context(group), memo={}))

    def decode(self, group: int, track: str, out: torch.Tensor) -> None:
        """Decode one group of one track into ``out``, [layer, K/V, head, token, dim]."""
        frame, below = self._read(group, track)
        unit = self.units[group]
        decode_group(frame, track, self._context(group), self.chunks[unit.chunk], unit.group, out, below)

    def decode_seconds(self, track: str) -> float:
        """Return the median seconds that one thread takes to check and decode a full group, as a player does.

        This is processor time, so that other work on the publisher's machine does not count.
        """
        threads = torch.get_num_threads()
        sizes = [unit.tokens * self.spec.parts[unit.part].elements_per_token for unit in self.units]
        groups = [group for group, size in enumerate(sizes) if size == max(sizes)][:_TIMED_GROUPS]
        first = self._context(groups[0])
        out = torch.empty(first.spec.shape(first.tokens), dtype=first.spec.torch_dtype)
        times = []
        torch.set_num_threads(1)
        try:
            self.decode(groups[0], track, out)  # the first use builds tables that a player would have by then
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
        """Return the losses of all units from those of the groups of tokens: each group's, split by size."""
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
        loss_method: str,
        source: str,
        measured: Mapping[str, Quality] | None = None,
        prefill: PrefillCost | None = None,
        expected: Mapping[str, Sequence[int]] | None = None,
    ) -> Catalog:
        """Return the catalog of what was encoded, with these losses and decode times by track.

        It has the tracks that ``loss`` has. With ``expected`` it is that of a cache to come: these are the sizes, and
        the digests are unknown.
        """
        listed = [track for track in self.tracks if track in loss]
        profile = self._profile if needs_profile(listed) else None
        return Catalog(
            namespace=TrackNamespace(self.spec.model, self.chunks[-1]),
            spec=self.spec,
            tokens=self.tokens,
            position=self._position,
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
                )
                for track in listed
            ),
            profile=None if profile is None else profile.digest,
            profile_bytes=0 if profile is None else len(profile.to_bytes()),
            prefill=prefill,
            loss_method=loss_method,
            source=source,
        )

    def _read(self, group: int, track: str) -> tuple[bytes, list[memoryview]]:
        unit, part = self.units[group], self._context(group).spec
        names = [part.track_name(name) for name in (*_below(track), track)]
        *below, frame = (self._store.read_frame(unit.group, name) for name in names)
        return frame, [payload_of(each) for each in below]

    def _context(self, group: int) -> GroupContext:
        unit = self.units[group]
        part, first = self.spec.parts[unit.part], self._position + unit.first
        return GroupContext(part, first, unit.tokens, self._profile)


class GroupEncoder:
    """Encodes one group on its tracks, each after those that it refines; what the tracks share is computed once."""

    def __init__(
        self, frames: FrameEncoder, store: FrameStore, group: int, kv: torch.Tensor, context: GroupContext
    ) -> None:
        """See `FrameEncoder.group`."""
        self._frames, self._store, self._group, self._context = frames, store, group, context
        self._kv, replaced = clean(kv, largest_number(context.spec))
        self._made: dict[str, bytes] = {}
        if not any(sizes[group] for sizes in frames.bytes.values()):  # this group was not begun before
            frames.replaced += replaced

    def encode(self, track: str) -> None:
        """Encode the group on a track, and write the frame."""
        frames, unit, name = self._frames, self._frames.units[self._group], self._context.spec.track_name
        below = []
        for lower in _below(track):
            if lower not in self._made:  # it was made before
                self._made[lower] = self._store.read_frame(unit.group, name(lower))
            below.append(bytes(payload_of(self._made[lower])))
        frame = encode_group(self._kv, track, self._context, frames.chunks[unit.chunk], unit.group, below)
        self._made[track] = frame
        self._store.frame(unit.group, name(track), frame)
        frames.aside[track] += codec(track).aside(payload_of(frame), self._context)
        frames.bytes[track][self._group] = len(frame)
        frames.digests[track][self._group] = digest_of(frame, frames.digest)


def compute_cache(
    engine: Engine,
    tokens: Sequence[int],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    spec: KVSpec | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the exact cache of a prompt, computed in pieces, in the engine's dtype.

    It is a tensor per layer class, [layer, K/V, head, token, dim], each of all tokens, or of all snapshots of a state;
    which there are, ``spec`` says, by default the engine's.
    """
    total, parts = len(tokens), (spec or engine.spec).parts
    if not total:
        raise UsageError("a prompt takes at least 1 token")
    snapshots = [snapshot_ends(part, total) for part in parts]
    ends = sorted({*range(_PREFILL_TOKENS, total, _PREFILL_TOKENS), total}.union(*snapshots))
    cache: tuple[torch.Tensor, ...] = ()
    pieces: tuple[torch.Tensor, ...] = ()
    for first, end in pairwise((0, *ends)):
        before = None
        if cache:
            held = zip(cache, pieces, snapshots, strict=True)
            before = tuple(piece if marks else place[:, :, :, :first] for place, piece, marks in held)
        pieces = prefill_classes(engine, tokens[first:end], before)
        if not cache:
            shapes = [part.shape(cache_length(part, total)) for part in parts]
            cache = tuple(piece.new_empty(shape) for piece, shape in zip(pieces, shapes, strict=True))
        for place, piece, marks in zip(cache, pieces, snapshots, strict=True):
            if not marks:
                place[:, :, :, first:end] = piece
            elif end in marks:
                row = marks.index(end) * piece.shape[3]
                place[:, :, :, row : row + piece.shape[3]] = piece
        progress(end, total)
    return cache


def own_profile(spec: KVSpec, exact: Sequence[torch.Tensor]) -> Profile:
    """Return a profile for one cache alone, a tensor per layer class: no transform and few tables, so small."""
    plain = FitConfig(transform=False, classes=_OWN_CLASSES, sinks=min(FitConfig.sinks, int(exact[0].shape[3]) - 1))
    pairs = zip(spec.parts, exact, strict=True)
    return joined(spec, [fit(part, partial(list, (cache,)), plain) for part, cache in pairs])


def publish(
    engine: ScoringEngine,
    prompt: Prompt,
    tracks: Sequence[str],
    profile: Profile | None,
    store: FrameStore,
    *,
    group_tokens: int | None = None,
    snapshots_every: int | None = None,
    source: str = "",
    salt: bytes = b"",
    digest: str = SHA256,
    max_passes: int = MAX_PASSES,
    time_engine: bool = True,
    progress: Progress = lambda _stage, _done, _all: None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Catalog:
    """Encode and measure one prompt; return its catalog, whose floats have six significant digits.

    Args:
        engine: the model.
        prompt: what to publish, and what followed it.
        tracks: names of the tracks, see `ordered_tracks`.
        profile: side information of the model, for the tracks that need it; None: one is estimated from this cache,
            small and without a transform, and published with it.
        store: keeps every frame and the profile, and gives frames back for measuring; as a rule an asset's writer.
        group_tokens: tokens per group; None: as in the engine's spec.
        snapshots_every: tokens between two snapshots of a state, a multiple of the group's; None: as in the engine's
            spec.
        source: what the prompt is, in words, for the catalog.
        salt: a tenant's secret, see `kvabr.types.naming.chain`. It is not kept, so `Prompt.sealed` must tie the token
            ids to the catalog.
        digest: kind of the frames' digests, see `kvabr.types.digests`.
        max_passes: forward passes for attributing losses to groups, see `kvabr.publish.quality`.
        time_engine: whether to time a few prefills for the catalog's cost model.
        progress: called after every step.
        tell: called, in words, with what is unusual about the cache.

    Raises `ForeignError` if the profile is of another model, `FormatError` if a group cannot have that many tokens or
    snapshots do not lie between groups, and `UsageError` if the model has no states to take them of.
    """
    spec = _published(engine.spec, group_tokens, snapshots_every)
    needing = needs_profile(tracks)
    if needing:
        check_class(spec, next(track for track in tracks if codec(track).needs_profile))
        if profile is not None:
            profile.check(spec)
    exact = compute_cache(engine, prompt.tokens, partial(progress, "prefill"), spec=spec)
    if needing and profile is None:
        profile = own_profile(spec, exact)
        tell(
            f"no profile of {spec.model}: the AC tracks have tables of this asset alone and take two to three "
            "times the bytes; `kvabr calibrate` makes a profile"
        )
    chunks = chain(prompt.tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)
    frames = FrameEncoder(spec, chunks, len(prompt.tokens), tracks, profile, store, digest=digest)
    frames.encode(exact, partial(progress, "encode"))
    if frames.replaced:
        tell(f"{frames.replaced:,} numbers of the cache were NaN, infinite or beyond FP16; they were replaced")
        # Behind numbers that are not finite a model's probabilities are not, and nothing could be compared with them.
        exact = tuple(torch.nan_to_num(part, nan=0.0, posinf=_FP16_MAX, neginf=-_FP16_MAX) for part in exact)
    for track, count in frames.aside.items():
        if count:
            tell(f"{track} keeps {count:,} of {len(prompt.tokens):,} tokens aside, which stand out")
    decode_s = {}
    for index, track in enumerate(tracks):
        decode_s[track] = frames.decode_seconds(track)
        progress("time", index + 1, len(tracks) + 1)
    prefill: PrefillCost | None = None
    if time_engine and len(prompt.tokens) >= 128:
        prefill = time_prefills(engine, prompt.tokens)
        prefill = PrefillCost(*(six(value) for value in prefill.to_json().values()))
    progress("time", len(tracks) + 1, len(tracks) + 1)
    reference = Reference(engine, exact, prompt.continuation)
    measured = measure_quality(
        reference,
        exact,
        spec,
        tracks,
        frames.decode,
        tokens=len(prompt.tokens),
        max_passes=max_passes,
        progress=partial(progress, "measure"),
    )
    del exact
    qualities = {track: Quality(six(one.kl), six(one.dnll), six(one.top1)) for track, one in measured.quality.items()}
    catalog = frames.catalog(
        measured.loss, decode_s, loss_method=measured.method, source=source, measured=qualities, prefill=prefill
    )
    if not catalog.every_token:
        return catalog  # its groups cannot be recomputed one by one, which is what mixes are about
    mixes = measure_mixes(
        catalog, sample_mixes(catalog), reference, prompt.tokens, frames.decode, progress=partial(progress, "mix")
    )
    return replace(catalog, mixes=tuple(Mix(mix.tracks, six(mix.predicted), six(mix.measured)) for mix in mixes))


def _published(spec: KVSpec, group_tokens: int | None, snapshots_every: int | None) -> KVSpec:
    """Return the spec of what is published of a model with this one."""
    if group_tokens is not None:
        spec = replace(spec, group_tokens=group_tokens)
    if snapshots_every is None:
        return spec
    states = [each.kind == "state" for each in spec.classes]
    if not any(states):
        raise UsageError(f"{spec.model} has no recurrent states to take snapshots of")
    pairs = zip(spec.classes, states, strict=True)
    return replace(
        spec, classes=tuple(replace(each, interval=snapshots_every) if state else each for each, state in pairs)
    )


def needs_raw(spec: KVSpec) -> bool:
    """Return whether only `RAW` keeps a cache as it is: one that is quantised, or has states in float32."""
    return any(each.scales is not None or (each.kind == "state" and each.dtype == "float32") for each in spec.classes)


def pointless(spec: KVSpec | None) -> tuple[str, ...]:
    """Return the tracks that add nothing to others for these layer classes; None: for those of 16 bits."""
    if spec is None or not needs_raw(spec):
        return (RAW,)
    return NO_SMALLER if any(each.scales is not None for each in spec.classes) else ()


def needs_profile(tracks: Sequence[str]) -> bool:
    """Return whether any of these tracks needs a codec profile."""
    return any(codec(track).needs_profile for track in tracks)


def _below(track: str) -> list[str]:
    below: list[str] = []
    lower = codec(track).refines
    while lower is not None:
        below.insert(0, lower)
        lower = codec(lower).refines
    return below


def six(value: float) -> float:
    """Return a float rounded to six significant digits."""
    return float(f"{value:.6g}")
