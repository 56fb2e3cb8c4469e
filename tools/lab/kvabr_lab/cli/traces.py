"""`kvabr traces`: inspect network traces, synthesise them, and convert them to one format."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from kvabr.replay.readers import BYTES_PER_SECOND, FORMATS, TIME_UNITS, Columns, find, native, read, sniff
from kvabr.replay.readers.numerals import Mark
from kvabr.replay.trace import BYTES_PER_MBIT, Trace, three
from kvabr.store.files import write_text
from kvabr.types.errors import AssetError, TraceError, UsageError
from kvabr.types.words import counted
from kvabr_lab.day.synth import KINDS, Shape, synthesise

if TYPE_CHECKING:
    from rich.table import Table

    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - its only name

SCHEMA = "kvabr.traces/1"
_BARS = "▁▂▃▄▅▆▇█"
_Action = Callable[[argparse.Namespace], int]
_WIDE = 110
_SHAPE = (
    ("--scatter", "scatter", "standard deviation of the log rate (all but constant)"),
    ("--dwell", "dwell_s", "mean time in a state, s (markov, outages)"),
    ("--outage-every", "outage_every_s", "mean time between outages, s (outages)"),
    ("--outage", "outage_s", "mean length of an outage, s (outages)"),
    ("--ramp", "ramp_s", "time until the plateau, s (slow-start)"),
    ("--period", "period_s", "length of a cycle, s (diurnal)"),
    ("--depth", "depth", "swing around the mean, 0 to below 1 (diurnal)"),
    ("--cross", "cross", "rate of other flows, as a share of the port, 0 to 0.95 (port)"),
    ("--flow", "flow_s", "mean duration of a flow that has the port to itself, s (port)"),
    ("--fan-in", "fan_in", "senders of an incast, 0 for none (port)"),
    ("--incast-every", "incast_every_s", "mean time between incasts, s (port)"),
    ("--incast", "incast_s", "mean length of an incast, s (port)"),
    ("--pause-every", "pause_every_s", "mean time between pauses, s (port)"),
    ("--pause", "pause_s", "mean length of a pause, s (port)"),
    ("--burst", "burst", "rate of a burst over the limit (bucket)"),
    ("--burst-every", "burst_every_s", "mean time between bursts, s (bucket)"),
    ("--burst-length", "burst_s", "mean length of a burst, s (bucket)"),
)

_INFO_EPILOG = """\
examples:
  kvabr traces info traces                              every trace of a folder
  kvabr traces info traces --families                   one line per data set
  kvabr traces info log.csv --rate-column dl --unit kbit/s --time-column at --time-unit ms
  kvabr traces info interface.csv --counter rx_bytes

A trace is read as: mahimahi (one millisecond a line), sabre or iperf3 (JSON), the text of iperf, the CSV of iperf 2,
Pensieve (`seconds Mbit/s` a line), NYU-METS (`value,unit` a line), CSV with a header, or kvabr's own CSV. The guide
"Replaying network traces" lists the names of columns and units that are known; whatever is unclear is a question, and
an option answers it. Of several files, those that cannot be read are reported, and the exit status is 1. Statistics are
weighted by time, at the trace's own resolution: mahimahi's milliseconds without a packet count as zero.
"""
_IMPORT_EPILOG = """\
examples:
  kvabr traces import ~/data/norway_bus_1 --out mine
  kvabr traces import iperf.csv --rate-column upload_mbps --out mine

Each trace becomes FAMILY/NAME.csv in the folder, in kvabr's own lossless format: plain CSV (time_s,bits_per_second),
which a spreadsheet opens. Mind the licence of what you import: some data sets may not be redistributed.
"""
_SYNTH_EPILOG = """\
examples:
  kvabr traces synth constant --mean-mbps 50 --duration 60 --out flat.csv
  kvabr traces synth outages --mean-mbps 400 --duration 120 --seed 7 --outage-every 15 --outage 3 --out mmwave.csv

The same arguments make the same file, byte for byte.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Inspect, import or synthesise network traces."
    kinds = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    _add_info(kinds)
    _add_import(kinds)
    _add_synth(kinds)


