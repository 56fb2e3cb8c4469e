"""`kvabr calibrate`: make the codec profile of a model."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvabr.errors import UsageError

if TYPE_CHECKING:
    from kvabr.codec.fit import FitConfig

_EPILOG = """\
examples:
  kvabr calibrate --model smollm2 --out smollm2.profile.safetensors
  kvabr calibrate --model ./my-llama --text manual.txt code.py letters.txt --out my-llama.safetensors

The AC tracks code a cache against statistics of the model: channel means, the transform that decorrelates channels and
layers, quantiser steps, probability tables. They are calibrated once per model on texts as diverse as its prompts will
be, and fetched once by every player. More layers in a stack and more components of each make smaller caches and a
larger profile; --step-scale makes all tracks smaller and coarser, or larger and finer.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "calibrate",
        help="make the codec profile of a model",
        description="Run a model over texts and write the statistics that its AC tracks are coded with.",
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
        help="texts, the more diverse the better (default: half of Python's manual, and made-up records)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="F.safetensors", help="the profile to write")
    parser.add_argument("--contexts", type=int, metavar="N", help="contexts to cut out of the texts (default: 24)")
    parser.add_argument("--context-tokens", type=int, metavar="N", help="tokens of each (default: 1024)")
    parser.add_argument("--stack-layers", type=int, metavar="N", help="layers that are transformed together, at most")
    parser.add_argument(
        "--kept", type=int, nargs=2, metavar=("K", "V"), help="components of a layer's keys, and values, that take part"
    )
    parser.add_argument("--sinks", type=int, metavar="N", help="first tokens of a prompt that are kept aside")
    parser.add_argument("--step-scale", type=float, default=1.0, metavar="X", help="lengthen every step (default: 1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate, and write the profile."""
    from kvabr.commands.progress import StageBar  # noqa: PLC0415 - a command loads what it needs when it runs
    from kvabr.engines.bed import open_bed  # noqa: PLC0415
    from kvabr.files import read_text, write_file  # noqa: PLC0415
    from kvabr.origin.calibrate import CONTEXT_TOKENS, CONTEXTS, STAGES, calibrate  # noqa: PLC0415
    from kvabr.origin.texts import calibration_texts  # noqa: PLC0415

    config = _config(args)
    texts = calibration_texts() if args.text is None else {str(path): read_text(path) for path in args.text}
    console = Console(stderr=True)
    start = time.perf_counter()
    with console.status("loading the model"):
        bed = open_bed(args.model)
    with StageBar({stage: f"{stage} (contexts)" for stage in STAGES}, console) as bar:
        profile = calibrate(
            bed,
            texts,
            contexts=CONTEXTS if args.contexts is None else args.contexts,
            tokens=CONTEXT_TOKENS if args.context_tokens is None else args.context_tokens,
            config=config,
            progress=bar,
        )
    data = profile.to_bytes()
    write_file(args.out, data)
    seconds = time.perf_counter() - start
    print(f"profile of {profile.spec.model}: {args.out}, {len(data):,} bytes ({seconds:.0f} s)")
    print(f"SHA-256 {profile.digest}")
    return 0


def _config(args: argparse.Namespace) -> FitConfig:
    from kvabr.codec.fit import FitConfig  # noqa: PLC0415 - needs torch

    if args.step_scale <= 0 or (args.stack_layers is not None and args.stack_layers < 1):
        raise UsageError("--step-scale and --stack-layers must be positive")
    if min(0, args.sinks or 0, *(args.kept or ())) < 0:
        raise UsageError("--kept and --sinks cannot be negative")
    options = {"stack_layers": args.stack_layers, "kept": args.kept and tuple(args.kept), "sinks": args.sinks}
    return replace(FitConfig(), **{name: value for name, value in options.items() if value is not None}).scaled(
        args.step_scale
    )
