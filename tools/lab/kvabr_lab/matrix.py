"""The plays of a laboratory run: all combinations of values on its axes, given in a TOML file, by options, or both."""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.plugins import policies as known_policies
from kvabr.abr.policies import DEFAULT
from kvabr.abr.tail import DEFAULT_MAX_TAIL
from kvabr.data import default_catalog
from kvabr.player.session_types import GPU_PRICE, TIME_PRICE, BlendGoal, PlayerConfig
from kvabr.replay.engines import ENGINES
from kvabr.replay.experiment import ReplayOptions
from kvabr.replay.passages import EXACT, QUESTION, prompt_of
from kvabr.replay.readers import find, read
from kvabr.replay.trace import Trace
from kvabr.store.admin import names_in
from kvabr.store.files import read_text
from kvabr.store.locations import open_catalog
from kvabr.store.store_tree import StoreTree
from kvabr.types.catalog import Catalog
from kvabr.types.cost import MISS_PENALTY, PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.errors import AssetError, PolicyError, UsageError

_ENGINE = re.compile(
    rf"(?:(none)|(asset|{'|'.join(ENGINES)})|([0-9.eE+-]+)(x|/s))(?:@([0-9.eE+-]+|inf))?(?::(suffix|hole))?"
)
_MAX_PLAYS = 10_000_000
SHIPPED = "smollm2-8k"
DEFAULT_LOADS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Loads of links: from those that hardly carry the cheapest track by the deadline, to those of a data centre."""
_LISTS = ("traces", "exclude", "policies", "deadlines", "loads", "rtts", "engines", "assets")
_NUMBERS = ("starts", "per_family", "seed", "decode_scale", "decoders", "time_price", "question", "tail")
_OTHERS = ("families", "estimator", "slow_start")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine's mode and cost; `parse` reads its notation."""

    text: str
    kind: str
    """``none``, ``asset`` (as measured by its publisher), ``x`` (multiple of the deadline), ``/s`` (tokens per second)
    or a name in `kvabr.replay.engines.ENGINES`.
    """
    number: float
    mode: EngineMode
    gpu_price: float = GPU_PRICE
    """Price of a second of engine time, nats per token: low for an idle engine, high for a busy one."""

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        """Parse ``none``, ``asset``, ``2x``, ``1500/s`` or ``h200-8b``, also with ``@PRICE`` and ``:suffix``.

        ``2x`` computes the whole prompt in twice the deadline. With ``@0.05`` a second costs 0.05 nats per token.

        Raises:
            UsageError: The text is invalid.
        """
        match = _ENGINE.fullmatch(text)
        try:
            number = float(match[3]) if match is not None and match[3] else 0.0
            price = float(match[5]) if match is not None and match[5] else GPU_PRICE
        except ValueError:
            number = price = -1.0
        if match is None or number < 0 or (match[3] and not 0 < number < math.inf) or not price >= 0:
            raise UsageError(
                f"engine {text!r}: give none, asset, 2x (times the deadline), 1500/s or one of {', '.join(ENGINES)}, "
                "optionally with @PRICE (nats per token and second) and :suffix"
            )
        kind = match[1] or match[2] or match[4]
        return cls(text, kind, number, "suffix" if match[6] == "suffix" else "hole", price)

    def cost(self, catalog: Catalog, deadline_s: float) -> PrefillCost | None:
        """Return the cost of recomputing this asset; None without an engine.

        Raises:
            UsageError: The asset's publisher did not measure its prefill.
        """
        if self.kind == "none":
            return None
        if self.kind == "x":
            return PrefillCost(0.0, self.number * deadline_s / catalog.tokens)
        if self.kind == "/s":
            return PrefillCost.from_rate(self.number)
        if self.kind in ENGINES:
            return ENGINES[self.kind]
        if catalog.prefill is None:
            raise UsageError("engine 'asset': this asset does not have the cost of its prefill; give 2x or 1500/s")
        return catalog.prefill


