"""Counts the work that code does, in lines of Python: the same on every machine, however busy."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_BLOCK = 32


def lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python run, each turn of a loop or of a comprehension counted."""
    return about_lines(lambda _: work(), 1)


def about_lines(work: Callable[[Callable[[], None]], object], share: int) -> int:
    """Return about how many lines run, from every ``share``-th block of turns; `work` calls its argument at each turn.

    The first block, with what precedes it, is counted apart: it is like no other.
    """
    count = turns = first = 0

    def trace(_frame: FrameType, _event: str, _argument: Any) -> Callable[..., None]:
        nonlocal count
        count += 1
        return line

    def line(_frame: FrameType, _event: str, _argument: Any) -> None:
        nonlocal count
        count += 1

    def turn() -> None:
        nonlocal turns, first
        block, turns = turns // _BLOCK, turns + 1
        if block == 0:
            first = count
        sys.settrace(trace if block == 0 or block % share == share // 2 else None)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(turn)
    finally:
        sys.settrace(before)
    return first + share * (count - first)
