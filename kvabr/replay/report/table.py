"""Terminal tables: policies over all plays, policies per trace family, and verified plays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kvabr.replay.fitting_table import FittingTable
from kvabr.replay.report.queries import (
    DARK,
    DASH,
    RECOMPUTED,
    RECOMPUTED_DARK,
    Result,
    Run,
    families,
    feasible,
    mean_regret,
    nats,
    number,
    play_key,
    ramp,
    ranked,
    set_apart,
    track_order,
    why_apart,
)
from kvabr.replay.trace import three

_FAMILY_WIDTH = 11
_BAR = (4, 24)


_TITLES = (
    *("\nmet", "\n95 %", "TTFT\np50", "s\np95", "loss\nmean", "\np95"),
    *("\nregret", "\ncomp.", "\nwaste"),
)
"""Column headers no wider than the numbers, to fit 80 columns; the first line groups pairs of columns."""


class ShareBar:
    """A bar that shows the tracks' shares of the groups; on monochrome terminals, with letters instead of colours."""

    def __init__(self, parts: Iterable[tuple[str, str, float]]) -> None:
        """Create a bar of (letter, colour ``#rrggbb``, relative share), left to right."""
        self._parts = [part for part in parts if part[2] > 0]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(*_BAR).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _BAR[1])
        plain = console.color_system is None or console.no_color
        total = sum(share for _, _, share in self._parts)
        done = cells = 0.0
        for mark, colour, share in self._parts:
            done += share
            end = round(done / total * width)
            count = int(end - cells)
            cells = end
            yield Segment(mark * count, None) if plain else Segment(" " * count, Style(bgcolor=colour))
        yield Segment(" " * (width - int(cells)))


def summary_table(result: Result) -> RenderableType:
    """Return one row per policy, least mean regret first, with a legend of the tracks; fits 80 columns."""
    table = plain_table()
    table.spare = ("\n95 %", "\np95", "\nwaste", "\ncomp.", "s\np95", "\nmix")
    table.add_column("policy", no_wrap=True, overflow="ellipsis", min_width=10)
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("\nmix")
    summary = result.get("summary", {})
    tracks = track_order(result)
    style = _styles(tracks)
    used: set[str] = set()
    for rank, policy in enumerate(ranked(result)):
        line: dict[str, Any] = summary[policy]
        share = {str(track): number(part) or 0.0 for track, part in (line.get("track_share") or {}).items()}
        used.update(track for track, part in share.items() if part > 0)
        table.add_row(
            Text(policy, style="bold" if rank == 0 else ""),
            _percent(line.get("hit_ratio")),
            _interval(line.get("hit_ratio_ci95")),
            _seconds(line.get("ttft_p50_s")),
            _seconds(line.get("ttft_p95_s")),
            nats(number(line.get("loss_mean"))),
            nats(number(line.get("loss_p95"))),
            Text(nats(number(line.get("regret_mean"))), style="bold" if rank == 0 else ""),
            _count(line.get("tokens_recomputed_mean")),
            _percent(line.get("bytes_wasted_share")),
            ShareBar((*style[track], share.get(track, 0.0)) for track in style),
        )
    return Group(table, *_notes(result, {track: style[track] for track in style if track in used}))


def family_table(result: Result) -> RenderableType | None:
    """Return the mean regret of every policy on every trace family; None if there are fewer than two families.

    Families that do not fit the console's width follow in a further block. The result's runs must have
    ``trace_family``.
    """
    by_family = families(result)
    return _FamilyTable(ranked(result), by_family) if len(by_family) > 1 else None


