"""`kvabr lab` plays a whole matrix and explains which policy is better; `kvabr report` shows the result."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.types.errors import UsageError
from kvabr.types.words import counted

if TYPE_CHECKING:
    from kvabr_lab.matrix import LabMatrix
    from kvabr_lab.run import PlayedMatrix

_EPILOG = """\
examples:
  kvabr lab traces --policy all --load 0.03 0.1 0.3 --rtt 10 50 200 --starts 4 --out results
  kvabr lab traces --policy anytime ./mine.py:Mine --out results       plays only what is not in results
  kvabr lab matrix.toml --out results
  kvabr report results                                                 one page that shows it all

A matrix as a file (options on the command line override it; paths are relative to its folder):

  traces   = ["traces"]                    # files or folders; a folder's name is the family
  exclude  = ["grid"]                      # families to leave out
  policies = ["cheapfirst", "mpc", "./mine.py:Mine:caution=0.5"]
  deadlines = [1.0, 2.0]                   # seconds
  loads    = [0.03, 0.1, 0.3]              # fraction of FP16 that the mean rate carries; "own": not scaled
  rtts     = [10, 50, 200]                 # ms; "own": the trace's
  engines  = ["none", "2x", "2x:suffix"]   # 2x: the whole prompt takes two deadlines; 1500/s; h200-8b; asset
                                           # 2x@0.05: a second of its time costs 0.05 nats per token
  assets   = ["smollm2-8k", "my.asset"]
  starts   = 4                             # per trace; or per_family = 100: plays per family and cell
  [families]                               # instead of traces, to name the families yourself
  lte      = ["recorded/a.csv", "recorded/b"]

The folder keeps every play, keyed by digests of trace, catalog, policy, options and code. A second run plays only what
is new; after Ctrl-C the next run continues where this one stopped. A policy from a file is played again when the file,
or a module in its folder that it imports, changes.

Regret is compared play by play. Intervals are bootstraps over whole traces (95 %). Two policies cannot be told apart if
chance (random signs of the difference on each trace) produces a difference this large anywhere in the table in 5 % of
draws. Policies that share a place cannot be told from its first. At least six traces are needed to tell anything. `net
only` is regret against a clairvoyant without an engine. Regret splits into: too high (asked for more than came), too
low (asked for less than the link would have carried, or ended too early), waited (ended too late), order (the bytes in
place could have bought more), idle (round trips), wasted, decode, compute (the engine should have done more or less).
Infeasible plays, which not even the clairvoyant
could have made, are in none of these numbers; they have their own table.

A policy that spends 20 seconds of CPU on one play counts as stuck in a loop: the run ends and names the place.
"""

_REPORT_EPILOG = """\
examples:
  kvabr lab traces --policy all --load 0.1 0.3 --out results
  kvabr report results                          writes results/report.html
  kvabr report results --html page.html --worst 5

The page is self-contained: which policy beats which, and where the difference is not significant; regret and deadlines
met by family, deadline, load and round trip; the causes and the distribution of regret; and the worst plays of every
policy with their timelines. Traces and assets are read again from where `kvabr lab` found them. Plays that are missing,
or outdated by a change of code or policy, are played first.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = (
        "Play every combination of traces, deadlines, loads, round trips, engines, assets and policies, and compare "
        "the policies over the same plays."
    )
    parser.epilog = _EPILOG
    add_axes(parser)
    parser.add_argument(
        "-p",
        "--policy",
        nargs="+",
        metavar="NAME|FILE.py:CLASS",
        help="policies to compare, or `all`; give this option after the traces (default: the default policy)",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder that stores the plays")
    parser.add_argument("--html", type=Path, metavar="F", help="also write the page of `kvabr report`")
    parser.set_defaults(run=_lab)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Declare `kvabr report`."""
    parser.description = "Write one self-contained page for a folder of `kvabr lab`."
    parser.epilog = _REPORT_EPILOG
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that `kvabr lab --out` has written")
    parser.add_argument("--html", type=Path, metavar="F", help="page to write (default: report.html in the folder)")
    parser.add_argument("--worst", type=int, default=3, metavar="N", help="worst plays to show per policy (default: 3)")
    parser.add_argument(
        "-j", "--jobs", type=int, metavar="N", help="processes for missing plays (default: one per core)"
    )
    parser.set_defaults(run=_report)


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a matrix; `axes_of` reads them."""
    parser.add_argument(
        "source", nargs="+", type=Path, metavar="MATRIX.toml|TRACE", help="a matrix file, or trace files and folders"
    )
    axes = parser.add_argument_group("the matrix: every combination of")
    axes.add_argument("-d", "--deadline", nargs="+", type=float, metavar="S", help="TTFT deadlines (default: 2)")
    axes.add_argument(
        "--load",
        nargs="+",
        metavar="X",
        help="scale traces so that the mean rate carries this fraction of the FP16 cache within the deadline; own: do "
        "not scale (default: 0.03 0.1 0.3 1 3 10 30)",
    )
    axes.add_argument(
        "--rtt", nargs="+", metavar="MS", help="round trips, ms; own: the trace's (default: own, otherwise 40)"
    )
    axes.add_argument(
        "--engine",
        nargs="+",
        metavar="E",
        help="engines: none, asset, 2x (times the deadline), 1500/s, h200-8b, 2x@0.05:suffix (default: none; asset "
        "for prompts of passages)",
    )
    axes.add_argument(
        "--asset",
        nargs="+",
        metavar="A",
        help="assets or catalogs; a folder of passages makes one prompt (default: the shipped catalog of SmolLM2)",
    )
    axes.add_argument("--exclude", nargs="+", metavar="FAMILY", help="trace families to leave out")
    axes.add_argument("--starts", type=int, metavar="N", help="start points of each trace (default: 1)")
    axes.add_argument("--per-family", type=int, metavar="N", help="plays per family and cell, spread over its traces")
    axes.add_argument("--seed", type=int, metavar="K", help="seed of the start points (default: 0)")
    axes.add_argument("--estimator", help="bandwidth estimator for all policies (default: each policy's own)")
    axes.add_argument("--decode-scale", type=float, metavar="X", help="multiply the catalog's decode times by X")
    axes.add_argument("--decoders", type=int, metavar="N", help="decoder threads (default: 1)")
    what = "price of a second of TTFT, nats per token (default: 0.001; 0: only the deadline counts)"
    axes.add_argument("--time-price", type=float, metavar="NATS", help=what)
    what = "tokens of a question after the cache, which the engine always computes (default: 0)"
    axes.add_argument("--question", type=int, metavar="N", help=what)
    what = (
        "maximum tokens at the end of the cache that the engine computes with the question instead of fetching them "
        "(default: 512; 0: none)"
    )
    axes.add_argument("--tail", type=int, metavar="N", help=what)
    axes.add_argument("--no-slow-start", action="store_true", help="simulate warm connections")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="processes (default: one per core)")


