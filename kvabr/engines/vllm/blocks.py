"""The engine's blocks in one worker: plays write into them, and publications read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.client.result import PlayedPrefix
from kvabr.codec.block_slots import BlockLayers, BlockSlots, Place
from kvabr.codec.paged import CodedGroup
from kvabr.engines.layouts import BlockLayout, block_layers
from kvabr.engines.vllm.caches import Pages
from kvabr.engines.vllm.config import ServedModel
from kvabr.engines.vllm.states import StateForm
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.units import Span, Unit

Runs = Sequence[Sequence[int]]
"""Block numbers of a run of tokens, for each block table."""
Caches = Mapping[str, torch.Tensor]
"""vLLM's tensor of each layer, [block, head, token, dim of key and value], or, for states, [block, 1, 1, byte]."""
LayoutOf = Callable[[torch.Tensor], BlockLayout]
Store = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Stores keys and values, [token, head, dim] in the engine's element type: layer name, keys, values, slots."""


@dataclass(frozen=True, slots=True)
class _Shelf:
    pages: Pages
    part: KVSpec
    layers: tuple[torch.Tensor, ...]
    layout: BlockLayout
    blocks: BlockLayers

    def rows(self, kv: torch.Tensor) -> list[torch.Tensor]:
        """Return the stored layers of a class's tensor, [K/V, head, token, dim] each."""
        return [codes(kv)[row] for row in self.pages.rows]

    def slots(self, numbers: NDArray[np.int64], first: int, tokens: NDArray[np.int64]) -> BlockSlots:
        """Return the slots of tokens, given the numbers of blocks that start at token ``first``; -1 outside of them."""
        block = self.pages.block
        place = tokens - first
        inside = (place >= 0) & (place < len(numbers) * block)
        place = np.where(inside, place, 0)
        own, at = self.pages.interleaving.own(place % block)
        return BlockSlots(self.blocks, np.where(inside & own, numbers[place // block] * self.pages.held + at, -1))


@dataclass(frozen=True, slots=True)
class _StateShelf:
    pages: Pages
    form: StateForm
    layers: tuple[torch.Tensor, ...]

    def write(self, kv: torch.Tensor, block: int) -> None:
        """Copy a published snapshot, [layer, 1, head, row, column], into a block."""
        for states, row in zip(self.layers, self.pages.rows, strict=True):
            self.form.write(states, block, kv[row, 0])

    def read(self, kv: torch.Tensor, block: int) -> None:
        for states, row in zip(self.layers, self.pages.rows, strict=True):
            self.form.read(states, block, kv[row, 0])


@dataclass(frozen=True, eq=False)
class _GroupPlace:
    shape: tuple[int, ...]
    """[layer, K/V, head, token, dim]."""
    dtype: torch.dtype
    device: torch.device
    direct: BlockSlots | None
    whole: None = field(default=None, init=False)
    writes: tuple[Callable[[torch.Tensor], None], ...]

    def fits(self, shape: Sequence[int]) -> bool:
        return tuple(shape) == self.shape

    def write(self, group: torch.Tensor) -> None:
        for each in self.writes:
            each(group)


_CLEARED_BLOCKS = 64


class _Own(NamedTuple):
    part: int
    rows: range
    heads: range
    whole: bool


class EngineBlocks:
    """The engine's caches in one worker; thread-safe for different blocks."""

    def __init__(self, model: ServedModel, caches: Caches, layout_of: LayoutOf, store: Store | None = None) -> None:
        """Wrap the engine's caches, by vLLM's layer names; quantised caches need ``store``.

        Raise `UsageError` if caches differ from vLLM's configuration.
        """
        self._model, self._store = model, store
        named = {name for pages in model.caches.pages for name in pages.names}
        if named != set(caches):
            raise UsageError(f"vLLM has caches of {len(caches)} layers, but its configuration has {len(named)}")
        self._shelves: list[_Shelf] = []
        self._states: list[_StateShelf] = []
        for pages in model.caches.pages:
            if not pages.names:
                continue
            if pages.form is not None:
                self._states.append(_StateShelf(pages, pages.form, _states(pages, pages.form, caches)))
                continue
            part = model.shard.parts[pages.part]
            kept = model.kept(part)
            held = torch.uint8 if kept.itemsize == 1 else kept
            wanted = (part.only.heads, pages.held, sum(part.only.split))
            layers = tuple(_tokens(name, caches[name], wanted, held) for name in pages.names)
            layout = layout_of(layers[0]) if part.only.v_dim else BlockLayout.PLAIN
            blocks = block_layers(layers, layout, part.only.split, kept)
            self._shelves.append(_Shelf(pages, part, layers, layout, blocks))

    @property
    def device(self) -> Any:
        """Device of the caches."""
        return self._all[0].layers[0].device

    @property
    def layers(self) -> tuple[BlockLayers, ...]:
        return tuple(shelf.blocks for shelf in self._shelves)

    @property
    def tokens(self) -> int:
        """Capacity of all blocks in tokens."""
        return max(shelf.layers[0].shape[0] * shelf.pages.block for shelf in self._all)

    @property
    def _all(self) -> list[_Shelf | _StateShelf]:
        return [*self._shelves, *self._states]

    def places(
        self, prefix: PlayedPrefix, first: int, last: int, runs: Runs
    ) -> tuple[list[CodedGroup], list[Place], list[int]]:
        """Return the groups to decode for tokens ``first`` to ``last`` - 1, their places, and their first tokens.

        ``runs`` has the blocks of these tokens, which must be whole in every table; blocks that left a window are
        skipped. Raise `PlayError` if the play lacks tokens of a block.
        """
        own, spans = self._own(prefix.spec), prefix.spans
        numbers: dict[int, NDArray[np.int64]] = {}
        for shelf in self._shelves:
            if (mine := own.get(shelf.pages.part)) is None:
                self._clear(shelf, runs[shelf.pages.group])
            else:
                numbers[id(shelf)] = self._numbers(shelf, spans[mine.part], first, last, runs)
        for states in self._states:
            span, block = spans[own[states.pages.part].part], runs[states.pages.group][-1]
            if span.first != last or not span.tokens or not block:
                raise PlayError(
                    f"the states after token {last:,} are needed, but those after {span.first:,} were played"
                )
        groups: list[CodedGroup] = []
        places: list[Place] = []
        begins: list[int] = []
        for group, unit in zip(prefix.groups, prefix.units, strict=True):
            if (place := self._place(group, unit, own, numbers, first, runs)) is not None:
                groups.append(group)
                places.append(place)
                state = prefix.spec.classes[unit.part].kind == "state"
                begins.append(first if state else max(first, unit.first))
        return groups, places, begins

    def _numbers(self, shelf: _Shelf, span: Span, first: int, last: int, runs: Runs) -> NDArray[np.int64]:
        """Return the blocks of a table, negative for blocks not to write; clear blocks that no group fills."""
        pages, numbers = shelf.pages, np.array(runs[shelf.pages.group], np.int64)
        if len(numbers) * pages.block != last - first:
            raise PlayError(f"{len(numbers)} blocks of {pages.block} do not hold {last - first:,} tokens")
        absent = pages.absent(runs[pages.group])
        numbers[:absent] = -1
        begin = first + absent * pages.block
        missing = max(0, span.first - begin)
        if begin < last and (missing >= pages.block or span.first + span.tokens < last):
            raise PlayError(
                f"{shelf.part.only.title}: tokens {span.first:,} to {span.first + span.tokens:,} were played, "
                f"{begin:,} to {last:,} are needed"
            )
        if missing and begin < last:  # outside the window, but in its first block
            there = shelf.slots(numbers[absent:], begin, np.arange(begin, span.first))
            shape = (len(shelf.blocks), len(shelf.blocks[0]), there.first.shape[1], missing, there.first.shape[3])
            there.write(torch.zeros(shape, dtype=there.dtype, device=there.device))
        return numbers

    def _place(
        self,
        group: CodedGroup,
        unit: Unit,
        own: Mapping[int, _Own],
        numbers: Mapping[int, NDArray[np.int64]],
        first: int,
        runs: Runs,
    ) -> _GroupPlace | None:
        shape = group.context.spec.shape(group.context.tokens)
        direct: BlockSlots | None = None
        dtype, device = group.context.spec.torch_dtype, torch.device("cpu")
        writes: list[Callable[[torch.Tensor], None]] = [
            partial(states.write, block=runs[states.pages.group][-1])
            for states in self._states
            if own[states.pages.part].part == unit.part
        ]
        for shelf in self._shelves:
            mine = own.get(shelf.pages.part)
            if mine is None or mine.part != unit.part:
                continue
            slots = shelf.slots(numbers[id(shelf)], first, np.arange(unit.first, unit.first + unit.tokens))
            if not bool((slots.slots >= 0).any()):
                continue
            dtype, device, rows = slots.dtype, slots.device, [mine.rows.start + row for row in shelf.pages.rows]
            theirs, ours = group.context.spec.only, shelf.part.only
            if theirs.scales != ours.scales:
                if ours.scales is None or self._store is None:
                    raise PlayError(f"the play has {theirs.summary}, but the engine has {ours.summary}")
                dtype = self._model.dtype
                writes.append(partial(_store_some, self._store, shelf.pages.names, slots, rows, mine.heads))
            elif mine.whole and len(rows) == shape[0]:
                direct = slots.direct
                writes.append(slots.write)
            else:
                writes.append(partial(_write_some, slots, rows, mine.heads))
        if not writes:
            return None
        return _GroupPlace(shape, dtype, device, direct if len(writes) == 1 else None, tuple(writes))

    def _clear(self, shelf: _Shelf, run: Sequence[int]) -> None:
        for first in range(0, len(run), _CLEARED_BLOCKS):
            there = BlockSlots.of_blocks(shelf.blocks, run[first : first + _CLEARED_BLOCKS])
            tokens = len(run[first : first + _CLEARED_BLOCKS]) * shelf.pages.held
            shape = (len(shelf.blocks), len(shelf.blocks[0]), there.first.shape[1], tokens, there.first.shape[3])
            there.write(torch.zeros(shape, dtype=there.dtype, device=there.device))

    def _own(self, played: KVSpec) -> Mapping[int, _Own]:
        """Return this rank's part of each class, for a play of the whole model or of the rank."""
        model = self._model
        given = [(len(one.layers), one.heads) for one in played.classes]
        if given == [(len(one.layers), one.heads) for one in model.shard.classes]:
            return {part: _Own(part, range(layers), range(heads), True) for part, (layers, heads) in enumerate(given)}
        bare, wanted = model.undrafted, model.spec.classes
        if bare is not None and len(given) == len(bare.classes):
            wanted = bare.classes
        there = {one: part for part, one in enumerate(wanted)}
        if given != [(len(one.layers), one.heads) for one in there]:
            raise PlayError(f"the play has layers and heads {given}, which fit neither the model nor this rank")
        pairs = enumerate(zip(model.places, model.heads, strict=True))
        return {
            mine: _Own(there[one], rows, heads, False)
            for mine, ((part, rows), heads) in pairs
            if (one := model.spec.classes[part]) in there
        }

    def read(self, runs: Runs, out: Sequence[torch.Tensor | None]) -> None:
        """Copy the KV of blocks into tensors, one per layer class, [layer, K/V, head, token, dim]; skip None."""
        for shelf in self._shelves:
            kv = out[shelf.pages.part]
            if kv is not None:
                BlockSlots.of_blocks(shelf.blocks, runs[shelf.pages.group]).read(shelf.rows(kv))

    def snapshot(self, blocks: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Return copies of the states in one block of each table, by layer class."""
        out: dict[int, torch.Tensor] = {}
        for states in self._states:
            part = self._model.shard.parts[states.pages.part]
            if states.pages.part not in out:
                out[states.pages.part] = torch.empty(part.shape(part.rows), dtype=states.layers[0].dtype)
            states.read(out[states.pages.part], blocks[states.pages.group])
        return out


def _write_some(slots: BlockSlots, rows: list[int], heads: range, group: torch.Tensor) -> None:
    some = group[rows[0] : rows[-1] + 1] if rows == list(range(rows[0], rows[-1] + 1)) else codes(group)[rows]
    slots.write(some.view(group.dtype)[:, :, heads.start : heads.stop])


def _store_some(
    store: Store, names: Sequence[str], slots: BlockSlots, rows: list[int], heads: range, group: torch.Tensor
) -> None:
    used = np.flatnonzero(slots.slots >= 0)
    at, there = torch.from_numpy(used).to(group.device), torch.from_numpy(slots.slots[used]).to(group.device)
    for name, row in zip(names, rows, strict=True):
        keys, values = group[row, :, heads.start : heads.stop].index_select(2, at).transpose(1, 2).contiguous()
        store(name, keys, values, there)


def _tokens(name: str, cache: torch.Tensor, wanted: tuple[int, int, int], held: torch.dtype) -> torch.Tensor:
    cache = codes(cache)
    if tuple(cache.shape[1:]) != wanted or cache.dtype != held:
        raise UsageError(
            f"vLLM's cache of {name} is {tuple(cache.shape)} {cache.dtype}, not [block, head, token, dim of key and "
            f"value] of {wanted} and {held}: kvabr does not support this layout"
        )
    return cache


def _states(pages: Pages, form: StateForm, caches: Caches) -> tuple[torch.Tensor, ...]:
    found = []
    for name in pages.names:
        cache = caches[name]
        if cache.dim() != 4 or cache.shape[1:3] != (1, 1) or cache.dtype.itemsize != 1:
            raise UsageError(
                f"vLLM's states of {name} are {tuple(cache.shape)} {cache.dtype}, not [block, 1, 1, byte]: kvabr "
                "does not support this layout"
            )
        found.append(form.of(cache))
    return tuple(found)


def codes(kv: torch.Tensor) -> torch.Tensor:
    """Return a quantised cache as bytes; other caches unchanged."""
    return kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
