"""Searches the declared parameters of a policy, with cross-validation over trace families of equal weight.

The search starts from the default, and points spread evenly over the declared ranges (a scrambled Sobol sequence). Then
each fold samples around its own best point, in smaller and smaller steps, and plays its held-out family only after its
choice. A further fold without a held-out family makes the recommendation. As its own score uses the plays that selected
it, the reported score is the cross-validated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvabr.abr.plugins import policy_class
from kvabr.types.errors import UsageError
from kvabr.types.parameters import Parameter, declared, parse, spell
from kvabr_lab.matrix import LabMatrix
from kvabr_lab.paired import Bootstrap, Interval
from kvabr_lab.results_folder import Line, PlayStore
from kvabr_lab.run import Progress, run

Scores = Mapping[str, Mapping[str, float]]

_LOCAL_WIDTH = 0.15
"""Width of the first local round, as a fraction of the range; it is halved every round."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Fold:
    """A fold's choice, and its result on the held-out family."""

    held_out: str
    chosen: str
    inside: float
    """Mean regret of the choice on the other families."""
    outside: float
    """Mean regret of the choice on the held-out family."""
    default_outside: float
    """Mean regret of the default on the held-out family."""


def mean_over(scores: Mapping[str, float], families: Iterable[str]) -> float:
    """Return the mean over families."""
    listed = [scores[family] for family in families]
    return sum(listed) / len(listed)


def choose(scores: Scores, families: Sequence[str], default: str) -> str:
    """Return the candidate with the lowest mean regret over these families; if equal, the default."""
    best = default
    for candidate in scores:
        if mean_over(scores[candidate], families) < mean_over(scores[best], families) - 1e-12:
            best = candidate
    return best


def others(families: Sequence[str], held_out: str | None) -> list[str]:
    """Return all families except the held-out one."""
    return [family for family in families if family != held_out]


@dataclass(frozen=True, slots=True)
class Search:
    """Size of a search."""

    points: int = 16
    """Number of points in the first round, in addition to the default."""
    rounds: int = 2
    near: int = 4
    """Number of points per local round and fold."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 1 or self.rounds < 0 or self.near < 1 or self.points > 4096:
            raise UsageError("a search needs 1 to 4096 points, 0 or more rounds, and at least one point in each round")


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a search."""

    policy: str
    parameters: dict[str, Parameter]
    default: str
    chosen: str
    """The best candidate over all families."""
    folds: tuple[Fold, ...]
    gain: Interval
    """Regret of the default minus that of each fold's choice, on held-out families."""
    default_regret: float
    """Mean regret of the default over families."""
    held_out_regret: float
    """Mean regret of the folds' choices, each on its held-out family."""
    inside_regret: float
    """Mean regret of the recommendation, on the plays that selected it."""
    left_out: tuple[str, ...]
    """Families that have no feasible play."""
    candidates: int
    plays: int

    @property
    def won(self) -> bool:
        """True if the gain on held-out families is significant."""
        return self.gain.low > _ROUNDING

    def values(self, name: str) -> dict[str, float]:
        """Return the values of all parameters of a candidate."""
        given = parse(name.removeprefix(f"{self.policy}:")) if name != self.policy else {}
        return {key: given.get(key, parameter.default) for key, parameter in self.parameters.items()}

    def verdict(self) -> str:
        """Return the outcome as a sentence."""
        if self.chosen == self.default:
            return f"Tuning won nothing: no candidate is better than the defaults of {self.policy} over all families."
        if abs(self.gain.mean) <= _ROUNDING and self.gain.high - self.gain.low <= _ROUNDING:
            return "Tuning won nothing: on held-out families, the chosen parameters do as well as the defaults."
        span = f"{self.gain.low:.2g} to {self.gain.high:.2g}"
        if self.won:
            return f"Tuning won {self.gain.mean:.2g} of regret on held-out families ({span}): {self.chosen}"
        word = "lost" if self.gain.mean < 0 else "gained"
        return (
            f"Tuning won nothing significant: on held-out families it {word} {abs(self.gain.mean):.2g} of regret "
            f"({span}, which includes zero). Keep the defaults."
        )


class _Scores:
    def __init__(self, matrix: LabMatrix, store: PlayStore, jobs: int | None, progress: Progress | None) -> None:
        self._matrix, self._store, self._jobs, self._progress = matrix, store, jobs, progress
        self.families = sorted({trace.family for trace in matrix.traces})
        self.table: dict[str, dict[str, float]] = {}
        self.lines: dict[tuple[str, str], list[Line]] = {}
        self.plays = 0

    def play(self, candidates: Iterable[str], families: Sequence[str]) -> None:
        todo: dict[tuple[str, ...], list[str]] = {}
        for candidate in dict.fromkeys(candidates):
            missing = tuple(family for family in families if (candidate, family) not in self.lines)
            if missing:
                todo.setdefault(missing, []).append(candidate)
        for missing, names in todo.items():
            traces = tuple(trace for trace in self._matrix.traces if trace.family in missing)
            part = replace(self._matrix, traces=traces, policies=tuple(names))
            played = run(part, self._store, jobs=self._jobs, progress=self._progress)
            self.plays += part.plays
            for line in (line for lines in played.lines for line in lines):
                self.lines.setdefault((line["policy"], line["trace_family"]), []).append(line)
            for name in names:
                for family in missing:
                    found = [line["regret"] for line in self.lines[name, family] if line["feasible"]]
                    # `narrow` drops families without a feasible play.
                    self.table.setdefault(name, {})[family] = sum(found) / len(found) if found else 0.0

    def narrow(self, policy: str) -> list[str]:
        told = [family for family in self.families if any(line["feasible"] for line in self.lines[policy, family])]
        out = [family for family in self.families if family not in told]
        self.families = told
        return out


