"""`kvabr bench blend`: the loss of prompts joined from passages, and how much recomputing some tokens reduces it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.cli.fields import add_fields
from kvabr.cli.options import ModelOption, check_writable, load
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.codec.profile import Profile
    from kvabr_lab.bench.blend_prompts import FusedPrompt

_EPILOG = """\
examples:
  kvabr bench blend --quick                          a few prompts, in minutes
  kvabr bench blend --json blend.json --svg blend.svg
  kvabr bench blend --kinds codes --prompts 40 --selectors question question-value ./mine.py:Mine

A prompt is an exact beginning, passages whose caches were computed elsewhere, and a question. Passages are computed
alone, behind a neutral text, or as the mean over several contexts; their keys are rotated to where they stand. A
selector then chooses tokens of the passages to recompute over the joined cache. The loss is the KL divergence against
a full prefill, in nats per token, over what follows the question. For codes it is also whether greedy decoding says
them, and the margin in nats by which the code is likelier than the likeliest of the others.
Means have 95 % bootstrap intervals over prompts. Work counts tokens and layers, time is the processor's; both are
shares of the full prefill of the same prompt.

Prompts: `text` goes on with a text after four consecutive pieces; `facts` asks for an entry of one of five invented
manual pages; `codes` asks for one of five six-digit codes. Results stay in the work folder, so an interrupted run
continues.
"""

_KINDS = ("text", "facts", "codes")


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the bench."""
    parser.description = (
        "Measure with the real model the loss of joining passages, and how much of it selectors restore."
    )
    parser.epilog = _EPILOG
    what = parser.add_argument_group("what to measure on")
    what.add_argument("--texts", type=Path, metavar="DIR", help="folder of *.txt files (default: Python's own texts)")
    what.add_argument(
        "--kinds", nargs="+", choices=_KINDS, default=list(_KINDS), help="kinds of prompts (default: all)"
    )
    what.add_argument("--prompts", type=int, default=12, metavar="N", help="prompts of each kind (default: 12)")
    what.add_argument(
        "--passage-tokens", type=int, default=256, metavar="N", help="tokens of each passage (default: 256)"
    )
    what.add_argument("--seed", type=int, default=0, metavar="K", help="seed of the prompts (default: 0)")
    how = parser.add_argument_group("what to measure")
    add_fields(how, ModelOption)
    how.add_argument(
        "--selectors",
        nargs="+",
        metavar="NAME|FILE.py:CLASS",
        help="selectors; the first is also measured with compressed tracks",
    )
    how.add_argument(
        "--shares", type=float, nargs="+", metavar="X", help="shares of tokens to recompute (default: 0.05 0.15 0.3)"
    )
    how.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="element type of the model (default: float32)",
    )
    how.add_argument(
        "--contexts",
        type=int,
        default=4,
        metavar="N",
        help="contexts over which caches of passages are averaged (default: 4)",
    )
    how.add_argument("--tracks", nargs="*", metavar="TRACK", help="tracks (default: AC-L0 AC-L1 AC-L2)")
    how.add_argument("--profile", type=Path, metavar="F", help="codec profile, as for encode")
    how.add_argument("--quick", action="store_true", help="two prompts of each kind, one share, one track")
    out = parser.add_argument_group("output")
    out.add_argument("--work", type=Path, default=Path(".bench"), metavar="DIR", help="work folder (default: .bench)")
    out.add_argument("--json", type=Path, metavar="F", help="write everything as JSON")
    out.add_argument("--svg", type=Path, metavar="F", help="write the picture")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every recipe on every prompt."""
    import torch
    from rich.console import Console

    from kvabr.cli.display import StageBar, output, table, write_json
    from kvabr.engines.transformers.blend import blend_engine
    from kvabr.publish.passages import contexts_for
    from kvabr.publish.texts import calibration_texts
    from kvabr.store.files import write_text
    from kvabr_lab.bench import blend, blend_summary
    from kvabr_lab.bench.blend_picture import picture
    from kvabr_lab.bench.blend_prompts import make_prompts
    from kvabr_lab.bench.contexts import read_texts
    from kvabr_lab.bench.measure import CacheStore

    _check(args)
    check_writable(args.json, args.svg)
    selectors = args.selectors or list(blend.SELECTORS)
    shares = args.shares or ([blend.SHARES[1]] if args.quick else list(blend.SHARES))
    tracks = args.tracks if args.tracks is not None else list(blend.TRACKS[: 1 if args.quick else None])
    texts = read_texts(args.texts, None)
    console = Console(stderr=True)
    loaded = load(args.model, console)
    loaded.engine.model.to(getattr(torch, args.dtype))
    engine = blend_engine(loaded.engine)
    lab = blend.FusionLab(
        engine,
        contexts_for(loaded, calibration_texts(), args.contexts),
        contexts_for(loaded, calibration_texts(), 2, seed=1)[1:],
        contexts_for(loaded, calibration_texts(), 2, seed=2)[1],
        _profile(args, tracks, engine.spec),
    )
    count = 2 if args.quick else args.prompts
    prompts: list[FusedPrompt] = []
    for kind in args.kinds:
        prompts += make_prompts(loaded, texts, kind, count, size=args.passage_tokens, seed=args.seed)
    # Alternate, so that an interrupted run has some prompts of each kind.
    prompts.sort(key=lambda prompt: prompt.index)
    plan = blend.recipes(selectors, shares, tracks)
    store = CacheStore(args.work, engine.spec)
    with StageBar(blend.STAGES, console) as bar:
        found = blend.measure(lab, prompts, plan, store.known, store.keep, bar)
    result: dict[str, Any] = {"schema": blend_summary.SCHEMA, "model": engine.spec.model, "prompts": count}
    result |= {"passage_tokens": args.passage_tokens, "contexts": args.contexts, "seed": args.seed, "dtype": args.dtype}
    result |= blend_summary.summarise(found, plan)
    result["rows"] = found
    out = output()
    title = f"{engine.spec.model}: {count} prompts of each kind, passages of {args.passage_tokens} tokens"
    heads, lines = blend_summary.loss_table(result)
    out.print(table(f"{title}: KL with 95 % intervals", heads, lines, fold=heads[:1], spare=("work",)))
    heads, lines = blend_summary.ratio_table(result)
    out.print(table("ratios of losses on the same prompts", heads, lines, fold=heads[:3]))
    write_json(args.json, result)
    if args.svg is not None:
        write_text(args.svg, picture(result))
    return 0


def _check(args: argparse.Namespace) -> None:
    from kvabr.blend.selectors import load_selector
    from kvabr.codec.base import codec

    if args.prompts < 1 or args.passage_tokens < 16 or args.contexts < 1:
        raise UsageError("--prompts and --contexts must be at least 1, --passage-tokens at least 16")
    if not all(0 < share <= 1 for share in args.shares or ()):
        raise UsageError("--shares must be more than 0 and at most 1")
    for name in args.selectors or ():
        load_selector(name)
    for track in args.tracks or ():
        codec(track)


def _profile(args: argparse.Namespace, tracks: list[str], spec: Any) -> Profile | None:
    from kvabr.codec.base import codec
    from kvabr.engines.transformers.publish import find_profile

    return find_profile(spec, args.profile) if any(codec(track).needs_profile for track in tracks) else None
