"""The registry of adapters, with their features and their tested and installed versions.

An adapter is a package with an `Adapter` in ``ADAPTER``, listed in `BUILTIN` or an entry point of ``kvabr.engines``.
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
"""Packages with an ``ADAPTER``; importing one imports neither its engine nor torch."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Features of one engine's adapter."""

    name: str
    package: str
    module: str
    tested: tuple[str, str]
    """First tested version, and the first untested version after it."""
    mode: EngineMode
    """``hole``: the engine can compute any group once all groups before it are complete; ``suffix``: it can only
    compute all groups after the first miss.
    """
    layout: str
    rate: str
    """How the adapter gets the cost of a prefill, as text."""
    plays: str
    upgrades: bool = False
    publishes: bool = True
    passages: str = "no"
    """How the adapter plays prompts made of passages: ``no``, or ``recomputed`` if it recomputes the tokens that need
    it.
    """
    also: tuple[str, ...] = ()

    @property
    def installed(self) -> str | None:
        """The installed version of the engine, or None."""
        for package in (self.package, *self.also):
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(package)
        return None

    @property
    def range(self) -> str:
        """The tested versions, in pip's notation."""
        return f">={self.tested[0]},<{self.tested[1]}"

    def is_tested(self, version: str) -> bool:
        """Return True for a version in the tested range."""
        return release(self.tested[0]) <= release(version) < release(self.tested[1])

    def check(self, version: str | None = None) -> bool:
        """Return True if a version (default: the installed one) was tested; otherwise warn once per process."""
        version = version or self.installed
        return version is not None and _checked(self, version)


def adapters() -> dict[str, Adapter]:
    """Return all adapters by name, including entry points; raise `UsageError` for a broken one."""
    declared: list[Adapter] = [importlib.import_module(package).ADAPTER for package in BUILTIN]
    found = {adapter.name: adapter for adapter in declared}
    for entry in metadata.entry_points(group="kvabr.engines"):
        try:
            loaded = entry.load()
        except Exception as error:  # importing another package may raise anything
            raise UsageError(f"the engine {entry.name!r} of an installed package cannot be loaded: {error}") from error
        if not isinstance(loaded, Adapter):
            raise UsageError(f"the entry point {entry.name!r} of kvabr.engines must be an Adapter, got {loaded!r}")
        found.setdefault(loaded.name, loaded)
    return found


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version without trailing zeros, such as (5, 19) for ``5.19.0.dev0+cpu``."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@cache
def _checked(adapter: Adapter, version: str) -> bool:
    if not (tested := adapter.is_tested(version)):
        _log.warning(
            "kvabr was tested with %s %s, this is %s: check its output, and look for a newer kvabr",
            adapter.name,
            adapter.range,
            version,
        )
    return tested


def require(module: str) -> ModuleType:
    """Import a module that the extra ``model`` installs; raise `ModelError` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"transformers models need {module} ({error}); install it with: {MODEL} ({WHERE})") from error