def _add_info(kinds: _Actions) -> None:
    parser = _add_reading(kinds, "info", _info, "show what traces hold", _INFO_EPILOG)
    parser.add_argument("--families", action="store_true", help="one line per data set instead of one per trace")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the numbers, schema {SCHEMA}")


def _add_import(kinds: _Actions) -> None:
    parser = _add_reading(kinds, "import", _import, "convert traces to kvabr's format", _IMPORT_EPILOG)
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="DIR", help="folder to write to (created if missing)"
    )


def _add_synth(kinds: _Actions) -> None:
    parser = _action(kinds, "synth", _synth, "make a trace", _SYNTH_EPILOG)
    shape = Shape()
    parser.add_argument("kind", choices=KINDS, help="model of the rate")
    parser.add_argument("--mean-mbps", type=float, required=True, metavar="M", help="mean rate, Mbit/s")
    parser.add_argument("--duration", type=float, required=True, metavar="S", help="length, seconds")
    parser.add_argument("--step", type=float, default=1.0, metavar="S", help="length of a step, seconds (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="seed of the random numbers (default: 0)")
    parser.add_argument("--rtt", type=float, metavar="MS", help="round-trip time to record, ms")
    parser.add_argument("--name", metavar="FAMILY/NAME", help="name of the trace (default: synth/KIND-SEED)")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="file to write")
    tune = parser.add_argument_group("how it varies")
    for option, field, what in _SHAPE:
        default = getattr(shape, field)
        tune.add_argument(
            option, dest=field, type=float, default=default, metavar="X", help=f"{what} (default: {default:g})"
        )


def _action(kinds: _Actions, name: str, action: _Action, what: str, epilog: str) -> argparse.ArgumentParser:
    about = f"{what[0].upper()}{what[1:]}."
    style = argparse.RawDescriptionHelpFormatter
    parser = kinds.add_parser(name, help=what, description=about, epilog=epilog, formatter_class=style)
    parser.set_defaults(run=action)
    return parser


def _add_reading(kinds: _Actions, name: str, action: _Action, what: str, epilog: str) -> argparse.ArgumentParser:
    parser = _action(kinds, name, action, what, epilog)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="trace files, or folders of them")
    group = parser.add_argument_group("how to read files of unclear format")
    group.add_argument("--format", choices=FORMATS, help="the format (default: detected)")
    group.add_argument("--time-column", metavar="NAME", help="CSV: column with the start time of a row")
    group.add_argument("--end-column", metavar="NAME", help="CSV: column with the end time of a row")
    group.add_argument("--rate-column", metavar="NAME", help="CSV: column with the rate")
    group.add_argument(
        "--counter", metavar="NAME", help="CSV: column with a running total instead of a rate; its differences are used"
    )
    units, times = ", ".join(BYTES_PER_SECOND), ", ".join(TIME_UNITS)
    group.add_argument(
        "--unit", metavar="UNIT", help=f"CSV and Pensieve: unit of the rate, or of the counter's ({units})"
    )
    group.add_argument("--time-unit", metavar="UNIT", help=f"CSV and Pensieve: unit of numeric times ({times})")
    group.add_argument("--decimal", choices=get_args(Mark), help="CSV: decimal mark of numbers")
    group.add_argument("--step", type=float, metavar="S", help="CSV without times: each row lasts S seconds")
    return parser


def _read(args: argparse.Namespace, failed: list[TraceError]) -> Iterator[tuple[Path, str, Trace]]:
    said = Columns(
        time=args.time_column,
        end=args.end_column,
        rate=args.rate_column,
        counter=args.counter,
        unit=args.unit,
        time_unit=args.time_unit,
        decimal=args.decimal,
        step_s=args.step,
    )
    if args.format not in (None, "csv") and (said.of_csv or (said != Columns() and args.format != "pensieve")):
        raise UsageError(f"--format {args.format} has no columns; leave out the options for CSV")
    paths = find(args.paths)
    for path in paths:
        try:
            chosen = args.format or ("csv" if said.of_csv else sniff(path)) or "?"
            traces = read(path, format_name=args.format, columns=said)
        except TraceError as error:
            if len(paths) == 1:
                raise
            failed.append(error)
            from kvabr.cli.display import printable

            print(f"kvabr: {printable(str(error))}", file=sys.stderr)
            continue
        for trace in traces:
            yield path, chosen, trace


