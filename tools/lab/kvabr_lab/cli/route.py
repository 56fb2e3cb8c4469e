"""`kvabr route`: decide where to prefill a prompt, and compare rules over a day of requests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.cli.options import check_writable
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.replay.trace import Trace
    from kvabr_lab.day.compare import DayResult
    from kvabr_lab.route import CacheSize, Route

SCHEMA = "kvabr.route/1"
_EPILOG = """\
examples:
  kvabr route --tokens 32000 --link 400
  kvabr route --tokens 32000 --link 400 --local-queue 3 --remote-cached 16000 --deadline 5
  kvabr route --tokens 9000 --link 1000 --local 0.03,0.00025,2e-9 --remote 20000 --asset my.asset --floor 0.002
  kvabr route --day --link 100 400 1600 --svg day.svg

local   the decode node's own site prefills
remote  the other site prefills, and sends the cache while it computes
both    as remote, and meanwhile the first tokens are computed here and not sent: worth it if the link is the limit
fetch   a prefix that is cached there is fetched, and the rest is prefilled here

A prefill cost is a rate in tokens a second, or three constants C,B,A: x tokens after L cached ones take
C + B x + A (2 L x + x^2) seconds. The bytes of a token are those of an asset's cheapest tracks that keep the quality
floor, scaled to the model's own cache (--kv-bytes).

--local-events and --remote-events, such as tcp://10.0.0.7:5557,tcp://10.0.0.7:5558, take what is cached from the KV
events of engines (vLLM: --kv-events-config) and of kvabr's own stores (kvabr serve --kv-events) in place of
--local-cached and --remote-cached. The prompt's token ids are then needed: --prompt.

--day replays a day of generated requests (arrivals, lengths and shared prefixes from the seed) over two sites whose
prefills queue and whose caches share the link: always local, always remote, PrfaaS's threshold, the best fixed
threshold in hindsight, the length n*(C), kvabr's rule, and with --oracle a search that knows everything. `selfish` is
kvabr's rule without regard for other requests, `whole` the same rule without `both`, `unprobed` without probes of the
idle link.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = (
        "Decide whether to prefill a prompt here, or at another site that sends its KV cache over the network."
    )
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--tokens", type=int, metavar="N", help="length of the prompt (needed without --day)")
    parser.add_argument(
        "--link", type=float, nargs="+", required=True, metavar="MBPS",
        help="rate of the link, Mbit/s; with --day its mean, one or more values",
    )  # fmt: skip
    bound = "lower bound of that rate, used for the deadline (default: --link)"
    parser.add_argument("--link-bound", type=float, metavar="MBPS", help=bound)
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="round trip in ms (default: 20)")
    cost = "cost of a prefill: TOK/S or C,B,A (default: %(default)s)"
    parser.add_argument("--local", default="4000", metavar="COST", help=f"local {cost}")
    parser.add_argument("--remote", default="16000", metavar="COST", help=f"remote {cost}")
    parser.add_argument("-d", "--deadline", type=float, metavar="S", help="TTFT deadline, seconds (default: none)")
    parser.add_argument("--at-end", action="store_true", help="the remote site sends only after its prefill has ended")
    parser.add_argument(
        "--no-both",
        action="store_true",
        help="the local engine cannot compute the beginning of a prompt while the end is loaded",
    )
    size = parser.add_argument_group("bytes of the cache")
    size.add_argument("--asset", help="an asset, or its catalog (default: the catalog that comes with kvabr)")
    size.add_argument(
        "--floor", type=float, default=0.01, metavar="NATS",
        help="quality floor: maximum loss of the whole cache, nats per generated token (default: %(default)g)",
    )  # fmt: skip
    size.add_argument(
        "--kv-bytes", type=float, metavar="B",
        help="FP16 cache bytes per token of your model (default: 131072, Llama-3.1-8B; with --asset, the asset's)",
    )  # fmt: skip
    size.add_argument("--decoders", type=int, default=8, metavar="N", help="decoder threads (default: %(default)s)")
    now = parser.add_argument_group("state of the sites")
    now.add_argument(
        "--prompt", type=Path, metavar="F.json", help="token ids of the prompt, for --local-events and --remote-events"
    )
    events = "KV events of an engine or a store %s, to find the cached part of the prompt"
    now.add_argument("--local-events", metavar="ENDPOINT[,REPLAY]", help=events % "here")
    now.add_argument("--remote-events", metavar="ENDPOINT[,REPLAY]", help=events % "there")
    now.add_argument("--listen", type=float, default=5.0, metavar="S", help="maximum seconds to listen (default: 5)")
    now.add_argument("--local-cached", type=int, default=0, metavar="N", help="tokens of the prompt cached here")
    now.add_argument("--remote-cached", type=int, default=0, metavar="N", help="tokens of the prompt cached there")
    now.add_argument("--local-queue", type=float, default=0.0, metavar="S", help="seconds until a local worker is free")
    now.add_argument(
        "--remote-queue", type=float, default=0.0, metavar="S", help="seconds until a remote worker is free"
    )
    now.add_argument("--backlog", type=float, default=0.0, metavar="MB", help="megabytes in flight on the link")
    _add_day_options(parser)
    parser.add_argument("--json", type=Path, metavar="F", help="write the decision, or the numbers of the day, as JSON")
    parser.set_defaults(run=run)


