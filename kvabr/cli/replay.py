"""`kvabr replay`: play an asset over network traces, in simulation or live, and show the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from kvabr.abr.policies import DEFAULT
from kvabr.abr.tail import DEFAULT_MAX_TAIL
from kvabr.cli.commands import load_extension
from kvabr.cli.fields import command
from kvabr.cli.options import Deadline, load
from kvabr.player.play_choices import PlayChoices
from kvabr.player.session_types import BlendGoal, PlayerConfig
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MIN_RATE, PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.fields import Heading, OptionGroup, Shown
from kvabr.types.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from kvabr.replay.experiment import LinkSharing
    from kvabr.replay.run import Matrix, Report
    from kvabr.store.asset import Asset


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCommand:
    """Play a KV cache over network traces with ABR policies, and compare them with a player that knows the future.

    Examples:
      kvabr replay traces                                   the default policy over every trace of a folder
      kvabr replay traces --policy all --starts 4 --html p.html
      kvabr replay lte.csv --policy anytime fixed:Int4 ./mine.py:MyPolicy --deadline 2
      kvabr replay lte.csv --asset my.asset --verify        decode, recompute and score with the model
      kvabr replay lte.csv --asset my.asset --live          real bytes over QUIC, compared with the simulation
      kvabr replay lte.csv --prefill-rate 8000 --question 20  the engine computes the end of the cache with a question
      kvabr replay lte.csv --passages manual report         a prompt joined from two passages

    Traces may be in the formats of mahimahi, sabre (JSON), Pensieve, iperf or CSV with named columns; `kvabr traces
    info` shows one, and the guide "Replaying network traces" lists the names. If a file is ambiguous, kvabr asks.
    Cellular traces are slow for KV caches: --load 0.4 scales each trace so that its mean rate carries 40 % of the FP16
    cache within the deadline.
    """

    traces: Annotated[tuple[Path, ...], Shown("TRACE")] = ()
    """Trace files, or folders of them (default: kvabr's synthetic traces)."""
    asset: Annotated[str | None, Shown()] = None
    """An asset, or its catalog (default: kvabr's catalog of SmolLM2)."""
    policy: Annotated[tuple[str, ...], Shown("-p --policy NAME|FILE.py:CLASS")] = (DEFAULT,)
    """ABR policies, which `kvabr policies` lists; `all` is every policy that needs no argument, and fixed:TRACK for
    every track worth playing.
    """
    deadline: Deadline = 2.0
    play: Annotated[
        PlayChoices,
        OptionGroup(
            only=("estimator", "patience", "time_price", "gpu_price", "max_loss"),
            defaults=(("patience", PlayerConfig().give_up_after),),
        ),
    ]

    of_passages: ClassVar = Heading(
        "a prompt of passages",
        "Instead of one asset, play a prompt joined from passages; some of their tokens are recomputed.",
    )
    passages: Annotated[tuple[str, ...], Shown("--passages A")] = ()
    """Passages, in the order of the prompt."""
    exact: Annotated[int | None, Shown("--exact N", needs="passages")] = None
    """Tokens of text before the passages (default: 32)."""
    share: Annotated[float | None, Shown("--share X", needs="passages")] = None
    """Share of the passages' tokens to recompute, 0 to 1 (default: as much as pays off)."""

    the_link: ClassVar = Heading("the link")
    load: Annotated[float | None, Shown("--load X")] = None
    """Scale each trace so that its mean rate carries the fraction X of the FP16 cache within the deadline (default: as
    recorded).
    """
    rtt: Annotated[float | None, Shown("--rtt MS")] = None
    """Round trip in ms (default: the trace's own, otherwise 40)."""
    link: Annotated[tuple[Path, ...], Shown("--link TRACE", repeated=True)] = ()
    """Trace of a further link, to another source of the asset; it starts with each trace; may be repeated."""
    no_slow_start: Annotated[bool, Shown()] = False
    """Begin with a warm connection, after slow start."""
    producer: Annotated[float | None, Shown("--producer S")] = None
    """Prefill the cache during the play, group by group, in S seconds (default: it is complete)."""
    cold: Annotated[bool, Shown()] = False
    """Include handshake and catalog in the deadline."""
    queue: Annotated[float | None, Ge(0), Lt(math.inf), Shown("--queue KB")] = None
    """Queue of the bottleneck (default: none in a simulation; with --live or --rivals, one round trip at the trace's
    highest rate, at least 64 packets).
    """
    rivals: Annotated[int, Shown("--rivals N")] = 0
    """Other plays that share the link."""
    one_connection: Annotated[bool, Shown()] = False
    """The plays belong to one client and share its connection."""
    codel: Annotated[bool, Shown()] = False
    """The queue drops packets that have waited too long (RFC 8289)."""

    the_engine: ClassVar = Heading(
        "the engine", "Recompute costs are the publisher's measurements; without --asset there is no recompute."
    )
    prefill_rate: Annotated[float | None, Ge(MIN_RATE), Lt(math.inf), Shown("--prefill-rate TOK/S", alone="engine")] = (
        None
    )
    """Recompute rate (default: the asset's own)."""
    engine: Annotated[str | None, Shown("--engine NAME", alone="engine")] = None
    """Use the times of a measured engine: h200-8b, h200-70b or cpu-smollm2."""
    prefill: Annotated[str | None, Shown("--prefill C:B[:D[:A[:F]]]", alone="engine")] = None
    """Prefill cost in seconds: per call, per token, per token cached before, per pair of tokens,
    and minimum per call.
    """
    no_recompute: Annotated[bool, Shown(alone="engine")] = False
    """Use no engine: every group must be fetched."""
    recompute_mode: Annotated[Literal["suffix", "prefix", "hole"], Shown()] = "hole"
    """Groups that the engine can recompute: with suffix, all after the first miss; with prefix, the same in a separate
    call, as in vLLM; with hole, any group.
    """
    question: Annotated[int | None, Shown("--question N")] = None
    """Tokens of a question after the cache, which the engine computes (default: none; with --passages 24)."""
    tail: Annotated[int | None, Shown("--tail N")] = None
    """Maximum tokens at the end of the cache that the engine computes with the question instead of fetching them
    (default: 512; 0: none).
    """
    decode_scale: Annotated[float, Shown("--decode-scale X")] = 1.0
    """Multiply the catalog's decode times by X; 0: instant."""
    decoders: Annotated[int, Shown("--decoders N")] = 1
    """Decoder threads; each decodes one group at a time."""

    how_many: ClassVar = Heading("how many plays")
    starts: Annotated[int, Shown("--starts N")] = 1
    """Start points per trace."""
    seed: Annotated[int, Shown()] = 0
    """Seed of the start points."""
    jobs: Annotated[int | None, Shown("-j --jobs N")] = None
    """Processes (default: one per core)."""

    real: ClassVar = Heading(
        "a real link",
        "Play real bytes: an origin, a link shaped by the trace, and the player run as three processes over QUIC. The "
        "same plays are also simulated, for comparison. With an engine, a stand-in takes as long as the engine would, "
        "but computes nothing; otherwise there is no recompute.",
    )
    live: Annotated[bool, Shown()] = False
    """Play real bytes over a real link (needs --asset and the laboratory); with --producer also growing caches."""
    quic: Annotated[Literal["aioquic", "qh3"] | None, Shown(needs="live")] = None
    """QUIC library (default: aioquic)."""
    loss: Annotated[float | None, Shown("--loss PERCENT", needs="live")] = None
    """Packets lost at random in each direction."""

    output: ClassVar = Heading("output in addition to the table")
    verify: Annotated[bool, Shown()] = False
    """Repeat every play with the model and score it."""
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """The report, schema kvabr.replay/1."""
    html: Annotated[Path | None, Shown("--html F", written=True)] = None
    """A self-contained page with timelines."""
    svg: Annotated[Path | None, Shown("--svg F", written=True)] = None
    """A picture of the first play."""
    log: Annotated[Path | None, Shown("--log F.jsonl", written=True)] = None
    """All decisions and events of the plays with timelines."""
    perfetto: Annotated[Path | None, Shown("--perfetto F", written=True)] = None
    """Timelines for ui.perfetto.dev."""
    timelines: Annotated[int, Shown("--timelines N")] = 24
    """Number of plays with a timeline; -1: all."""


def run(args: ReplayCommand) -> int:
    """Replay the matrix, then write and print the results."""
    from rich.console import Console

    console = Console(stderr=True)
    if args.cold and args.no_slow_start:
        raise UsageError(
            "--cold times a new connection, but --no-slow-start begins with a warm one; give only one of them"
        )
    if args.live:
        load_extension("replay.live.check", "replay --live")(args)
    catalog, asset = _asset(args.asset) if not args.passages else (_joined(args, console), None)
    matrix = _matrix(args, catalog)
    if args.verify and asset is None:
        raise UsageError(
            "--verify needs an asset with its groups: make one with `kvabr encode`, and give it with --asset"
        )
    report = _replay(args, matrix, asset)
    if args.verify and asset is not None:
        _verify(asset, report, console)
    _warn(report, console, live=args.live)
    _write(args, report)
    _show(args, report.result)
    return 0


add = command(ReplayCommand, run)


def _write(args: ReplayCommand, report: Report) -> None:
    from kvabr.cli.display import write_json
    from kvabr.replay import report as views

    result, timelines = report.result, report.timelines
    write_json(args.json, result)
    for path, write in (
        (args.log, views.write_log),
        (args.perfetto, views.write_perfetto),
        (args.svg, views.write_picture),
        (args.html, views.write_page),
    ):
        if path is not None:
            write(path, result, timelines)


def _show(args: ReplayCommand, result: dict[str, Any]) -> None:
    from kvabr.cli.display import output, say
    from kvabr.replay import report as views

    out = output()
    out.print(views.summary_table(result))
    if len(result["families"]) > 1:
        out.print(views.family_table(result))
    if args.verify:
        out.print(views.verification_table(result))
    if args.live:
        out.print(load_extension("replay.live.table", "replay --live")(result))
    say(out, views.verdict(result))
    if args.html is not None:
        say(out, f"page: {args.html.resolve()}")


def _asset(path: str | None) -> tuple[Catalog, Asset | None]:
    if path is None:
        from kvabr.data import default_catalog

        return default_catalog(), None
    from kvabr.store.locations import open_catalog

    return open_catalog(path)


def _joined(args: ReplayCommand, console: Console) -> Catalog:
    from kvabr.replay.passages import EXACT, prompt_of
    from kvabr.store.locations import open_catalog

    if args.asset is not None or args.verify:
        raise UsageError("--passages cannot be combined with --asset or --verify")
    exact = EXACT if args.exact is None else args.exact
    limit = args.play.joined_loss_limit

    def computed(number: int, reason: str) -> None:
        from kvabr.cli.display import say

        say(console, f"note: {args.passages[number]} is computed: {reason}", style="yellow")

    return prompt_of([open_catalog(path)[0] for path in args.passages], exact, limit, computed)


def _blend(args: ReplayCommand) -> BlendGoal | None:
    if not args.passages:
        return None
    from kvabr.replay.passages import QUESTION

    question = QUESTION if args.question is None else args.question
    return BlendGoal(args.share, question, args.play.joined_loss_limit)


def _matrix(args: ReplayCommand, catalog: Catalog) -> Matrix:
    from kvabr.data import traces_folder
    from kvabr.replay.engines import engine_cost, parse_cost
    from kvabr.replay.experiment import ReplayOptions
    from kvabr.replay.live_bound import Producer
    from kvabr.replay.readers import find, read
    from kvabr.replay.run import Matrix

    # The publisher's measured speed is a fair guess for the user's own engine; that of the shipped catalog is not. Real
    # plays have an engine only on request: its stand-in would just take time.
    own = args.asset is not None or args.passages
    cost = catalog.prefill if own and not args.live and args.producer is None else None
    if args.no_recompute:
        cost = None
    elif args.prefill_rate is not None:
        cost = PrefillCost.from_rate(args.prefill_rate)
    elif args.engine is not None:
        cost = engine_cost(args.engine, "--engine")
    elif args.prefill is not None:
        cost = parse_cost(args.prefill, "--prefill")
    question = 0 if args.question is None or args.passages else args.question
    if args.tail is not None and (not question or cost is None):
        raise UsageError("--tail needs --question and an engine: the engine computes both together")
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
        estimator=args.play.estimator,
        config=PlayerConfig(
            gpu_price=args.play.gpu_price,
            time_price=args.play.time_price,
            max_loss=math.inf if args.passages or args.play.max_loss is None else args.play.max_loss,
            give_up_after=args.play.patience,
        ),
        sharing=_sharing(args),
        blend=_blend(args),
        producer=None if args.producer is None else Producer(args.producer),
        question=question,
        tail=DEFAULT_MAX_TAIL if args.tail is None else args.tail,
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


def _queue_bytes(args: ReplayCommand) -> int | None:
    return None if args.queue is None else int(1000 * args.queue)


def _sharing(args: ReplayCommand) -> LinkSharing | None:
    if args.live or not (args.rivals or args.one_connection or args.codel or args.queue is not None):
        return None
    given = next((name for name in ("rivals", "one_connection", "codel") if getattr(args, name)), "queue")
    sharing: LinkSharing = load_extension("replay.sharing", f"replay --{given.replace('_', '-')}")(
        args.rivals, _queue_bytes(args), args.codel, args.one_connection
    )
    return sharing


def _policies(names: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
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


def _replay(args: ReplayCommand, matrix: Matrix, asset: Asset | None) -> Report:
    from kvabr.cli.display import PlayBar
    from kvabr.replay.run import replay

    with PlayBar("replaying", len(matrix.traces) * matrix.starts * len(matrix.policies)) as bar:
        if args.live and asset is not None:
            live: Report = load_extension("replay.live", "replay --live")(
                args, matrix, asset, _queue_bytes(args), bar.advance
            )
            return live
        return replay(matrix, jobs=args.jobs, on_progress=bar.advance)


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
        say(console, f"note: some plays are longer than their trace, which then repeats: {names}", style="yellow")
    below = sum(line["below_bound"] for line in report.result["summary"].values())
    if below and not live:
        say(console, below_bound(below), style="yellow")
    lost = sum(run["gave_up"] is not None for run in runs)
    if lost:
        say(console, f"note: {counted(lost, 'play')} gave up; `gave_up` in the report says why", style="yellow")
