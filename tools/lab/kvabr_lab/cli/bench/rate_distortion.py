"""`kvabr bench rd`: rate against quality on a real model, for kvabr's tracks and other codecs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.cli.fields import add_fields
from kvabr.cli.options import ModelOption, load
from kvabr.types.errors import ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvabr.codec.profile import Profile
    from kvabr.types.kv import KVSpec
    from kvabr_lab.bench.calibrated import CalibrationPlan

_EPILOG = """\
examples:
  tools/fetch-texts && tools/setup-peers          texts to measure on, and LMCache's CacheGen as a peer
  kvabr bench rd --html rd.html --json rd.json
  kvabr bench rd --domains german chat --retrieval 0
  kvabr bench rd --repeated --contexts 1 --retrieval 0
  kvabr bench rd --kvtc 8 16 32 --retrieval 0
  kvabr bench rd --tokens 4096 --contexts 1 --group-tokens 128 256 1024
  tools/gemma-model gemma
  kvabr bench rd --model gemma --calibrate 24 --target-kl 0.1 --target-track AC-L0 --retrieval 0
  kvabr bench rd --profile one.safetensors two.safetensors --tracks AC-L0 AC-L1 AC-L2 AC-L3

Every text is cut into contexts: a prompt and its continuation. The cache of the prompt goes through every scheme, and
the model measures on the continuation what that loses against the exact cache (KL, nats per token; change of the
negative log-likelihood; share of tokens whose most likely successor stays the same). KL compares with what the model
says with the exact cache, ΔNLL with the text: if the model is often surprised by a text where it expects not to be,
ΔNLL may be many times the KL, or negative. So both are printed: what it expects, and what the text costs it. The first
tokens of an answer lose most; *loss*, which catalogs have, is the mean of the KL over 8, 32 and all tokens. For
retrieval, a random six-digit code is planted at ten depths of a context, and the model is asked for it; the question is
not coded.

Sizes count every byte that a reader needs except the profile. Numbers are means over contexts, with 95 % bootstrap
intervals. The rate at which kvabr is as good as CacheGen is interpolated between the measured tracks: the least rate
above which KL, log-probability of the codes and share of whole codes are never worse.

