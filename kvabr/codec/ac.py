"""The AC tracks: transformed (`kvabr.codec.transform`), quantised, and entropy coded with the profile's tables.

AC-L0 is a self-contained base. AC-L1 to AC-L3 each refine the previous layer with a third of its step. Each codes only
the choices that the index below leaves open, so a base with its enhancements is as large as a payload of the finest
quantiser alone. AC-5x, the draft's level, is a single self-contained layer. A payload is:

    listed 4 | offsets 4 ... | scales | codes | far tokens | biases | coded

Some tokens are stored separately instead of being coded. Every self-contained payload stores the sinks, the first
tokens of a prompt, without listing them. It lists outliers, the last tokens of a prompt
(`kvabr.codec.base.GroupContext.finer`), and far tokens, which have coefficients beyond a decoder's integers; these have
the highest bit of their offset set. An enhancement lists the far tokens that its finer step adds.

A payload with references begins with them (`kvabr.codec.referring`). If the coded part is cut into streams
(`kvabr.codec.native.streams`), the payload begins with the number 0xFFFFFFFB.

    scales: FP16, [token, layer, K/V], for all stored tokens that are not far, in order codes:  [token, layer, K/V,
    head, dim], in units of the scale, see `kvabr.codec.stored` far:    FP16, [token, layer, K/V, head, dim] biases:
    size 4 | see `kvabr.codec.bias`; only if the highest bit of `listed` is set

The biases of the last layer in a chain apply. AC-L0 has the coarse parts of codes. AC-L1 and AC-L2 add fine parts after
the list: number of tokens 4 | fine. AC-5x has the coarse parts, followed by the fine parts of both layers. A payload
with such parts begins with the number 0xFFFFFFFA. In small groups a code is one byte, in units of the scale, and layers
add no fine parts.

For a state, columns take the place of tokens (`kvabr.codec.columns`). Unusual groups have other payloads
(`kvabr.codec.unusual`). Every finite cache is accepted, and a payload plus those below it is at most 1 % larger than
the group in FP16.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec import gpu
from kvabr.codec.base import Codec, GroupContext, codec
from kvabr.codec.bias import UNITS, biases, error_sums, join_biases, shift_of, split_biases
from kvabr.codec.coefficients import Coefficients, encode_rows, hold, indices
from kvabr.codec.columns import check_class, coded_spec, turned, turned_back
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob
from kvabr.codec.native.references import References, pack_references, read_references, references_size
from kvabr.codec.native.streams import has_streams
from kvabr.codec.payload import PayloadReader, finite, raw
from kvabr.codec.profile import ClassProfile, Depth
from kvabr.codec.quantiser import RATIO, SINGLE
from kvabr.codec.quantiser import below as track_below
from kvabr.codec.referring import MARK, checked_refers, choose_references, informative_rows
from kvabr.codec.rope import rope_tables, rotate_by
from kvabr.codec.stored import (
    FINE_LAYERS,
    LARGEST,
    MIN_NUMBERS,
    Codes,
    coarse_of,
    coarse_size,
    fine_size,
    join_coarse,
    join_fine,
    meant,
    split_coarse,
    split_fine,
)
from kvabr.codec.stored import (
    UNITS as CODES,
)
from kvabr.codec.unusual import (
    COARSE,
    EXACT,
    FINE,
    NOTHING,
    Chain,
    by_another,
    contained,
    crowded,
    glanced,
    layered,
    other,
    other_codec,
    read_chain,
)
from kvabr.types.errors import FormatError
from kvabr.types.kv import FP16_MAX
from kvabr.types.naming import LAYERS

_MEMO = "ac"
_MAX_INDEX = 32767 - RATIO ** len(LAYERS)


_Part = tuple[str, bytes, int]
"""Track, mask of the separately stored tokens as bytes, and `id` of the references."""


class Ac(Codec):
    """One depth of the AC codec."""

    needs_profile: ClassVar[bool] = True
    rotates: ClassVar[bool] = True

    def __init__(self, track: str) -> None:
        self.name, self.refines = track, track_below(track)

    def prepare(self, groups: Sequence[tuple[torch.Tensor, GroupContext]]) -> None:
        by_profile: dict[int, tuple[ClassProfile, list[tuple[torch.Tensor, GroupContext]]]] = {}
        for group, context in groups:
            if gpu.runs_on(group.device) and context.memo is not None and context.spec.only.kind != "state":
                profile = _profile(context, self.name)
                by_profile.setdefault(id(profile), (profile, []))[1].append((group, context))
        for profile, some in by_profile.values():
            _prepare(self.name, profile, some)

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
        profile = _profile(context, self.name)
        profile.depth(self.name)
        work = _work(group, context, profile)
        limit_bytes = 2 * group.numel()
        if self.refines is None:
            made = _base(self.name, work, context, limit_bytes)
            if made is None or len(made) > limit_bytes:
                made = other(EXACT, codec(EXACT).encode(group, context))
            return made
        chain = _read_chain(self.refines, below)
        coded = None
        if chain.other is not None and self.name == LAYERS[-1] and chain.other[0] in COARSE:
            coded = by_another(FINE, group, context)
        elif not chain.full and self.name not in chain.tracks:
            coded = _layer(self.name, work, _coded(context), list(map(bytes, chain.payloads)))
        taken = sum(map(len, below))
        return NOTHING if coded is None or taken + len(coded) > limit_bytes + limit_bytes // 100 else coded

    def decode(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> None:
        profile, spec, whole = _profile(context, self.name), context.spec, context
        profile.depth(self.name)
        chain = _read_chain(self.name, (*below, payload))
        if chain.other is not None:
            from kvabr.codec.group import decode_by  # noqa: PLC0415

            name, inner = chain.other
            decode_by(other_codec(name), inner, whole, 0, out)
            return
        context = _coded(context)
        columns = spec.only.kind == "state"
        made = out.new_empty(context.spec.shape(context.tokens)) if columns else out
        job, parts = _decoding(profile, context, chain, made)
        (gpu.decode_many if out.device.type == "cuda" else coder.decode_many)([job])
        for part in parts:
            part.place(made, context)
        if columns:
            out.copy_(turned_back(made, spec))

    def job(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> tuple[DecodeJob, list[ParsedPayload]] | None:
        """Return the coder's job for `decode` and the tokens to place; None for a state or another codec's payload."""
        profile = _profile(context, self.name)
        profile.depth(self.name)
        chain = _read_chain(self.name, (*below, payload))
        unlike = chain.other is not None or context.spec.only.kind == "state"
        return None if unlike else _decoding(profile, context, chain, out)

    def outliers(self, payload: memoryview, context: GroupContext) -> int:
        """Return the number of separately stored tokens, not counting sinks; all tokens for another codec's payload."""
        profile, context = _profile(context, self.name), _coded(context)
        if payload == NOTHING:
            return 0
        chain = read_chain((self.name,), (payload,))
        if chain.other is not None:
            return context.tokens
        sinks = _sinks(profile, context) if self.refines is None else 0
        counts = [sinks, *[0] * (len(chain.tracks) - 1)]
        split = zip(chain.payloads, repeat(context), counts, chain.tracks, strict=False)
        heads, end = [_split_head(*each) for each in split], context.tokens - context.finer
        return sum(int((head.tokens[len(head.tokens) - head.listed :] < end).sum()) for head in heads)


