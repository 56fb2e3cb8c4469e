"""`kvabr store`: manage what a store holds, a folder of assets or a bucket."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

_Action = Callable[[argparse.Namespace], int]

_TIMES = "A time is a number of seconds, or 90m, 12h, 7d, 4w; a date is 2026-11-30 or 2026-11-30T12:00, UTC.\n"
_LS = """\
examples:
  kvabr store ls assets
  kvabr store ls 's3://kv-caches/prod?tenant=team-a' --model meta-llama/Llama-3.1-8B

own: bytes that only this asset has, which are freed when it goes. used: time since it was published, or looked for by a
publisher; plays are not seen. measured: made by kvabr encode; gc keeps such assets unless --measured.
"""
_DU = """\
examples:
  kvabr store du assets
  kvabr store du s3://kv-caches/prod --all-tenants --json usage.json

Bytes that assets share count once.
"""
_PIN = f"""\
examples:
  kvabr store pin s3://kv-caches/prod 3f9c2a17 --for 30d

{_TIMES}The end is the store's time. A pin never lasts for ever: pin again. The beginning of a name is enough.
"""
_EXPIRE = f"""\
examples:
  kvabr store expire s3://kv-caches/prod --model meta-llama/Llama-3.1-8B
  kvabr store expire assets --model my-model --before 2026-11-30 --dry-run

For a model, tokenizer or profile that changed under its old name. What was published before is removed, pinned or not,
and publishers do not bring it back. Origins over this store notice at their next look, and tell their relays. An HTTP
cache in front of a bucket must be purged.
{_TIMES}"""
_GC = f"""\
examples:
  kvabr store gc s3://kv-caches/prod                         only what nothing names any more
  kvabr store gc s3://kv-caches/prod --ttl 14d --max-age 90d --max-bytes 2T
  kvabr store gc assets --max-bytes 200G --evict lru --dry-run

Run it from cron, next to publishers and players, as often as you like. Pinned assets stay, and so do measured ones
unless --measured. What an evicted asset had in a bucket is deleted by a later run, when the grace is over.
{_TIMES}"""
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
(prompt.json) go from folder to folder only.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Manage what a store holds: a folder of assets, or a bucket."
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
    du.add_argument("--all-tenants", action="store_true", help="of all tenants of the bucket, not only the URL's")
    _add_json(du)

    pin = action("pin", "pin", "keep an asset for a time", _PIN)
    _add_store(pin)
    pin.add_argument("name", metavar="NAME", help="the asset, or the beginning of its name")
    end = pin.add_mutually_exclusive_group(required=True)
    end.add_argument("--for", dest="time", metavar="TIME", help="how long")
    end.add_argument("--until", metavar="DATE", help="until when")

    unpin = action("unpin", "unpin", "end the pin of an asset", "")
    _add_store(unpin)
    unpin.add_argument("name", metavar="NAME", help="the asset, or the beginning of its name")

    expire = action("expire", "expire", "remove all caches of a model that has changed", _EXPIRE)
    _add_store(expire)
    expire.add_argument("--model", required=True, metavar="M", help="the model's name")
    expire.add_argument("--before", metavar="DATE", help="only what was published before (default: now)")
    expire.add_argument("--dry-run", action="store_true", help="only show what would go")
    _add_json(expire)

    _add_gc(action("gc", "gc", "remove what is not used, and what nothing names any more", _GC))

    verify = action("verify", "verify", "check that everything is there and undamaged", _VERIFY)
    _add_store(verify)
    verify.add_argument("--deep", action="store_true", help="also read all frames, and compare their digests")
    verify.add_argument("--repair", action="store_true", help="remove what is damaged, pinned or not")
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


def _add_gc(gc: argparse.ArgumentParser) -> None:
    from kvabr.store.eviction import DEFAULT_ORDER, ORDERS

    _add_store(gc)
    gc.add_argument("--ttl", metavar="TIME", help="remove assets this long after their last use (default: never)")
    gc.add_argument(
        "--model-ttl", action="append", default=[], metavar="M=TIME", help="the same for one model; may be repeated"
    )
    gc.add_argument("--max-age", metavar="TIME", help="remove assets at this age, used or not (default: never)")
    gc.add_argument("--max-bytes", metavar="SIZE", help="remove assets until the tenant's rest has at most these bytes")
    gc.add_argument(
        "--evict",
        choices=ORDERS,
        default=DEFAULT_ORDER,
        help=f"which go first: least valuable, least recently or least often used (default: {DEFAULT_ORDER})",
    )
    gc.add_argument(
        "--grace",
        default="1h",
        metavar="TIME",
        help="keep new assets, and what nothing names any more, for this long: plays may still read it (default: 1h)",
    )
    gc.add_argument(
        "--deep", action="store_true", help="before, read all frames, and remove assets that are damaged, pinned or not"
    )
    gc.add_argument("--measured", action="store_true", help="measured assets, those of kvabr encode, may go too")
    gc.add_argument(
        "--cache-ttl", metavar="TIME", help="remove single groups that relays and clients cached this long ago"
    )
    gc.add_argument(
        "--take-over",
        action="store_true",
        help="do not wait for another collector, which may have been killed; two at once do no harm",
    )
    gc.add_argument("--dry-run", action="store_true", help="only show what would go")
    _add_json(gc)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", metavar="STORE", help="a folder of assets, or a bucket: s3://BUCKET/PREFIX?tenant=NAME"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="F", help="write the result as JSON")


def _lazily(name: str) -> _Action:
    """Return an action of `kvabr.cli.store_actions`, imported when it runs."""

    def run(args: argparse.Namespace) -> int:
        from kvabr.cli import store_actions

        action: _Action = getattr(store_actions, name)
        return action(args)

    return run