@dataclass(frozen=True, slots=True)
class Offer:
    """One asset of a matrix."""

    name: str
    catalog: Catalog
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of all axes except trace, start and policy."""

    asset: str
    deadline_s: float
    load: float | None
    """Fraction of the FP16 cache that the mean rate carries within the deadline; None: unscaled."""
    rtt_s: float | None
    """Round trip time in seconds; None: that of the trace."""
    engine: str

    def title(self, axes: Collection[str] | None = None, *, kinds: bool = False) -> str:
        """Return a description of the cell by these axes (None: all); with ``kinds``, names instead of values."""
        words = {
            "asset": ("asset", self.asset),
            "deadline_s": ("deadline", f"{self.deadline_s:g} s"),
            "load": ("load", "as recorded" if self.load is None else f"load {self.load:g}"),
            "rtt_s": ("round trip", "own RTT" if self.rtt_s is None else f"{1000 * self.rtt_s:g} ms"),
            "engine": ("engine", "no engine" if self.engine == "none" else f"engine {self.engine}"),
        }
        return " · ".join(words[name][0 if kinds else 1] for name in words if axes is None or name in axes)


def varying(cells: Sequence[Cell]) -> list[str]:
    """Return the fields in which the cells differ; for a single cell, all fields."""
    names = [field.name for field in fields(Cell)]
    if len(cells) < 2:
        return names
    return [name for name in names if len({getattr(cell, name) for cell in cells}) > 1]


@dataclass(frozen=True, slots=True)
class LabMatrix:
    """All plays of a laboratory run.

    Raises:
        UsageError: An axis is empty, or has a value twice or out of range.
        PolicyError: A policy cannot be loaded.
    """

    offers: tuple[Offer, ...]
    traces: tuple[Trace, ...]
    policies: tuple[str, ...]
    deadlines: tuple[float, ...] = (2.0,)
    loads: tuple[float | None, ...] = DEFAULT_LOADS
    rtts: tuple[float | None, ...] = (None,)
    engines: tuple[EngineSpec, ...] = (EngineSpec("none", "none", 0.0, "hole"),)
    starts: int = 1
    """Number of start points per trace: its beginning, then random ones."""
    per_family: int | None = None
    """Number of plays per family and cell, spread evenly over the family's traces, so that families have equal weight;
    None: `starts` plays of every trace.
    """
    seed: int = 0
    estimator: str | None = None
    """Estimator for all policies; None: each policy's default."""
    decode_scale: float = 1.0
    decoders: int = 1
    slow_start: bool = True
    time_price: float = TIME_PRICE
    """Price of a second before the first token, nats per token."""
    question: int = 0
    """Number of tokens after the cache that an engine always computes."""
    tail: int = DEFAULT_MAX_TAIL
    """Maximum number of tokens at the cache's end to compute with the question, see `kvabr.abr.tail`."""

    def __post_init__(self) -> None:
        axes: dict[str, Sequence[object]] = {
            "assets": [offer.name for offer in self.offers],
            "traces": [trace.name for trace in self.traces],
            "policies": self.policies, "deadlines": self.deadlines, "loads": self.loads, "rtts": self.rtts,
            "engines": [engine.text for engine in self.engines],
        }  # fmt: skip
        for name, values in axes.items():
            if not values:
                raise UsageError(f"the matrix must have {name}")
            if len(set(values)) != len(values):
                twice = next(value for value in values if list(values).count(value) > 1)
                raise UsageError(f"the matrix names {twice!r} twice in its {name}")
        for name, value in (("starts", self.starts), ("plays per family", self.per_family)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.plays > _MAX_PLAYS:
            raise UsageError(
                f"the matrix has {self.plays:,} plays, more than the {_MAX_PLAYS:,} allowed; give fewer starts"
            )
        for cell in self.cells():
            self.options(cell)  # raises for values out of range, before hours of work
        for policy in self.policies:
            _try(policy, self.offers)
        if self.estimator is not None:
            load_estimator(self.estimator)()

    @property
    def plays(self) -> int:
        """Number of plays."""
        axes = (self.offers, self.deadlines, self.loads, self.rtts, self.engines, self.policies)
        return math.prod(map(len, axes)) * sum(self.counts())

    def counts(self) -> list[int]:
        """Return the number of start points of each trace."""
        if self.per_family is None:
            return [self.starts] * len(self.traces)
        sizes = Counter(trace.family for trace in self.traces)
        seen: Counter[str] = Counter()
        found = []
        for trace in self.traces:
            size, index = sizes[trace.family], seen[trace.family]
            found.append(self.per_family * (index + 1) // size - self.per_family * index // size)
            seen[trace.family] += 1
        return found

    def cells(self) -> Iterator[Cell]:
        """Yield every cell in axis order."""
        axes = (self.offers, self.deadlines, self.loads, self.rtts, self.engines)
        for offer, deadline_s, load, rtt_s, engine in product(*axes):
            yield Cell(offer.name, deadline_s, load, rtt_s, engine.text)

    def catalog(self, cell: Cell) -> Catalog:
        """Return the catalog of a cell."""
        return next(offer.catalog for offer in self.offers if offer.name == cell.asset)

    def options(self, cell: Cell) -> ReplayOptions:
        """Return the options of a cell."""
        engine = next(engine for engine in self.engines if engine.text == cell.engine)
        return ReplayOptions(
            deadline_s=cell.deadline_s,
            rtt_s=cell.rtt_s,
            scale_to_mean=cell.load,
            cost=engine.cost(self.catalog(cell), cell.deadline_s),
            mode=engine.mode,
            decode_scale=self.decode_scale,
            decoders=self.decoders,
            slow_start=self.slow_start,
            estimator=self.estimator,
            config=PlayerConfig(gpu_price=engine.gpu_price, time_price=self.time_price),
            blend=BlendGoal(None, QUESTION, MISS_PENALTY) if self.catalog(cell).sources else None,
            question=self.question,
            tail=self.tail,
        )

    def starts_of(self, trace: Trace, count: int) -> list[float]:
        """Return ``count`` start points of a trace in seconds; a larger count only adds points."""
        dice = random.Random(f"{self.seed}:{trace.family}:{trace.name}")  # noqa: S311  # start points, not secrets
        return [0.0, *(dice.uniform(0.0, trace.duration_s) for _ in range(count - 1))]


def _try(policy: str, offers: tuple[Offer, ...]) -> None:
    load_policy(policy)()
    track = policy.removeprefix("fixed:")
    for offer in offers:
        if track != policy and track not in offer.catalog.by_name:
            names = ", ".join(offer.catalog.by_name)
            raise PolicyError(f"{policy}: asset {offer.name} has no such track; choose from {names}")


def read_toml(path: Path) -> dict[str, Any]:
    """Read the axes in a TOML file; its paths are relative to its folder.

    Raises:
        UsageError: The file is not TOML, or has an unknown key or a value of the wrong type.
    """
    text = read_text(path, _MAX_BYTES, unreadable=UsageError)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML ({error})") from error
    known = (*_LISTS, *_NUMBERS, *_OTHERS)
    if unknown := sorted(set(table) - set(known)):
        raise UsageError(f"{path}: unknown key {unknown[0]!r}; choose from {', '.join(known)}")
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
    """Build the matrix with these axes; missing axes have default values.

    Args:
        axes: ``traces`` (files or folders), ``families`` (name to files or folders), ``exclude`` (families),
            ``policies``, ``deadlines`` (seconds), ``loads`` (fractions of FP16, or "own" for unscaled traces), ``rtts``
            (milliseconds, or "own"), ``engines``, ``assets``, ``starts``, ``per_family``, ``seed``, ``decode_scale``,
            ``decoders``, ``time_price`` (nats per token and second), ``question`` and ``tail`` (tokens), ``estimator``,
            ``slow_start``.

    Raises:
        UsageError: A value has the wrong type or is out of range.
        TraceError: A trace cannot be read.
        AssetError: An asset does not exist.
    """
    offers = tuple(_offer(item) for item in axes.get("assets") or [SHIPPED])
    # A prompt of passages needs an engine for the text between them.
    default = "asset" if any(offer.catalog.sources for offer in offers) else "none"
    estimator = axes.get("estimator")
    if estimator is not None and not isinstance(estimator, str):
        raise UsageError(f"estimator {estimator!r} must be a name")
    return LabMatrix(
        offers=offers,
        traces=_traces(axes),
        policies=_policies([_text(item, "policies") for item in axes.get("policies") or [DEFAULT]], offers),
        deadlines=tuple(_number(item, "deadlines") for item in axes.get("deadlines") or [2.0]),
        loads=tuple(None if item == "own" else _number(item, "loads") for item in axes.get("loads") or DEFAULT_LOADS),
        rtts=tuple(None if i == "own" else _number(i, "rtts") / 1000.0 for i in axes.get("rtts") or ["own"]),
        engines=tuple(EngineSpec.parse(_text(item, "engines")) for item in axes.get("engines") or [default]),
        starts=_whole(axes.get("starts", 1), "starts"),
        per_family=None if axes.get("per_family") is None else _whole(axes["per_family"], "per_family"),
        seed=_whole(axes.get("seed", 0), "seed"),
        estimator=estimator,
        decode_scale=_number(axes.get("decode_scale", 1.0), "decode_scale"),
        decoders=_whole(axes.get("decoders", 1), "decoders"),
        slow_start=axes.get("slow_start", True) is not False,
        time_price=_number(axes.get("time_price", TIME_PRICE), "time_price"),
        question=_whole(axes.get("question", 0), "question"),
        tail=_whole(axes.get("tail", DEFAULT_MAX_TAIL), "tail"),
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
        raise UsageError(
            f"exclude: unknown family {missing[0]!r}; choose from {', '.join(sorted({t.family for t in found}))}"
        )
    return tuple(trace for trace in found if trace.family not in out)


def _renamed(trace: Trace, family: str) -> Trace:
    return replace(trace, family=family, name=f"{family}/{trace.name.removeprefix(f'{trace.family}/')}")


def _policies(names: Sequence[str], offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return each name once; ``all`` means every policy without an argument, and ``fixed:TRACK`` for each track."""
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
    notes: list[str] = []
    if path.is_dir():
        stores = names_in(StoreTree(path))
        named = sorted(stores)
        catalogs = [stores[name].open(name.rpartition("/")[2]).catalog for name in named]
    else:
        named, catalogs = [text], [open_catalog(path)[0]]
    if not catalogs:
        raise AssetError(f"{path}: contains no asset; make one with: kvabr encode")
    catalog = catalogs[0]
    if len(catalogs) > 1:

        def computed(number: int, reason: str) -> None:
            notes.append(f"{named[number]} is computed: {reason}")

        catalog = prompt_of(catalogs, EXACT, refused=computed)
    name = path.name.removesuffix(".json").removesuffix(".catalog").removesuffix(".asset")
    return Offer(name, catalog, tuple(notes))


def _beside(home: Path, item: Any) -> str:
    return str(home / _text(item, "paths"))


def _policy_beside(home: Path, item: Any) -> str:
    text = _text(item, "policies")
    file, colon, rest = text.partition(":")
    return f"{home / file}{colon}{rest}" if file.endswith(".py") else text


def _text(item: Any, where: str) -> str:
    if not isinstance(item, str) or not item:
        raise UsageError(f"{where}: {item!r} must be text")
    return item


def _number(item: Any, where: str) -> float:
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise UsageError(f"{where}: {item!r} must be a number")
    return float(item)


def _whole(item: Any, where: str) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise UsageError(f"{where}: {item!r} must be a whole number")
    return item
