"""The engine's blocks in one worker: plays are written into them, and publications are read from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvabr.engines.layouts import BlockLayout, PagedBlocks
from kvabr.engines.vllm.caches import Pages
from kvabr.engines.vllm.config import ServedModel
from kvabr.engines.vllm.states import StateForm
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.units import Span

Runs = Sequence[Sequence[int]]
"""Numbers of the blocks of a run of tokens, per block table of the engine."""
Caches = Mapping[str, torch.Tensor]
"""vLLM's tensor of each layer, [block, head, token, dim of key and value], or, with states, [block, 1, 1, byte]."""
LayoutOf = Callable[[torch.Tensor], BlockLayout]
"""Returns the layout of a layer's cache."""


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Layers of one class with one table of blocks."""

    pages: Pages
    part: KVSpec
    layers: tuple[torch.Tensor, ...]
    layout: BlockLayout

    def at(self, numbers: Sequence[int]) -> PagedBlocks:
        return PagedBlocks(self.layers, numbers, self.layout, self.part.only.split)

    def rows(self, kv: torch.Tensor) -> list[torch.Tensor]:
        """Return the layers of a class's tensor that are kept here, [K/V, head, token, dim] each."""
        return [codes(kv)[row] for row in self.pages.rows]


@dataclass(frozen=True, slots=True)
class _StateShelf:
    """States of one class with one table of blocks."""

    pages: Pages
    form: StateForm
    layers: tuple[torch.Tensor, ...]

    def write(self, kv: torch.Tensor, block: int) -> None:
        """Copy a published snapshot of the class, [layer, 1, head, row, column], into a block."""
        for states, row in zip(self.layers, self.pages.rows, strict=True):
            self.form.write(states, block, kv[row, 0])

    def read(self, kv: torch.Tensor, block: int) -> None:
        """Copy a block into what is published of the class."""
        for states, row in zip(self.layers, self.pages.rows, strict=True):
            self.form.read(states, block, kv[row, 0])