def tune(
    policy: str,
    matrix: LabMatrix,
    store: PlayStore,
    search: Search | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Tuned:
    """Tune a policy over a matrix of at least two trace families; the policies in the matrix are ignored.

    ``progress`` is called with the number of plays finished since its last call, ``notify`` with a description of each
    step.

    Raises:
        UsageError: The policy declares no parameters, or fewer than two families have feasible plays.
        PolicyError: The policy cannot be loaded, or fails.
    """
    search = search or Search()
    parameters = declared(policy_class(policy))
    if not parameters:
        raise UsageError(f"{policy} has no parameters to tune; `kvabr tune --help` shows how to declare them")
    scores = _Scores(matrix, store, jobs, progress)
    families = scores.families
    if len(families) < 2:
        raise UsageError("tuning needs traces of at least two families: one to choose on, one to hold out")
    say = notify or (lambda _: None)
    say(f"first round: {search.points} points and the default over {len(families)} families")
    scores.play([policy, *_spread(policy, parameters, search)], families)
    out = scores.narrow(policy)
    families = scores.families
    if len(families) < 2:
        raise UsageError(f"no play over {', '.join(out)} is feasible: give a lower load, or more families")
    common = list(scores.table)
    chosen: dict[str | None, str] = {}
    for held_out in (*families, None):
        within = others(families, held_out)
        say("local rounds over all families" if held_out is None else f"local rounds without {held_out}")
        chosen[held_out] = _closer(policy, parameters, search, scores, common, within, held_out)
    for held_out in families:
        scores.play([chosen[held_out]], [held_out])
    return _result(policy, parameters, scores, chosen, tuple(out))


def _spread(policy: str, parameters: dict[str, Parameter], search: Search) -> list[str]:
    from scipy.stats import qmc  # noqa: PLC0415 - takes a second to import, and only this needs it

    sobol = qmc.Sobol(len(parameters), scramble=True, rng=np.random.default_rng(search.seed))
    rows = sobol.random(1 << max(0, search.points - 1).bit_length())[: search.points]
    return [_name(policy, parameters, row) for row in rows]


def _closer(
    policy: str, parameters: dict[str, Parameter], search: Search, scores: _Scores, common: Sequence[str],
    within: Sequence[str], held_out: str | None,
) -> str:  # fmt: skip
    dice = np.random.default_rng([search.seed, *(held_out or "").encode()])
    seen = list(common)
    for number in range(search.rounds):
        best = choose({name: scores.table[name] for name in seen}, within, policy)
        centre = np.array([parameters[key].share(value) for key, value in _values(policy, best, parameters).items()])
        width = _LOCAL_WIDTH / 2**number
        rows = np.clip(centre + width * dice.standard_normal((search.near, len(parameters))), 0.0, 1.0)
        near = [_name(policy, parameters, row) for row in rows]
        scores.play(near, within)
        seen = list(dict.fromkeys((*seen, *near)))
    return choose({name: scores.table[name] for name in seen}, within, policy)


def _name(policy: str, parameters: dict[str, Parameter], shares: Iterable[float]) -> str:
    values = {key: parameters[key].at(float(share)) for key, share in zip(parameters, shares, strict=True)}
    return spell(policy, values)


def _values(policy: str, name: str, parameters: dict[str, Parameter]) -> dict[str, float]:
    given = parse(name.removeprefix(f"{policy}:")) if name != policy else {}
    return {key: given.get(key, parameter.default) for key, parameter in parameters.items()}


def _result(
    policy: str, parameters: dict[str, Parameter], scores: _Scores, chosen: dict[str | None, str], out: tuple[str, ...]
) -> Tuned:
    families = scores.families
    folds = tuple(
        Fold(
            held_out=family,
            chosen=chosen[family],
            inside=mean_over(scores.table[chosen[family]], others(families, family)),
            outside=scores.table[chosen[family]][family],
            default_outside=scores.table[policy][family],
        )
        for family in families
    )
    everywhere = chosen[None]
    return Tuned(
        policy=policy,
        parameters=parameters,
        default=policy,
        chosen=everywhere,
        folds=folds,
        gain=_gain(policy, scores, chosen),
        default_regret=mean_over(scores.table[policy], families),
        held_out_regret=sum(fold.outside for fold in folds) / len(folds),
        inside_regret=mean_over(scores.table[everywhere], families),
        left_out=out,
        candidates=len(scores.table),
        plays=scores.plays,
    )


def _gain(policy: str, scores: _Scores, chosen: dict[str | None, str]) -> Interval:
    drawn, means = [], []
    for number, family in enumerate(scores.families):
        pairs = [
            (default["trace"], default["regret"] - other["regret"])
            for default, other in zip(scores.lines[policy, family], scores.lines[chosen[family], family], strict=True)
            if default["feasible"]
        ]
        values = np.array([value for _, value in pairs])
        means.append(float(values.mean()))
        drawn.append(Bootstrap([trace for trace, _ in pairs], seed=number).means(values))
    # Resample families, too, to predict the result on new families.
    dice = np.random.default_rng(0)
    weights = dice.multinomial(len(means), [1 / len(means)] * len(means), size=len(drawn[0])).T
    total = (np.array(drawn) * weights).sum(axis=0) / len(means)
    low, high = np.quantile(total, (0.025, 0.975))
    mean = sum(means) / len(means)
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))
