"""`kvabr store`: manage the assets of a store, a folder or a bucket."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

_Action = Callable[[argparse.Namespace], int]

_LS = """\
examples:
  kvabr store ls assets
  kvabr store ls s3://kv-caches/team-a --model meta-llama/Llama-3.1-8B

own: bytes that only this asset has, which are freed when it goes. measured: its losses were measured by kvabr encode;
engines never remove such assets.
"""
_DU = """\
examples:
  kvabr store du assets
  kvabr store du s3://kv-caches/prod --json usage.json

Bytes that assets share count once.
"""
_RM = """\
examples:
  kvabr store rm assets 3f9c2a17
  kvabr store rm s3://kv-caches/prod --model meta-llama/Llama-3.1-8B
  kvabr store rm s3://kv-caches/prod --unreferenced

The beginning of a name is enough. What other assets share stays. An HTTP cache in front of a bucket must be purged.
Old assets of a bucket are best removed by its lifecycle rules, and those of engines in a folder by their publish_mib.
"""
_VERIFY = """\
examples:
  kvabr store verify assets
  kvabr store verify s3://kv-caches/prod --deep --repair

Exit status 1 if anything is damaged and was not repaired.
"""
_COPY = """\
examples:
  kvabr store copy assets s3://kv-caches/prod
  kvabr store copy s3://kv-caches/prod warm --model my-model

Every frame is checked. What is at the target already stays, so an interrupted copy goes on where it was. Token ids
of prompts go from folder to folder only.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Manage the assets of a store, a folder or a bucket."
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)

    def action(name: str, run: str, what: str, epilog: str) -> argparse.ArgumentParser:
        style = argparse.RawDescriptionHelpFormatter
        about = f"{what[0].upper()}{what[1:]}."
        made = actions.add_parser(name, help=what, description=about, epilog=epilog, formatter_class=style)
        made.set_defaults(run=_lazily(run))
        return made

    ls = action("ls", "ls", "list the assets", _LS)
    _add_store(ls)
    ls.add_argument("--model", metavar="M", help="only assets of this model")
    _add_json(ls)

    du = action("du", "du", "show how many bytes models and tracks take", _DU)
    _add_store(du)
    _add_json(du)

    rm = action("rm", "rm", "remove assets", _RM)
    _add_store(rm)
    rm.add_argument("names", nargs="*", metavar="NAME", help="an asset, or the beginning of its name")
    rm.add_argument("--model", metavar="M", help="all assets of this model")
    rm.add_argument(
        "--unreferenced",
        action="store_true",
        help="also objects that no asset names, such as those of a killed publisher, once they are an hour old",
    )
    _add_json(rm)

    verify = action("verify", "verify", "check that everything is there and undamaged", _VERIFY)
    _add_store(verify)
    verify.add_argument("--deep", action="store_true", help="also read all frames, and compare their digests")
    verify.add_argument("--repair", action="store_true", help="remove what is damaged")
    _add_json(verify)

    copy = action("copy", "copy", "copy assets to another store", _COPY)
    _add_store(copy)
    copy.add_argument("target", metavar="TARGET", help="a folder (made if missing), or the URL of a bucket")
    copy.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="N",
        help="only this asset, by its name or the beginning of it; may be repeated",
    )
    copy.add_argument("--model", metavar="M", help="only assets of this model")
    _add_json(copy)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a folder, or a bucket: s3://BUCKET/PREFIX")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="F", help="write the result as JSON")


def _lazily(name: str) -> _Action:
    """Return an action of `kvabr.cli.store_actions`, imported when it runs."""

    def run(args: argparse.Namespace) -> int:
        from kvabr.cli import store_actions

        action: _Action = getattr(store_actions, name)
        return action(args)

    return run
