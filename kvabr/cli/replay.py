"""`kvabr replay`: play an asset over network traces, in simulation or live, and show what happened."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.abr.policies import DEFAULT
from kvabr.abr.tail import MOST_TAIL
from kvabr.cli.commands import part
from kvabr.cli.fields import add_fields
from kvabr.cli.options import (
    add_deadline_option,
    check_writable,
    load,
)
from kvabr.player.play_choices import PlayChoices
from kvabr.player.session_types import BlendGoal, PlayerConfig
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from kvabr.replay.experiment import LinkSharing
    from kvabr.replay.live_bound import Producer
    from kvabr.replay.run import Matrix, Report
    from kvabr.store.asset import Asset

_EPILOG = """\
examples:
  kvabr replay traces                                   the default policy over every trace of a folder
  kvabr replay traces --policy all --starts 4 --html p.html
  kvabr replay lte.csv --policy anytime fixed:Int4 ./mine.py:MyPolicy --deadline 2
  kvabr replay lte.csv --asset my.asset --verify        decode, recompute and score with the real model
  kvabr replay lte.csv --asset my.asset --live          real bytes over QUIC, compared with the simulation
  kvabr replay lte.csv --prefill-rate 8000 --question 20  the engine computes the end of the cache with a question
  kvabr replay lte.csv --passages manual report         a prompt joined from two passages

Traces may be in the formats of mahimahi, sabre (JSON), Pensieve, iperf or CSV with named columns; `kvabr traces info`
shows one, and the guide "Replaying network traces" lists the names. Whatever a file leaves open is a question.
Cellular traces are slow compared with a KV cache: --load 0.4 scales each trace so that its mean rate carries
40 % of the FP16 cache within the deadline.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = (
        "Play a KV cache over recorded network traces with one or more ABR policies, and compare them "
        "with a clairvoyant player that knows the future."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="trace files, or folders of them (default: the synthetic traces that come with kvabr)",
    )
    _add_asset_options(parser)
    parser.add_argument(
        "-p",
        "--policy",
        nargs="+",
        default=[DEFAULT],
        metavar="NAME|FILE.py:CLASS",
        help=f"ABR policies (default: {DEFAULT}; `kvabr policies` lists them); `all` is every policy without an "
        "argument, and fixed:TRACK of every track worth playing",
    )
    add_fields(parser, PlayChoices, ("estimator",))
    add_deadline_option(parser)
    add_fields(parser, PlayChoices, ("patience", "time_price"), patience=PlayerConfig().give_up_after)
    link = parser.add_argument_group("the link")
    load = "scale traces: the mean rate carries the fraction X of FP16 within the deadline (default: as recorded)"
    link.add_argument("--load", type=float, metavar="X", help=load)
    link.add_argument("--rtt", type=float, metavar="MS", help="round trip in ms (default: the trace's, else 40)")
    link.add_argument(
        "--link",
        type=Path,
        action="append",
        default=[],
        metavar="TRACE",
        help="another source of the asset, over a link of its own that begins with each trace; may be repeated",
    )
    link.add_argument("--no-slow-start", action="store_true", help="the connection is warm: slow start is over")
    link.add_argument(
        "--producer",
        type=float,
        metavar="S",
        help="the cache is prefilled while it is played, which takes S seconds: groups exist one after the other "
        "(default: all exist)",
    )
    link.add_argument("--cold", action="store_true", help="the deadline includes handshake and catalog")
    link.add_argument(
        "--queue",
        type=float,
        metavar="KB",
        help="the bottleneck's queue; a simulation has none unless given (default with --live and --rivals: a round "
        "trip of the trace at its best, at least 64 packets)",
    )
    link.add_argument("--rivals", type=int, default=0, metavar="N", help="plays that share the link (default: 0)")
    link.add_argument(
        "--one-connection", action="store_true", help="the plays are of one client, and share its connection"
    )
    link.add_argument("--codel", action="store_true", help="the queue drops what has waited too long (RFC 8289)")
    engine = parser.add_argument_group(
        "the engine", "Recompute costs what the asset's publisher measured; without --asset there is no recompute."
    )
    how = engine.add_mutually_exclusive_group()
    how.add_argument("--prefill-rate", type=float, metavar="TOK/S", help="recompute rate (default: the asset's own)")
    how.add_argument("--engine", metavar="NAME", help="as a measured engine takes: h200-8b, h200-70b or cpu-smollm2")
    how.add_argument(
        "--prefill",
        metavar="C:B[:D[:A[:F]]]",
        help="as these constants say, seconds: per call, per token, per token cached before, per pair of tokens, and "
        "the least of a call",
    )
    how.add_argument("--no-recompute", action="store_true", help="there is no engine: every group must be fetched")
    mode = "suffix: all behind the first miss; prefix: the same by itself, as vLLM; hole: any group (default: hole)"
    engine.add_argument("--recompute-mode", choices=("suffix", "prefix", "hole"), default="hole", help=mode)
    add_fields(engine, PlayChoices, ("gpu_price",))
    engine.add_argument(
        "--question",
        type=int,
        metavar="N",
        help="tokens that follow the cache, which the engine computes in any case (default: none; of passages 24)",
    )
    engine.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="most tokens at the end of the cache that it computes in the same call, instead of having them fetched "
        "(default: 512; 0: none)",
    )
    engine.add_argument(
        "--decode-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the catalog's decode times by X (0: instant)",
    )
    engine.add_argument(
        "--decoders",
        type=int,
        default=1,
        metavar="N",
        help="threads that decode, each a group at a time (default: 1)",
    )
    matrix = parser.add_argument_group("how many plays")
    matrix.add_argument("--starts", type=int, default=1, metavar="N", help="start points per trace (default: 1)")
    matrix.add_argument("--seed", type=int, default=0, help="seed of the start points (default: 0)")
    matrix.add_argument("-j", "--jobs", type=int, metavar="N", help="processes (default: one per core)")
    _add_live_options(parser)
    out = parser.add_argument_group("output, besides the table")
    out.add_argument("--verify", action="store_true", help="repeat every play with the real model and score it")
    out.add_argument("--json", type=Path, metavar="F", help="the report, schema kvabr.replay/1")
    out.add_argument("--html", type=Path, metavar="F", help="a self-contained page with timelines")
    out.add_argument("--svg", type=Path, metavar="F", help="a picture of the first play")
    out.add_argument("--log", type=Path, metavar="F.jsonl", help="every decision and event of the plays with timelines")
    out.add_argument("--perfetto", type=Path, metavar="F", help="timelines for ui.perfetto.dev")
    out.add_argument("--timelines", type=int, default=24, metavar="N", help="plays that keep a timeline (-1: all)")
    parser.set_defaults(run=run)


