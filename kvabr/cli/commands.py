"""All commands by name: those of kvabr, of its laboratory, and of other installed packages.

A command is a function ``add(parser)`` that declares its options and sets the default ``run``, a function that takes
the parsed arguments and returns the exit status. A package adds commands by entry points of the group
``kvabr.commands``; a name with a dot extends a command. Entry points are read only for commands outside `COMMANDS`,
since reading them is slow.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvabr.types import installing
from kvabr.types.errors import KvabrError, UsageError
from kvabr.types.installing import WHERE

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = {
    "demo": ("demo:add", "a first look in a few seconds, without model or network"),
    "doctor": ("doctor:add", "report what is installed, what is missing, and whether an origin answers"),
    "encode": ("encode:add", "publish the KV cache of a text, with the loss of each track"),
    "prefill": ("prefill:add", "publish the KV cache of a text while it is being computed"),
    "inspect": ("inspect:add", "show the tracks of an asset"),
    "calibrate": ("calibrate:add", "make the codec profile of a model"),
    "serve": ("serve:add", "publish assets over the network"),
    "relay": ("relay:add", "cache an origin's assets for players nearby"),
    "player": ("player:add", "play for the serving engines of this node, in a separate process"),
    "fetch": ("fetch:add", "play a cache from an origin"),
    "replay": ("replay:add", "play an asset over network traces"),
    "policies": ("listings:add_policies", "list the ABR policies"),
    "estimators": ("listings:add_estimators", "list the bandwidth estimators"),
    "selectors": ("listings:add_selectors", "list the selectors, which choose the tokens of passages to recompute"),
    "engines": ("listings:add_engines", "list the serving engines that play through kvabr"),
    "store": ("store:add", "list, remove, check and copy the assets of a store"),
    "completion": ("completion:add", "print a completion script for bash or zsh"),
}
"""kvabr's own commands: the module and function that declare each, and its one-line help."""

LAB = {
    "lab": "compare policies over a matrix of traces and conditions",
    "report": "write a page with the results of `kvabr lab`",
    "tune": "tune a policy's parameters, with cross-validation",
    "bench": "measure codecs: quality, rate against distortion, speed",
    "traces": "inspect, import or synthesise network traces",
    "crowd": "simulate very many players of one asset below a tree of caches",
    "route": "decide where to prefill: here, or at a site that sends its cache over the network",
}
"""Commands of the laboratory, a separate package, with their one-line help."""


def names() -> list[str]:
    """Return the names of all commands, including those of the laboratory if it is not installed."""
    return list(dict.fromkeys([*COMMANDS, *LAB, *_added()]))


def exists(name: str) -> bool:
    """Return True if there is a command of that name, installed or not."""
    return name in LAB or is_here(name)


def is_here(name: str) -> bool:
    """Return True if a command is installed."""
    return name in COMMANDS or name in _added()


def declare(name: str, parser: argparse.ArgumentParser) -> None:
    """Import a command and declare its options.

    Raises:
        UsageError: The command belongs to the laboratory, which is not installed.
        KvabrError: The command belongs to another package, which cannot be loaded.
    """
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        getattr(import_module(f"kvabr.cli.{module}"), function)(parser)
        return
    entry = _entry(name, name)
    try:
        entry.load()(parser)
    except Exception as error:  # another package's code may raise anything
        raise _broken(name, entry, error) from error


def load_extension(name: str, words: str) -> Any:
    """Import an extension of a command that another package provides.

    Args:
        name: Name of the entry point.
        words: The user's words after ``kvabr``, for errors.

    Raises:
        UsageError: The extension belongs to the laboratory, which is not installed.
        KvabrError: It cannot be loaded.
    """
    entry = _entry(name, words)
    try:
        return entry.load()
    except Exception as error:  # as above
        raise _broken(words, entry, error) from error


def _added() -> dict[str, EntryPoint]:
    return {name: entry for name, entry in _entries().items() if "." not in name and name not in COMMANDS}


def _entries() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # takes half of the time of `kvabr --help`

    return {entry.name: entry for entry in entry_points(group="kvabr.commands")}


def _entry(name: str, words: str) -> EntryPoint:
    try:
        return _entries()[name]
    except KeyError:
        raise UsageError(
            f"`kvabr {words}` is part of the laboratory, which is not installed; install it with: {installing.LAB} "
            f"({WHERE})"
        ) from None


def _broken(words: str, entry: EntryPoint, error: Exception) -> KvabrError:
    package = "another package" if entry.dist is None else f"the package {entry.dist.name}"
    return KvabrError(f"`kvabr {words}` of {package} ({entry.value}) cannot be loaded: {error!r}")