def _status(failed: Sequence[TraceError]) -> int:
    if failed:
        print(f"kvabr: {counted(len(failed), 'file')} could not be read, see above", file=sys.stderr)
    return 1 if failed else 0


def _info(args: argparse.Namespace) -> int:
    from kvabr.cli.display import output, write_json

    console = output()
    cells = 24 if console.width >= _WIDE else 12
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    failed: list[TraceError] = []
    for path, name, trace in _read(args, failed):
        rows.append({"file": str(path), "format": name, **describe(trace)})
        lines.append(sparkline(trace, cells))
    if rows:
        console.print(_family_table(rows) if args.families else _trace_table(rows, lines, wide=console.width >= _WIDE))
    write_json(args.json, {"schema": SCHEMA, "traces": rows})
    return _status(failed)


def _import(args: argparse.Namespace) -> int:
    out: dict[Path, str] = {}
    count = 0
    failed: list[TraceError] = []
    for path, name, trace in _read(args, failed):
        target = args.out.joinpath(*(re.sub(r"[^\w.+=#@-]", "_", part) for part in trace.name.split("/")))
        target = target.with_name(target.name + ".csv")
        if target in out:
            raise UsageError(
                f"{path}: would overwrite {target}, made from {out[target]}; import it into another folder"
            )
        out[target] = str(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AssetError(f"{target.parent}: cannot be created ({error.strerror})") from error
        write_text(target, dumps(trace, note=f"imported from {path.name} ({name})"))
        count += 1
    print(f"{count} trace{'s' if count != 1 else ''} in {args.out}")
    return _status(failed)


def _synth(args: argparse.Namespace) -> int:
    shape = Shape(**{field: getattr(args, field) for _, field, _ in _SHAPE})
    trace = synthesise(
        args.kind,
        mean_mbps=args.mean_mbps,
        duration_s=args.duration,
        step_s=args.step,
        seed=args.seed,
        rtt_s=None if args.rtt is None else args.rtt / 1000,
        shape=shape,
        name=args.name,
    )
    write_text(args.out, dumps(trace, note=_recipe(args)))
    print(f"{args.out}: {args.kind}, {trace.mean_rate / BYTES_PER_MBIT:.2f} Mbit/s over {trace.duration_s:g} s")
    return 0


def _recipe(args: argparse.Namespace) -> str:
    words = ["kvabr traces synth", args.kind, f"--mean-mbps {_short(args.mean_mbps)}"]
    words += [f"--duration {_short(args.duration)}", f"--step {_short(args.step)}", f"--seed {args.seed}"]
    if args.rtt is not None:
        words.append(f"--rtt {_short(args.rtt)}")
    if args.name is not None:
        words.append(f"--name {shlex.quote(args.name)}")
    plain = Shape()
    words += [
        f"{option} {_short(getattr(args, field))}"
        for option, field, _ in _SHAPE
        if getattr(args, field) != getattr(plain, field)
    ]
    return " ".join(words)


def _short(value: float) -> str:
    return f"{value:.15g}"


def _trace_table(rows: Sequence[dict[str, Any]], lines: Sequence[str], *, wide: bool) -> Table:
    from kvabr.cli.display import table

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "s": lambda row: three(row["duration_s"]),
        "mean": lambda row: three(row["mean_mbps"]),
        "CV": lambda row: f"{row['cv']:.2f}",
        "p5": lambda row: three(row["p5_mbps"]),
        "max": lambda row: three(row["max_mbps"]),
        "zero": lambda row: f"{row['zero_share']:.0%}",
    }
    if wide:
        columns = {"format": lambda row: row["format"], "min": lambda row: three(row["min_mbps"]), **columns}
        columns["RTT ms"] = lambda row: "" if row["rtt_s"] is None else three(row["rtt_s"] * 1000)
    cells = [
        (row["name"], *(show(row) for show in columns.values()), line) for row, line in zip(rows, lines, strict=True)
    ]
    names, spare = ("name", *columns, "rate over time"), ("rate over time", "max", "p5", "zero", "CV")
    return table("traces (rates in Mbit/s)", names, cells, fold=("name",), spare=spare)