def _add_asset_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--asset", help="an asset, or its catalog (default: a catalog of SmolLM2 that comes with kvabr)"
    )
    group = parser.add_argument_group(
        "a prompt of passages",
        "Instead of one asset, play a prompt that is joined from passages, of which tokens are computed again.",
    )
    group.add_argument("--passages", nargs="+", metavar="A", help="passages, in the order of the prompt")
    group.add_argument("--exact", type=int, metavar="N", help="tokens of the text before them (default: 32)")
    group.add_argument(
        "--share", type=float, metavar="X", help="share of their tokens to compute again (default: what it is worth)"
    )
    group.add_argument("--max-loss", type=float, metavar="X", help="give up above this expected loss (default: 0.5)")


def _add_live_options(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group(
        "a real link",
        "Play real bytes: an origin, a link shaped by the trace and the player run as three processes over QUIC. The "
        "trace counts whole packets. The same plays are simulated as well, and the two compared. There is no recompute "
        "unless an engine is given; then a stand-in for it takes the time and computes nothing.",
    )
    live.add_argument(
        "--live",
        action="store_true",
        help="play real bytes over a real link (needs --asset and the laboratory); caches that are still being "
        "prefilled: --producer",
    )
    live.add_argument("--quic", choices=("aioquic", "qh3"), help="QUIC library (default: aioquic)")
    live.add_argument("--loss", type=float, metavar="PERCENT", help="packets lost at random in each direction")


def run(args: argparse.Namespace) -> int:
    """Replay the matrix, then write and print the results."""
    from rich.console import Console

    console = Console(stderr=True)
    _check(args)
    catalog, asset = _asset(args.asset) if args.passages is None else (_joined(args, console), None)
    matrix = _matrix(args, catalog)
    check_writable(args.json, args.html, args.svg, args.log, args.perfetto)
    if args.verify and asset is None:
        raise UsageError("--verify needs an asset with its groups: `kvabr encode` makes one, --asset names it")
    report = _replay(args, matrix, asset)
    if args.verify and asset is not None:
        _verify(asset, report, console)
    _warn(report, console, live=args.live)
    _write(args, report)
    _show(args, report.result)
    return 0


def _write(args: argparse.Namespace, report: Report) -> None:
    from kvabr.cli.display import write_json
    from kvabr.replay import report as views

    result, timelines = report.result, report.timelines
    write_json(args.json, result)
    if args.log is not None:
        views.write_log(args.log, result, timelines)
    if args.perfetto is not None:
        views.write_perfetto(args.perfetto, result, timelines)
    if args.svg is not None:
        views.write_picture(args.svg, result, timelines)
    if args.html is not None:
        views.write_page(args.html, result, timelines)


def _show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from kvabr.cli.display import output, say
    from kvabr.replay import report as views

    out = output()
    out.print(views.summary_table(result))
    if len(result["families"]) > 1:
        out.print(views.family_table(result))
    if args.verify:
        out.print(views.verification_table(result))
    if args.live:
        out.print(part("replay.live.table", "replay --live")(result))
    say(out, views.verdict(result))
    if args.html is not None:
        say(out, f"page: {args.html.resolve()}")


def _asset(path: str | None) -> tuple[Catalog, Asset | None]:
    if path is None:
        from kvabr.data import default_catalog

        return default_catalog(), None
    from kvabr.store.locations import open_catalog

    return open_catalog(path)


def _joined(args: argparse.Namespace, console: Console) -> Catalog:
    from kvabr.replay.passages import EXACT, prompt_of
    from kvabr.store.locations import open_catalog

    if args.asset is not None or args.verify:
        raise UsageError("--passages takes the place of --asset, and is for simulations")
    exact = EXACT if args.exact is None else args.exact
    limit = MISS_PENALTY if args.max_loss is None else args.max_loss

    def computed(number: int, reason: str) -> None:
        from kvabr.cli.display import say

        say(console, f"note: {args.passages[number]} is computed: {reason}", style="yellow")

    return prompt_of([open_catalog(path)[0] for path in args.passages], exact, limit, computed)


def _blend(args: argparse.Namespace) -> BlendGoal | None:
    given = [name for name in ("exact", "share", "max_loss") if getattr(args, name) is not None]
    if args.passages is None:
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} is about a prompt of passages: it needs --passages")
        return None
    from kvabr.replay.passages import QUESTION

    question = QUESTION if args.question is None else args.question
    return BlendGoal(args.share, question, MISS_PENALTY if args.max_loss is None else args.max_loss)


