"""The contract between kvabr and a serving engine: what an engine gives, what it gets, and what an adapter says of it.

No class has to be derived from, since engines call very differently; what all adapters share are these parts:

==============================  =====================================================================================
what the engine gives           how
==============================  =====================================================================================
shape and meaning of its cache  a `kvabr.types.kv.KVSpec`
KV layout, and where to write   `kvabr.engines.layouts` converts between kvabr's layout and the engine's; a play
                                writes into a tensor of the engine's own with ``out=``
compute rate                    a `kvabr.types.cost.PrefillCost`: timed (`kvabr.prefill_cost`), or as the engine
                                sees itself serve
whether holes can be computed   mode ``hole``: an object of the protocol `kvabr.types.engine.Engine`; mode
                                ``suffix``: the engine computes behind what it was given, by itself
upgrades of a cache in use      a hook `kvabr.client.upgrades.Rewrite`, if it has a moment at which nothing reads
==============================  =====================================================================================

============================  =======================================================================================
what the engine gets          how
============================  =======================================================================================
a play, mode ``hole``         `kvabr.play` (async), `kvabr.sync` (blocking), `kvabr.node` (for many at once): `Played`
a play, mode ``suffix``       `kvabr.client.prefix.play_prefix`: what is in place before the first miss: `Prefix`
a play of what has a key      `kvabr.engines.chunk_store`, for engines that tell no tokens
coverage, loss, times         fields of both
statistics                    `kvabr.telemetry`, `kvabr.node.NodeMetrics`, or what the engine itself has
a way to publish              `kvabr.publish.publisher.Publisher`, in the background
============================  =======================================================================================

An `Adapter` says which of these an engine has, which versions were tested, and which is installed. Nothing here imports
an engine.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from kvabr.types.engine import EngineMode

_log = logging.getLogger("kvabr.engines")


@dataclass(frozen=True, slots=True)
class Adapter:
    """What kvabr knows of one engine."""

    name: str
    package: str
    """The distribution that holds it."""
    module: str
    """Of kvabr, or of who adds it."""
    tested: tuple[str, str]
    """The first version that was tested, and the first that is too new."""
    mode: EngineMode
    """``hole``: any group can be computed whose left side is complete; ``suffix``: all behind the first miss is."""
    layout: str
    """Of its cache, in words."""
    rate: str
    """How it is known what a prefill costs, in words."""
    upgrades: bool
    """Whether a cache in use may be upgraded."""
    publishes: bool
    """Whether it can publish what it computed."""
    plays: str
    """How it waits for a play, in words."""
    also: tuple[str, ...] = ()
    """Distributions that hold it under another name."""

    @property
    def installed(self) -> str | None:
        """The version that is installed; None if there is none."""
        for package in (self.package, *self.also):
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return None

    @property
    def range(self) -> str:
        """The versions that were tested, as pip has it."""
        return f">={self.tested[0]},<{self.tested[1]}"

    def knows(self, version: str) -> bool:
        """Whether a version lies in the tested range."""
        return release(self.tested[0]) <= release(version) < release(self.tested[1])

    def check(self, version: str | None = None) -> bool:
        """Warn, once per process and version, if the installed version was not tested.

        Args:
            version: what the engine says it is; None: what is installed.

        Returns:
            Whether it was tested; False as well if none is installed.
        """
        version = version or self.installed
        return version is not None and _checked(self, version)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (5, 19) of ``5.19.dev0+cpu``; zeros at the end do not count."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@cache
def _checked(adapter: Adapter, version: str) -> bool:
    if not (tested := adapter.knows(version)):
        _log.warning(
            "kvabr was tested with %s %s, this is %s: watch that texts stay right, and look for a newer kvabr",
            adapter.name,
            adapter.range,
            version,
        )
    return tested