def _add_day_options(parser: argparse.ArgumentParser) -> None:
    day = parser.add_argument_group("a day of requests")
    day.add_argument("--day", action="store_true", help="replay a day, and compare rules")
    day.add_argument(
        "--trace", type=Path, metavar="F", help="trace of the link, scaled to --link (default: a synthetic one)"
    )
    day.add_argument(
        "--requests", type=int, default=3000, metavar="N", help="expected number of requests (default: %(default)s)"
    )
    day.add_argument(
        "--hours", type=float, default=6.0, metavar="H", help="length of the day in hours (default: %(default)g)"
    )
    day.add_argument("--lengths", type=float, default=1.0, metavar="X", help="factor on the prompts' lengths")
    workers = "concurrent prefills at the local and the remote site (default: 1 1)"
    day.add_argument("--workers", type=int, nargs=2, default=[1, 1], metavar=("L", "R"), help=workers)
    burst = "factor on arrivals during bursts of a minute, every ten minutes (default: 1, no bursts)"
    day.add_argument("--burst", type=float, default=1.0, metavar="X", help=burst)
    warm = "both sites begin with shared prompt beginnings cached, as many as fit"
    day.add_argument("--warm", action="store_true", help=warm)
    day.add_argument("--seed", type=int, default=0, metavar="K", help="seed of the requests (default: 0)")
    day.add_argument(
        "--oracle", type=int, nargs="?", const=2, default=0, metavar="SWEEPS",
        help="also search for the best decisions with full knowledge; takes minutes (suggested: 2 sweeps)",
    )  # fmt: skip
    day.add_argument("--svg", type=Path, metavar="F", help="write a chart over the rates of --link")


def run(args: argparse.Namespace) -> int:
    """Decide, or replay a day."""
    check_writable(args.json, args.svg)
    if not all(0 <= mbps <= 1e7 for mbps in args.link):
        raise UsageError("--link must be from 0 to 10000000 Mbit/s")
    if not 0 <= args.rtt <= 60_000:
        raise UsageError(f"--rtt {args.rtt:g}: must be 0 to 60000 ms")
    if not 1 <= args.decoders <= 4096:
        raise UsageError(f"--decoders {args.decoders}: must be 1 to 4096")
    return _day(args) if args.day else _one(args)


