"""`kvabr bench quality`: the loss of every track on a real model, by text."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.cli.fields import add_fields
from kvabr.cli.options import ModelOption, load
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from kvabr.types.catalog import Catalog

_EPILOG = """\
examples:
  kvabr bench quality
  kvabr bench quality --text chapter.txt --tokens 2048 --tracks Int4 AC-5x --json quality.json

Every text is cut into a prompt and its continuation. The cache of the prompt is encoded on every track and decoded, and
the model measures on the continuation what that loses against the exact cache. The default texts come with Python. The
shipped profile was calibrated on Python's manual among others, and on neither source code nor licences.
"""


_NOISE = 1e-4
"""Losses below this are noise, nats per token."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the bench."""
    parser.description = (
        "Measure with the real model the loss of every compression level, and how well the losses of mixed caches "
        "are predicted."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="texts (default: three that come with Python)"
    )
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="tokens of each prompt (default: 1024)")
    parser.add_argument(
        "--continuation",
        type=int,
        default=256,
        metavar="M",
        help="tokens after the prompt to measure losses on (default: 256)",
    )
    add_fields(parser, ModelOption)
    parser.add_argument("--tracks", nargs="+", metavar="TRACK", help="levels to measure (default: all)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="codec profile, as for encode")
    parser.add_argument("--json", type=Path, metavar="F", help="write the tables as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every track on every text."""
    from rich.console import Console

    from kvabr.cli.display import StageBar, mix_rows, mix_table, output, say, track_rows, track_table, write_json
    from kvabr.cli.encode import STAGES
    from kvabr.engines.transformers.publish import find_profile
    from kvabr.publish.encoder import ordered_tracks, publish
    from kvabr.publish.frames import MemoryFrames
    from kvabr.publish.texts import cut_prompt, measuring_texts
    from kvabr.store.files import read_text

    if args.tokens < 1 or args.continuation < 2:
        raise UsageError("--tokens must be at least 1 and --continuation at least 2")
    texts = (
        measuring_texts()
        if args.text is None
        else {str(path): read_text(path, unreadable=UsageError) for path in args.text}
    )
    tracks = ordered_tracks(args.tracks)
    console = Console(stderr=True)
    loaded = load(args.model, console)
    profile = find_profile(loaded.engine.spec, args.profile)
    prompts = {name: cut_prompt(loaded, text, args.tokens, args.continuation) for name, text in texts.items()}
    out = output()
    catalogs: dict[str, Catalog] = {}
    for name, prompt in prompts.items():
        with StageBar(STAGES, console) as bar:
            frames = MemoryFrames()
            catalog = publish(loaded.engine, prompt, tracks, profile, frames, time_engine=False, progress=bar)
        catalogs[name] = catalog
        title = f"{name}: {args.tokens} tokens, measured on the {args.continuation} that follow"
        out.print(track_table(catalog, title))
        out.print(mix_table(catalog))
    summary = _summary(list(catalogs.values()))
    if len(catalogs) > 1:
        out.print(_summary_table(summary, len(catalogs)))
    worst = max((abs(math.log(row["ratio"])) for row in _ratios(list(catalogs.values()))), default=0.0)
    say(out, f"mixed caches: predicted within a factor {math.exp(worst):.2f} of measured", highlight=False)
    result = {
        "schema": "kvabr.bench.quality/1",
        "model": loaded.engine.spec.model,
        "tokens": args.tokens,
        "continuation": args.continuation,
        "texts": {
            name: {"tracks": track_rows(catalog), "mixes": mix_rows(catalog)} for name, catalog in catalogs.items()
        },
        "mean": summary,
        "worst_mix_factor": math.exp(worst),
    }
    write_json(args.json, result)
    return 0


def _ratios(catalogs: list[Catalog]) -> list[dict[str, Any]]:
    from kvabr.cli.display import mix_rows

    rows = [row for catalog in catalogs for row in mix_rows(catalog) if row["ratio"]]
    # Drop rows in which both values are noise, since their ratio is meaningless.
    return [row for row in rows if max(row["predicted"], row["measured"]) >= _NOISE]


def _summary(catalogs: list[Catalog]) -> list[dict[str, Any]]:
    from kvabr.cli.display import track_rows

    rows = []
    for same in zip(*(track_rows(catalog) for catalog in catalogs), strict=True):
        mean = {key: sum(row[key] for row in same) / len(same) for key in ("bits_per_element", "ratio", "dnll", "top1")}
        kl = [row["kl"] for row in same]
        rows.append({"track": same[0]["track"], **mean, "kl": sum(kl) / len(kl), "kl_worst": max(kl)})
    return rows


def _summary_table(rows: list[dict[str, Any]], texts: int) -> Table:
    from kvabr.cli.display import quality_cells, table

    cells = []
    for row in rows:
        kl, dnll, top1 = quality_cells(row)
        sizes = (f"{row['bits_per_element']:.3f}", f"{row['ratio']:.2f}x")
        cells.append((row["track"], *sizes, kl, f"{row['kl_worst']:.5f}", dnll, top1))
    names = ("track", "bits/el", "ratio", "KL", "worst KL", "ΔNLL", "top-1")
    return table(f"mean over {texts} texts", names, cells, left=("track",))