Retrieval takes most of the time: ten cases per context, each on every scheme; --retrieval 1 plants codes in one only.
Caches (24 MB for 1,024 tokens of SmolLM2; 3 GB for 120 cases) and results stay in the work folder, so an interrupted
run continues, and only changes are measured again. Layers with sliding windows are coded as classes of their own, of
which every token counts, whether or not the model still sees it.
"""

_CONTEXTS = 3
_TOKENS = 1024
_CONTINUATION = 192


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the bench."""
    parser.description = "Measure with the real model the loss and the size of every track and of other codecs."
    parser.epilog = _EPILOG
    what = parser.add_argument_group("what to measure on")
    what.add_argument("--texts", type=Path, metavar="DIR", help="DOMAIN.txt files (default: .texts, else Python's own)")
    what.add_argument(
        "--repeated", action="store_true",
        help="measure on texts that repeat themselves (one word, dumps, tables of zeros, a log), instead of --texts",
    )  # fmt: skip
    what.add_argument("--domains", nargs="+", metavar="D", help="domains to measure (default: python c licence prose)")
    what.add_argument("--contexts", type=int, default=_CONTEXTS, metavar="N", help="contexts per domain (default: 3)")
    what.add_argument("--tokens", type=int, default=_TOKENS, metavar="N", help="tokens per prompt (default: 1024)")
    what.add_argument(
        "--continuation",
        type=int,
        default=_CONTINUATION,
        metavar="M",
        help="tokens after the prompt to measure losses on (default: 192)",
    )
    what.add_argument(
        "--retrieval",
        type=int,
        metavar="N",
        help="contexts in which to plant codes, ten cases each (default: all; 0: none)",
    )
    how = parser.add_argument_group("what to measure")
    add_fields(how, ModelOption)
    how.add_argument(
        "--whole-windows", action="store_true",
        help="encode a model with sliding windows as if all layers had full attention (default: class by class)",
    )  # fmt: skip
    how.add_argument("--tracks", nargs="+", metavar="TRACK", help="kvabr's tracks (default: all)")
    how.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        metavar="F",
        help="codec profiles; each adds points to the curve (default: as for encode)",
    )
    how.add_argument(
        "--calibrate", type=int, metavar="N",
        help="calibrate profiles with N contexts, as `kvabr calibrate` does, and keep them in the work folder",
    )  # fmt: skip
    how.add_argument(
        "--calibrate-tokens", type=int, metavar="N", help="with --calibrate: tokens of each context (default: 1024)"
    )
    how.add_argument(
        "--target-kl",
        type=float,
        metavar="X",
        help="with --calibrate: choose the steps by loss, as `kvabr calibrate` does",
    )
    how.add_argument("--target-track", metavar="TRACK", help="track that must meet --target-kl (default: AC-5x)")
    how.add_argument(
        "--step-scale", type=float, nargs="+", metavar="X",
        help="with --calibrate: a profile for every scale of the steps, for more points on the curve (default: 1)",
    )  # fmt: skip
    how.add_argument(
        "--group-tokens", type=int, nargs="+", default=(), metavar="N",
        help="tokens per group; with several values, the others are compared only by size (default: the model's)",
    )  # fmt: skip
    how.add_argument(
        "--peers",
        type=Path,
        default=Path(".peers"),
        metavar="DIR",
        help="folder created by tools/setup-peers (default: .peers)",
    )
    how.add_argument(
        "--cachegen", nargs="+", default=["CacheGen"], choices=("CacheGen", "CacheGen-low", "CacheGen-32"),
        help="levels of CacheGen: LMCache's only one, a coarser one (low) and a finer one (32) (default: CacheGen)",
    )  # fmt: skip
    how.add_argument(
        "--kvtc", type=float, nargs="+", default=(), metavar="X",
        help="also measure KVTC at these compression ratios, such as 8 16 32; learning its transforms takes minutes",
    )  # fmt: skip
    out = parser.add_argument_group("output")
    out.add_argument("--work", type=Path, default=Path(".bench"), metavar="DIR", help="work folder (default: .bench)")
    out.add_argument("--json", type=Path, metavar="F", help="write everything as JSON")
    out.add_argument("--html", type=Path, metavar="F", help="write a page with plot and tables")
    out.add_argument("--svg", type=Path, metavar="F", help="write the plot")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every scheme on every context."""
    from rich.console import Console

    from kvabr.cli.calibrate import stage_titles
    from kvabr.cli.display import StageBar, output, say, table, write_json
    from kvabr.engines.transformers.spec import spec_of
    from kvabr.store.files import write_text
    from kvabr_lab.bench import rate_distortion as rd
    from kvabr_lab.bench import summary
    from kvabr_lab.bench.calibrated import profiles
    from kvabr_lab.bench.contexts import cut, seen_sentence
    from kvabr_lab.bench.measure import STAGES, CacheStore, QualityBench
    from kvabr_lab.bench.page import drawing, page

    calibration = _check(args)
    texts = _texts(args)
    console = Console(stderr=True)
    # Compute caches of all tokens in all layers; the model masks tokens outside of windows.
    loaded = load(args.model, console, whole_windows=True)
    spec = loaded.engine.spec
    if len(spec.classes) > 1 or spec.only.halves == 1:
        raise ModelError(
            f"{spec.model} has layers of several shapes, or keys and values of different shapes ({spec.summary})"
        )
    if not args.whole_windows:
        spec = spec_of(loaded.engine.model, name=spec.model, tokenizer=spec.tokenizer, dtype=spec.dtype)
    contexts = cut(loaded, texts, args.contexts, args.tokens, args.continuation)
    store = CacheStore(args.work, loaded.engine.spec)
    results: list[str] = []
    search = calibration is not None and calibration.target is not None
    with StageBar(stage_titles(spec, search=search), console) as bar:
        made = calibration and profiles(loaded, spec, calibration, store.folder, bar, results.append)
    plan = rd.BenchPlan(
        contexts,
        args.tracks,
        made or _profiles(spec, args.profile),
        args.peers,
        args.cachegen,
        args.group_tokens,
        len(contexts) if args.retrieval is None else args.retrieval,
        args.kvtc,
        spec,
    )
    with StageBar(STAGES, console) as bar:
        findings, families, notes = rd.run(QualityBench(loaded, store, bar), plan)
    result = {"model": loaded.engine.spec.model, "tokens": args.tokens, "continuation": args.continuation}
    result |= rd.result(findings, families, plan)
    groups = args.group_tokens[0] if args.group_tokens else loaded.engine.spec.group_tokens
    title = (
        f"{loaded.engine.spec.model}: {len(contexts)} contexts of {args.tokens} tokens ({', '.join(texts)}), measured "
        f"on the {args.continuation} that follow; {rd.cases(findings)} planted codes; groups of {groups}"
    )
    every = {
        "size and loss": summary.loss_table(result),
        "first tokens": summary.first_table(result),
        "planted codes": summary.recall_table(result),
        "by domain": summary.domain_table(result),
        "size at CacheGen's quality, by length of groups": summary.group_table(result),
    }
    shown = [(name, found) for name, found in every.items() if found is not None]
    out = output()
    say(out, title, highlight=False)
    for name, (heads, lines) in shown:
        out.print(table(name, heads, lines, left=heads[:1]))
    _print(out, [summary.sentence(result), *filter(None, [summary.text_sentence(result)]), *results])
    if plan.profiles:
        _print(out, [seen_sentence({row["name"]: row["seen"] for row in result["contexts"]})])
    _print(console, [f"not measured: {note}" for note in notes])
    write_json(args.json, result)
    if args.svg is not None:
        write_text(args.svg, drawing(result["schemes"], result["exact"]))
    if args.html is not None:
        write_text(args.html, page(title, summary.sentence(result), result["schemes"], result["exact"], shown))
    return 0


def _check(args: argparse.Namespace) -> CalibrationPlan | None:
    """Return the calibration to run, if any; raise UsageError for arguments out of range before the model is loaded."""
    if args.contexts < 1 or args.tokens < 1 or args.continuation < 2:
        raise UsageError("--contexts and --tokens must be at least 1, and --continuation at least 2")
    if args.retrieval is not None and args.retrieval < 0:
        raise UsageError("--retrieval must be 0 or more")
    if args.repeated and args.texts is not None:
        raise UsageError("--repeated and --texts exclude each other: one makes texts, the other reads them")
    _check_each("--group-tokens must be from 1 to 65536", args.group_tokens, 1, 65536)
    _check_each("--kvtc must be from 1.1 to 256", args.kvtc, 1.1, 256)
    from kvabr.cli.calibrate import AC_TRACKS, target_of
    from kvabr_lab.bench.calibrated import CalibrationPlan

    if args.calibrate is None:
        if any(
            given is not None for given in (args.calibrate_tokens, args.target_kl, args.target_track, args.step_scale)
        ):
            raise UsageError("--calibrate-tokens, --target-kl, --target-track and --step-scale need --calibrate")
        return None
    if args.profile is not None:
        raise UsageError("--profile and --calibrate exclude each other: one reads profiles, the other makes them")
    if args.calibrate < 1:
        raise UsageError("--calibrate must be at least 1")
    if args.target_track not in (None, *AC_TRACKS):
        raise UsageError(f"--target-track {args.target_track}: must be one of {', '.join(AC_TRACKS)}")
    scales = args.step_scale or [1.0]
    _check_each("--step-scale must be from 0.01 to 100", scales, 0.01, 100)
    target = target_of(args.target_kl, args.target_track)
    return CalibrationPlan(args.calibrate, args.calibrate_tokens, target, tuple(scales))


def _texts(args: argparse.Namespace) -> dict[str, str]:
    from kvabr_lab.bench.contexts import check_unseen, chosen, read_texts
    from kvabr_lab.bench.repeated_texts import repeated_texts

    if args.repeated:
        return chosen(repeated_texts(), args.domains)
    texts = read_texts(args.texts or (Path(".texts") if Path(".texts").is_dir() else None), args.domains)
    check_unseen(texts)
    return texts


def _check_each(takes: str, given: Sequence[float], least: float, limit: float) -> None:
    if not all(least <= number <= limit for number in given) or len(set(given)) < len(given):
        raise UsageError(f"{takes}, each given only once")


def _print(console: Console, lines: Sequence[str]) -> None:
    from kvabr.cli.display import say

    for line in lines:
        say(console, line, highlight=False)


def _profiles(spec: KVSpec, paths: list[Path] | None) -> dict[str, Profile]:
    """Return profiles by label: an empty one for a single profile, otherwise the file's name."""
    from kvabr.engines.transformers.publish import find_profile

    found: dict[str, Any] = {}
    if paths is None or len(paths) == 1:
        found[""] = find_profile(spec, None if paths is None else paths[0])
    else:
        found = {f"@{path.name.removesuffix('.safetensors')}": find_profile(spec, path) for path in paths}
    if paths is not None and len(found) < len(paths):
        raise UsageError("two profiles have the same file name, which would label their results: rename one")
    return {label: profile for label, profile in found.items() if profile is not None}
