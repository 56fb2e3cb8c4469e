"""`kvabr estimators`: the bandwidth estimators that can be named."""

from __future__ import annotations

import argparse
import inspect

from rich.console import Console
from rich.table import Table

from kvabr.abr.plugins import estimators


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "estimators",
        help="list the bandwidth estimators",
        description="List the bandwidth estimators that --estimator can name, or FILE.py:CLASS for one of your own.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:  # noqa: ARG001
    """Print the table."""
    table = Table(title="bandwidth estimators", title_justify="left")
    for column in ("name", "what it does", "from"):
        table.add_column(column)
    for name, cls in sorted(estimators().items()):
        table.add_row(name, (inspect.getdoc(cls) or "").splitlines()[0], cls.__module__)
    Console().print(table)
    return 0
