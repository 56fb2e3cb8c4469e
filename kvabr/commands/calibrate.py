"""`kvabr calibrate`: make the codec profile of a model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

_EPILOG = """\
examples:
  kvabr calibrate --model smollm2 --out smollm2.profile.safetensors
  kvabr calibrate --model ./my-llama --text manual.txt code.py letters.txt --out my-llama.safetensors

The AC track codes a cache against statistics of the model: channel means, quantiser steps, probability tables. They
are calibrated once per model on texts as diverse as its prompts will be, and fetched once by every player.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "calibrate",
        help="make the codec profile of a model",
        description="Run a model over texts and write the statistics that its AC track is coded with.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm2", metavar="smollm2|DIR", help="the model, as for encode (default: smollm2)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts, the more diverse the better (default: half of Python's manual, and standard library sources)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="F.safetensors", help="the profile to write")
    parser.add_argument("--contexts", type=int, metavar="N", help="contexts to cut out of the texts (default: 24)")
    parser.add_argument("--context-tokens", type=int, metavar="N", help="tokens of each (default: 1024)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate, and write the profile."""
    from kvabr.commands.progress import StageBar  # noqa: PLC0415 - a command loads what it needs when it runs
    from kvabr.engines.bed import open_bed  # noqa: PLC0415
    from kvabr.files import read_text, write_file  # noqa: PLC0415
    from kvabr.origin.calibrate import CONTEXT_TOKENS, CONTEXTS, calibrate  # noqa: PLC0415
    from kvabr.origin.texts import calibration_texts  # noqa: PLC0415

    texts = calibration_texts() if args.text is None else {str(path): read_text(path) for path in args.text}
    console = Console(stderr=True)
    start = time.perf_counter()
    with console.status("loading the model"):
        bed = open_bed(args.model)
    with StageBar({"prefill": "prefill (contexts)"}, console) as bar:
        profile = calibrate(
            bed,
            texts,
            contexts=CONTEXTS if args.contexts is None else args.contexts,
            tokens=CONTEXT_TOKENS if args.context_tokens is None else args.context_tokens,
            progress=lambda done, total: bar("prefill", done, total),
        )
    data = profile.to_bytes()
    write_file(args.out, data)
    seconds = time.perf_counter() - start
    print(f"profile of {profile.spec.model}: {args.out}, {len(data):,} bytes ({seconds:.0f} s)")
    print(f"SHA-256 {profile.digest}")
    return 0
