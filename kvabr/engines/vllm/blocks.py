"""The engine's blocks in one worker: plays are written into them, and publications are read from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvabr.engines.layouts import BlockLayout, PagedBlocks
from kvabr.engines.vllm.caches import Pages
from kvabr.engines.vllm.config import ServedModel
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.kv import KVSpec
from kvabr.types.units import Span

Runs = Sequence[Sequence[int]]
"""Numbers of the blocks of a run of tokens, per block table of the engine."""
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


class EngineBlocks:
    """All of the engine's caches in this worker. Thread-safe as far as the blocks differ."""

    def __init__(self, model: ServedModel, caches: Mapping[str, torch.Tensor], layout_of: LayoutOf) -> None:
        """Take the engine's caches, by vLLM's names, [block, head, token, dim of key and value].

        Raises `UsageError` if these are not the caches that vLLM's configuration describes.
        """
        self._model = model
        named = [name for pages in model.caches.pages for name in pages.names]
        if sorted(named) != sorted(caches):
            raise UsageError(f"vLLM has caches of {len(caches)} layers, its configuration of {len(named)}")
        held = torch.uint8 if model.quantised else model.dtype
        shelves = []
        for pages in model.caches.pages:
            if not pages.names:
                continue
            part, layers = model.shard.parts[pages.part], tuple(codes(caches[name]) for name in pages.names)
            wanted = (part.only.heads, pages.block, sum(part.only.split))
            for name, cache in zip(pages.names, layers, strict=True):
                if tuple(cache.shape[1:]) != wanted or cache.dtype != held:
                    raise UsageError(
                        f"vLLM's cache of {name} is {tuple(cache.shape)} {cache.dtype}, not [block, head, token, dim "
                        f"of key and value] of {wanted} and {held}: this version lays it out as kvabr does not "
                        "know"
                    )
            shelves.append(_Shelf(pages, part, layers, layout_of(layers[0])))
        self._shelves = tuple(shelves)

    @property
    def device(self) -> Any:
        """Where the caches are."""
        return self._shelves[0].layers[0].device

    @property
    def tokens(self) -> int:
        """Tokens that all blocks hold, at most."""
        return max(shelf.layers[0].shape[0] * shelf.pages.block for shelf in self._shelves)

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


def codes(kv: torch.Tensor) -> torch.Tensor:
    """Return the codes of a quantised cache, and any other as it is."""
    return kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
