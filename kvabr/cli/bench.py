"""`kvabr bench NAME`: measurements that anyone can repeat."""

from __future__ import annotations

import argparse

from kvabr.cli import bench_codec, bench_quality, bench_rd


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its benches."""
    parser = commands.add_parser("bench", help="measure", description="Measure something; each bench prints a table.")
    benches = parser.add_subparsers(title="benches", metavar="NAME", required=True)
    bench_quality.add(benches)
    bench_rd.add(benches)
    bench_codec.add(benches)
