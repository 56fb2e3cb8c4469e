"""`kvabr bench codec`: the speed of every codec by stage, on one core and on all cores, compared with LMCache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from kvabr_lab.bench.codec_speed import Subject

_EPILOG = """\
examples:
  kvabr bench codec                                  SmolLM2 and the shape of Llama-3.1-8B, every path of the coder
  kvabr bench codec --models smollm2 --tracks AC-L1 AC-5x --paths avx2
  tools/setup-peers && kvabr bench codec --json codec.json

A group of 128 tokens is encoded and decoded. Rates are millions of cache elements per second (an element is 2 bytes at
FP16, so 1,000 M/s are 2 GB/s), medians of several rounds: per processor time of one thread on one core, per wall time
on all cores. For layers, a stage covers the whole chain; `entropy encode` includes quantising. `decode` goes all the
way into a BF16 tensor in one call, which skips rows without symbols and so can be faster than its stages one by one.
`scratch` is the memory that decoding a group takes besides its output, in units of the group's FP16 size.

SmolLM2's group is real. Llama's is synthetic: shapes, rates and the share of rows without symbols are those of real
caches, and speed depends on nothing else.
"""

_NAMES = ("track", "path")
_STAGES = ("analysis", "entropy encode", "encode", "entropy decode", "synthesis", "decode")


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the bench."""
    parser.description = "Time the codecs: every stage, every path of the native coder, one core and all."
    parser.epilog = _EPILOG
    parser.add_argument(
        "--models", nargs="+", default=["smollm2", "llama-8b"], metavar="smollm2|DIR|llama-8b",
        help="models to measure; llama-8b uses only its shape (default: smollm2 llama-8b)",
    )  # fmt: skip
    parser.add_argument("--tracks", nargs="+", metavar="TRACK", help="tracks to time (default: all)")
    parser.add_argument("--profile", type=Path, metavar="F", help="codec profile of the model, as for encode")
    parser.add_argument(
        "--paths", nargs="+", choices=("portable", "avx2"), metavar="PATH",
        help="paths of the coder: portable, avx2 (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0.5, metavar="S", help="processor time per stage, seconds (default: 0.5)"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(".peers"),
        metavar="DIR",
        help="folder created by tools/setup-peers (default: .peers)",
    )
    parser.add_argument(
        "--work", type=Path, default=Path(".bench"), metavar="DIR", help="work folder (default: .bench)"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Time the codecs and print the tables."""
    from rich.console import Console

    from kvabr.cli.display import StageBar, output, say, waiting, write_json
    from kvabr.codec.base import codec, names
    from kvabr.codec.native.coder import available_paths
    from kvabr.engines.transformers.model_loader import load_tokenizer
    from kvabr_lab.bench import codec_speed
    from kvabr_lab.bench.codec_speed import paths
    from kvabr_lab.bench.other_codecs import find_peers
    from kvabr_lab.bench.schemes import tracks_to_measure

    tracks = tracks_to_measure(args.tracks, names())
    for model in args.models:
        if model != "llama-8b":
            load_tokenizer(model)  # raises before anything is timed
    missing = set(args.paths or ()) - set(available_paths())
    if missing or not args.seconds > 0:
        there = ", ".join(available_paths())
        raise UsageError(f"--paths must be some of {there}, and --seconds must be positive")
    console, out = Console(stderr=True), output()
    result: dict[str, Any] = {"schema": codec_speed.SCHEMA, "machine": codec_speed.machine()}
    result |= {"coder": [], "tracks": [], "lmcache": [], "over_ideal": {}}
    out.print("{processor}, {cores} cores; coder: {0}".format(", ".join(available_paths()), **result["machine"]))
    with waiting("timing the entropy coder", console):
        result["coder"] = codec_speed.coder_alone(args.paths, args.seconds)
    out.print(_coder_table(result["coder"]))
    peers, notes = find_peers(args.peers, ("lmcache",))
    rounds = sum(len(paths(args.paths)) if codec(track).needs_profile else 1 for track in tracks)
    for model in args.models:
        with waiting(f"making a group of {model}", console):
            subject = _subject(model, args)
        with StageBar({"time": f"{model} (tracks x paths)"}, console) as bar:
            done: list[dict[str, Any]] = []
            for row in codec_speed.measure(subject, tracks, args.paths, seconds=args.seconds):
                done.append(row)
                bar("time", len(done), rounds)
        result["tracks"] += done
        result["over_ideal"][subject.name] = codec_speed.over_ideal(subject, tracks)
        theirs = None
        if "lmcache" in peers:
            with waiting("timing LMCache", console), peers["lmcache"] as peer:
                theirs = codec_speed.against_lmcache(subject, peer)
            result["lmcache"].append(theirs)
        out.print(_stage_table(subject.name, done))
        out.print(_whole_table(subject.name, done, theirs, result["over_ideal"][subject.name]))
    for note in notes:
        say(console, f"not measured: {note}", highlight=False)
    write_json(args.json, result)
    return 0


def _subject(model: str, args: argparse.Namespace) -> Subject:
    from kvabr.engines.transformers.model_loader import load_model
    from kvabr.engines.transformers.publish import find_profile
    from kvabr_lab.bench import codec_speed

    if model == "llama-8b":
        return codec_speed.llama(args.work)
    loaded = load_model(model)
    return codec_speed.real(loaded, find_profile(loaded.engine.spec, args.profile))


def _coder_table(rows: Sequence[dict[str, Any]]) -> Table:
    from kvabr.cli.display import table

    cells = [
        (row["path"], f"{row['bits']:.2f}", f"{row['decode']:.0f}", f"{row['encode']:.0f}", f"{row['over_ideal']:.4f}")
        for row in rows
    ]
    title = "entropy coder alone, every symbol coded: M symbols/s on one core"
    return table(title, ("path", "bits", "decode", "encode", "size/ideal"), cells, left=("path",))


def _stage_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    from kvabr.cli.display import table

    cells = [
        (row["track"], row["path"], *(f"{row['rates'][stage]:.0f}" for stage in _STAGES))
        for row in rows
        if set(_STAGES) <= set(row["rates"])
    ]
    return table(f"{name}: M elements/s by stage, one core", (*_NAMES, *_STAGES), cells, left=_NAMES)


def _whole_table(
    name: str, rows: Sequence[dict[str, Any]], theirs: dict[str, Any] | None, ideal: dict[str, float]
) -> Table:
    from kvabr.cli.display import table

    cells: list[tuple[str, ...]] = []
    for row in rows:
        one, every = row["rates"]["decode"], row["all_cores"]
        cells.append(
            (
                row["track"],
                row["path"],
                f"{row['bits']:.3f}",
                f"{ideal[row['track']]:.4f}" if row["track"] in ideal else "",
                f"{row['rates']['encode']:.0f}",
                f"{one:.0f}",
                "-" if theirs is None else f"{one / theirs['decode']:.0f}x",
                f"{every:.0f}",
                "-" if theirs is None else f"{every / theirs['decode_all']:.0f}x",
                "-" if row["scratch"] is None else f"{row['scratch']:.2f}",
            )
        )
    if theirs is not None:
        rates = [f"{theirs[key]:.1f}" for key in ("encode", "decode", "decode_all")]
        cells.append(("LMCache", "numba", f"{theirs['bits']:.3f}", "", *rates[:2], "1x", rates[2], "1x", ""))
    title = f"{name}: from end to end, M elements/s; times faster than LMCache decodes"
    names = (*_NAMES, "bits/el", "size/ideal", "encode", "decode", "faster", "all cores", "faster", "scratch")
    return table(title, names, cells, left=_NAMES)
