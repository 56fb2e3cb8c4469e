"""`kvabr store`: manage the assets of a store, a folder or a bucket."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from kvabr.cli.fields import command
from kvabr.types.fields import Shown

StoreArgument = Annotated[str, Shown("STORE", "a folder, or a bucket: s3://BUCKET/PREFIX")]
Json = Annotated[Path | None, Shown("--json F", "write the result as JSON", written=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCommand:
    """List the assets.

    Examples:
      kvabr store ls assets
      kvabr store ls s3://kv-caches/team-a --model meta-llama/Llama-3.1-8B

    own: bytes that only this asset has, and that its removal frees. measured: `kvabr encode` measured its losses;
    engines never remove such assets.
    """

    store: StoreArgument
    model: Annotated[str | None, Shown("--model M")] = None
    """Only assets of this model."""
    json: Json = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveCommand:
    """Remove assets.

    Examples:
      kvabr store rm assets 3f9c2a17
      kvabr store rm s3://kv-caches/prod --model meta-llama/Llama-3.1-8B
      kvabr store rm s3://kv-caches/prod --unreferenced

    The beginning of a name is enough. Bytes that other assets share stay. Purge HTTP caches in front of a bucket. To
    remove old assets, use the lifecycle rules of a bucket, and the publish_mib of engines for a folder.
    """

    store: StoreArgument
    names: Annotated[tuple[str, ...], Shown("NAME")] = ()
    """An asset, or the beginning of its name."""
    model: Annotated[str | None, Shown("--model M")] = None
    """All assets of this model."""
    unreferenced: Annotated[bool, Shown()] = False
    """Also remove objects older than an hour that belong to no asset, such as those of a killed publisher."""
    json: Json = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """Check that no object is missing or damaged.

    Examples:
      kvabr store verify assets
      kvabr store verify s3://kv-caches/prod --deep --repair

    Exit status 1 if anything is damaged and was not repaired.
    """

    store: StoreArgument
    deep: Annotated[bool, Shown()] = False
    """Also read all frames and compare their digests."""
    repair: Annotated[bool, Shown()] = False
    """Remove damaged assets and objects, and write missing pages and models again."""
    json: Json = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCommand:
    """Copy assets to another store.

    Examples:
      kvabr store copy assets s3://kv-caches/prod
      kvabr store copy s3://kv-caches/prod warm --model my-model

    Every frame is checked. Assets that the target has already are skipped, so an interrupted copy can continue. Token
    ids of prompts are copied only between folders.
    """

    store: StoreArgument
    target: Annotated[str, Shown("TARGET")]
    """A folder (created if missing), or the URL of a bucket."""
    name: Annotated[tuple[str, ...], Shown("--name N", repeated=True)] = ()
    """Only this asset, by its name or the beginning of its name; may be repeated."""
    model: Annotated[str | None, Shown("--model M")] = None
    """Only assets of this model."""
    json: Json = None


_ACTIONS = {
    "ls": (ListCommand, "list the assets"),
    "rm": (RemoveCommand, "remove assets"),
    "verify": (VerifyCommand, "check that no object is missing or damaged"),
    "copy": (CopyCommand, "copy assets to another store"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.description = "Manage the assets of a store, a folder or a bucket."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, (kind, line) in _ACTIONS.items():
        command(kind, _lazily(name))(actions.add_parser(name, help=line))


def _lazily(name: str) -> Callable[[Any], int]:
    """Return an action of `kvabr.cli.store_actions`, which is imported only when it runs."""
    return lambda options: int(getattr(import_module("kvabr.cli.store_actions"), name)(options))
