"""Matrices as people write them: a TOML file, options of a command, or both."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvabr.abr.plugins import policies as known_policies
from kvabr.abr.policies import DEFAULT
from kvabr.data import default_catalog
from kvabr.lab.matrix import EngineSpec, LabMatrix, Offer
from kvabr.replay.readers import find, read
from kvabr.replay.trace import Trace
from kvabr.store.files import read_text
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, UsageError

SHIPPED = "smollm2-8k"
"""Name of the asset that is played where none is named."""

_LISTS = ("traces", "exclude", "policies", "deadlines", "loads", "rtts", "engines", "assets")
_NUMBERS = ("starts", "per_family", "seed", "decode_scale")
_OTHERS = ("families", "estimator", "slow_start")
_MAX_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """The axes in a TOML file; paths in it count from the file's own folder.

    Raises:
        UsageError: it is no TOML, or has a key or value that a matrix does not know.
    """
    text = read_text(path, _MAX_BYTES, unreadable=UsageError)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML ({error})") from error
    known = (*_LISTS, *_NUMBERS, *_OTHERS)
    if unknown := sorted(set(table) - set(known)):
        raise UsageError(f"{path}: unknown key {unknown[0]!r}; a matrix has {', '.join(known)}")
    for name in _LISTS:
        if not isinstance(table.get(name, []), list):
            raise UsageError(f"{path}: {name} must be a list, such as {name} = [...]")
    families = table.get("families", {})
    if not isinstance(families, dict) or not all(isinstance(paths, list) for paths in families.values()):
        raise UsageError(f"{path}: [families] must map names to lists of trace files or folders")
    home = path.parent
    table["traces"] = [_beside(home, item) for item in table.get("traces", [])]
    table["families"] = {name: [_beside(home, item) for item in paths] for name, paths in families.items()}
    table["assets"] = [item if item == SHIPPED else _beside(home, item) for item in table.get("assets", [])]
    table["policies"] = [_policy_beside(home, item) for item in table.get("policies", [])]
    return table


def build(axes: Mapping[str, Any]) -> LabMatrix:
    """The matrix that these axes name; what is not named has its default.

    Args:
        axes: ``traces`` (files or folders), ``families`` (name to files or folders), ``exclude`` (families to leave
            out), ``policies``, ``deadlines`` (seconds), ``loads`` (fractions of FP16, or "own" for unscaled traces),
            ``rtts`` (milliseconds, or "own"), ``engines``, ``assets``, ``starts``, ``per_family``, ``seed``,
            ``decode_scale``, ``estimator``, ``slow_start``.

    Raises:
        UsageError: something is not what it should be.
        TraceError: a trace cannot be read.
        AssetError: an asset is not there.
    """
    offers = tuple(_offer(item) for item in axes.get("assets") or [SHIPPED])
    estimator = axes.get("estimator")
    if estimator is not None and not isinstance(estimator, str):
        raise UsageError(f"estimator {estimator!r}: give a name")
    return LabMatrix(
        offers=offers,
        traces=_traces(axes),
        policies=_policies([_text(item, "policies") for item in axes.get("policies") or [DEFAULT]], offers),
        deadlines=tuple(_number(item, "deadlines") for item in axes.get("deadlines") or [2.0]),
        loads=tuple(None if item == "own" else _number(item, "loads") for item in axes.get("loads") or [0.1]),
        rtts=tuple(None if i == "own" else _number(i, "rtts") / 1000.0 for i in axes.get("rtts") or ["own"]),
        engines=tuple(EngineSpec.parse(_text(item, "engines")) for item in axes.get("engines") or ["none"]),
        starts=_whole(axes.get("starts", 1), "starts"),
        per_family=None if axes.get("per_family") is None else _whole(axes["per_family"], "per_family"),
        seed=_whole(axes.get("seed", 0), "seed"),
        estimator=estimator,
        decode_scale=_number(axes.get("decode_scale", 1.0), "decode_scale"),
        slow_start=axes.get("slow_start", True) is not False,
    )


def _traces(axes: Mapping[str, Any]) -> tuple[Trace, ...]:
    found: list[Trace] = []
    for path in find([Path(_text(item, "traces")) for item in axes.get("traces") or []]):
        found += read(path)
    for family, paths in (axes.get("families") or {}).items():
        for path in find([Path(_text(item, "families")) for item in paths]):
            found += [_renamed(trace, family) for trace in read(path)]
    out = {_text(item, "exclude") for item in axes.get("exclude") or []}
    if missing := sorted(out - {trace.family for trace in found}):
        raise UsageError(f"exclude: no family {missing[0]!r} among {', '.join(sorted({t.family for t in found}))}")
    return tuple(trace for trace in found if trace.family not in out)


def _renamed(trace: Trace, family: str) -> Trace:
    return replace(trace, family=family, name=f"{family}/{trace.name.removeprefix(f'{trace.family}/')}")


def _policies(names: Sequence[str], offers: Sequence[Offer]) -> tuple[str, ...]:
    """Names as they are given, each once; ``all`` is every one that needs no argument, and one track each."""
    from kvabr.abr.ladder import Ladder  # noqa: PLC0415

    out: list[str] = []
    for name in names:
        if name == "all":
            shared = [set(Ladder(offer.catalog).names) for offer in offers]
            out += [f"fixed:{track}" for track in Ladder(offers[0].catalog).names if all(track in s for s in shared)]
            out += [known for known in known_policies() if known != "fixed"]
        else:
            out.append(name)
    return tuple(dict.fromkeys(out))


def _offer(item: Any) -> Offer:
    text = _text(item, "assets")
    if text == SHIPPED:
        return Offer(SHIPPED, default_catalog())
    path = Path(text)
    if not path.exists():
        raise AssetError(f"{path}: no such asset; `kvabr encode` makes one")
    catalog = Catalog.read(path / "catalog.json" if path.is_dir() else path)
    return Offer(path.name.removesuffix(".json").removesuffix(".catalog").removesuffix(".asset"), catalog)


def _beside(home: Path, item: Any) -> str:
    return str(home / _text(item, "paths"))


def _policy_beside(home: Path, item: Any) -> str:
    text = _text(item, "policies")
    file, colon, rest = text.partition(":")
    return f"{home / file}{colon}{rest}" if file.endswith(".py") else text


def _text(item: Any, where: str) -> str:
    if not isinstance(item, str) or not item:
        raise UsageError(f"{where}: {item!r} should be text")
    return item


def _number(item: Any, where: str) -> float:
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise UsageError(f"{where}: {item!r} should be a number")
    return float(item)


def _whole(item: Any, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise UsageError(f"{where}: {item!r} should be a whole number")
    return item