def _family_table(rows: Sequence[dict[str, Any]]) -> Table:
    from kvabr.cli.display import table

    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    cells = []
    for family, members in sorted(families.items()):
        total = sum(row["duration_s"] for row in members)
        means = [row["mean_mbps"] for row in members]
        mean = sum(row["mean_mbps"] * row["duration_s"] for row in members) / total
        numbers = (median(row["duration_s"] for row in members), total, mean, min(means), max(means))
        cells.append(
            (
                family,
                " ".join(sorted({row["format"] for row in members})),
                str(len({row["file"] for row in members})),
                str(len(members)),
                *map(three, numbers),
                f"{sum(row['zero_share'] * row['duration_s'] for row in members) / total:.0%}",
            )
        )
    names = ("family", "format", "files", "traces", "median s", "total s", "mean", "lowest", "highest", "zero")
    return table(
        "families (rates in Mbit/s, weighted by time)",
        names,
        cells,
        fold=("family",),
        spare=("format", "files", "median s", "zero", "lowest", "highest"),
    )


def describe(trace: Trace) -> dict[str, Any]:
    """Return statistics of a trace as plain JSON values: rates in Mbit/s, all weighted by time.

    ``cv`` is standard deviation over mean, ``p5_mbps`` the rate that the link does not reach for 5 % of the time,
    ``zero_share`` the fraction of time at rate zero.
    """
    parts = [(rate / BYTES_PER_MBIT, end - start) for start, end, rate in trace.segments()]
    mean = trace.mean_rate / BYTES_PER_MBIT
    variance = math.fsum(length * (rate - mean) ** 2 for rate, length in parts) / trace.duration_s
    return {
        "name": trace.name,
        "family": trace.family,
        "duration_s": trace.duration_s,
        "segments": len(parts),
        "mean_mbps": mean,
        "cv": math.sqrt(variance) / mean,
        "min_mbps": min(trace.rates) / BYTES_PER_MBIT,
        "p5_mbps": _quantile(parts, 0.05),
        "max_mbps": max(trace.rates) / BYTES_PER_MBIT,
        "zero_share": math.fsum(length for rate, length in parts if rate == 0) / trace.duration_s,
        "rtt_s": trace.rtt_s,
    }


def sparkline(trace: Trace, cells: int = 24) -> str:
    """Return the rate over time as a row of bars; each is the mean over an equal part of the time, blank for zero."""
    step = trace.duration_s / cells
    carried = [0.0] * cells
    for start, end, rate in trace.segments():
        cell = min(int(start / step), cells - 1)
        while start < end:
            edge = end if cell == cells - 1 else min(end, (cell + 1) * step)
            carried[cell] += max(edge - start, 0.0) * rate
            if edge >= end:
                break
            start, cell = edge, cell + 1  # noqa: PLW2901  # walks through the cells that the segment covers
    top = max(carried)
    return "".join(" " if part == 0 else _BARS[min(int(part / top * len(_BARS)), len(_BARS) - 1)] for part in carried)


def _quantile(parts: list[tuple[float, float]], share: float) -> float:
    """Return the lowest rate that is not exceeded for ``share`` of the time; ``parts`` are (rate, length)."""
    rest = share * math.fsum(length for _, length in parts)
    for rate, length in sorted(parts):
        rest -= length
        if rest <= 0:
            return rate
    return max(rate for rate, _ in parts)


def dumps(trace: Trace, note: str = "") -> str:
    """Return the trace as text.

    Raises:
        TraceError: The trace's name or family would be read back differently.
    """
    for what, name in (("name", trace.name), ("family", trace.family)):
        if not native.is_plain(name):
            raise TraceError(f"the {what} {name[:40]!r} must be a plain name, such as lte/walk")
    head = [native.MAGIC, f"# name: {trace.name}", f"# family: {trace.family}"]
    if trace.rtt_s is not None:
        head.append(f"# rtt_s: {_decimal(trace.rtt_s)}")
    if note:
        head.append(f"# note: {' '.join(note.split())}")
    rows = [f"{_decimal(t)},{_decimal(rate * 8)}" for t, rate in zip(trace.times, trace.rates, strict=True)]
    return "\n".join([*head, native.COLUMNS, *rows, f"{_decimal(trace.duration_s)},end", ""])


def _decimal(value: float) -> str:
    """Return the shortest decimal that is read back as ``value``."""
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
