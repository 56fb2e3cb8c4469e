"""Digests of all inputs of a play. A play with a known digest is not repeated.

A policy's digest covers the source of its class, of its base classes, and of modules that these import from their
folders. Another digest covers player and simulator: if it changes, everything is played again.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvabr.abr.plugins import load_estimator, policy_class
from kvabr.replay.experiment import ReplayOptions
from kvabr.replay.trace import Trace
from kvabr.types.catalog import Catalog

_DECIDES = ("abr", "player", "replay", "types")
"""Packages that can change the outcome of a simulated play."""
_DOES_NOT = (
    *("abr/policies", "abr/estimators.py", "replay/report", "replay/readers"),
    *("replay/run.py", "replay/summary.py", "replay/verify.py", "replay/workers.py"),
)
_LAB = ("causes.py", "cell.py")
"""Files of the laboratory that can change the outcome."""


def digest(*parts: Any) -> str:
    """Return the SHA-256 of plain JSON values, hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def of_trace(trace: Trace) -> str:
    """Return the digest of a trace's numbers and of its name, which is the seed of start points."""
    sums = hashlib.sha256(f"{trace.family}\0{trace.name}\0{trace.rtt_s!r}\0{trace.duration_s!r}\0".encode())
    sums.update(struct.pack(f"<{len(trace.times)}d", *trace.times))
    sums.update(struct.pack(f"<{len(trace.rates)}d", *trace.rates))
    return sums.hexdigest()


def of_catalog(catalog: Catalog) -> str:
    """Return the digest of a catalog."""
    # Joined catalogs are not published; their name depends on the position of each passage.
    own = "".join(each.dumps() for each in catalog.sources) + catalog.namespace.prompt
    return hashlib.sha256((own if catalog.sources else catalog.dumps()).encode()).hexdigest()


def of_options(options: ReplayOptions) -> str:
    """Return the digest of the options of a play."""
    values = asdict(options)
    estimator = values["estimator"]
    return digest(values, None if estimator is None else of_class(type(load_estimator(estimator)())))


def of_policy(text: str) -> str:
    """Return the digest of a policy, its parameters and its estimator; the path of its file does not matter."""
    cls = policy_class(text)
    file, colon, rest = text.partition(":")
    name = f"{Path(file).name}{colon}{rest}" if file.endswith(".py") else text
    return digest(name, of_class(cls), of_class(type(load_estimator(cls.estimator)())))


def of_class(cls: type[Any]) -> str:
    """Return the digest of a class's source (see this module); without source, that of its name."""
    sums = hashlib.sha256(f"{cls.__module__ if _ours(cls.__module__) else ''}.{cls.__qualname__}".encode())
    found: dict[Path, None] = {}
    for base in cls.__mro__:
        if base.__module__ not in {"builtins", "abc"}:
            _gather(base.__module__, found)
    for path in sorted(found, key=lambda item: item.name):
        sums.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sums.hexdigest()


@cache
def of_code() -> str:
    """Return the digest of all code that affects a play, except policies and estimators."""
    sums = hashlib.sha256()
    for name, data in sorted(sources()):
        sums.update(name.encode() + b"\0" + data + b"\0")
    return sums.hexdigest()


def sources() -> Iterator[tuple[str, bytes]]:
    """Yield name and text of every file covered by `of_code`."""
    yield from _sources(files("kvabr"), "")
    for name in _LAB:
        yield f"lab/{name}", files("kvabr_lab").joinpath(name).read_bytes()


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        name = prefix + item.name
        if name in _DOES_NOT:
            continue
        if item.is_dir():
            yield from _sources(item, f"{name}/")
        elif name.endswith(".py") and _decides(name):
            yield name, item.read_bytes()


def _decides(name: str) -> bool:
    return any(name == part or name.startswith(f"{part}/") for part in _DECIDES)


def _ours(module: str) -> bool:
    return module.partition(".")[0] in {"kvabr", "kvabr_lab"}


_PLUGINS = ("kvabr.abr.policies.", "kvabr.abr.estimators", "kvabr_lab.policies.", "kvabr_lab.estimators")


def _gather(module: str, found: dict[Path, None]) -> None:
    """Add a module's file, and recursively the files in its folder that it imports."""
    if _ours(module) and not module.startswith(_PLUGINS):
        return  # covered by `of_code`
    loaded = sys.modules.get(module)
    source = None if loaded is None else inspect.getsourcefile(loaded)
    path = None if source is None else Path(source)
    if path is None or path in found or not path.is_file():
        return
    found[path] = None
    for other in _imports(path, module):
        _gather(other, found)


def _imports(path: Path, module: str) -> Iterable[str]:
    """Yield loaded modules that a file imports from its own folder or below, or from kvabr."""
    names: set[str] = set()
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            whole = ".".join(part for part in (base, node.module or "") if part)
            names.update((whole, *(f"{whole}.{alias.name}" for alias in node.names)))
    for name in sorted(names):
        source = getattr(sys.modules.get(name), "__file__", None)
        if source is not None and (_ours(name) or Path(source).is_relative_to(path.parent)):
            yield name
