"""The adapters: which engines kvabr plays into, what each supports, and which versions are installed.

An adapter is a package with an `Adapter` in its attribute ``ADAPTER``; `BUILTIN` lists those of kvabr. Another
distribution adds one by an entry point of the group ``kvabr.engines`` that refers to an `Adapter`. What an adapter has
to do is in `kvabr.engines`.
"""

from __future__ import annotations

import importlib
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType

from kvabr.types.engine import EngineMode
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.installing import MODEL, WHERE

_log = logging.getLogger("kvabr.engines")

BUILTIN = ("kvabr.engines.transformers", "kvabr.engines.vllm", "kvabr.engines.lmcache", "kvabr.engines.sglang")
"""Packages with an ``ADAPTER`` each. Importing one imports neither its engine nor torch."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What kvabr knows of one engine."""

    name: str
    package: str
    """Distribution that holds the engine."""
    module: str
    """Module of the adapter."""
    tested: tuple[str, str]
    """First version that was tested, and first version that is too new."""
    mode: EngineMode
    """``hole``: any group can be computed whose left side is complete; ``suffix``: everything behind the first miss
    is."""
    layout: str
    """Layout of the engine's cache, in words."""
    rate: str
    """How the cost of a prefill is known, in words."""
    plays: str
    """How it waits for a play, in words."""
    upgrades: bool = False
    """Whether a cache in use can be upgraded."""
    publishes: bool = True
    """Whether it can publish what the engine computes."""
    passages: str = "no"
    """How it plays prompts made of passages: ``no``, or ``recomputed`` where tokens matter."""
    also: tuple[str, ...] = ()
    """Other distributions that hold the engine."""

    @property
    def installed(self) -> str | None:
        """The installed version, None if there is none."""
        for package in (self.package, *self.also):
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(package)
        return None

    @property
    def range(self) -> str:
        """The tested versions, as pip writes them."""
        return f">={self.tested[0]},<{self.tested[1]}"

    def knows(self, version: str) -> bool:
        """Return whether a version is in the tested range."""
        return release(self.tested[0]) <= release(version) < release(self.tested[1])

    def check(self, version: str | None = None) -> bool:
        """Return whether a version, by default the installed one, was tested; warn once per process if it was not."""
        version = version or self.installed
        return version is not None and _checked(self, version)


def adapters() -> dict[str, Adapter]:
    """Return every adapter by name: kvabr's own and those of installed distributions, which may be a `UsageError`."""
    declared: list[Adapter] = [importlib.import_module(package).ADAPTER for package in BUILTIN]
    found = {adapter.name: adapter for adapter in declared}
    for entry in metadata.entry_points(group="kvabr.engines"):
        try:
            loaded = entry.load()
        except Exception as error:  # importing another package may raise anything
            raise UsageError(f"the engine {entry.name!r} of an installed package cannot be loaded: {error}") from error
        if not isinstance(loaded, Adapter):
            raise UsageError(f"the entry point {entry.name!r} of kvabr.engines is not an Adapter, but {loaded!r}")
        found.setdefault(loaded.name, loaded)
    return found


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, without trailing zeros: (5, 19) for ``5.19.0.dev0+cpu``."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@cache
def _checked(adapter: Adapter, version: str) -> bool:
    if not (tested := adapter.knows(version)):
        _log.warning(
            "kvabr was tested with %s %s, this is %s: check that texts stay right, and look for a newer kvabr",
            adapter.name,
            adapter.range,
            version,
        )
    return tested


def require(module: str) -> ModuleType:
    """Import a module that the extra ``model`` installs; if it is not there, a `ModelError` says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"transformers models need {module} ({error}); {MODEL} ({WHERE})") from error
