"""What commands show on a terminal: progress bars, and tables of a catalog (also as plain JSON values)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvabr.types.catalog import Catalog, Track


class StageBar:
    """Progress of work in stages, on standard error if that is a terminal. A context manager."""

    def __init__(self, stages: Mapping[str, str], console: Console | None = None) -> None:
        """Take the stages: what to call each of them on the screen, by name."""
        self._stages = stages
        self._tasks: dict[str, TaskID] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that ``done`` steps of a stage's ``total`` are done."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(self._stages.get(stage, stage), total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)


class PlayBar:
    """Progress of many plays, on standard error if that is a terminal. A context manager."""

    def __init__(self, what: str = "playing", total: int | None = None) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("plays"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def planned(self, fresh: int, total: int) -> None:
        """Report how many plays there are, and how many of them are not cached."""
        self._bar.update(self._task, total=total, completed=total - fresh)

    def say(self, what: str) -> None:
        """Show what is being done now."""
        self._bar.update(self._task, description=what)

    def advance(self, plays: int) -> None:
        """Report that this many more plays are done."""
        self._bar.advance(self._task, plays)


def plain_table(title: str | None = None) -> Table:
    """Return an empty table with few rules, so that ten columns fit a narrow terminal."""
    return Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False)


def human(size: int) -> str:
    """Return a number of bytes with three digits and a unit."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):  # noqa: B007 - used after the loop
        if value < 1000:
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def track_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return one dictionary per track: what `track_table` shows, unrounded."""
    elements = catalog.tokens * catalog.spec.elements_per_token
    rows = []
    for track in catalog.tracks:
        quality = track.measured
        size = _with_layers(catalog, track)
        rows.append(
            {
                "track": track.name,
                "refines": track.refines,
                "bytes": track.total_bytes,
                "bits_per_element": 8 * size / elements,
                "ratio": catalog.fp16_bytes / size,
                "loss": sum(track.loss),
                "kl": None if quality is None else quality.kl,
                "dnll": None if quality is None else quality.dnll,
                "top1": None if quality is None else quality.top1,
                "decode_s": track.decode_s,
            }
        )
    return rows


def track_table(catalog: Catalog, title: str | None = None) -> Table:
    """Return the tracks: size, ratio, measured quality, and the time to decode a group."""
    table = plain_table(title)
    table.add_column("track", no_wrap=True)
    layered = any(track.refines is not None for track in catalog.tracks)
    if layered:
        table.add_column("refines", no_wrap=True)
    for name in ("bytes", "bits/el", "ratio", "loss", "KL", "ΔNLL", "top-1", "ms/group"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in track_rows(catalog):
        measured = ("-", "-", "-")
        if row["kl"] is not None:
            measured = (f"{row['kl']:.5f}", f"{row['dnll']:+.5f}", f"{row['top1']:.3f}")
        table.add_row(
            row["track"],
            *([row["refines"] or ""] if layered else []),
            human(row["bytes"]),
            f"{row['bits_per_element']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['loss']:.5f}",
            *measured,
            f"{1000 * row['decode_s']:.1f}",
        )
    return table


def group_tables(catalog: Catalog) -> tuple[Table, Table]:
    """Return the size and the expected loss of every group on every track."""
    sizes, losses = plain_table("size of each group"), plain_table("expected loss of each group, millinats per token")
    for table in (sizes, losses):
        for name in ("group", "tokens", *(track.name for track in catalog.tracks)):
            table.add_column(name, justify="right", no_wrap=True)
    for group in range(catalog.groups):
        head = (str(group), str(catalog.group_tokens(group)))
        sizes.add_row(*head, *(human(track.bytes[group]) for track in catalog.tracks))
        losses.add_row(*head, *(f"{1000 * track.loss[group]:.3f}" for track in catalog.tracks))
    return sizes, losses


def mix_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return one dictionary per mixed cache: what `mix_table` shows, unrounded."""
    return [
        {
            "tracks": list(mix.tracks),
            "predicted": mix.predicted,
            "measured": mix.measured,
            "ratio": mix.predicted / mix.measured if mix.measured > 0 else None,
        }
        for mix in catalog.mixes
    ]


def mix_table(catalog: Catalog, title: str = "caches of several tracks: loss predicted and measured") -> Table:
    """Return the mixed caches: the loss that the catalog predicts, and the loss that the model measured."""
    table = plain_table(title)
    table.add_column("groups", overflow="fold")
    for name in ("predicted", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in mix_rows(catalog):
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(_in_brief(row["tracks"]), f"{row['predicted']:.5f}", f"{row['measured']:.5f}", ratio)
    return table


def _with_layers(catalog: Catalog, track: Track) -> int:
    """Return the bytes of a track and of all layers below it."""
    size = track.total_bytes
    while track.refines is not None:
        track = catalog.track(track.refines)
        size += track.total_bytes
    return size


def _in_brief(tracks: list[str]) -> str:
    """Return the runs of equal tracks in order, or, if there are many, how many groups are on each track."""
    runs = [(name, len(list(run))) for name, run in groupby(tracks)]
    if len(runs) <= 8:
        return ", ".join(f"{count} {name}" for name, count in runs)
    counts = dict.fromkeys(tracks, 0)
    for name in tracks:
        counts[name] += 1
    return "scattered: " + ", ".join(f"{count} {name}" for name, count in counts.items())
