"""A set of a play's groups, ascending, with running sums: no question about it takes longer for a longer prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet, Sequence
from itertools import compress


class GroupSet(MutableSet[int]):
    """Some of the groups 0 to ``groups`` - 1.

    A byte per group says whether it is in the set, so that the next group is found at the speed of memory.
    """

    __slots__ = ("_count", "_flags", "_sums", "_weights", "returned")

    def __init__(self, groups: int, members: Iterable[int] | None = None) -> None:
        """Begin with ``members``; None: all groups."""
        self._flags = bytearray(groups) if members is not None else bytearray(b"\1") * groups
        self._count = 0 if members is not None else groups
        self._sums: dict[str, int] = {}
        self._weights: dict[str, Sequence[int]] = {}
        self.returned: list[int] = []
        """Every group added since the beginning, once per time. Readers remember their position and read on from there,
        instead of looking at all groups again. A group may have left the set since."""
        for group in members or ():
            self._count += not self._flags[group]
            self._flags[group] = 1

    def __contains__(self, group: object) -> bool:
        return isinstance(group, int) and 0 <= group < len(self._flags) and bool(self._flags[group])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return compress(range(len(self._flags)), self._flags)

    def __reversed__(self) -> Iterator[int]:
        group = self._flags.rfind(1)
        while group >= 0:
            yield group
            group = self._flags.rfind(1, 0, group)

    def __repr__(self) -> str:
        return f"GroupSet({list(self)})"

    def first(self, begin: int = 0) -> int | None:
        """Return the least group from ``begin`` on, or None."""
        group = self._flags.find(1, begin)
        return None if group < 0 else group

    def firsts(self, count: int) -> list[int]:
        """Return the least ``count`` groups, or all."""
        found: list[int] = []
        group = self._flags.find(1)
        while group >= 0 and len(found) < count:
            found.append(group)
            group = self._flags.find(1, group + 1)
        return found

    def gap(self, begin: int) -> int:
        """Return the least group from ``begin`` on that is not in the set; the number of groups if there is none."""
        group = self._flags.find(0, begin)
        return len(self._flags) if group < 0 else group

    def last(self) -> int | None:
        """Return the greatest group, or None."""
        group = self._flags.rfind(1)
        return None if group < 0 else group

    def add(self, group: int) -> None:
        """Add a group."""
        if not self._flags[group]:
            self._flags[group] = 1
            self._count += 1
            self.returned.append(group)
            for name, weights in self._weights.items():
                self._sums[name] += weights[group]

    def discard(self, group: int) -> None:
        """Remove a group if it is in the set."""
        if self._flags[group]:
            self._flags[group] = 0
            self._count -= 1
            for name, weights in self._weights.items():
                self._sums[name] -= weights[group]

    def total(self, name: str, weights: Sequence[int]) -> int:
        """Return the sum of the members' weights; from the first call for a ``name`` on it is kept up to date."""
        if name not in self._sums:
            self._sums[name] = sum(weights[group] for group in self)
            self._weights[name] = weights
        return self._sums[name]