class _FamilyTable:
    def __init__(self, policies: list[str], by_family: dict[str, list[Run]]) -> None:
        self._policies, self._families = policies, by_family

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = list(self._families)
        side = max([len("policy"), *map(len, self._policies)])
        fit = max(1, (options.max_width - side) // (_FAMILY_WIDTH + 2))
        for first in range(0, len(names), fit):
            yield self._block(names[first : first + fit])

    def _block(self, names: list[str]) -> Table:
        table = plain_table()
        table.add_column("mean\nregret", no_wrap=True, overflow="ellipsis")
        columns: list[list[Text]] = []
        for name in names:
            runs = self._families[name]
            plays = len({play_key(run) for run in runs if feasible(run)})
            title = f"{_broken(name)}\n{plays} {'play' if plays == 1 else 'plays'}"
            table.add_column(title, justify="right", vertical="bottom", no_wrap=True)
            values = [mean_regret(run for run in runs if run["policy"] == policy) for policy in self._policies]
            least = min((value for value in values if value is not None), default=0.0)
            best = [value is not None and value <= least * 1.01 for value in values]
            columns.append([Text(nats(v), style="bold" if b else "") for v, b in zip(values, best, strict=True)])
        for policy, cells in zip(self._policies, zip(*columns, strict=True), strict=True):
            table.add_row(Text(policy), *cells)
        return table


def _broken(name: str) -> str:
    lines = [""]
    for part in re.findall(r"[^_\- ]*[_\- ]?", name):
        rest = part
        if len(lines[-1]) + len(rest) > _FAMILY_WIDTH and lines[-1]:
            lines.append("")
        while len(rest) > _FAMILY_WIDTH:
            lines[-1:] = [rest[:_FAMILY_WIDTH], ""]
            rest = rest[_FAMILY_WIDTH:]
        lines[-1] += rest
    return "\n".join(line for line in lines if line)


def _styles(tracks: list[str]) -> dict[str, tuple[str, str]]:
    marks = "123456789abcdefghijklmnopqstuvwxyz"
    colours = ramp(len(tracks), DARK)
    pairs = enumerate(zip(tracks, colours, strict=True))
    found = {name: (marks[index % len(marks)], colour) for index, (name, colour) in pairs}
    found[RECOMPUTED] = ("r", RECOMPUTED_DARK)
    return found


def _notes(result: Result, styles: dict[str, tuple[str, str]]) -> list[RenderableType]:
    legend = Text()
    for name, (mark, colour) in styles.items():
        legend.append(f" {mark} ", style=Style(bgcolor=colour, color="#000000"))
        legend.append(f" {name}  ")
    units = (
        "met: share of plays with a first token by the deadline, with its 95 % interval · TTFT: time to first token · "
        "loss, regret: nats per generated token · comp.: mean tokens that the engine computed"
    )
    notes: list[RenderableType] = [legend, Text(units, style="dim")]
    apart = set_apart(result)
    if apart:
        noun = "play is" if apart == 1 else "plays are"
        text = f"{apart:,} {noun} set apart: {why_apart(result)}"
        notes.append(Text(text, style="yellow"))
        summary = result.get("summary", {})
        known = ((number(line.get("infeasible_ttft_p50_s")), policy) for policy, line in summary.items())
        late = sorted((ttft, policy) for ttft, policy in known if ttft is not None)
        if late:
            ends = (f"{_seconds(ttft)} ({policy})" for ttft, policy in dict.fromkeys((late[0], late[-1])))
            notes.append(Text(f"their TTFT p50: {' to '.join(ends)}", style="dim"))
    return notes


def _seconds(value: Any) -> str:
    seconds = number(value)
    return DASH if seconds is None else three(seconds)


def _percent(value: Any) -> str:
    share = number(value)
    return DASH if share is None else f"{math.floor(share * 100 + 0.5)} %"


def _interval(value: Any) -> str:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return DASH
    low, high = map(number, value)
    return DASH if low is None or high is None else f"{low * 100:.0f}{DASH}{high * 100:.0f}"


def _count(value: Any) -> str:
    count = number(value)
    return DASH if count is None else f"{count:,.0f}"


_VERIFIED_TITLES = (
    "start\ns", "recom-\nputed", "pre-\ndicted", "measured\nKL", "\nratio", "\nΔNLL", "\ntop-1",
)  # fmt: skip


def verification_table(result: Result) -> Table:
    """Return one row per verified run: recomputed tokens, predicted loss, measured KL, their ratio, ΔNLL, top-1.

    Fits 80 columns; long names continue on the next line.
    """
    table = plain_table("verified with the real model")
    table.spare = ("\ntop-1", "\nΔNLL", "start\ns", "recom-\nputed")
    for name in ("policy", "trace"):
        table.add_column(f"\n{name}", overflow="fold")
    for title in _VERIFIED_TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for run in result["runs"]:
        measured = run.get("measured")
        if measured is None:
            continue
        predicted, kl = measured["predicted"], measured["kl"]
        table.add_row(
            Text(run["policy"]),
            Text(run["trace"]),
            f"{run['start_s']:.1f}",
            str(run["tokens_recomputed"]),
            f"{predicted:.5f}",
            f"{kl:.5f}",
            f"{kl / predicted:.2f}" if predicted > 0 else DASH,
            f"{measured['dnll']:+.4f}",
            f"{measured['top1']:.3f}",
        )
    return table


def plain_table(title: str | None = None) -> FittingTable:
    """Return an empty table without lines."""
    return FittingTable(
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
        header_style="bold",
        collapse_padding=True,
    )
