"""`kvabr crowd`: the number of caches needed for very many players of one asset, and the first bottleneck."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from kvabr.abr.policies import DEFAULT
from kvabr.cli.options import check_writable
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from kvabr.types.catalog import Catalog
    from kvabr_lab.crowd import Flow, RatePlay, Tree

SCHEMA = "kvabr.crowd/1"
_MAX_SAMPLE = 100_000
_EPILOG = """\
examples:
  kvabr crowd                                             a million players of an 8B model's 8,064 tokens in a minute
  kvabr crowd --edge relay --edges 500 2000
  kvabr crowd --players 20000 --within 5 --access 200 --edge nginx --edges 1 2 4
  kvabr crowd --asset my.asset --deadline 0.5 --edges 40 --middle nginx --middles 6 --json crowd.json

The players arrive evenly, and each plays the asset with the real policy over its share of what its cache (the edge)
carries. Edges get missing bytes from middle caches or from the store, each byte once. Edges: `nginx` and `nginx-tls`
are machines of 16 cores with a card of 100 Gbit/s that serve objects of a bucket over HTTP, `relay` is one process of
`kvabr relay`, which also takes 1.3 ms for each group on each level. Their throughput per core was measured on loopback;
the network between them is not modelled, and neither are failures.

With --kv-bytes the asset stands for that of a larger model: its tracks and decode times grow in proportion, and the
--decoders threads share the decoding. The real policy plays for the drawn players over the rates of the flow; where
both differ, trust the drawn players. The second table has the share of each resource that players would use if only
their own link were the limit and all edges were cold at once: resources above 100 % break, the first line first.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = (
        "Simulate very many players of one asset below a tree of caches: quality, deadlines, first bottleneck, and "
        "number of machines needed."
    )
    parser.epilog = _EPILOG
    crowd = parser.add_argument_group("the players")
    crowd.add_argument(
        "-n", "--players", type=int, default=1_000_000, metavar="N", help="number of players (default: 1000000)"
    )
    crowd.add_argument(
        "--within", type=float, default=60.0, metavar="S", help="seconds within which all players arrive (default: 60)"
    )
    crowd.add_argument(
        "-d", "--deadline", type=float, default=2.0, metavar="S", help="TTFT deadline, seconds (default: 2)"
    )
    crowd.add_argument(
        "--access", type=float, default=1000.0, metavar="MBPS", help="each player's own link, Mbit/s (default: 1000)"
    )
    crowd.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="round trip to the edge (default: 20)")
    crowd.add_argument(
        "-p", "--policy", default=DEFAULT, metavar="NAME", help=f"the players' policy (default: {DEFAULT})"
    )
    crowd.add_argument(
        "--decoders", type=int, default=8, metavar="N", help="decoder threads of each player (default: 8)"
    )
    asset = parser.add_argument_group("the asset")
    asset.add_argument("--asset", help="an asset, or its catalog (default: the catalog that comes with kvabr)")
    asset.add_argument(
        "--kv-bytes", type=float, metavar="B",
        help="FP16 cache bytes per token of your model (default: 131072, Llama-3.1-8B; with --asset, the asset's)",
    )  # fmt: skip
    tree = parser.add_argument_group("the caches")
    tree.add_argument("--edge", default="nginx", metavar="KIND", help="nginx, nginx-tls or relay (default: nginx)")
    tree.add_argument(
        "--edges",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of edges to simulate (default: around the number that the base needs)",
    )
    tree.add_argument("--middle", metavar="KIND", help="caches between the edges and the store (default: none)")
    tree.add_argument("--middles", type=int, default=0, metavar="N", help="number of middle caches")
    tree.add_argument(
        "--store-gbit", type=float, default=100.0, metavar="G", help="rate of the store, Gbit/s (default: 100)"
    )
    tree.add_argument(
        "--store-gets", type=float, default=5500.0, metavar="N",
        help="GETs per second that the store answers (default: 5500, the rate that S3 promises for a prefix)",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=int, default=40, metavar="N",
        help="random players to play with the real policy over the rates of the flow (default: 40; 0: none)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="seed of the random players (default: 0)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the numbers as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the tables."""
    from rich.console import Console

    from kvabr.cli.display import output, say, waiting, write_json
    from kvabr.cli.display import table as as_table
    from kvabr_lab.crowd import Crowd, PlayTable, drawn, fewest, flow, loads, without_caches

    check_writable(args.json)
    if not 0 <= args.sample <= _MAX_SAMPLE:
        raise UsageError(f"--sample {args.sample}: must be 0 to {_MAX_SAMPLE:,}")
    if not 1 <= args.decoders <= 4096:
        raise UsageError(f"--decoders {args.decoders}: must be 1 to 4096")
    _check_tree(args)
    catalog, scale = _asset(args)
    crowd = Crowd(args.players, args.within, args.access * 125_000, args.deadline, args.rtt / 1000)
    progress = Console(stderr=True)
    with waiting("playing the asset at constant rates", progress):
        table = PlayTable(catalog, crowd, scale=scale, policy=args.policy, decoders=args.decoders)
    tree = _tree(args, table.group_bytes)
    with waiting("looking for the fewest edges", progress):
        base = fewest(table, tree)
    numbers = args.edges or sorted({max(1, round((base or 16) * factor)) for factor in (0.5, 1, 2, 4, 8)})
    rows, cells = [], []
    for edges in numbers:
        one = replace(tree, edges=edges)
        with waiting(f"{edges} edges", progress):
            found = flow(table, one)
            plays = list(drawn(table, found, args.sample, args.seed))
        rows.append(_row(one, found, plays))
        cells.append(_cells(rows[-1]))
    out = output()
    title = (
        f"{crowd.players:,} players in {crowd.within_s:g} s, deadline {crowd.deadline_s:g} s, {tree.edge.kind} edges"
    )
    heads = ["edges", "Gbit/s each", "in time", "mean loss", "drawn: in time", "mean loss", "TTFT p50", "p99"]
    out.print(as_table(title, heads, cells))
    largest = replace(tree, edges=numbers[-1])
    wanted = loads(table, largest)
    lines = [
        [load.resource, f"{load.share:.0%}", "-" if load.machines is None else f"{load.machines:,}"] for load in wanted
    ]
    out.print(as_table(f"load with {numbers[-1]} edges", ["resource", "share of capacity", "machines needed"], lines))
    enough = "no number of edges" if base is None else f"{base:,} edges"
    say(out, f"99.9 % of the players have a complete cache in time with {enough}")
    say(out, f"without caches: {without_caches(table):,.0f} GETs per second at the store")
    write_json(
        args.json,
        {
            "schema": SCHEMA,
            "crowd": asdict(crowd),
            "asset": {
                "model": catalog.spec.model,
                "tokens": catalog.tokens,
                "scale": scale,
                "bytes": table.asset_bytes,
            },
            "edge": asdict(tree.edge),
            "fewest_edges_in_time": base,
            "flows": rows,
            "wanted": [asdict(load) for load in wanted],
            "gets_without_caches_per_s": without_caches(table),
        },
    )
    return 0


def _asset(args: argparse.Namespace) -> tuple[Catalog, float]:
    from kvabr.data import default_catalog
    from kvabr.store.locations import open_catalog

    catalog = default_catalog() if args.asset is None else open_catalog(args.asset)[0]
    own = catalog.fp16_bytes / catalog.tokens
    usual = 131_072.0 if args.asset is None else own
    wanted = usual if args.kv_bytes is None else args.kv_bytes
    if not 1 <= wanted <= 1e9:
        raise UsageError(f"--kv-bytes {wanted:g}: must be 1 to 1000000000")
    return catalog, wanted / own


def _check_tree(args: argparse.Namespace) -> None:
    from kvabr.types.errors import did_you_mean
    from kvabr_lab.crowd import MACHINES

    for kind in (args.edge, args.middle):
        if kind is not None and kind not in MACHINES:
            raise UsageError(
                f"unknown kind of cache {kind!r}{did_you_mean(kind, MACHINES)}; choose from {', '.join(MACHINES)}"
            )
    if any(number < 1 for number in args.edges or ()):
        raise UsageError("--edges must be at least 1")
    if args.store_gbit <= 0 or args.store_gets <= 0:
        raise UsageError("--store-gbit and --store-gets must be more than 0")
    if args.middle is not None and args.middles < 1:
        raise UsageError("--middle needs --middles N, the number of middle caches")


def _tree(args: argparse.Namespace, group_bytes: float) -> Tree:
    from kvabr_lab.crowd import MACHINES, BucketModel, Tree

    middle = None if args.middle is None else MACHINES[args.middle].serving(group_bytes)
    return Tree(
        edge=MACHINES[args.edge].serving(group_bytes),
        edges=1,
        middle=middle,
        middles=0 if middle is None else args.middles,
        store=BucketModel(args.store_gbit * 125e6, args.store_gets),
    )


def _row(tree: Tree, found: Flow, plays: list[RatePlay]) -> dict[str, Any]:
    from kvabr.replay.summary import percentile

    ends = [play.stays_s for play in plays]
    return {
        "edges": tree.edges,
        "edge_bytes_per_s": tree.edge.carries,
        "met": found.met_share,
        "loss_mean": found.loss,
        "most_players_at_an_edge": float(found.active.max()),
        "drawn": len(plays),
        "drawn_met": mean(play.met for play in plays) if plays else None,
        "drawn_loss_mean": mean(play.loss for play in plays) if plays else None,
        "drawn_ttft_p50_s": percentile(ends, 0.5),
        "drawn_ttft_p99_s": percentile(ends, 0.99),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        f"{row['edges']:,}",
        f"{row['edge_bytes_per_s'] / 125e6:.3g}",
        f"{row['met']:.2%}",
        f"{row['loss_mean']:.4f}",
        shown(row["drawn_met"], ".1%"),
        shown(row["drawn_loss_mean"], ".4f"),
        shown(row["drawn_ttft_p50_s"], ".3f"),
        shown(row["drawn_ttft_p99_s"], ".3f"),
    ]
