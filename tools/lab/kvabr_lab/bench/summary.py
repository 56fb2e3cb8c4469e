"""Results of a rate-distortion bench: statistics per scheme, rates of equal quality, tables and a sentence.

Intervals are bootstrapped: contexts (for losses) and cases (for retrieval) are resampled with replacement, in the same
way for both sides of a comparison.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvabr_lab.bench.measure import EXACT, Findings
from kvabr_lab.bench.page import Table

RESAMPLES = 1000
_INTERVAL = (2.5, 97.5)

Row = dict[str, Any]
Samples = npt.NDArray[np.float64]


def scheme_rows(findings: Findings, families: Mapping[str, str]) -> list[Row]:
    """Return one dictionary per scheme, smallest first; ``families`` names the curve of each scheme.

    Returns:
        ``scheme, family, bits, ratio`` (to 16 bits), ``kl, kl8, kl32, loss, kl_median, kl_worst, kl_ci95, dnll,
        dnll_worst, dnll_ci95, top1, digits, whole, logprob, logprob_ci95``; None if not measured.
    """
    names = list(dict.fromkeys((*findings.quality, *findings.recall)))
    rows = [_row(findings, name, families.get(name, name)) for name in names]
    return sorted(rows, key=lambda row: (row["bits"] is None, row["bits"] or 0.0))


def _row(findings: Findings, name: str, family: str) -> Row:
    row: Row = {"scheme": name, "family": family}
    quality = list(findings.quality.get(name, {}).values())
    recalls = list(findings.recall.get(name, {}).values())
    row["bits"] = _mean(quality, "bits") or None
    row["ratio"] = None if row["bits"] is None else 16 / row["bits"]
    for key in ("kl", "kl8", "kl32", "loss", "dnll", "top1"):
        row[key] = _mean(quality, key)
    row["kl_median"] = statistics.median(one["kl"] for one in quality) if quality else None
    row["kl_worst"] = max((one["kl"] for one in quality), default=None)
    row["dnll_worst"] = max((one["dnll"] for one in quality), default=None)
    for key in ("kl", "dnll"):
        row[f"{key}_ci95"] = _interval([one[key] for one in quality])
    for key in ("digits", "whole", "logprob"):
        row[key] = _mean(recalls, key)
    row["logprob_ci95"] = _interval([one["logprob"] for one in recalls])
    return row


def _mean(rows: Sequence[Row], key: str) -> float | None:
    return statistics.fmean(row[key] for row in rows) if rows and all(row[key] is not None for row in rows) else None


def _interval(values: Sequence[float]) -> list[float] | None:
    if len(values) < 2:
        return None
    samples = np.asarray(values)
    means = samples[_draws(len(samples))].mean(axis=1)
    return [float(edge) for edge in np.percentile(means, _INTERVAL)]


def _draws(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


@dataclass(frozen=True)
class RateCurve:
    """Schemes of one family, smallest first."""

    names: tuple[str, ...]
    bits: Samples
    """Bits per element, [scheme], mean over contexts."""
    losses: Samples
    """KL divergences, [scheme, context]."""
    felt: Samples
    """Losses that give the first tokens more weight (`kvabr.types.catalog.Quality.loss`), [scheme, context]."""
    recalls: dict[str, Samples]
    """``logprob`` and ``whole``, each [scheme, case]; empty without retrieval."""


def curve(findings: Findings, names: Sequence[str]) -> RateCurve:
    """Return the curve of schemes that were measured on the same contexts and cases."""
    bits = {name: _mean(list(findings.quality[name].values()), "bits") or 0.0 for name in names}
    ordered = sorted(names, key=bits.__getitem__)
    losses, felt = (
        np.array([[row[key] for row in findings.quality[name].values()] for name in ordered]) for key in ("kl", "loss")
    )
    recalls = {}
    if all(findings.recall.get(name) for name in ordered):
        for key in ("logprob", "whole"):
            recalls[key] = np.array([[float(row[key]) for row in findings.recall[name].values()] for name in ordered])
    return RateCurve(tuple(ordered), np.array([bits[name] for name in ordered]), losses, felt, recalls)


def crossing(bits: Samples, costs: Samples, target: float, *, log: bool) -> float:
    """Return the lowest rate from which on a curve never costs more than ``target``; infinity if there is none.

    ``bits`` ascend. ``log`` interpolates the logarithm of the costs, as is right for KL, which falls exponentially.
    """
    good = costs <= target + 1e-9 * abs(target)  # tolerate rounding
    if not good[-1]:
        return float("inf")
    if good.all():
        return float(bits[0])
    above = int(np.flatnonzero(~good)[-1])  # the highest rate that is not good enough
    scale: Callable[[float], float] = (lambda cost: float(np.log(max(cost, 1e-12)))) if log else float
    worse, better, wanted = scale(costs[above]), scale(costs[above + 1]), scale(target)
    share = min(1.0, (worse - wanted) / (worse - better))
    return float(bits[above] + share * (bits[above + 1] - bits[above]))


def match(ours: RateCurve, theirs: RateCurve) -> Row:
    """Return the rate at which a curve of two or more schemes is as good as another scheme by every measure.

    Returns:
        ``kl, loss, logprob, whole``: bits per element at which KL, the loss with more weight on first tokens, the
            log-probability of planted codes, and the share of whole codes equal those of the other scheme. ``bits``
            with ``ci95``: their maximum. ``theirs``: the other scheme's rate.
    """
    every = np.arange(ours.losses.shape[1])
    cases = np.arange(next(iter(ours.recalls.values())).shape[1]) if ours.recalls and theirs.recalls else None
    found = _match(ours, theirs, every, cases)
    draws = _draws(len(every))
    more = [None] * RESAMPLES if cases is None else list(_draws(len(cases), 1))
    spread = [max(_match(ours, theirs, draw, other).values()) for draw, other in zip(draws, more, strict=True)]
    finite = [value for value in spread if np.isfinite(value)]
    ci = [float(edge) for edge in np.percentile(finite, _INTERVAL)] if len(finite) == len(spread) else None
    bits = max(found.values())
    return {
        **{key: value if np.isfinite(value) else None for key, value in found.items()},
        "bits": bits if np.isfinite(bits) else None,
        "ci95": ci,
        "theirs": float(theirs.bits[0]) or None,
    }


def _match(
    ours: RateCurve, theirs: RateCurve, contexts: npt.NDArray[np.int64], cases: npt.NDArray[np.int64] | None
) -> dict[str, float]:
    found = {
        key: crossing(ours.bits, mine[:, contexts].mean(axis=1), float(its[0, contexts].mean()), log=True)
        for key, mine, its in (("kl", ours.losses, theirs.losses), ("loss", ours.felt, theirs.felt))
    }
    if cases is not None:
        for key in ("logprob", "whole"):
            costs = -ours.recalls[key][:, cases].mean(axis=1)
            found[key] = crossing(ours.bits, costs, -float(theirs.recalls[key][0, cases].mean()), log=False)
    return found


def at_group_size(ours: RateCurve, bits: float, sizes: Mapping[str, Mapping[str, Row]]) -> float | None:
    """Return the rate that corresponds to ``bits`` on a curve for another group size; ``sizes`` has its rows."""
    if any(name not in sizes for name in ours.names):
        return None
    other = [_mean(list(sizes[name].values()), "bits") or 0.0 for name in ours.names]
    return float(np.interp(bits, ours.bits, other))


def exact_recall(findings: Findings) -> Row | None:
    """Return the mean retrieval from the exact cache; None if not measured."""
    rows = list(findings.recall.get(EXACT, {}).values())
    return {key: _mean(rows, key) for key in ("digits", "whole", "logprob")} | {"cases": len(rows)} if rows else None


def text_row(findings: Findings) -> Row | None:
    """Return the mean ``nll`` and ``entropy`` with exact caches; None if not measured."""
    rows = list(findings.texts.values())
    return {key: _mean(rows, key) for key in ("nll", "entropy")} if rows else None


def text_sentence(result: Row) -> str:
    """Return a sentence on how well the model predicts the texts; empty if not measured."""
    text = result["text"]
    if not text:
        return ""
    return (
        f"With exact caches these texts cost the model {text['nll']:.3f} nats per token, where it expects "
        f"{text['entropy']:.3f}; the more these differ, the less ΔNLL shows about a codec"
    )


def loss_table(result: Row) -> Table:
    """Return size, loss and agreement of every scheme."""
    names = ["scheme", "bits/el", "ratio", "KL", "median", "worst", "95%", "ΔNLL", "95%", "top-1"]
    lines = []
    for row in result["schemes"]:
        if row["kl"] is not None:
            line = [row["scheme"], _show(row["bits"], ".3f"), _show(row["ratio"], ".2f", "x")]
            line += [_show(row[key], ".5f") for key in ("kl", "kl_median", "kl_worst")]
            line += [_show_interval(row["kl_ci95"], ".4f"), _show(row["dnll"], "+.4f")]
            line += [_show_interval(row["dnll_ci95"], "+.4f"), _show(row["top1"], ".3f")]
            lines.append(line)
    return names, lines


def first_table(result: Row) -> Table | None:
    """Return the KL over the first tokens; None if continuations are too short."""
    names = ["scheme", "bits/el", "KL of 8 tokens", "of 32", "of all", "loss"]
    lines = [
        [row["scheme"], _show(row["bits"], ".3f"), *(_show(row[key], ".5f") for key in ("kl8", "kl32", "kl", "loss"))]
        for row in result["schemes"]
        if row["kl8"] is not None
    ]
    return (names, lines) if lines else None


def recall_table(result: Row) -> Table | None:
    """Return the retrieval of every scheme, if measured."""
    if result["exact"] is None:
        return None
    names = ["scheme", "bits/el", "digits right", "whole codes", "log p", "95%"]
    lines = []
    for row in result["schemes"]:
        if row["logprob"] is not None:
            line = [row["scheme"], _show(row["bits"], ".3f"), *(_show(row[key], ".3f") for key in ("digits", "whole"))]
            lines.append([*line, _show(row["logprob"], ".4f"), _show_interval(row["logprob_ci95"], ".4f")])
    return names, lines


def domain_table(result: Row) -> Table:
    """Return bits and KL by domain."""
    domains = list(result["domains"])
    names = ["scheme", *(f"{domain}: {what}" for domain in domains for what in ("bits", "KL"))]
    lines = []
    for row in result["schemes"]:
        cells = [result["domains"][domain].get(row["scheme"]) for domain in domains]
        if any(cell is not None for cell in cells):
            shown = [((cell["bits"] or None, ".3f"), (cell["kl"], ".5f")) for cell in cells if cell]
            lines.append([row["scheme"], *(_show(*number) for pair in shown for number in pair)])
    return names, lines


def group_table(result: Row) -> Table | None:
    """Return sizes at CacheGen's quality by group size; None if not measured."""
    against = result["against"]
    if not against or not against["group_sizes"]:
        return None
    lines = [
        [str(row["group_tokens"]), f"{row['theirs']:.3f}", f"{row['ours']:.3f}", f"{row['ratio']:.2f}x"]
        for row in against["group_sizes"]
    ]
    return ["tokens a group", "CacheGen bits/el", "kvabr bits/el", "fewer bytes"], lines


