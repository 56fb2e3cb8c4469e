"""A terminal table that omits columns instead of truncating numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table


class FittingTable(Table):
    """A table that drops columns until the others fit the width."""

    spare: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out: list[str] = []
        kept = self
        for header in self.spare:
            if kept.needed(console, options) <= options.max_width:
                break
            if any(column.header == header for column in kept.columns):
                kept = kept._without(header)
                left_out.append(" ".join(header.replace("-\n", "").split()))
        spare_width = options.max_width - kept.needed(console, options)
        yield from Table.__rich_console__(kept.shortened(max(0, spare_width)), console, options)
        if left_out:
            yield console.render_str(f"[dim]not shown in {options.max_width} columns: {', '.join(left_out)}[/]")

    def needed(self, console: Console, options: ConsoleOptions) -> int:
        """Return the minimum width without truncated numbers or broken words."""
        free = options.update_width(10_000)
        needed = self._extra_width
        for column in self.columns:
            measured = self._measure_column(console, free, column)
            if _may_be_shortened(column):
                needed += min(measured.maximum, column.min_width or _SHORTENED)
            else:
                needed += measured.maximum if column.no_wrap else min(measured.minimum, column.max_width or _FOLDED)
        return needed

    def _without(self, header: str) -> FittingTable:
        return self._with([column for column in self.columns if column.header != header])

    def shortened(self, spare_width: int) -> FittingTable:
        """Return the table with shortened texts, which use ``spare_width`` characters beyond the minimum width.

        Without this, rich narrows wrapping columns down to one character.
        """
        columns = list(self.columns)
        for index, column in enumerate(columns):
            if _may_be_shortened(column):
                columns[index] = replace(column, max_width=(column.min_width or _SHORTENED) + spare_width)
        return self._with(columns)

    def _with(self, columns: Sequence[Column]) -> FittingTable:
        table = FittingTable(
            box=self.box,
            padding=self.padding,
            pad_edge=self.pad_edge,
            collapse_padding=self.collapse_padding,
            title=self.title,
            title_justify=self.title_justify,
            header_style=self.header_style,
        )
        table.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
        table.rows = self.rows
        return table


def _may_be_shortened(column: Column) -> bool:
    return column.no_wrap and column.overflow == "ellipsis"


_SHORTENED = 12
_FOLDED = 12