def axes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the axes in the matrix file, if there is one; options override them."""
    from kvabr_lab.matrix import read_toml

    files = [path for path in args.source if path.suffix == ".toml"]
    if files and len(args.source) > 1:
        raise UsageError("give either one matrix file, which names its own traces, or traces")
    axes: dict[str, Any] = read_toml(files[0]) if files else {"traces": [str(path) for path in args.source]}
    given = {
        "deadlines": args.deadline, "loads": args.load and [_or_own(item) for item in args.load],
        "rtts": args.rtt and [_or_own(item) for item in args.rtt], "engines": args.engine, "assets": args.asset,
        "exclude": args.exclude, "starts": args.starts, "per_family": args.per_family, "seed": args.seed,
        "estimator": args.estimator,
        "decode_scale": args.decode_scale, "decoders": args.decoders, "time_price": args.time_price,
        "question": args.question, "tail": args.tail, "slow_start": False if args.no_slow_start else None,
        "policies": getattr(args, "policy", None),
    }  # fmt: skip
    return axes | {name: value for name, value in given.items() if value is not None}


def _play(
    matrix: LabMatrix, folder: Path, jobs: int | None, axes: dict[str, Any] | None = None
) -> tuple[PlayedMatrix, dict[str, Any]]:
    from kvabr.cli.display import PlayBar
    from kvabr_lab import results_folder, run, totals

    with kept_on_interrupt(folder), results_folder.PlayStore(folder) as store, PlayBar() as bar:
        if axes is not None:
            results_folder.save_axes(folder, axes)
        played = run.run(matrix, store, jobs=jobs, progress=bar.advance, planned=bar.planned)
    result = totals.result(matrix, played)
    results_folder.save_result(folder, result)
    return played, result


def _lab(args: argparse.Namespace) -> int:
    from rich.console import Console

    from kvabr.cli.display import below_bound, output, say
    from kvabr_lab import tables
    from kvabr_lab.matrix import build
    from kvabr_lab.totals import cuts

    axes = axes_of(args)
    matrix = build(axes)
    for note in (note for offer in matrix.offers for note in offer.notes):
        say(Console(stderr=True), f"note: {note}", style="yellow")
    played, result = _play(matrix, args.out, args.jobs, axes)
    console = output()
    console.print(tables.ranking_table(result))
    console.print(tables.deadline_table(result))
    ranked = [row["policy"] for row in result["comparison"]["ranking"]]
    for cut in cuts(played, ranked) if ranked else ():
        for table in tables.cut_tables(cut, ranked, console.width):
            console.print(table)
    for table in tables.causes_tables(result, console.width):
        console.print(table)
    if (apart := tables.apart_table(result)) is not None:
        console.print(apart)
    say(console, tables.verdict(result))
    if below := sum(line["below_bound"] for line in result["summary"].values()):
        say(console, below_bound(below), style="yellow")
    kept = matrix.plays - played.fresh
    say(console, f"{counted(matrix.plays, 'play')}, {kept:,} of them from earlier runs; results in {args.out}")
    if args.html is not None:
        from kvabr_lab.report import write_report

        write_report(args.html, matrix, played, result)
        say(console, f"page: {args.html.resolve()}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from kvabr.cli.display import output, say
    from kvabr_lab import results_folder, tables
    from kvabr_lab.report import write_report

    if not 0 <= args.worst <= 100:
        raise UsageError(f"--worst {args.worst}: must be 0 to 100")
    matrix = results_folder.load_matrix(args.folder)
    path = args.html or args.folder / "report.html"
    played, result = _play(matrix, args.folder, args.jobs)
    write_report(path, matrix, played, result, per_policy=args.worst)
    out = output()
    if played.fresh:
        was = "was" if played.fresh == 1 else "were"
        say(out, f"{counted(played.fresh, 'play')} {was} missing or outdated and {was} played first")
    say(out, tables.verdict(result))
    say(out, f"page: {path.resolve()}")
    return 0


def _or_own(text: str) -> float | str:
    if text == "own":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} must be a number or `own`") from error


@contextmanager
def kept_on_interrupt(folder: Path) -> Iterator[None]:
    """On Ctrl-C, print that finished plays are kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        note = f"finished plays are stored in {folder}; the same command continues from there"
        raise KeyboardInterrupt(note) from error
