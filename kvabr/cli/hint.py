"""`kvabr hint`: have a node fetch a cache before it is played there."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.cli import network
from kvabr.cli.interrupt import run_async
from kvabr.cli.options import add_salt_option, check_writable
from kvabr.types.errors import PlayError, UsageError

if TYPE_CHECKING:
    from kvabr.types.naming import TrackNamespace

_EPILOG = """\
examples:
  kvabr hint moqt://node-7:4443/ --token-file rack.token --name MODEL/DIGEST --keep 600
  kvabr hint moqt://node-7:4443/ --token-file rack.token --text conversation.txt --model DIR

A router or an agent runs it while a tool works, for the node where the next turn will be served: an engine's node
(kvabr player --serve) or a program with `kvabr.node.serving`. The token is that of the node's neighbours. What the node
keeps, and for how long, is bounded there. The exit status is 1 if nothing of the prompt is cached.
"""
_HOW = "say which cache: moqt://HOST/#kvcache:MODEL/DIGEST, --name MODEL/DIGEST, or the prompt: --text and --model"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Have a node fetch a cache into its store, before it is played there."
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the node, moqt://HOST[:PORT]/[#kvcache:MODEL/DIGEST]")
    which = parser.add_argument_group("which cache")
    which.add_argument("--name", metavar="MODEL/DIGEST", help="the cache's name")
    prompt = which.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", type=Path, metavar="F.json", help="its token ids, or a prompt.json")
    prompt.add_argument("--text", type=Path, metavar="F", help="the prompt as text")
    which.add_argument(
        "--model",
        metavar="smollm2|DIR",
        help="model of the prompt: its tokenizer reads --text (default for --prompt: the only one that it offers)",
    )
    add_salt_option(parser)
    parser.add_argument(
        "--within", type=float, default=30.0, metavar="S", help="seconds that it may take, at most 60 (default: 30)"
    )
    parser.add_argument(
        "--keep",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds for which the node keeps it rather than other caches (default: 0)",
    )
    network.add_options(parser)
    parser.add_argument("--json", type=Path, metavar="F", help="write what the node has, as JSON")
    parser.set_defaults(run=run, recompute=None)


def run(args: argparse.Namespace) -> int:
    """Ask the node, and print what it has then."""
    from rich.console import Console

    from kvabr.cli.display import write_result
    from kvabr.cli.fetch import read_prompt
    from kvabr.client.origins import asset_of, dialling, parse_namespace
    from kvabr.types.hints import MAX_WITHIN_S

    if not 0 < args.within <= MAX_WITHIN_S:
        raise UsageError(f"--within {args.within:g}: must be a number of seconds up to {MAX_WITHIN_S:g}")
    if not 0 <= args.keep < math.inf:
        raise UsageError(f"--keep {args.keep:g}: must be a number of seconds, 0 or more")
    dialling(args.url, **network.options(args))
    if not args.url.startswith("moqt"):
        raise UsageError(f"{args.url}: a node has a moqt:// address; nobody fetches ahead in a bucket")
    name = asset_of(args.url)
    if args.name is not None:
        if name is not None:
            raise UsageError("the cache is named twice: by --name and in the URL")
        name = parse_namespace(args.name)
    if (name is None) == (args.prompt is None and args.text is None):
        raise UsageError(_HOW if name is None else "the cache has a name already: leave --prompt and --text out")
    check_writable(args.json)
    _, model, tokens = (None, None, ()) if name is not None else read_prompt(args, Console(stderr=True))
    result = run_async(_hint(args, name, model, tokens))
    write_result(args.json, "hint", result)
    if not result["tokens"]:
        raise PlayError("nothing of this prompt is cached where the node fetches, or nothing came in time")
    print(f"{result['tokens']:,} tokens are in the node's store, {result['bytes'] / 1e6:,.2f} MB")
    return 0


async def _hint(
    args: argparse.Namespace, name: TrackNamespace | None, model: str | None, tokens: tuple[int, ...]
) -> dict[str, Any]:
    from kvabr.client.async_client import AsyncClient
    from kvabr.client.options import PlayOptions
    from kvabr.store.files import read_salt

    url = args.url.partition("#")[0]
    options = PlayOptions(salt=read_salt(args.salt_file))
    async with AsyncClient(url, model=model, options=options, **network.options(args)) as client:
        how = {"within_s": args.within, "keep_s": args.keep, "node": client.origins[0]}
        if name is not None:
            hinted = await client.hint_asset(name, **how)
        else:
            hinted = await client.hint(tokens, **how)
    return {"tokens": hinted.tokens, "bytes": hinted.bytes, "loss": hinted.loss}
