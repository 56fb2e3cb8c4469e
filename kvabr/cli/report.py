"""`kvabr report`: one page for a folder of `kvabr lab`."""

from __future__ import annotations

import argparse
from pathlib import Path

_EPILOG = """\
examples:
  kvabr lab traces --policy all --load 0.1 0.3 --out results
  kvabr report results                          writes results/report.html
  kvabr report results --html page.html --worst 5

The page is self-contained: who wins against whom and where that cannot be told; regret and deadlines met by family,
deadline, load and round trip; the causes and the distribution of regret; and the worst plays of every policy with their
timelines. Traces and assets are read again from where `kvabr lab` found them. Plays that are missing, or outdated by a
change of code or policy, are played first.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Write one self-contained page for a folder of `kvabr lab`."
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder that `kvabr lab --out` made")
    parser.add_argument("--html", type=Path, metavar="F", help="the page (default: report.html in the folder)")
    parser.add_argument("--worst", type=int, default=3, metavar="N", help="worst plays to show per policy (default: 3)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes for missing plays (default: one per core)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the folder, play what is missing, write the page."""
    from kvabr.cli.display import PlayBar
    from kvabr.cli.lab import kept_on_interrupt
    from kvabr.lab import results_folder, tables, totals
    from kvabr.lab.report import write_report
    from kvabr.lab.results_folder import PlayStore
    from kvabr.lab.run import run as play
    from kvabr.types.errors import UsageError

    if not 0 <= args.worst <= 100:
        raise UsageError(f"--worst {args.worst}: give 0 to 100")
    matrix = results_folder.load_matrix(args.folder)
    path = args.html or args.folder / "report.html"
    with kept_on_interrupt(args.folder), PlayStore(args.folder) as store, PlayBar() as bar:
        played = play(matrix, store, jobs=args.jobs, progress=bar.advance, planned=bar.planned)
    result = totals.result(matrix, played)
    results_folder.save_result(args.folder, result)
    write_report(path, matrix, played, result, per_policy=args.worst)
    if played.fresh:
        print(f"{played.fresh:,} plays were missing or outdated and were played first")
    print(tables.verdict(result))
    print(f"page: {path.resolve()}")
    return 0
