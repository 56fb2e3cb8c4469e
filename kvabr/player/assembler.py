"""Assembles groups into a cache, in any order and from any track; readers never see a partly written group.

Without a destination, checked groups stay compressed and are expanded elsewhere (`kvabr.codec.paged`). Otherwise, a
group whose place is empty is decoded directly into it if that is fast, and counts as in place once the whole frame is
verified. Other groups are decoded into scratch memory and copied. After a handover with upgrades, each upgrade is
decoded into separate memory, and the user of the cache decides when to write it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from kvabr.codec.base import GroupContext, payload_layout
from kvabr.codec.block_slots import CacheTensor, Place, TensorPlace
from kvabr.codec.container import HasDigest, unpack
from kvabr.codec.group import frame_header
from kvabr.codec.paged import CodedGroup, expand
from kvabr.codec.profile import Profile
from kvabr.codec.quantised import all_finite, check_wanted, convert
from kvabr.player.prefixes import PlacedPrefix, longest_prefix
from kvabr.types.catalog import RECOMPUTED, Catalog, Track
from kvabr.types.errors import FormatError, HoleError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.units import Unit, computed_shape


class Destination(Protocol):
    """The memory that an assembler fills."""

    @property
    def device(self) -> torch.device:
        """Device of the memory."""

    def place(self, unit: Unit) -> Place:
        """Return the place of a group of the catalog."""


class Tensors:
    """One contiguous tensor [layer, K/V, head, token, dim] per layer class, with the tokens of `Catalog.spans`."""

    def __init__(self, catalog: Catalog, out: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """Create tensors, or use ``out``; see `Assembler`."""
        spec, spans = catalog.spec, catalog.spans
        shapes = [part.shape(span.tokens) for part, span in zip(spec.parts, spans, strict=True)]
        if out is None:
            types = [dtype or part.torch_dtype for part in spec.parts]
            self.parts = tuple(torch.zeros(shape, dtype=kind) for shape, kind in zip(shapes, types, strict=True))
        elif len(shapes) > 1:
            raise UsageError(f"a cache of several layer classes ({', '.join(spec.names)}) is not one tensor")
        elif tuple(out.shape) != shapes[0] or not out.dtype.is_floating_point:
            raise UsageError(f"`out` must be floats of {shapes[0]}, got {tuple(out.shape)} {out.dtype}")
        else:
            self.parts = (out,)
        for made, part in zip(self.parts, spec.parts, strict=True):
            if made.dtype != part.torch_dtype:
                check_wanted(made.dtype, part)
        self.begins = tuple(span.first for span in spans)
        self._spec = spec

    @cached_property
    def _cache_tensors(self) -> tuple[CacheTensor, ...]:
        return tuple(map(CacheTensor, self.parts))

    @property
    def device(self) -> torch.device:
        """See `Destination.device`."""
        return self.parts[0].device

    def place(self, unit: Unit) -> TensorPlace:
        """See `Destination.place`."""
        begin = 0 if self.is_state(unit.part) else unit.first - self.begins[unit.part]
        return self._cache_tensors[unit.part].place(begin, unit.tokens)

    def is_state(self, part: int) -> bool:
        """Return True if layer class number ``part`` is a state, whose tensor has rows instead of tokens."""
        return self._spec.classes[part].kind == "state"

    def before(self, end: int, *, every: bool) -> tuple[torch.Tensor, ...]:
        """See `Assembler.before_classes`; ``every``: every token is present, so return views instead of copies."""
        if every:
            return (self.parts[0][:, :, :, :end],)
        parts = []
        for part, (spec, out) in enumerate(zip(self._spec.parts, self.parts, strict=True)):
            whole = out.new_zeros(computed_shape(spec, end))
            if self.is_state(part):
                whole.copy_(out)
            elif (begin := self.begins[part]) < end:
                whole[:, :, :, begin:] = out[:, :, :, : end - begin]
            parts.append(whole)
        return tuple(parts)


_MAX_IDLE_SCRATCH = 4


class Layer(NamedTuple):
    """One received frame of a group."""

    track: str
    frame: bytes | memoryview
    """Untrusted bytes. The caller must not change them afterwards."""
    has_digest: HasDigest | None = None


class Placement(Enum):
    """Result of placing a group."""

    PLACED = "placed"
    """It filled an empty place."""
    REPLACED = "replaced"
    """It replaced a worse track."""
    STALE = "stale"
    """Ignored: the track in place is at least as good."""
    LATE = "late"
    """Ignored: the cache has been handed over."""


class _Decoding(NamedTuple):
    number: int
    group: int
    layers: Sequence[Layer]
    coded: CodedGroup
    out: Place | None
    """Where to decode; None: the group stays compressed."""
    scratch: torch.Tensor | None = None
    claimed: bool = False


class Assembler:
    """One KV cache under construction. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        profile: Profile | None = None,
        *,
        out: torch.Tensor | Destination | None = None,
        dtype: torch.dtype | None = None,
        coded: bool = False,
    ) -> None:
        """Create an empty cache.

        Args:
            catalog: of the play (`Catalog.to_play`), or a suffix of it; groups and tokens are counted from its first.
            profile: the model's side information, for tracks that need it.
            out: [layer, K/V, head, token, dim], any float dtype and strides; or another destination, which supports
                neither computing on the cache nor single tokens. None: a new tensor per layer class.
            dtype: element type of new tensors, by default the asset's. A float8 tensor holds the codes of the
                publisher's engine, any other dtype the decoded values (`kvabr.codec.quantised`).
            coded: leave groups compressed, for `take_coded`; excludes computing, and upgrades in place.

        Raises:
            ForeignError: the profile is of another model.
            UsageError: ``out`` has the wrong shape or type, or there are several layer classes, which need new tensors.
        """
        if profile is not None and profile.spec != catalog.spec:  # group sizes may differ
            profile.check(catalog.spec)
        if not catalog.every_token and catalog.chosen is None:
            raise UsageError(f"{catalog.spec.model}: the catalog has groups that no play needs; give catalog.to_play")
        self._catalog, self._profile = catalog, profile
        if dtype is not None:
            for part in catalog.spec.parts:
                check_wanted(dtype, part)
        self.coded = coded
        self._to: Destination | None = None
        if not coded:
            self._to = Tensors(catalog, out, dtype) if out is None or isinstance(out, torch.Tensor) else out
        self._tracks: list[str | None] = [None] * catalog.groups
        self._payloads: dict[int, dict[str, memoryview]] = {}
        refined = {track.refines for track in catalog.tracks if track.refines is not None}
        self._refined = set(catalog.by_name) if coded else refined
        self._lock = threading.Condition(threading.Lock())
        """Guards all state; notified when a group leaves `_direct`."""
        self._direct: set[int] = set()
        """Groups being decoded directly into their empty places; no other thread may write there."""
        self._spare: list[list[torch.Tensor]] = [[] for _ in catalog.spec.parts]
        """Scratch tensors kept for reuse, per layer class, since the system must clear fresh memory."""
        self._taken = self._open = self._handed = False
        """True if groups are refused; True if upgrades are accepted; True once handed over."""
        self._again: set[int] = set()

    @property
    def together(self) -> bool:
        """True if groups should be put in batches: on a GPU, or if they stay compressed."""
        return self._to is None or self._to.device.type == "cuda"

    @property
    def coverage(self) -> tuple[str | None, ...]:
        """Track in place per group, ``recomputed``, or None."""
        return tuple(self._tracks)

    @property
    def computed_again(self) -> tuple[int, ...]:
        """Positions of the tokens put by `put_tokens`, ascending."""
        return tuple(sorted(self._again))

    def put(
        self,
        group: int,
        track: str,
        frame: bytes | memoryview,
        *,
        has_digest: HasDigest | None = None,
        below: Sequence[Layer] = (),
    ) -> Placement:
        """Check, decode and place one group.

        The ``frame`` is untrusted, and must not change afterwards. ``has_digest`` compares its digest, if the caller
        can do it faster. ``below``: lower layers received with it that are not in place, lowest first.

        Raises:
            ForeignError: a valid frame of another asset or group.
            FormatError: a frame is corrupt, truncated, contradicts the catalog, or lacks its base. Groups in place have
                not changed.
        """
        (verdict,) = self.put_many([(group, (*below, Layer(track, frame, has_digest)))])
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    def put_many(self, requests: Sequence[tuple[int, Sequence[Layer]]]) -> list[Placement | Exception]:
        """Check, decode and place different groups in one batch, each with its layers, lowest first.

        Returns, per group, the result, or the error that `put` would raise.
        """
        done: dict[int, Placement | Exception] = {}
        work: list[_Decoding] = []
        try:
            for number, (group, layers) in enumerate(requests):
                try:
                    if (early := self._refusal(group, self._catalog.track(layers[-1].track))) is not None:
                        done[number] = early
                    else:
                        work.append(self._begin(number, group, layers))
                except Exception as error:  # noqa: BLE001  # after any error, a frame is unusable
                    done[number] = error
            wanted = [(one.coded, one.out) for one in work if one.out is not None]
            errors = iter(expand([coded for coded, _ in wanted], [place for _, place in wanted]))
            for one in work:
                if one.out is not None and (wrong := next(errors)) is not None:
                    done[one.number] = wrong
                elif one.claimed:
                    done[one.number] = self._settle(one)
        finally:
            self._release([one.group for one in work if one.claimed])
        done |= {one.number: self._settle(one) for one in work if one.number not in done}
        for one in work:
            if one.scratch is not None:
                spare = self._spare[self._catalog.unit(one.group).part]
                spare[:] = [*spare, one.scratch][-_MAX_IDLE_SCRATCH:]
        return [done[number] for number in range(len(requests))]

    def _begin(self, number: int, group: int, layers: Sequence[Layer]) -> _Decoding:
        claimed = not self.coded and self._claim(group, layers)
        try:
            coded = self._coded_layers(group, layers)
        except Exception:
            self._release([group] if claimed else [])
            raise
        if self._to is None:
            return _Decoding(number, group, layers, coded, None)
        if claimed:
            return _Decoding(number, group, layers, coded, self._place(group), claimed=True)
        scratch = self._scratch(group)
        return _Decoding(number, group, layers, coded, TensorPlace(scratch), scratch)

    def _settle(self, one: _Decoding) -> Placement | Exception:
        with self._lock:
            if not one.claimed:
                self._lock.wait_for(lambda: one.group not in self._direct)
            if (late := self._refusal(one.group, self._catalog.track(one.coded.track))) is not None:
                return late
            bottom = self._catalog.track(one.layers[0].track).refines
            if bottom is not None and self._tracks[one.group] != bottom:
                return FormatError(f"group {one.group} of {one.coded.track}: {bottom} is no longer in place")
            return self._write(one.group, one.layers, one.coded, one.scratch)

    def _release(self, claimed: Sequence[int]) -> None:
        with self._lock:
            self._direct.difference_update(claimed)
            self._lock.notify_all()

    def put_computed(self, first: int, last: int, *parts: torch.Tensor) -> Placement:
        """Place groups ``first`` to ``last`` - 1 as computed by the engine.

        ``parts``: per layer class, [layer, K/V, head, token, dim] for exactly the tokens of these groups
        (`Catalog.tokens_before`), or the state's snapshot after them; any float dtype.

        Raises:
            UsageError: a tensor has another shape, or contains NaN or infinity.
        """
        catalog = self._catalog
        begin, end = catalog.tokens_before(first), catalog.tokens_before(last)
        shapes = [computed_shape(part, end - begin) for part in catalog.spec.parts]
        if (given := [tuple(kv.shape) for kv in parts]) != shapes:
            raise UsageError(f"recomputed groups {first} to {last - 1} must have the shapes {shapes}, got {given}")
        if not all(map(all_finite, parts)):
            raise UsageError(
                f"recomputed groups {first} to {last - 1} must be finite; the engine returned NaN or infinity"
            )
        # One transfer from the engine's device, outside the lock, instead of one per group.
        parts = tuple(kv.to(self._place(first).device) for kv in parts)
        with self._lock:
            self._lock.wait_for(lambda: self._direct.isdisjoint(range(first, last)))
            if self._taken:
                return Placement.LATE
            verdict = Placement.PLACED if None in self._tracks[first:last] else Placement.REPLACED
            for group in range(first, last):
                unit = catalog.unit(group)
                spec = catalog.spec.parts[unit.part]
                where = 0 if spec.only.kind == "state" else unit.first - catalog.first_token - begin
                computed, place = parts[unit.part][:, :, :, where : where + unit.tokens], self._place(group)
                if place.whole is not None:
                    convert(computed, place.whole, spec)
                else:
                    convert(computed, stored := self._scratch(group), spec)
                    place.write(stored)
                self._tracks[group] = RECOMPUTED
                self._forget(group)
        return verdict

    def before(self, group: int) -> torch.Tensor:
        """Return the tensor of `before_classes` for a model with one layer class."""
        _ = self._catalog.spec.only
        return self.before_classes(group)[0]

    def before_classes(self, group: int) -> tuple[torch.Tensor, ...]:
        """Return the KV of all tokens before ``group``, one tensor per layer class, for an engine to compute on.

        If every token is needed, the tensors are views. Otherwise windows begin with zeros for tokens that are
        invisible from ``group`` on, which must be a result of `Catalog.cut`.

        Raises:
            HoleError: an earlier group is missing.
            UsageError: the first tokens are in another cache, or an engine cannot start at ``group``.
        """
        catalog = self._catalog
        if catalog.first_token:
            raise UsageError(f"this cache does not have the KV of the first {catalog.first_token} tokens")
        if group < catalog.groups and catalog.cut(group) != group:
            raise UsageError(
                f"an engine cannot compute from group {group} on: it needs groups that this play leaves out"
            )
        self._no_hole(group)
        return self._tensors.before(catalog.tokens_before(group), every=catalog.every_token)

    def prepare(
        self,
        group: int,
        track: str,
        frame: bytes | memoryview,
        *,
        has_digest: HasDigest | None = None,
        below: Sequence[Layer] = (),
    ) -> Callable[[], Placement]:
        """Check and decode an upgrade of one group for a cache in use, into separate memory; arguments as for `put`.

        Returns a function that writes the group into place and returns the result. Call it once, while no thread reads
        the group; after `seal` it has no effect.

        Raises:
            ForeignError, FormatError: see `put`.
            UsageError: the cache is not in use, or was taken without upgrades.
        """
        if not self._taken or not self._open:
            raise UsageError("upgrades need a cache from take(upgrades=True) that is not sealed yet")
        offer, place = self._catalog.track(track), self._place(group)
        ready = torch.empty(self._shape(group), dtype=place.dtype, device=place.device)
        layers = (*below, Layer(track, frame, has_digest))
        coded = self._coded_layers(group, layers)
        (wrong,) = expand([coded], [TensorPlace(ready)])
        if wrong is not None:
            raise wrong

        def write() -> Placement:
            with self._lock:
                refusal = self._refusal(group, offer, closed=not self._open)
                return self._write(group, layers, coded, ready) if refusal is None else refusal

        return write

    def put_tokens(self, at: Sequence[int], computed: torch.Tensor) -> Placement:
        """Put single tokens into a complete cache, all or none; the cache then accepts no groups.

        ``at``: their positions, counted from the cache's first token; ``computed``: [layer, K/V, head, len(at), dim],
        any float dtype.

        Raises:
            HoleError: a group is missing.
            FormatError: wrong shape, or a value is not finite; the cache has not changed.
        """
        spec, out = self._catalog.spec, self._tensors.parts[0]
        check_tokens(computed, spec, len(at))
        stored = torch.empty(computed.shape, dtype=out.dtype)
        convert(computed.cpu(), stored, spec)
        with self._lock:
            self._lock.wait_for(lambda: not self._direct)
            if self._handed:
                return Placement.LATE
            self._no_hole(self._catalog.groups)
            self._taken = True
            out[:, :, :, torch.tensor(list(at), device=out.device)] = stored.to(out.device)
            self._again.update(at)
        self.seal()
        return Placement.REPLACED

    def seal(self) -> None:
        """Accept no further data; wait for writes in progress."""
        with self._lock:
            self._taken, self._open = True, False
            self._lock.wait_for(lambda: not self._direct)
        self._payloads.clear()
        for spare in self._spare:
            spare.clear()

    def take(self, *, upgrades: bool = False) -> torch.Tensor:
        """Hand over the cache of a model with one layer class; see `take_classes`."""
        _ = self._catalog.spec.only
        return self.take_classes(upgrades=upgrades)[0]

    def take_classes(self, *, upgrades: bool = False) -> tuple[torch.Tensor, ...]:
        """Hand over the cache: a tensor per layer class with the tokens of `Catalog.spans`; () for another destination.

        Afterwards only `prepare` accepts data, and only if ``upgrades`` is true.

        Raises:
            HoleError: a group is missing. One zero-filled group of eight cost 0.6 nats per token on a real model, over
                half of the loss without any cache.
        """
        with self._lock:
            self._no_hole(self._catalog.groups)
            self._taken, self._open, self._handed = True, upgrades, True
        if not upgrades:
            self.seal()
        return self._to.parts if isinstance(self._to, Tensors) else ()

    def take_coded(self, groups: int | None = None, block: int = 1) -> tuple[tuple[CodedGroup, ...], PlacedPrefix]:
        """Hand over the longest prefix in place, compressed, see `longest_prefix`; then accept no data.

        ``groups``: number of leading groups to consider; None: all. ``block``: the prefix must end at a multiple of
        this many tokens of the prompt. Returns the groups of `PlacedPrefix.groups`, and the prefix.
        """
        with self._lock:
            self._handed = self._taken = True
        found = longest_prefix(self._catalog, self._tracks[:groups], block)
        coded = tuple(self._coded_group(group) for group in found.groups)
        self.seal()
        return coded, found

    def _coded_group(self, group: int) -> CodedGroup:
        offer = self._catalog.track(str(self._tracks[group]))
        payload = self._payloads[group][offer.name]
        number = self._catalog.unit(group).group
        return CodedGroup(payload, offer.name, self._context(group), self._below(group, offer), number)

    def take_prefix(self, groups: int | None = None, block: int = 1) -> tuple[tuple[torch.Tensor, ...], PlacedPrefix]:
        """Hand over the longest prefix in place; arguments as for `take_coded`.

        Returns a tensor per layer class, with the tokens of `PlacedPrefix.spans`, and the prefix.
        """
        with self._lock:
            self._handed = True
        self.seal()
        found = longest_prefix(self._catalog, self._tracks[:groups], block)
        if not isinstance(self._to, Tensors):
            return (), found
        parts = []
        for part, (out, span) in enumerate(zip(self._to.parts, found.spans, strict=True)):
            begin = 0 if self._to.is_state(part) else max(0, span.first - self._to.begins[part])
            parts.append(out[:, :, :, begin : begin + span.tokens])
        return tuple(parts), found

    def check(self, group: int, layer: Layer) -> memoryview:
        """Return the payload of a frame; raise `FormatError` or `ForeignError` as `put`."""
        catalog, offer = self._catalog, self._catalog.track(layer.track)
        if len(layer.frame) != (promised := offer.bytes[group]):
            size = f"must have {promised} bytes, as in the catalog, got {len(layer.frame)}"
            raise FormatError(f"group {group} of {offer.name} {size}")
        unit = self._catalog.unit(group)
        header = frame_header(offer.name, self._context(group), catalog.chunks[unit.chunk], unit.group)
        return unpack(layer.frame, header, offer.digests[group], layer.has_digest)[1]

    def _context(self, group: int) -> GroupContext:
        unit = self._catalog.unit(group)
        part = self._catalog.spec.parts[unit.part]
        if (free := unit.free) is not None:
            return GroupContext(part, free, unit.tokens, self._profile, free=True, at=unit.first)
        return GroupContext(part, unit.first, unit.tokens, self._profile)

    def _coded_layers(self, group: int, layers: Sequence[Layer]) -> CodedGroup:
        payloads = self._below(group, self._catalog.track(layers[0].track))
        payloads.extend(self.check(group, layer) for layer in layers)
        unit = self._catalog.unit(group)
        return CodedGroup(payloads.pop(), layers[-1].track, self._context(group), payloads, unit.group)

    def _claim(self, group: int, layers: Sequence[Layer]) -> bool:
        """Decide whether to decode a group directly into its place. If True, the caller must remove it from `_direct`.

        Invalid frames are harmless in empty places, which have no readers. `seal` waits for direct decoding, so on a
        CPU only tracks that decode about as fast as copying qualify.
        """
        context, track = self._context(group), self._catalog.track(layers[-1].track)
        slow = track.refines is not None or payload_layout(track.name, context.spec, context.tokens) is None
        if slow and self._place(group).device.type == "cpu":
            return False
        with self._lock:
            if self._taken or self._tracks[group] is not None or group in self._direct:
                return False
            self._direct.add(group)
            return True

    @property
    def _tensors(self) -> Tensors:
        if not isinstance(self._to, Tensors):
            raise UsageError("this cache is not decoded yet, so an engine can compute on it only after its delivery")
        return self._to

    def _place(self, group: int) -> Place:
        assert self._to is not None  # noqa: S101  # only used with a destination
        return self._to.place(self._catalog.unit(group))

    def _shape(self, group: int) -> tuple[int, int, int, int, int]:
        unit = self._catalog.unit(group)
        return self._catalog.spec.parts[unit.part].shape(unit.tokens)

    def _scratch(self, group: int) -> torch.Tensor:
        unit, out = self._catalog.unit(group), self._place(group)
        spec, spare = self._catalog.spec.parts[unit.part], self._spare[unit.part]
        need = spec.elements_per_token * unit.tokens
        try:
            whole = spare.pop().view(-1)
        except IndexError:
            whole = torch.empty(0)
        if len(whole) < need:
            whole = torch.empty(spec.elements_per_token * spec.rows, dtype=out.dtype, device=out.device)
        return whole[:need].view(spec.shape(unit.tokens))

    def _no_hole(self, groups: int) -> None:
        if None in (before := self._tracks[:groups]):
            missing = [group for group, track in enumerate(before) if track is None]
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise HoleError(f"groups {shown} are neither fetched nor recomputed; fetch or recompute them first")

    def _refusal(self, group: int, offer: Track, *, closed: bool | None = None) -> Placement | None:
        if self._taken if closed is None else closed:
            return Placement.LATE
        current = self._tracks[group]
        if current is None:
            return None
        if current == RECOMPUTED:
            return Placement.STALE
        if self._catalog.track(current).loss[group] > offer.loss[group]:
            return None
        while offer.refines is not None:  # a layer may lose more than the layer below it, if the next layer refines it
            if offer.refines == current:
                return None
            offer = self._catalog.track(offer.refines)
        return Placement.STALE

    def _write(self, group: int, layers: Sequence[Layer], coded: CodedGroup, decoded: torch.Tensor | None) -> Placement:
        if decoded is not None:
            self._place(group).write(decoded)
        verdict = Placement.PLACED if self._tracks[group] is None else Placement.REPLACED
        self._tracks[group] = layers[-1].track
        if self._catalog.track(layers[0].track).refines is None:
            self._forget(group)
        payloads = (*coded.below, coded.payload)[-len(layers) :]
        for layer, payload in zip(layers, payloads, strict=True):
            if layer.track in self._refined:
                self._payloads.setdefault(group, {})[layer.track] = payload
        return verdict

    def _below(self, group: int, offer: Track) -> list[memoryview]:
        payloads: list[memoryview] = []
        while offer.refines is not None:
            payload = self._payloads.get(group, {}).get(offer.refines)
            if payload is None:
                raise FormatError(f"group {group} of {offer.name}: it refines {offer.refines}, which is not in place")
            offer = self._catalog.track(offer.refines)
            payloads.insert(0, payload)
        return payloads

    def _forget(self, group: int) -> None:
        self._payloads.pop(group, None)


def check_tokens(computed: torch.Tensor, spec: KVSpec, tokens: int) -> None:
    """Raise `FormatError` unless ``computed`` is finite and [layer, K/V, head, token, dim] for this many tokens."""
    due = spec.shape(tokens)
    if not isinstance(computed, torch.Tensor):
        raise FormatError(f"the engine must return a tensor {due}, got {type(computed).__name__}")
    if tuple(computed.shape) != due or not all_finite(computed):
        raise FormatError(f"the engine must return {due} without NaN or infinity, got {tuple(computed.shape)}")