def _matrix(args: argparse.Namespace, catalog: Catalog) -> Matrix:
    from kvabr.data import traces_folder
    from kvabr.replay.engines import engine_cost, parse_cost
    from kvabr.replay.experiment import ReplayOptions
    from kvabr.replay.readers import find, read
    from kvabr.replay.run import Matrix

    # The speed that an asset's publisher measured is a fair guess at the user's own engine; that of the shipped catalog
    # is not. Real plays have no engine unless the user asks for one, because its stand-in would only take time.
    own = args.asset is not None or args.passages is not None
    cost = catalog.prefill if own and not args.live and args.producer is None else None
    if args.no_recompute:
        cost = None
    elif args.prefill_rate is not None:
        cost = PrefillCost.from_rate(args.prefill_rate)
    elif args.engine is not None:
        cost = engine_cost(args.engine, "--engine")
    elif args.prefill is not None:
        cost = parse_cost(args.prefill, "--prefill")
    question = 0 if args.question is None or args.passages is not None else args.question
    if args.tail is not None and (not question or cost is None):
        raise UsageError("--tail is about an engine that computes a --question: give that, and an --engine")
    options = ReplayOptions(
        deadline_s=args.deadline,
        rtt_s=None if args.rtt is None else args.rtt / 1000.0,
        scale_to_mean=args.load,
        cost=cost,
        mode="suffix" if args.recompute_mode == "prefix" else args.recompute_mode,
        prefix=args.recompute_mode == "prefix" and cost is not None,
        decode_scale=args.decode_scale,
        decoders=args.decoders,
        slow_start=not args.no_slow_start,
        cold=args.cold,
        estimator=args.estimator,
        config=PlayerConfig(gpu_price=args.gpu_price, time_price=args.time_price, give_up_after=args.patience),
        sharing=_sharing(args),
        blend=_blend(args),
        producer=_producer(args),
        question=question,
        tail=MOST_TAIL if args.tail is None else args.tail,
        links=tuple(trace for each in args.link for path in find([each]) for trace in read(path)),
    )
    traces = tuple(trace for path in find(args.traces or [traces_folder()]) for trace in read(path))
    wants_timelines = any((args.html, args.svg, args.log, args.perfetto))
    return Matrix(
        catalog=catalog,
        traces=traces,
        policies=_policies(args.policy, catalog),
        options=options,
        starts=args.starts,
        seed=args.seed,
        timelines=args.timelines if wants_timelines else 0,
        detail=wants_timelines or args.json is not None or args.verify,
    )


