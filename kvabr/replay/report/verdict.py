"""A sentence about the gain of adaptation over the best fixed track."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvabr.replay.report.queries import (
    FIXED,
    ORACLE,
    Result,
    Run,
    feasible,
    nats,
    number,
    play_key,
    set_apart,
    why_apart,
)

_EQUAL_SHARE = 0.01
_NEGLIGIBLE_LOSS = 1e-6
"""Losses below this are too small to measure, nats per token."""

Plays = dict[tuple[str, float, float], Run]


@dataclass(frozen=True, slots=True)
class _Score:
    policy: str
    plays: int
    met: int
    loss: float
    regret: float

    @property
    def hits(self) -> str:
        if self.plays == 1:
            return "met the deadline" if self.met else "missed the deadline"
        return f"met the deadline in {self.met:,} of {self.plays:,} plays"

    @property
    def title(self) -> str:
        return self.policy.removeprefix(FIXED)


def verdict(result: Result) -> str:
    """Return a sentence that compares the best adaptive policy with the best fixed track.

    "Best" means the lowest mean regret over the plays that all policies have in common. Infeasible plays are excluded;
    the sentence ends with their number. Oracles (``oracle``, ``...-oracle``) are ignored. If adaptation loses or is
    equal, the sentence says so.
    """
    apart = set_apart(result)
    by_policy: dict[str, Plays] = {}
    for run in result.get("runs", ()):
        if feasible(run):
            by_policy.setdefault(str(run["policy"]), {})[play_key(run)] = run
    if not by_policy:
        return _nothing_feasible(apart, why_apart(result))
    shared = set.intersection(*(set(plays) for plays in by_policy.values()))
    scores = [_score(policy, plays, shared or set(plays)) for policy, plays in by_policy.items()]
    scores.sort(key=lambda score: (score.regret, -score.met, score.loss))
    fixed = [score for score in scores if score.policy.startswith(FIXED)]
    adaptive = [score for score in scores if not score.policy.startswith(FIXED)]
    adaptive = [score for score in adaptive if not score.policy.endswith(ORACLE)] or adaptive
    if adaptive and fixed:
        sentence = _compare(adaptive[0], fixed[0])
        if not shared:
            sentence += " (each over its own plays: they share none)"
    elif adaptive:
        sentence = _alone(adaptive[0], len(scores))
        if len(adaptive) > 1 and shared:
            second = f"{_regret(adaptive[1])} for {adaptive[1].policy}"
            sentence += f"; its mean regret is {_regret(adaptive[0])} against {second}"
        else:
            sentence += "; no fixed track was played to compare it with"
    else:
        sentence = _alone(fixed[0], len(scores)) + "; no adaptive policy was played to compare it with"
    return sentence + _apart(apart, why_apart(result)) + "."


def _score(policy: str, plays: Plays, keys: set[tuple[str, float, float]]) -> _Score:
    runs = [plays[key] for key in sorted(keys)]
    losses = [number(run.get("loss")) for run in runs]
    regrets = [number(run.get("regret")) for run in runs]
    return _Score(
        policy,
        len(runs),
        sum(bool(run.get("met")) for run in runs),
        math.fsum(value for value in losses if value is not None) / len(runs),
        # An abandoned play is worse than any other.
        math.fsum(math.inf if value is None else value for value in regrets) / len(runs),
    )


def _compare(abr: _Score, fixed: _Score) -> str:
    fewer_losses = _order(abr.loss, fixed.loss)
    better = _order(abr.regret, fixed.regret)
    if better == 0 and fewer_losses == 0 and abr.met == fixed.met:
        both = f"both {abr.hits} and lost {_lost(abr)}"
        return f"{abr.policy} did as well as the best fixed track ({fixed.title}) and no better: {both}"
    if better > 0:
        return (
            f"No adaptive policy beat the best fixed track here: {fixed.title} {fixed.hits} and lost {_lost(fixed)}; "
            f"the best adaptive policy, {abr.policy}, {abr.hits} and lost {_lost(abr)} "
            f"(mean regret {nats(fixed.regret)} against {_regret(abr)})"
        )
    more_hits = abr.met - fixed.met
    if more_hits == 0:
        hits = f", as {'often as' if abr.plays > 1 else 'did'} the best fixed track ({fixed.title})"
    else:
        hits = f", against {fixed.met:,} of {fixed.plays:,} for the best fixed track ({fixed.title})"
    worse_somewhere = more_hits < 0 or fewer_losses > 0
    join = ", but" if fewer_losses > 0 and more_hits >= 0 else ", and"
    sentence = f"{abr.policy} {abr.hits}{hits}{join} {_quality(abr, fixed)}"
    if worse_somewhere or fewer_losses == 0:
        sentence += f"; its mean regret is {_regret(abr)} against {_regret(fixed)}"
    return sentence


def _quality(abr: _Score, fixed: _Score) -> str:
    if abr.loss < _NEGLIGIBLE_LOSS and fixed.loss < _NEGLIGIBLE_LOSS:
        return "neither lost any quality that could be measured"
    digits = 2 if nats(abr.loss) != nats(fixed.loss) else 3
    pair = f"{nats(abr.loss, digits)} against {nats(fixed.loss, digits)} nats per token"
    order = _order(abr.loss, fixed.loss)
    if order == 0:
        return f"lost as much quality ({nats(abr.loss)} nats per token)"
    if order > 0:
        times = abr.loss / fixed.loss if fixed.loss > 0 else math.inf
        how = f"{round((times - 1) * 100)} % more quality" if times < 3 else "more quality"
        return f"lost {how}: {pair}"
    percent = round((1 - abr.loss / fixed.loss) * 100)
    return f"lost {percent} % less quality: {pair}" if percent < 100 else f"lost next to no quality: {pair}"


def _alone(score: _Score, policies: int) -> str:
    who = score.policy if policies == 1 else f"{score.policy}, the best of {policies} policies,"
    return f"{who} {score.hits} and lost {_lost(score)}"


def _lost(score: _Score) -> str:
    return f"{nats(score.loss)} nats per token"


def _regret(score: _Score) -> str:
    return nats(score.regret) if math.isfinite(score.regret) else "beyond measure"


def _order(a: float, b: float) -> int:
    if a == b or (
        math.isfinite(a)
        and math.isfinite(b)
        and abs(a - b) <= max(_EQUAL_SHARE * max(abs(a), abs(b)), _NEGLIGIBLE_LOSS)
    ):
        return 0
    return -1 if a < b else 1


def _apart(plays: int, why: str) -> str:
    if not plays:
        return ""
    noun = "one more play is" if plays == 1 else f"{plays:,} more plays are"
    return f"; {noun} set apart because {why}"


def _nothing_feasible(apart: int, why: str) -> str:
    if not apart:
        return "Nothing was played."
    which = "the only play" if apart == 1 else f"all {apart:,} plays"
    return f"In {which}, {why}: there is nothing for a policy to win."