def sentence(result: Row) -> str:
    """Return a sentence or two about the outcome."""
    against, ends = result["against"], result["against_end"]
    if not against:
        return f"{len(result['schemes'])} schemes on {len(result['contexts'])} contexts"
    parts = [f"{name} {against[key]:.3f}" for key, name in _MEASURES.items() if against.get(key) is not None]
    finer = ""
    if ends and ends["bits"] is not None:
        finer = f". With the last group on a finer track: {_rate(ends)}"
    if against["bits"] is None:
        listed = ", ".join(parts) or "none"
        return f"No track is as good as CacheGen by every measure; bits per element: {listed}{finer}"
    theirs = f", where CacheGen takes {against['theirs']:.2f}" if against["theirs"] else ""
    said = f"{_rate(against)} bits per element{theirs}"
    return f"As good as CacheGen by every measure at {said}: {', '.join(parts)}{finer}"


def _rate(against: Row) -> str:
    spread = f" (95%: {_show_interval(against['ci95'], '.3f')})" if against["ci95"] else ""
    return f"{against['bits']:.3f}{spread}"


_MEASURES = {"kl": "KL", "loss": "loss", "logprob": "log p of codes", "whole": "whole codes"}


def _show(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _show_interval(ends: list[float] | None, form: str) -> str:
    return "-" if not ends else f"{ends[0]:{form}} to {ends[1]:{form}}"
