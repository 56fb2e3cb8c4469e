"""`kvabr bench NAME`: measurements that anyone can repeat, one file per bench."""

from __future__ import annotations

import argparse

from kvabr_lab.cli.bench import blend, codec_speed, rate_distortion, track_quality

BENCHES = {
    "quality": (track_quality, "size and loss of every level on real text"),
    "rd": (rate_distortion, "rate against KL, ΔNLL, agreement and retrieval, with peers and a plot"),
    "blend": (blend, "prompts joined from passages: the loss, and how much of it recomputing restores"),
    "codec": (codec_speed, "speed of every codec, stage by stage, and of LMCache's codec"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command and its benches."""
    parser.description = "Measure codecs; each bench prints tables."
    benches = parser.add_subparsers(title="benches", metavar="NAME", required=True)
    for name, (bench, line) in BENCHES.items():
        bench.add(benches.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter))
