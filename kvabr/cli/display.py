"""Output of commands: progress, prose, tables and JSON files; tables of a catalog also as plain JSON values."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvabr.replay.fitting_table import FittingTable
from kvabr.store.files import write_text
from kvabr.types.catalog import Catalog
from kvabr.types.tails import share_after_tail
from kvabr.types.words import counted

_FIRST_S, _EVERY_S = 2.0, 10.0
"""Without a terminal: seconds until the first line of progress, and between lines."""
_FILE_COLUMNS = 240
_SPEED_OVER_S = 600.0
"""Seconds of past progress from which the time left is estimated."""


class StageBar:
    """Progress of work in stages on standard error: bars on a terminal, otherwise a line now and then."""

    def __init__(self, stages: Mapping[str, str], console: Console | None = None) -> None:
        """``stages``: titles by stage; ``console``: None: standard error."""
        self._stages = stages
        self._tasks: dict[str, progress.TaskID] = {}
        self._due_s = time.monotonic() + _FIRST_S
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console or Console(stderr=True),
            get_time=time.monotonic,
            speed_estimate_period=_SPEED_OVER_S,
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report ``done`` of ``total`` steps of a stage (None: unknown)."""
        title = self._stages.get(stage, stage)
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(title, total=total)
        self._bar.update(self._tasks[stage], description=title, completed=done, total=total)
        if self._bar.disable and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _EVERY_S
            of = "" if total is None else f" of {total}"
            left_s = next(task for task in self._bar.tasks if task.id == self._tasks[stage]).time_remaining
            left = f", about {left_s:.0f} s left" if left_s else ""
            print(f"{title}: {done}{of}{left}", file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a message on standard error during slow work; yields a function that changes the message."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return
    messages, over = [what], threading.Event()

    def repeat() -> None:
        pause_s, printed = _FIRST_S, ""
        while not over.wait(pause_s):
            if messages[-1] != printed:
                printed = messages[-1]
                print(f"{printed} ...", file=sys.stderr, flush=True)
            pause_s = _EVERY_S

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield messages.append
    finally:
        over.set()
        thread.join()


class PlayBar(StageBar):
    """Progress of many plays."""

    def __init__(self, what: str = "playing", total: int | None = None) -> None:
        super().__init__({})
        self._done, self._total = 0, total
        self.say(what)

    def planned(self, fresh: int, total: int) -> None:
        """Set the number of plays; only ``fresh`` of them are not cached."""
        self._done, self._total = total - fresh, total
        self.advance(0)

    def say(self, what: str) -> None:
        """Show a description of the current work."""
        self._stages = {"plays": what}
        self.advance(0)

    def advance(self, plays: int) -> None:
        """Add ``plays`` to the number of completed plays."""
        self._done += plays
        self("plays", self._done, self._total)


def output() -> Console:
    """Return a console for results. Without a terminal it is wider than every table, unless COLUMNS is set."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS
    return console


def plain(*lines: str) -> None:
    """Print lines of prose without colours or markup."""
    out = output()
    for line in lines:
        say(out, printable(line), highlight=False)


def say(console: Console, text: str, *, style: str | None = None, highlight: bool | None = None) -> None:
    """Print prose without markup, wrapped between words on a terminal or if COLUMNS is set.

    Words are never broken, so that paths and URLs can be copied.
    """
    if console.is_terminal or "COLUMNS" in os.environ:
        text = "\n".join(_wrapped(line, console.width) for line in text.split("\n"))
    console.print(text, style=style, soft_wrap=True, highlight=highlight, markup=False)


def below_bound(plays: int) -> str:
    """Return a note about plays that cost less than the clairvoyant bound."""
    cost = "costs" if plays == 1 else "cost"
    return f"note: {counted(plays, 'play')} {cost} less than the clairvoyant bound, so the bound is wrong there"


def _wrapped(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    """Return a text with control characters replaced, since names from a store may contain terminal commands."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def write_json(path: Path | None, value: object) -> None:
    """Write a value as JSON, if a path is given."""
    if path is not None:
        write_text(path, json.dumps(value, indent=1) + "\n")


def write_result(path: Path | None, command: str, value: Mapping[str, object]) -> None:
    """Write the result of a command as JSON, if a path is given."""
    write_json(path, {"schema": "kvabr.result/1", "command": command, **value})


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    *,
    left: Container[str] = (),
    fold: Container[str] = (),
    spare: Sequence[str] = (),
) -> FittingTable:
    """Return a compact table.

    Args:
        title: The title.
        columns: Names of the columns.
        rows: The cells, plain text.
        left: Columns aligned to the left.
        fold: Columns aligned to the left that wrap.
        spare: Columns to omit on a narrow terminal, the first one first.
    """
    made = FittingTable(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False)
    made.spare = spare
    for name in columns:
        text = name in left or name in fold
        made.add_column(name, justify="left" if text else "right", no_wrap=name not in fold, overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def human(size: int) -> str:
    """Return a number of bytes with three digits and a unit."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):  # noqa: B007 - used after the loop
        if value < 1000:
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def track_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return one dictionary per track, with the unrounded numbers of `track_table`."""
    elements = catalog.fp16_bytes // 2
    rows = []
    for track in catalog.tracks:
        quality = track.measured
        size, below = track.total_bytes, track
        while below.refines is not None:
            below = catalog.track(below.refines)
            size += below.total_bytes
        rows.append(
            {
                "track": track.name,
                "refines": track.refines,
                "bytes": track.total_bytes,
                "bits_per_element": 8 * size / elements,
                "ratio": catalog.fp16_bytes / size,
                "loss": track.total_loss,
                "behind": [
                    {"tokens": tail.tokens, "loss": tail.share * track.total_loss, "spread": tail.spread}
                    for tail in track.tails
                ],
                **{name: quality and getattr(quality, name) for name in ("kl", "kl8", "kl32", "dnll", "top1")},
                "decode_s": track.decode_s,
            }
        )
    return rows


def track_table(catalog: Catalog, title: str | None = None) -> Table:
    """Return a table of the tracks: size, ratio, measured quality, and decode time of a group."""
    layered = ["refines"] if any(track.refines is not None for track in catalog.tracks) else []
    rows = [
        (
            row["track"],
            *(row[name] or "" for name in layered),
            human(row["bytes"]),
            f"{row['bits_per_element']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['loss']:.5f}",
            *quality_cells(row),
            f"{1000 * row['decode_s']:.1f}",
        )
        for row in track_rows(catalog)
    ]
    names = ("track", *layered, "bytes", "bits/el", "ratio", "loss", "KL", "ΔNLL", "top-1", "ms/group")
    spare = ("ms/group", "ΔNLL", "top-1", "bytes", "refines", "KL")
    return table(title, names, rows, left=("track", "refines"), spare=spare)


def tail_table(catalog: Catalog) -> Table | None:
    """Return a table of the losses that remain after tails; None if they were not measured."""
    lengths = max((tuple(tail.tokens for tail in track.tails) for track in catalog.tracks), key=len)
    rows = []
    for track in catalog.tracks:
        cells = [
            f"{share_after_tail(track.tails, length) * track.total_loss:.5f}" if track.tails else "-"
            for length in lengths
        ]
        factors = [math.exp(tail.spread) for tail in track.tails if tail.spread]
        rows.append((track.name, f"{track.total_loss:.5f}", *cells, f"{max(factors):.1f}x" if factors else "-"))
    names = ("track", "none", *(f"{length} tokens" for length in lengths), "varies by")
    return table("loss after tokens that an engine computes", names, rows, left=("track",)) if lengths else None


def quality_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return KL, change of the negative log-likelihood, and top-1 agreement; ``-`` if not measured."""
    if row["kl"] is None:
        return "-", "-", "-"
    return f"{row['kl']:.5f}", f"{row['dnll']:+.5f}", f"{row['top1']:.3f}"


def mix_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return one dictionary per mixed cache, with the unrounded numbers of `mix_table`."""
    return [
        {
            "tracks": list(mix.tracks),
            "predicted": mix.predicted,
            "measured": mix.measured,
            "ratio": mix.predicted / mix.measured if mix.measured > 0 else None,
        }
        for mix in catalog.mixes
    ]


def mix_table(catalog: Catalog) -> Table:
    """Return a table of the mixed caches: predicted and measured loss."""
    rows = [
        (
            _in_brief(row["tracks"]),
            f"{row['predicted']:.5f}",
            f"{row['measured']:.5f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        )
        for row in mix_rows(catalog)
    ]
    title = "caches of several tracks: loss predicted and measured"
    return table(title, ("groups", "predicted", "measured", "ratio"), rows, fold=("groups",))


def _in_brief(tracks: list[str]) -> str:
    """Return runs of equal tracks in order or, if there are many, the number of groups per track."""
    runs = [(name, len(list(run))) for name, run in groupby(tracks)]
    if len(runs) <= 8:
        return ", ".join(f"{count} {name}" for name, count in runs)
    return "scattered: " + ", ".join(f"{count} {name}" for name, count in Counter(tracks).items())
