"""Where the groups of a play belong: in the tensors of a cache, or wherever an engine keeps it.

A `Destination` names the place of each group (`kvabr.codec.block_slots.Place`): a part of a contiguous tensor, the
layers of a cache, blocks of a paged one, on any device. Groups are expanded straight there, or copied there once all of
them has proved good.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvabr.codec.block_slots import Place, TensorPlace
from kvabr.codec.quantised import check_wanted
from kvabr.types.catalog import Catalog
from kvabr.types.errors import UsageError
from kvabr.types.units import Unit, computed_shape


class Destination(Protocol):
    """What an assembler needs to know of the memory that it fills."""

    @property
    def device(self) -> torch.device:
        """Where the memory is."""

    def place(self, unit: Unit) -> Place:
        """Return where a group of the catalog belongs."""


class Tensors:
    """One contiguous tensor [layer, K/V, head, token, dim] per layer class, with the tokens of `Catalog.spans`."""

    def __init__(self, catalog: Catalog, out: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """Make new tensors, or take one; arguments and errors are those of `kvabr.player.assembler.Assembler`."""
        spec, spans = catalog.spec, catalog.spans
        shapes = [part.shape(span.tokens) for part, span in zip(spec.parts, spans, strict=True)]
        if out is None:
            types = [dtype or part.torch_dtype for part in spec.parts]
            self.parts = tuple(torch.zeros(shape, dtype=kind) for shape, kind in zip(shapes, types, strict=True))
        elif len(shapes) > 1:
            raise UsageError(f"a cache of several layer classes ({', '.join(spec.names)}) is not one tensor")
        elif tuple(out.shape) != shapes[0] or not out.is_floating_point():
            raise UsageError(f"`out` is {tuple(out.shape)} {out.dtype}, expected floats of {shapes[0]}")
        else:
            self.parts = (out,)
        for made, part in zip(self.parts, spec.parts, strict=True):
            check_wanted(made.dtype, part)
        self.begins = tuple(span.first for span in spans)
        """Per class, the first token of its tensor."""
        self._spec = spec

    @property
    def device(self) -> torch.device:
        """See `Destination.device`."""
        return self.parts[0].device

    def place(self, unit: Unit) -> TensorPlace:
        """See `Destination.place`."""
        begin = 0 if self.is_state(unit.part) else unit.first - self.begins[unit.part]
        return TensorPlace(self.parts[unit.part][:, :, :, begin : begin + unit.tokens])

    def is_state(self, part: int) -> bool:
        """Return whether a class is a state, whose tensor has rows where others have tokens."""
        return self._spec.classes[part].kind == "state"

    def before(self, end: int, *, every: bool) -> tuple[torch.Tensor, ...]:
        """Return the tokens before ``end`` of each class, see `Assembler.before_classes`; a view of ``every`` token."""
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
