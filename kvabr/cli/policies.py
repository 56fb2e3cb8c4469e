"""`kvabr policies`: the ABR policies that can be named."""

from __future__ import annotations

import argparse
import inspect

from rich.console import Console
from rich.table import Table

from kvabr.abr.plugins import policies
from kvabr.abr.policies import DEFAULT

_EPILOG = """\
A policy of your own is a class in a file, no installation needed:

  from kvabr.abr import Decision, Policy, View

  class Cautious(Policy):
      def decide(self, view: View) -> Decision:
          group = view.first_missing()
          if group is None:
              return Decision.finish("every group is in place or under way")
          share = 0.8 * view.budget_bytes(view.lower_bound) / len(view.missing)
          return Decision.fetch(group, view.best_track(group, share), f"{share:.0f} bytes a group")

  kvabr replay traces --policy ./cautious.py:Cautious anytime

An installed package offers one by the entry point group kvabr.policies.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "policies",
        help="list the ABR policies",
        description="List the ABR policies that --policy can name.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:  # noqa: ARG001
    """Print the table."""
    table = Table(title="ABR policies", title_justify="left")
    for column in ("name", "estimator", "abandons", "what it does", "from"):
        table.add_column(column)
    for name, cls in sorted(policies().items()):
        shown = {"fixed": "fixed:TRACK", "cake": "cake[:TRACK]"}.get(name, name)
        if name == DEFAULT:
            shown += " (default)"
        what = (inspect.getdoc(cls) or "").splitlines()[0]
        table.add_row(shown, cls.estimator, "yes" if cls.abandons else "no", what, cls.__module__)
    Console().print(table)
    return 0
