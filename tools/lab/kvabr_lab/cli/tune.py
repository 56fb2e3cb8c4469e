"""`kvabr tune`: searches the parameters that a policy declares, and reports the gain on links outside the search."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr_lab.cli.lab import add_axes, axes_of, kept_on_interrupt

if TYPE_CHECKING:
    from rich.table import Table

    from kvabr_lab.tune import Tuned

SCHEMA = "kvabr.tune/1"

_EPILOG = """\
examples:
  kvabr tune ./mine.py:Mine traces --load 0.1 0.3 --out results
  kvabr tune ./mine.py:Mine matrix.toml --points 32 --rounds 3 --out results --json tuned.json

A policy declares its parameters, and takes them as keyword arguments:

  from kvabr.types.parameters import Parameter

  class Mine(Policy):
      parameters = {"caution": Parameter(0.2, 1.0, 0.7), "reach": Parameter(0.01, 1.0, 0.1, log=True)}

      def __init__(self, *, caution: float = 0.7, reach: float = 0.1) -> None:
          ...

Candidates are compared by mean regret; every trace family counts the same. Each family is held out once: the search
chooses without it, and the choice is then played over it. The mean of these is the held-out score, the one to trust. If
its gain over the defaults cannot be told from zero (95 %, traces and families resampled), tuning won nothing and says
so. `kvabr lab` and `kvabr tune` share their folders: neither repeats the other's plays.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Search for the best parameters of a policy, holding out one trace family at a time."
    parser.epilog = _EPILOG
    parser.add_argument("tuned", metavar="NAME|FILE.py:CLASS", help="policy to tune")
    add_axes(parser)
    search = parser.add_argument_group("the search")
    search.add_argument("--points", type=int, default=16, metavar="N", help="points of the first round (default: 16)")
    search.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="local rounds after the first round (default: 2)"
    )
    search.add_argument("--near", type=int, default=4, metavar="N", help="points per local round and fold (default: 4)")
    search.add_argument("--search-seed", type=int, default=0, metavar="K", help="seed of the search (default: 0)")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder that stores the plays")
    parser.add_argument("--json", type=Path, metavar="F", help="write the result as JSON, schema kvabr.tune/1")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune the policy and print the result."""
    from kvabr.cli.display import PlayBar, output, say, write_json
    from kvabr_lab.matrix import build
    from kvabr_lab.results_folder import PlayStore
    from kvabr_lab.tune import Search, tune

    matrix = build(axes_of(args) | {"policies": [args.tuned]})
    search = Search(args.points, args.rounds, args.near, args.search_seed)
    with kept_on_interrupt(args.out), PlayStore(args.out) as store, PlayBar("tuning") as bar:
        found = tune(args.tuned, matrix, store, search, jobs=args.jobs, progress=bar.advance, notify=bar.say)
    write_json(args.json, as_json(found))
    console = output()
    console.print(_values(found))
    console.print(_folds(found))
    if found.left_out:
        say(console, f"families left out because no play is feasible: {', '.join(found.left_out)}")
    say(
        console,
        f"mean regret over families: {found.default_regret:.4g} with the defaults, {found.held_out_regret:.4g} held "
        f"out, {found.inside_regret:.4g} on the plays that the choice was made on (optimistic)",
    )
    say(console, found.verdict())
    return 0


def as_json(found: Tuned) -> dict[str, Any]:
    """Return the result as plain JSON values."""
    return {
        "schema": SCHEMA,
        "policy": found.policy,
        "parameters": {name: parameter._asdict() for name, parameter in found.parameters.items()},
        "chosen": found.chosen,
        "values": found.values(found.chosen),
        "won": found.won,
        "verdict": found.verdict(),
        "default_regret": found.default_regret,
        "held_out_regret": found.held_out_regret,
        "inside_regret": found.inside_regret,
        "gain": asdict(found.gain),
        "folds": [asdict(fold) for fold in found.folds],
        "left_out": list(found.left_out),
        "candidates": found.candidates,
        "plays": found.plays,
    }


def _values(found: Tuned) -> Table:
    from kvabr.cli.display import table

    chosen = found.values(found.chosen)
    rows = [
        (name, *(f"{number:.4g}" for number in (limits.low, limits.high, limits.default, chosen[name])))
        for name, limits in found.parameters.items()
    ]
    title = f"{found.policy}: {found.candidates} candidates"
    return table(title, ("parameter", "low", "high", "default", "chosen"), rows, fold=("parameter",))


def _folds(found: Tuned) -> Table:
    from kvabr.cli.display import table

    rows = []
    for fold in found.folds:
        values = ", ".join(f"{name} {value:.4g}" for name, value in found.values(fold.chosen).items())
        numbers = (fold.inside, fold.outside, fold.default_outside)
        rows.append((fold.held_out, *(f"{number:.4g}" for number in numbers), values))
    title = "parameters chosen without a family and played over that family: mean regret"
    return table(title, ("held out", "inside", "held-out", "default", "chosen"), rows, fold=("held out", "chosen"))