class EngineBlocks:
    """All of the engine's caches in this worker. Thread-safe as far as the blocks differ."""

    def __init__(self, model: ServedModel, caches: Caches, layout_of: LayoutOf) -> None:
        """Take the engine's caches, by vLLM's names.

        Raises `UsageError` if these are not the caches that vLLM's configuration describes.
        """
        self._model = model
        named = {name for pages in model.caches.pages for name in pages.names}
        if named != set(caches):
            raise UsageError(f"vLLM has caches of {len(caches)} layers, its configuration of {len(named)}")
        held = torch.uint8 if model.quantised else model.dtype
        self._shelves: list[_Shelf] = []
        self._states: list[_StateShelf] = []
        for pages in model.caches.pages:
            if not pages.names:
                continue
            if pages.form is not None:
                self._states.append(_StateShelf(pages, pages.form, _states(pages, pages.form, caches)))
                continue
            part = model.shard.parts[pages.part]
            wanted = (part.only.heads, pages.block, sum(part.only.split))
            layers = tuple(_tokens(name, caches[name], wanted, held) for name in pages.names)
            self._shelves.append(_Shelf(pages, part, layers, layout_of(layers[0])))

    @property
    def device(self) -> Any:
        """Where the caches are."""
        return self._all[0].layers[0].device

    @property
    def tokens(self) -> int:
        """Tokens that all blocks hold, at most."""
        return max(shelf.layers[0].shape[0] * shelf.pages.block for shelf in self._all)

    @property
    def _all(self) -> list[_Shelf | _StateShelf]:
        return [*self._shelves, *self._states]

    def write(self, parts: Sequence[torch.Tensor], spans: Sequence[Span], first: int, last: int, runs: Runs) -> None:
        """Copy the KV of tokens ``first`` to ``last`` - 1 into blocks.

        Args:
            parts: a tensor per layer class, with the tokens of ``spans``. Those of the whole model, or this rank's.
            spans: their tokens, as `kvabr.client.result.PlayedPrefix` has them.
            first: the beginning of a block in every table.
            last: the end of a block in every table.
            runs: the blocks of these tokens. Of windows those that were taken away already are left out.

        Raises:
            PlayError: what a block holds is not there.
        """
        parts, spans = self._own(parts, spans)
        for shelf in self._shelves:
            pages, numbers = shelf.pages, runs[shelf.pages.group]
            if len(numbers) * pages.block != last - first:
                raise PlayError(f"{len(numbers)} blocks of {pages.block} do not hold {last - first:,} tokens")
            absent = pages.absent(numbers)
            numbers = numbers[absent:]
            if not numbers:
                continue
            kv, span = codes(parts[pages.part]), spans[pages.part]
            begin = first + absent * pages.block
            missing = max(0, span.first - begin)
            if missing >= pages.block or span.first + span.tokens < last:
                raise PlayError(
                    f"{shelf.part.only.title}: tokens {span.first:,} to {span.first + span.tokens:,} were played, "
                    f"{begin:,} to {last:,} are needed"
                )
            kv = kv[:, :, :, max(0, begin - span.first) : last - span.first]
            if missing:  # out of sight, but in the block of what can be seen
                kv = torch.nn.functional.pad(kv, (0, 0, missing, 0))
            shelf.at(numbers).write(shelf.rows(kv))
        for states in self._states:
            kv, span, block = parts[states.pages.part], spans[states.pages.part], runs[states.pages.group][-1]
            if span != Span(last, kv.shape[3]) or not span.tokens or not block:
                raise PlayError(f"the states behind token {last:,} are needed; those behind {span.first:,} were played")
            states.write(kv, block)

    def _own(
        self, parts: Sequence[torch.Tensor], spans: Sequence[Span]
    ) -> tuple[Sequence[torch.Tensor], Sequence[Span]]:
        """Return what this rank holds of tensors of the whole model; its own as they are."""
        model = self._model
        given = [(kv.shape[0], kv.shape[2]) for kv in parts]
        if given == [(len(one.layers), one.heads) for one in model.shard.classes]:
            return parts, spans
        if given != [(len(one.layers), one.heads) for one in model.spec.classes]:
            raise PlayError(f"what was played has layers and heads of {given}, neither the model's nor this rank's")
        own = [
            parts[part][rows.start : rows.stop, :, heads.start : heads.stop]
            for (part, rows), heads in zip(model.places, model.heads, strict=True)
        ]
        return own, [spans[part] for part, _ in model.places]

    def read(self, runs: Runs, out: Sequence[torch.Tensor | None]) -> None:
        """Copy the KV of blocks into tensors, one per layer class, [layer, K/V, head, token, dim]; None: not wanted."""
        for shelf in self._shelves:
            kv = out[shelf.pages.part]
            if kv is not None:
                shelf.at(runs[shelf.pages.group]).read(shelf.rows(kv))

    def snapshot(self, blocks: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Return copies of the states in a block of each table of states, by layer class."""
        out: dict[int, torch.Tensor] = {}
        for states in self._states:
            part = self._model.shard.parts[states.pages.part]
            if states.pages.part not in out:
                out[states.pages.part] = torch.empty(part.shape(part.rows), dtype=states.layers[0].dtype)
            states.read(out[states.pages.part], blocks[states.pages.group])
        return out


def _tokens(name: str, cache: torch.Tensor, wanted: tuple[int, int, int], held: torch.dtype) -> torch.Tensor:
    """Return a layer's cache if it is as vLLM describes it, else raise."""
    cache = codes(cache)
    if tuple(cache.shape[1:]) != wanted or cache.dtype != held:
        raise UsageError(
            f"vLLM's cache of {name} is {tuple(cache.shape)} {cache.dtype}, not [block, head, token, dim of key and "
            f"value] of {wanted} and {held}: this version lays it out as kvabr does not know"
        )
    return cache


def _states(pages: Pages, form: StateForm, caches: Caches) -> tuple[torch.Tensor, ...]:
    """Return one state of some layers if vLLM has it as it says, else raise."""
    found = []
    for name in pages.names:
        cache = caches[name]
        if cache.dim() != 4 or cache.shape[1:3] != (1, 1) or cache.dtype.itemsize != 1:
            raise UsageError(
                f"vLLM's states of {name} are {tuple(cache.shape)} {cache.dtype}, not [block, 1, 1, byte]: this "
                "version lays them out as kvabr does not know"
            )
        found.append(form.of(cache))
    return tuple(found)


def codes(kv: torch.Tensor) -> torch.Tensor:
    """Return the codes of a quantised cache, and any other as it is."""
    return kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
