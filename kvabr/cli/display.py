"""What commands show and write: progress bars, tables, JSON files; tables of a catalog also as plain JSON values."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import threading
import time
from collections import Counter, deque
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
from kvabr.types.catalog import Catalog, Track
from kvabr.types.tails import share_behind
from kvabr.types.words import counted

_FIRST_S, _EVERY_S = 2.0, 10.0
"""Seconds until the first line of progress where there is no terminal, and from each line to the next."""
_FILE_COLUMNS = 240
_RECENT = 64
"""Reports of a stage that the time left is estimated from: what an earlier run has done already takes no time."""


class _Bar:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere. A context manager."""

    def __init__(self, *columns: progress.ProgressColumn, console: Console | None = None) -> None:
        self._reports: dict[str, deque[tuple[float, float]]] = {}
        """The last reports of each stage: when, and how many steps were done."""
        self._due_s = time.monotonic() + _FIRST_S
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            *columns,
            console=console or Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._said = ""
        """What the last line was about."""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _left(self, what: str, done: float, total: float | None) -> str:
        """Take a report, and return in words how long the rest of the stage takes; empty if that is not known."""
        now, reports = time.monotonic(), self._reports.setdefault(what, deque(maxlen=_RECENT))
        reports.append((now, done))
        began_s, before = reports[0]
        if not total or not before < done < total:
            return ""
        return _time_left((now - began_s) / (done - before) * (total - done))

    def _line(self, what: str, done: float, total: float | None, left: str, *, news: bool = False) -> None:
        """Print a line if there is no bar and it is time for one; with ``news`` it is if the work is another one."""
        due = time.monotonic() >= self._due_s or (news and bool(self._said) and what != self._said)
        if self._bar.disable and due:
            self._said = what
            self._due_s = time.monotonic() + _EVERY_S
            of = f" of {total:g}" if total else ""
            print(f"{what}: {done:g}{of}{left and ', ' + left}", file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Say on standard error what is being waited for; off a terminal by one line, if it takes long.

    Yields a function that changes what is said.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return
    said, over = [what], threading.Event()

    def tell() -> None:
        pause_s, told = _FIRST_S, ""
        while not over.wait(pause_s):
            if said[-1] != told:
                told = said[-1]
                print(f"{told} ...", file=sys.stderr, flush=True)
            pause_s = _EVERY_S

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield said.append
    finally:
        over.set()
        thread.join()


class StageBar(_Bar):
    """Progress of work in stages."""

    def __init__(
        self, stages: Mapping[str, str], console: Console | None = None, *, shares: Mapping[str, float] | None = None
    ) -> None:
        """Take the stages.

        Args:
            stages: what to call each of them on the screen, by name.
            console: where to draw; None: standard error.
            shares: what share of the time each of them takes, roughly, by name, in the order in which they come. They
                are then numbered, and the time left is that of them all; None: it is that of a stage.
        """
        super().__init__(progress.TimeElapsedColumn(), progress.TextColumn("{task.fields[left]}"), console=console)
        self._stages, self._shares = stages, shares or {}
        self._tasks: dict[str, progress.TaskID] = {}
        self._began_s = time.monotonic()
        """When the first of the numbered stages began."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that ``done`` steps of a stage's ``total`` are done."""
        title, numbered = self._stages.get(stage, stage), list(self._shares)
        if stage in self._shares:
            title = f"step {numbered.index(stage) + 1} of {len(numbered)}: {title}"
            left = self._whole_left(stage, done / total if total else 1.0)
        else:
            left = self._left(title, done, total)
            self._began_s = time.monotonic()
        for task in self._tasks.values():
            self._bar.update(task, left="")
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(title, total=total, left="")
        self._bar.update(self._tasks[stage], completed=done, total=total, left=left)
        self._line(title, done, total, left, news=stage in self._shares)

    def _whole_left(self, stage: str, part: float) -> str:
        """Return in words how long all stages take yet, of which a ``part`` of this one is done."""
        shares = list(self._shares.items())
        place = list(self._shares).index(stage)
        passed = sum(share for _, share in shares[:place]) + part * shares[place][1]
        rest = sum(share for _, share in shares) - passed
        return _time_left((time.monotonic() - self._began_s) * rest / passed) if passed > 0 else ""


class PlayBar(_Bar):
    """Progress of many plays."""

    def __init__(self, what: str = "playing", total: int | None = None) -> None:
        super().__init__(progress.TextColumn("plays"), progress.TimeRemainingColumn())
        self._task = self._bar.add_task(what, total=total)
        self._line(what, 0, total, self._left(what, 0, total))

    def planned(self, fresh: int, total: int) -> None:
        """Report how many plays there are, and how many of them are not cached."""
        self._bar.update(self._task, total=total, completed=total - fresh)

    def say(self, what: str) -> None:
        """Show what is being done now."""
        self._bar.update(self._task, description=what)

    def advance(self, plays: int) -> None:
        """Report that this many more plays are done."""
        self._bar.advance(self._task, plays)
        task = self._bar.tasks[self._task]
        left = self._left(task.description, task.completed, task.total)
        self._line(task.description, task.completed, task.total, left)


def _time_left(seconds: float) -> str:
    """Return how long something takes yet; empty if it is hardly anything."""
    return f"about {seconds:.0f} s left" if seconds >= 1 else ""


def output() -> Console:
    """Return a console for results; off a terminal it is wider than every table, so that a file has all of them.

    The variable COLUMNS goes before.
    """
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS
    return console


def plain(*lines: str) -> None:
    """Print lines of prose, neither coloured nor parsed as markup."""
    out = output()
    for line in lines:
        say(out, printable(line), highlight=False)


def say(console: Console, text: str, *, style: str | None = None, highlight: bool | None = None) -> None:
    """Print prose, wrapped between words where somebody reads it: on a terminal, or in COLUMNS columns.

    Nothing is parsed as markup, and no word is broken: paths and URLs can be copied. Files and pipes get whole lines.
    """
    if console.is_terminal or "COLUMNS" in os.environ:
        text = "\n".join(_wrapped(line, console.width) for line in text.split("\n"))
    console.print(text, style=style, soft_wrap=True, highlight=highlight, markup=False)


def below_bound(plays: int) -> str:
    """Return a note on plays that the clairvoyant bound should not have allowed."""
    cost = "costs" if plays == 1 else "cost"
    return f"note: {counted(plays, 'play')} {cost} less than the clairvoyant bound, which is wrong there"


def _wrapped(line: str, width: int) -> str:
    """Return a line with breaks between words, those after the first indented as the first one."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    """Return a text without control characters, which names from a store might send to the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def write_json(path: Path | None, value: object) -> None:
    """Write a value as JSON, if there is a path."""
    if path is not None:
        write_text(path, json.dumps(value, indent=1) + "\n")


def write_result(path: Path | None, command: str, value: Mapping[str, object]) -> None:
    """Write the result of a command as JSON, if there is a path."""
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
    """Return a table with few rules, so that ten columns fit a narrow terminal.

    Args:
        title: The title.
        columns: Names of the columns.
        rows: The cells, plain text.
        left: Columns that are aligned to the left.
        fold: Columns that are aligned to the left, and wrap.
        spare: Columns that are left out on a terminal that is too narrow, the first one first.
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
    """Return one dictionary per track: what `track_table` shows, unrounded."""
    elements = catalog.fp16_bytes // 2
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
                "loss": track.total_loss,
                "behind": [
                    {"tokens": tail.tokens, "loss": tail.share * track.total_loss, "spread": tail.spread}
                    for tail in track.tails
                ],
                "kl": None if quality is None else quality.kl,
                "kl8": None if quality is None else quality.kl8,
                "kl32": None if quality is None else quality.kl32,
                "dnll": None if quality is None else quality.dnll,
                "top1": None if quality is None else quality.top1,
                "decode_s": track.decode_s,
            }
        )
    return rows


def track_table(catalog: Catalog, title: str | None = None) -> Table:
    """Return the tracks: size, ratio, measured quality, and the time to decode a group."""
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
    """Return what each track loses behind tails, and by which factor it varies; None if nothing was measured."""
    lengths = max((tuple(tail.tokens for tail in track.tails) for track in catalog.tracks), key=len)
    rows = []
    for track in catalog.tracks:
        cells = [
            f"{share_behind(track.tails, length) * track.total_loss:.5f}" if track.tails else "-" for length in lengths
        ]
        factors = [math.exp(tail.spread) for tail in track.tails if tail.spread]
        rows.append((track.name, f"{track.total_loss:.5f}", *cells, f"{max(factors):.1f}x" if factors else "-"))
    names = ("track", "none", *(f"{length} tokens" for length in lengths), "varies by")
    return table("loss behind tokens that an engine computes", names, rows, left=("track",)) if lengths else None


def quality_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return KL, change of the NLL, and top-1 agreement, as far as they were measured."""
    if row["kl"] is None:
        return "-", "-", "-"
    return f"{row['kl']:.5f}", f"{row['dnll']:+.5f}", f"{row['top1']:.3f}"


def group_tables(catalog: Catalog) -> tuple[Table, Table]:
    """Return the size and the expected loss of every group on every track."""
    names = ("group", "tokens", *(track.name for track in catalog.tracks))
    titles = catalog.titles or tuple(map(str, range(catalog.groups)))
    heads = [(title, str(catalog.group_tokens(group))) for group, title in enumerate(titles)]
    sizes = [(*head, *(human(track.bytes[i]) for track in catalog.tracks)) for i, head in enumerate(heads)]
    losses = [(*head, *(f"{1000 * track.loss[i]:.3f}" for track in catalog.tracks)) for i, head in enumerate(heads)]
    return (
        table("size of each group", names, sizes),
        table("expected loss of each group, millinats per token", names, losses),
    )


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


def mix_table(catalog: Catalog) -> Table:
    """Return the mixed caches: the loss that the catalog predicts, and the loss that the model measured."""
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
    return "scattered: " + ", ".join(f"{count} {name}" for name, count in Counter(tracks).items())