def _producer(args: argparse.Namespace) -> Producer | None:
    if args.producer is None:
        return None
    from kvabr.replay.live_bound import Producer

    return Producer(args.producer)


def _queue_bytes(args: argparse.Namespace) -> int | None:
    if args.queue is not None and not math.isfinite(args.queue):
        raise UsageError(f"--queue {args.queue:g}: must be a number of kB")
    return None if args.queue is None else int(1000 * args.queue)


def _sharing(args: argparse.Namespace) -> LinkSharing | None:
    if args.live or not (args.rivals or args.one_connection or args.codel or args.queue is not None):
        return None
    given = next((name for name in ("rivals", "one_connection", "codel") if getattr(args, name)), "queue")
    sharing: LinkSharing = part("replay.sharing", f"replay --{given.replace('_', '-')}")(
        args.rivals, _queue_bytes(args), args.codel, args.one_connection
    )
    return sharing


def _policies(names: list[str], catalog: Catalog) -> tuple[str, ...]:
    from kvabr.abr.ladder import Ladder
    from kvabr.abr.plugins import policies as known_policies

    out: list[str] = []
    for name in names:
        if name == "all":
            out += [f"fixed:{track}" for track in Ladder(catalog).names]
            out += [known for known in known_policies() if known != "fixed"]
        else:
            out.append(name)
    for name in out:
        if name.startswith("fixed:"):
            catalog.track(name.removeprefix("fixed:"))
    return tuple(dict.fromkeys(out))


def _replay(args: argparse.Namespace, matrix: Matrix, asset: Asset | None) -> Report:
    from kvabr.cli.display import PlayBar
    from kvabr.replay.run import replay

    with PlayBar("replaying", len(matrix.traces) * matrix.starts * len(matrix.policies)) as bar:
        if args.live and asset is not None:
            live: Report = part("replay.live", "replay --live")(args, matrix, asset, _queue_bytes(args), bar.advance)
            return live
        return replay(matrix, jobs=args.jobs, on_progress=bar.advance)


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError if options contradict each other or need ``--live``."""
    if args.cold and args.no_slow_start:
        raise UsageError("--cold counts the handshake, --no-slow-start skips the start of a connection; give one")
    if args.live:
        part("replay.live.check", "replay --live")(args)
        return
    given = [name for name in ("quic", "loss") if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--{given[0]} is about a real transport: it needs --live")


def _verify(asset: Asset, report: Report, console: Console) -> None:
    from kvabr.cli.display import PlayBar
    from kvabr.replay.verify import steps_of, verify_play

    engine = load(asset.catalog.spec.model, console).engine
    plays = list(zip(report.result["runs"], report.steps, strict=True))
    with PlayBar("verifying", len(plays)) as bar:
        for line, steps in plays:
            if line["gave_up"] is None:
                line["measured"] = verify_play(asset, engine, steps_of(steps)).to_json()
            bar.advance(1)


def _warn(report: Report, console: Console, *, live: bool) -> None:
    from kvabr.cli.display import below_bound, say

    runs: list[dict[str, Any]] = report.result["runs"]
    wrapped = sorted({run["trace"] for run in runs if run["wrapped"]})
    if wrapped:
        names = ", ".join(wrapped[:3]) + (f" and {len(wrapped) - 3} more" if len(wrapped) > 3 else "")
        say(console, f"note: some plays outlast their trace, which then starts over (wraps): {names}", style="yellow")
    below = sum(line["below_bound"] for line in report.result["summary"].values())
    if below and not live:
        say(console, below_bound(below), style="yellow")
    lost = sum(run["gave_up"] is not None for run in runs)
    if lost:
        say(console, f"note: {counted(lost, 'play')} gave up; `gave_up` in the report says why", style="yellow")
