"""`kvabr engines`: the serving engines that play through kvabr, which are installed, and what was tested."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvabr.engines.adapters import adapters
from kvabr.engines.contract import Adapter

_EPILOG = """\
mode: with "hole", a group that was missed is computed where it is missing; with "suffix", the engine computes
everything behind the first miss, so the player protects the front. upgrades: whether a cache in use can be bettered.

An installed package adds an engine by the entry point group kvabr.engines: a kvabr.engines.contract.Adapter.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "engines",
        help="list the serving engines that play through kvabr",
        description="List the serving engines that play through kvabr: the version installed here, the versions that "
        "were tested, and what each can do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the list as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from kvabr.store.files import write_text  # noqa: PLC0415 - a command loads what it needs when it runs

    found = [adapter for _, adapter in sorted(adapters().items())]
    table = Table(title="serving engines", title_justify="left")
    for column in ("name", "installed", "tested", "mode", "upgrades", "publishes"):
        table.add_column(column, no_wrap=True)
    for adapter in found:
        table.add_row(
            adapter.name,
            _installed(adapter),
            adapter.range,
            adapter.mode,
            _yes(adapter.upgrades),
            _yes(adapter.publishes),
        )
    Console().print(table)
    if args.json is not None:
        write_text(args.json, json.dumps([_line(adapter) for adapter in found], indent=1) + "\n")
    return 0


def _installed(adapter: Adapter) -> str:
    version = adapter.installed
    if version is None:
        return "no"
    return version if adapter.knows(version) else f"{version} (not tested)"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _line(adapter: Adapter) -> dict[str, Any]:
    version = adapter.installed
    return {
        "name": adapter.name,
        "installed": version,
        "tested": list(adapter.tested),
        "known": version is not None and adapter.knows(version),
        "mode": adapter.mode,
        "upgrades": adapter.upgrades,
        "publishes": adapter.publishes,
        "plays": adapter.plays,
        "rate": adapter.rate,
        "layout": adapter.layout,
        "module": adapter.module,
    }
