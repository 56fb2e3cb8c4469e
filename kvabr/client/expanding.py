"""Expanding what a play has brought, when its destination wants it: by the threads that decode, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvabr.client.decode_speeds import on_one_core
from kvabr.codec.block_slots import Place
from kvabr.codec.paged import CodedGroup, expand
from kvabr.transfer.work import decoders

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def expand_here(groups: Sequence[CodedGroup], places: Sequence[Place]) -> list[Exception | None]:
    """Decode groups to their places, as `kvabr.codec.paged.expand`; blocks. Not for the threads that decode."""
    return expand(groups, places, _each)


def _each(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterable[_Result]:
    def alone(item: _Item) -> _Result:
        on_one_core()
        return work(item)

    return decoders().map(alone, items)