AcL0, AcL1, AcL2, AcL3, Ac5x = (partial(Ac, track) for track in (*LAYERS, SINGLE))


@dataclass(frozen=True, eq=False)
class _Made:
    payload: bytes
    outliers: NDArray[np.bool_]
    index: NDArray[np.int16] | None
    references: References | None
    near: NearTokens | None
    """Stored tokens of a base, for the layers above to refine."""


@dataclass(frozen=True, eq=False)
class _Work:
    given: torch.Tensor
    group: torch.Tensor
    profile: ClassProfile
    coefficients: Coefficients
    made: dict[str, _Made] = field(default_factory=dict)
    chosen: dict[bytes, tuple[References, bool] | None] = field(default_factory=dict)
    coded: dict[_Part, bytes | Exception] = field(default_factory=dict)
    plans: dict[str, tuple[bytes, _Plan]] = field(default_factory=dict)
    """Plan by depth, with the payload below."""
    sums: dict[_Part, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def coarsest(self) -> Depth:
        return max(self.profile.depths.values(), key=lambda depth: depth.step)

    def references(self, outliers: NDArray[np.bool_]) -> tuple[References, bool] | None:
        key, coarsest = outliers.tobytes(), self.coarsest
        if key not in self.chosen:
            rows = self.coefficients.some(informative_rows(coarsest.coder))
            self.chosen[key] = choose_references(rows, coarsest.step, ~outliers)
        return self.chosen[key]

    def coded_rows(self, track: str, outliers: NDArray[np.bool_], references: References | None) -> bytes:
        """Quantise and code all tokens except outliers; raise `FormatError` if indices do not fit the coder."""
        part = track, outliers.tobytes(), id(references)
        if part not in self.coded:
            _code(track, [(self, outliers, references)])
        made = self.coded.pop(part)
        if isinstance(made, Exception):
            raise made
        return made

    def biases(self, track: str, outliers: NDArray[np.bool_]) -> NDArray[np.int16] | None:
        if track not in UNITS:
            return None
        part = track, outliers.tobytes(), 0
        if part not in self.sums:
            _add_up(track, [(self, outliers)])
        return biases(self.sums.pop(part), int((~outliers).sum()), UNITS[track])

    def indices(self, track: str, outliers: NDArray[np.bool_]) -> NDArray[np.int16]:
        index = indices(self.coefficients.rows, self.profile.depth(track))
        index[:, outliers] = 0
        return index


def _code(track: str, groups: Sequence[tuple[_Work, NDArray[np.bool_], References | None]]) -> None:
    profile, refines = groups[0][0].profile, track_below(track)
    depth, below = profile.depth(track), None if refines is None else profile.depth(refines)
    jobs = [(work.coefficients.rows, ~outliers, references) for work, outliers, references in groups]
    made = encode_rows(depth.coder, jobs, depth, below)
    for (work, outliers, references), one in zip(groups, made, strict=True):
        work.coded[track, outliers.tobytes(), id(references)] = one


def _add_up(track: str, groups: Sequence[tuple[_Work, NDArray[np.bool_]]]) -> None:
    profile = groups[0][0].profile
    jobs = [(work.coefficients.rows, ~outliers) for work, outliers in groups]
    found = error_sums(profile.transform.structure, profile.depth(track), jobs)
    for (work, outliers), one in zip(groups, found, strict=True):
        work.sums[track, outliers.tobytes(), 0] = one


def _prepare(track: str, profile: ClassProfile, groups: Sequence[tuple[torch.Tensor, GroupContext]]) -> None:
    """Encode several ordinary groups on a GPU in one batch."""
    refines, works = track_below(track), _works(profile, groups)
    planned = []
    for work, (_, context) in zip(works, groups, strict=True):
        if refines is None and not crowded(work.coefficients.outlying):
            below = b""
        elif refines is not None and refines in work.made:
            below = work.made[refines].payload
        else:
            continue
        plan = _plan(track, work, context, [below] if below else [])
        work.plans[track] = below, plan
        planned.append((work, plan))
    if coded := [
        (work, plan.outliers, references)
        for work, plan in planned
        if plan.from_rows
        for references in dict.fromkeys((plan.references, None if plan.perhaps_without else plan.references))
    ]:
        _code(track, coded)
    if planned and track in UNITS:
        _add_up(track, [(work, plan.outliers) for work, plan in planned])


def _works(profile: ClassProfile, groups: Sequence[tuple[torch.Tensor, GroupContext]]) -> list[_Work]:
    runs: list[list[tuple[torch.Tensor, GroupContext]]] = []
    for group, context in groups:
        if _known(group, context, profile) is not None:
            continue
        last = runs[-1][-1][1] if runs else None
        follows = last is not None and (
            (last.free and context.free) or (not last.free and last.first_token + last.tokens == context.first_token)
        )
        if follows:
            runs[-1].append((group, context))
        else:
            runs.append([(group, context)])
    fresh = []
    for run in runs:
        found = profile.analysis.analyse_run([group for group, _ in run], _rotated_at(run[0][1]))
        for (group, context), coefficients in zip(run, found, strict=True):
            _remember(context, _Work(group, group, profile, coefficients))
            fresh.append(coefficients)
    works = [_work(group, context, profile) for group, context in groups]
    if fresh:
        hold(fresh, informative_rows(works[0].coarsest.coder))
        hold(fresh, glanced(profile.transform.structure.rows))
    return works


def _work(group: torch.Tensor, context: GroupContext, profile: ClassProfile) -> _Work:
    known = _known(group, context, profile)
    if known is None:
        coded = turned(group, context.spec)
        known = _Work(group, coded, profile, profile.analysis.analyse(coded, _rotated_at(context)))
        _remember(context, known)
    return known


def _known(group: torch.Tensor, context: GroupContext, profile: ClassProfile) -> _Work | None:
    known = None if context.memo is None else context.memo.get(_MEMO)
    return known if isinstance(known, _Work) and known.given is group and known.profile is profile else None


def _remember(context: GroupContext, work: _Work) -> None:
    if context.memo is not None:
        context.memo[_MEMO] = work


def _base(track: str, work: _Work, context: GroupContext, limit_bytes: int) -> bytes | None:
    """Return a self-contained payload, or None if indices do not fit the coder.

    Only a payload within ``limit_bytes`` may contain the layers above it.
    """
    if context.spec.only.kind == "state":
        return _layer(track, work, _coded(context), [])
    outlying = work.coefficients.outlying
    more = None if crowded(outlying) else 0
    if more is not None and track == LAYERS[0]:
        step, keep = work.profile.depth(track).step, ~outlying.numpy()
        more = contained(work.group, context.spec, work.coefficients, step, keep, work.profile.copies)
    if more is None:
        return by_another(COARSE if track == LAYERS[0] else FINE, work.given, context)
    payloads: list[bytes] = []
    for each in (track, *(each for each in LAYERS[1 : 1 + more] if each in work.profile.depths)):
        made = _layer(each, work, context, payloads)
        if made is None or (payloads and sum(map(len, payloads)) + len(made) > limit_bytes):
            break
        payloads.append(made)
    return None if not payloads else payloads[0] if len(payloads) == 1 else layered(payloads)


def _layer(track: str, work: _Work, context: GroupContext, below: Sequence[bytes]) -> bytes | None:
    """Return the ordinary payload of one depth, or None if indices do not fit the coder.

    ``context`` describes the group as coded; ``below`` are ordinary payloads, base first.
    """
    profile, refines = work.profile, track_below(track)
    known = work.plans.pop(track, None)
    plan = known[1] if known and known[0] == b"".join(below[-1:]) else _plan(track, work, context, below)
    outliers, lower, references = plan.outliers, plan.lower, plan.references
    index: NDArray[np.int16] | None = None
    try:
        if plan.from_rows:
            coded = work.coded_rows(track, outliers, references)
            if plan.perhaps_without:
                alone = work.coded_rows(track, outliers, None)
                if len(alone) <= len(coded) + len(MARK) + references_size(context.tokens):
                    coded, references = alone, None
        else:
            if lower is None:
                lower = work.indices(str(refines), plan.below_outliers)
            index = work.indices(track, outliers)
            index[:, outliers] = RATIO * lower[:, outliers]
            coded = coder.encode_indices(profile.depth(track).coder, index, lower, references)
    except FormatError:
        return None
    tokens, sinks = np.flatnonzero(plan.new), 0 if refines is not None else _sinks(profile, context)
    head = payload_head(coded, references if refines is None else None)
    below_near = _near_below(track, work, context, below)
    far, bias = plan.far[tokens], work.biases(track, outliers)
    payload, near = join_payload(track, head, work.group, tokens, far, sinks, coded, bias, below_near)
    work.made[track] = _Made(payload, outliers, index, references, near)
    return payload


class _Plan(NamedTuple):
    far: NDArray[np.bool_]
    """[token]: True if a coefficient exceeds a decoder's integers."""
    below_outliers: NDArray[np.bool_]
    new: NDArray[np.bool_]
    lower: NDArray[np.int16] | None
    """Indices at the depth below; None at the base, or if `_Work.indices` computes them."""
    references: References | None
    perhaps_without: bool
    from_rows: bool

    @property
    def outliers(self) -> NDArray[np.bool_]:
        return self.below_outliers | self.new


def _plan(track: str, work: _Work, context: GroupContext, below: Sequence[bytes]) -> _Plan:
    profile, refines = work.profile, track_below(track)
    depth = profile.depth(track)
    far = (work.coefficients.reach > depth.step).numpy()
    if track == LAYERS[0]:
        # Layers above code multiples of this index as 16-bit integers, even for stored tokens.
        finest = min(profile.depths[track].step for track in LAYERS if track in profile.depths)
        far |= (work.coefficients.largest > _MAX_INDEX * finest).numpy()
    lower, below_outliers, references = _lower(refines, context, work, below)
    new = far & ~below_outliers
    if refines is None:
        sinks = _sinks(profile, context)
        far[:sinks] = False
        new |= work.coefficients.outlying.numpy()
        new[context.tokens - context.finer :] = True
        new[:sinks] = True
    chosen = None
    if refines is None and depth.coder.near is not None and context.spec.only.kind != "state":
        chosen = work.references(below_outliers | new)
    if chosen is not None:
        references = chosen[0]
    from_rows = lower is None and (refines is None or not bool(new.any()))
    return _Plan(far, below_outliers, new, lower, references, chosen is not None and not chosen[1], from_rows)


def _lower(
    refines: str | None, context: GroupContext, work: _Work, below: Sequence[bytes]
) -> tuple[NDArray[np.int16] | None, NDArray[np.bool_], References | None]:
    if refines is None:
        return None, np.zeros(context.tokens, dtype=bool), None
    made = work.made.get(refines)
    if made is not None and below and made.payload == below[-1]:
        return made.index, made.outliers, made.references
    tracks = tuple(_chain(refines))
    parts = _split_chain(work.profile, context, Chain(tracks, tuple(map(memoryview, below))))
    outliers = np.zeros(context.tokens, dtype=bool)
    index: NDArray[np.int16] | None = None
    for track, part in zip(tracks, parts, strict=True):
        model = work.profile.depth(track).coder
        index = coder.decode_indices(model, part.coded, context.tokens, index, parts[0].references)
        outliers[part.tokens] = True
    return index, outliers, parts[0].references


def _near_below(track: str, work: _Work, context: GroupContext, below: Sequence[bytes]) -> NearTokens | None:
    if track not in LAYERS[1 : 1 + FINE_LAYERS] or not all(_is_parted(memoryview(each)) for each in below):
        return None
    made = work.made.get(LAYERS[0])
    if made is not None and made.payload == below[0]:
        return made.near
    return split_payload(below[0], context, _sinks(work.profile, context), LAYERS[0]).near


def _rotated_at(context: GroupContext) -> int | None:
    return None if context.free else _coded(context).first_token


def _coded(context: GroupContext) -> GroupContext:
    if context.spec.only.kind != "state":
        return context
    tokens = context.tokens // context.spec.rows * context.spec.only.v_dim
    return replace(context, spec=coded_spec(context.spec), first_token=0, tokens=tokens, finer=0)


def _chain(track: str) -> list[str]:
    tracks = [track]
    while (lower := track_below(tracks[0])) is not None:
        tracks.insert(0, lower)
    return tracks


def _read_chain(track: str, payloads: Sequence[memoryview | bytes]) -> Chain:
    tracks = _chain(track)
    if len(payloads) != len(tracks):
        raise FormatError(
            f"{tracks[-1]} needs the payloads of {' and '.join(tracks[:-1])} below it, base first; "
            f"got {len(payloads) - 1}"
        )
    return read_chain(tracks, payloads)


def _split_chain(profile: ClassProfile, context: GroupContext, chain: Chain) -> list[ParsedPayload]:
    sinks = [_sinks(profile, context), *[0] * (len(chain.tracks) - 1)]
    parts = [split_payload(*each) for each in zip(chain.payloads, repeat(context), sinks, chain.tracks, strict=False)]
    for track, part in zip(chain.tracks[1:], parts[1:], strict=True):
        if part.fine is not None:
            parts[0] = parts[0].finer(part.fine, LAYERS.index(track))
    return parts


def _decoding(
    profile: ClassProfile, context: GroupContext, chain: Chain, out: torch.Tensor
) -> tuple[DecodeJob, list[ParsedPayload]]:
    parts = _split_chain(profile, context, chain)
    last = profile.depth(chain.tracks[-1])
    models, coded = [profile.depth(track).coder for track in chain.tracks], [part.coded for part in parts]
    position = context.at if context.free else context.first_token
    references, mean = parts[0].references, None
    if parts[-1].biases is not None:
        mean = shift_of(profile.transform.structure, parts[-1].biases, UNITS[chain.tracks[-1]])
    return DecodeJob(models, coded, profile.transform, last.step, position, out, last.gains, references, mean), parts


def _profile(context: GroupContext, track: str) -> ClassProfile:
    check_class(context.spec, track)
    if context.profile is None:
        raise FormatError(
            f"{track} needs the model's profile, and this asset has none: publish it again with its profile"
        )
    return context.profile.of(context.spec)


def _sinks(profile: ClassProfile, context: GroupContext) -> int:
    return 0 if context.free else min(context.tokens, max(0, profile.sinks - context.first_token))


_COUNT = struct.Struct("<I")
_FP16_FLAG = 1 << 31
_HAS_BIASES = 1 << 31
"""Flag in the number of listed tokens. That number stays below the markers of `kvabr.codec.unusual`."""
STREAMED = _COUNT.pack(0xFFFFFFFB)
PARTED = _COUNT.pack(0xFFFFFFFA)


def _is_parted(payload: memoryview) -> bool:
    return payload[: len(PARTED)] == PARTED


def _is_streamed(payload: memoryview) -> bool:
    return payload[: len(STREAMED)] == STREAMED


class NearTokens(NamedTuple):
    """Stored tokens that are not far, with the precision decoded so far (`kvabr.codec.stored`)."""

    tokens: NDArray[np.int64]
    which: torch.Tensor
    """[stored token]: True for tokens in this tuple."""
    scale: torch.Tensor
    coarse: Codes
    """[token, layer, K/V, head, dim]."""
    fine: tuple[Codes, ...] = ()

    @property
    def values(self) -> torch.Tensor:
        """[token, layer, K/V, head, dim] float32, within FP16's range."""
        return _scaled(torch.from_numpy(meant(self.coarse, self.fine)), self.scale)


@dataclass(frozen=True, eq=False)
class ParsedPayload:
    """A parsed payload."""

    tokens: NDArray[np.int64]
    """Offsets of the stored tokens in the group, ascending."""
    listed: int
    """Number of stored tokens that are not sinks."""
    values: torch.Tensor
    coded: memoryview
    references: References | None = None
    biases: NDArray[np.int16] | None = None
    """Biases of values (`kvabr.codec.bias`), or None."""
    near: NearTokens | None = None
    """Stored tokens of a base that are not far, or None."""
    fine: memoryview | None = None
    """Fine parts that a layer adds to the stored tokens below."""

    def finer(self, fine: memoryview, layer: int) -> ParsedPayload:
        """Return a base's payload with the fine parts of a layer added; raise `FormatError` if they do not fit."""
        if self.near is None or len(self.near.fine) != layer - 1:
            raise FormatError(
                f"{LAYERS[layer]}: refines stored tokens that the layer below does not have; the payload is corrupt"
            )
        near, values = self.near, self.values.clone()
        near = near._replace(fine=(*near.fine, split_fine(fine, near.coarse.shape, LAYERS[layer])))
        values[near.which] = near.values
        return replace(self, values=values, near=near)

    def place(self, out: torch.Tensor, context: GroupContext) -> None:
        """Write the stored tokens into a group; rotate position-free keys."""
        if len(self.tokens):
            # Indexed assignment neither casts nor copies between devices.
            values = self.stored(context, out.dtype, out.device)
            out[:, :, :, torch.from_numpy(self.tokens).to(out.device)] = values

    def stored(self, context: GroupContext, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the stored tokens as `place` writes them, [layer, K/V, head, token, dim]."""
        values, rope = self.values.permute(1, 2, 3, 0, 4), context.spec.rope
        if context.free and context.at is not None and rope is not None:
            tables = rope_tables(rope, context.at, context.tokens)
            values = values.clone()
            values[:, 0] = rotate_by((tables[0][self.tokens], tables[1][self.tokens]), values[:, 0], rope)
            values = values.clamp_(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else values
        return values.to(device).to(dtype)


def payload_head(coded: bytes, references: References | None = None) -> bytes:
    """Return the bytes before the number of listed tokens in a payload."""
    streamed = STREAMED if has_streams(coded) else b""
    return streamed if references is None else streamed + MARK + pack_references(references)


def join_payload(
    track: str,
    head: bytes,
    group: torch.Tensor,
    tokens: NDArray[np.int64],
    far: NDArray[np.bool_],
    sinks: int,
    coded: bytes,
    biases: NDArray[np.int16] | None = None,
    base: NearTokens | None = None,
) -> tuple[bytes, NearTokens | None]:
    """Build a payload; also return the stored tokens that layers above may refine.

    ``tokens`` are the offsets of stored tokens, ascending; the first ``sinks`` are never ``far``. ``base`` has the
    stored tokens that a layer refines.
    """
    listed = (tokens + np.where(far, _FP16_FLAG, 0))[sinks:].astype("<u4")
    biased = biases is not None and bool(biases.any())
    parts = [head, _COUNT.pack(len(listed) | (_HAS_BIASES if biased else 0)), listed.tobytes()]
    near: NearTokens | None = None
    if parted := base is not None:
        codes = _codes(_gathered(group, base.tokens), base.scale)
        parts += [_COUNT.pack(len(codes)), join_fine(codes, base.coarse, LAYERS.index(track))]
    if len(tokens):
        values = _gathered(group, tokens)
        own = values[torch.from_numpy(~far)]
        if len(own):
            parted = own.numel() >= MIN_NUMBERS
            unit = CODES / LARGEST if parted else 1 / 127
            scale = (own.abs().amax(dim=(3, 4)) * unit).clamp(min=2.0**-24).half()
            parts.append(raw(scale))
            if parted:
                codes = _codes(own, scale.float())
                coarse = coarse_of(codes)
                parts.append(join_coarse(coarse.reshape(scale.numel(), -1)))
                parts += [join_fine(codes, coarse, layer) for layer in _layers_in(track)]
                near = NearTokens(tokens[~far], torch.from_numpy(~far), scale.float(), coarse)
            else:
                bytewise = (own / scale.float()[..., None, None]).round_().clamp_(-127, 127)
                parts.append(raw(bytewise.to(torch.int8)))
        if far.any():
            parts.append(raw(values[torch.from_numpy(far)].half()))
    if biased and biases is not None:
        bits = join_biases(biases)
        parts += [_COUNT.pack(len(bits)), bits]
    return b"".join((PARTED if parted else b"", *parts, coded)), near


def _layers_in(track: str) -> range:
    return range(1, 1 + FINE_LAYERS) if track == SINGLE else range(0)


def _codes(values: torch.Tensor, scale: torch.Tensor) -> Codes:
    exact = values / (scale[..., None, None] / CODES)
    codes: Codes = exact.round_().clamp_(-LARGEST, LARGEST).numpy().astype(np.int16)
    return codes


def _scaled(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (numbers.float() * scale[..., None, None]).clamp_(-FP16_MAX, FP16_MAX)


def _gathered(group: torch.Tensor, tokens: NDArray[np.int64]) -> torch.Tensor:
    chosen = group[:, :, :, torch.from_numpy(tokens).to(group.device)].permute(3, 0, 1, 2, 4)
    return chosen.float().clamp(-FP16_MAX, FP16_MAX).cpu()


class _Head(NamedTuple):
    reader: PayloadReader
    references: References | None
    listed: int
    tokens: NDArray[np.int64]
    far: torch.Tensor
    biased: bool
    streamed: bool
    parted: bool


def _split_head(payload: memoryview | bytes, context: GroupContext, sinks: int, what: str) -> _Head:
    payload = memoryview(payload)
    parted = _is_parted(payload)
    payload = payload[len(PARTED) * parted :]
    streamed = _is_streamed(payload)
    payload = payload[len(STREAMED) * streamed :]
    reader = PayloadReader(payload, what)
    references: References | None = None
    if track_below(what) is None and checked_refers(payload, what, context.tokens):
        reader.bytes(len(MARK))
        references = read_references(reader.bytes(references_size(context.tokens)), context.tokens)
    listed = int(_COUNT.unpack(reader.bytes(_COUNT.size))[0])
    biased, listed = bool(listed & _HAS_BIASES), listed & ~_HAS_BIASES
    if listed > context.tokens - sinks:
        raise FormatError(f"{what}: lists {listed} tokens, but the group has {context.tokens}; the payload is corrupt")
    offsets = np.frombuffer(reader.bytes(4 * listed), dtype="<u4").astype(np.int64)
    tokens = np.concatenate([np.arange(sinks), offsets % _FP16_FLAG])
    far = torch.from_numpy(np.concatenate([np.zeros(sinks, dtype=bool), offsets >= _FP16_FLAG]))
    if listed and (bool((np.diff(tokens) <= 0).any()) or int(tokens[-1]) >= context.tokens):
        raise FormatError(f"{what}: the listed tokens are not in ascending order; the payload is corrupt")
    return _Head(reader, references, listed, tokens, far, biased, streamed, parted)


def split_payload(payload: memoryview | bytes, context: GroupContext, sinks: int, what: str) -> ParsedPayload:
    """Parse an untrusted payload of a group that stores ``sinks`` tokens without listing them."""
    reader, references, listed, tokens, far, biased, streamed, parted = _split_head(payload, context, sinks, what)
    layers, halves, heads, _, dim = context.spec.shape(1)
    values = torch.empty((len(tokens), layers, halves, heads, dim))
    near: NearTokens | None = None
    fine: memoryview | None = None
    if parted and what in LAYERS[1 : 1 + FINE_LAYERS]:
        count = int(_COUNT.unpack(reader.bytes(_COUNT.size))[0])
        fine, parted = reader.bytes(fine_size(count * layers * halves * heads * dim)), False
    if len(tokens):
        count = int(far.sum())
        shape = (len(tokens) - count, layers, halves)
        full = (*shape, heads, dim)
        scale = finite(reader.tensor(torch.float16, shape), what).float()
        if math.prod(full) >= MIN_NUMBERS:
            if not parted or track_below(what) is not None:
                raise FormatError(
                    f"{what}: the stored tokens are not split into coarse and fine parts; the payload is corrupt"
                )
            parted = False
            size = coarse_size(reader.bytes(_COUNT.size))
            coarse = split_coarse(reader.bytes(size), scale.numel(), heads * dim, what).reshape(full)
            two = (reader.bytes(fine_size(coarse.size)) for _ in _layers_in(what))
            fines = tuple(split_fine(each, full, what) for each in two)
            near = NearTokens(tokens[~far.numpy()], ~far, scale, coarse, fines)
            values[~far] = near.values
        else:
            values[~far] = _scaled(reader.tensor(torch.int8, full), scale)
        values[far] = finite(reader.tensor(torch.float16, (count, *values.shape[1:])), what).float()
    if parted:
        raise FormatError(f"{what}: too few stored tokens to be split into parts; the payload is corrupt")
    biases = None
    if biased:
        size = int(_COUNT.unpack(reader.bytes(_COUNT.size))[0])
        of_values = layers * heads * dim if halves == 2 and what in UNITS else 0
        biases = split_biases(reader.bytes(size), of_values, what)
    coded = reader.rest()
    if has_streams(coded) != streamed:
        raise FormatError(f"{what}: the flag for several streams is wrong; the payload is corrupt")
    return ParsedPayload(tokens, listed, values, coded, references, biases, near, fine)