def parse_cost(text: str, option: str) -> PrefillCost:
    """Return a prefill cost from ``TOK/S`` or ``C,B,A``.

    Raises:
        UsageError: The text is neither, or out of range.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return PrefillCost.from_rate(numbers[0])
    if len(numbers) != 3:
        raise UsageError(f"{option} {text}: give tokens per second, or three constants C,B,A")
    return PrefillCost(*numbers)


def _size(args: argparse.Namespace) -> CacheSize:
    from kvabr_lab.route import CacheSize

    if args.asset is None:
        from kvabr.data import default_catalog

        catalog, kv_bytes = default_catalog(), 131_072.0 if args.kv_bytes is None else args.kv_bytes
    else:
        from kvabr.store.locations import open_catalog

        catalog, kv_bytes = open_catalog(args.asset)[0], args.kv_bytes
    size = CacheSize.of_catalog(catalog, args.floor, decoders=args.decoders)
    if kv_bytes is None:
        return size
    if not 1 <= kv_bytes <= 1e9:
        raise UsageError(f"--kv-bytes {kv_bytes:g}: must be 1 to 1000000000")
    return size.scaled(kv_bytes * catalog.tokens / catalog.fp16_bytes)


def _read_events(args: argparse.Namespace) -> None:
    from kvabr.cli.display import plain
    from kvabr.cli.options import read_tokens
    from kvabr.telemetry.kv_events.publisher import EventSockets
    from kvabr_lab.heard import listen

    named = {site: getattr(args, f"{site}_events") for site in ("local", "remote")}
    sites = {site: EventSockets.parse(text, f"--{site}-events") for site, text in named.items() if text is not None}
    if not sites and args.prompt is None:
        return
    if args.prompt is None or not sites:
        raise UsageError("--prompt needs --local-events or --remote-events")
    if not 0 < args.listen <= 3600:
        raise UsageError(f"--listen {args.listen:g}: must be more than 0 and at most 3,600 seconds")
    tokens = read_tokens(args.prompt, "--prompt")
    if args.tokens not in (None, len(tokens)):
        raise UsageError(
            f"--tokens {args.tokens}: the prompt in {args.prompt} has {len(tokens)} tokens; leave out --tokens"
        )
    args.tokens = len(tokens)
    for site, count in listen(sites, tokens, args.listen).items():
        setattr(args, f"{site}_cached", count or 0)
        said = "no KV events were received" if count is None else f"{count} of {len(tokens)} tokens are cached"
        plain(f"{site}: {said} ({named[site]})")


def _one(args: argparse.Namespace) -> int:
    from kvabr.cli.display import plain, write_json
    from kvabr.replay.link import FIRST_BYTE_S, PAYLOAD_SHARE
    from kvabr.replay.trace import BYTES_PER_MBIT
    from kvabr_lab.route import PrefillSite, RouteLink, decide, remote_lengths

    _read_events(args)
    if args.tokens is None:
        raise UsageError("give --tokens, the length of the prompt, or --day")
    if len(args.link) > 1 or args.svg is not None:
        raise UsageError("several rates of --link, and --svg, need --day")
    size = _size(args)
    local = PrefillSite(parse_cost(args.local, "--local"), args.local_queue, args.local_cached)
    remote = PrefillSite(parse_cost(args.remote, "--remote"), args.remote_queue, args.remote_cached)
    payload = BYTES_PER_MBIT * PAYLOAD_SHARE
    rate, bound = args.link[0] * payload, None if args.link_bound is None else args.link_bound * payload
    link = RouteLink(rate, args.rtt / 1000 + FIRST_BYTE_S, 1e6 * args.backlog, not args.at_end, bound=bound)
    route = decide(args.tokens, local, remote, link, size, deadline_s=args.deadline, both=not args.no_both)
    lengths = remote_lengths(local, remote, link, size)
    _show(route, size, lengths)
    known = {
        "bytes_per_token": size.per_token,
        "loss": size.loss,
        "remote_lengths": [[low, None if high == float("inf") else high] for low, high in lengths],
    }
    write_json(args.json, {"schema": SCHEMA, **route.to_json(), **known})
    plain(f"{route.place}: {route.reason}")
    return 0


def _show(route: Route, size: CacheSize, lengths: Sequence[tuple[float, float]]) -> None:

    from kvabr.cli.display import human, output, plain, table

    rows = [
        (
            f"{one.place}, {one.front_tokens} here" if one.front_tokens else one.place,
            *(f"{value:.3f}" for value in (one.ttft_s, one.queue_s, one.prefill_s)),
            human(round(one.bytes)),
            one.limit,
        )
        for one in route.options
    ]
    columns = ("place", "TTFT s", "queue s", "prefill s", "over the link", "limited by")
    output().print(table(None, columns, rows, left=("place", "limited by")))
    plain(f"{human(round(size.per_token))} per token at a loss of {size.loss:.2g} nats per generated token")
    if lengths:
        words = " and ".join(
            f"from {low:,.0f} tokens on" if high == float("inf") else f"from {low:,.0f} to {high:,.0f} tokens"
            for low, high in lengths
        )
        plain(f"remote prefill is faster {words} beyond the tokens cached at both sites")
    else:
        plain("remote prefill is never faster")


def _day(args: argparse.Namespace) -> int:

    from kvabr.cli.display import StageBar, output, plain, write_json
    from kvabr.replay.trace import BYTES_PER_MBIT
    from kvabr.store.files import write_text
    from kvabr_lab.bench.routes import DAY_SCHEMA, chart
    from kvabr_lab.day.compare import compare
    from kvabr_lab.day.requests import DayShape, day_of_requests, shared_parts
    from kvabr_lab.day.world import SiteShape, WorldShape

    if args.tokens is not None:
        raise UsageError("--tokens cannot be used with --day, which generates its own prompts")
    if not all(mbps > 0 for mbps in args.link):
        raise UsageError("--link must be more than 0 with --day")
    if args.oracle < 0:
        raise UsageError(f"--oracle {args.oracle}: must be the number of sweeps, 0 for no oracle")
    deadline_s = 5.0 if args.deadline is None else args.deadline
    shape = DayShape(args.requests, 3600 * args.hours, length=args.lengths, burst=args.burst)
    requests = day_of_requests(shape, args.seed)
    sites = [
        SiteShape(parse_cost(getattr(args, name), f"--{name}"), workers)
        for name, workers in zip(("local", "remote"), args.workers, strict=True)
    ]
    size, trace = _size(args), _trace(args.trace)
    warm = shared_parts(requests) if args.warm else ()
    days: list[dict[str, Any]] = []
    for mbps in args.link:
        scaled = trace.scaled(mbps * BYTES_PER_MBIT / trace.mean_rate)
        live, both = not args.at_end, not args.no_both
        world = WorldShape(sites[0], sites[1], size, scaled, args.rtt / 1000, live, both, warm=warm)
        with StageBar({"rules": f"rules at {mbps:g} Mbit/s", "oracle": f"oracle at {mbps:g} Mbit/s"}) as bar:
            found = compare(requests, world, deadline_s=deadline_s, sweeps=args.oracle, on_progress=bar)
        output().print(_day_table(mbps, len(requests), deadline_s, found))
        plain(*(f"{one.rule}: {one.note}" for one in found if one.note), "")
        days.append({"mbps": mbps, "requests": len(requests), "rules": [one.to_json() for one in found]})
    result = {"schema": DAY_SCHEMA, "deadline_s": deadline_s, "seed": args.seed, "trace": trace.name, "days": days}
    write_json(args.json, result)
    if args.svg is not None:
        write_text(args.svg, chart(result))
    return 0


def _trace(path: Path | None) -> Trace:
    from kvabr.replay.readers import find, read
    from kvabr_lab.day.synth import synthesise

    if path is None:
        return synthesise("markov", mean_mbps=100.0, duration_s=3600.0, step_s=1.0, seed=0)
    traces = [trace for each in find([path]) for trace in read(each)]
    if len(traces) != 1:
        raise UsageError(f"{path}: contains {len(traces)} traces; --trace needs exactly one")
    return traces[0]


def _day_table(mbps: float, requests: int, deadline_s: float, found: Sequence[DayResult]) -> object:
    from kvabr.cli.display import human, table
    from kvabr_lab.route import BOTH, FETCH, REMOTE

    times = ("mean s", "p50 s", "p95 s", f"within {deadline_s:g} s", "local GPU s", "remote GPU s")
    columns = ("rule", *times, "over the link", "remote", "both", "fetch")
    rows = [
        (
            one.rule, f"{one.mean_s:.3f}", f"{one.p50_s:.3f}", f"{one.p95_s:.2f}", f"{100 * one.met:.1f} %",
            f"{one.local_s:.0f}", f"{one.remote_s:.0f}", human(round(one.bytes)),
            *(f"{100 * one.shares[place]:.0f} %" for place in (REMOTE, BOTH, FETCH)),
        )
        for one in found
    ]  # fmt: skip
    title = f"{requests} requests, {mbps:g} Mbit/s: time to the first token"
    spare = ("fetch", "p50 s", "remote GPU s", "local GPU s", "both", "remote", "over the link")
    return table(title, columns, rows, left=("rule",), spare=spare)
