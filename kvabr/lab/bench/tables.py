"""The tables of a rate-distortion bench, as text cells for terminal and page alike, and its outcome in a sentence."""

from __future__ import annotations

from typing import Any

from kvabr.lab.bench.page import Table

Row = dict[str, Any]


def loss_table(result: Row) -> Table:
    """Every scheme: size, loss, agreement."""
    names = ["scheme", "bits/el", "ratio", "KL", "median", "worst", "95%", "ΔNLL", "top-1"]
    lines = []
    for row in result["schemes"]:
        if row["kl"] is not None:
            line = [row["scheme"], _show(row["bits"], ".3f"), _show(row["ratio"], ".2f", "x")]
            line += [_show(row[key], ".5f") for key in ("kl", "kl_median", "kl_worst")]
            line += [_interval(row["kl_ci95"], ".4f"), _show(row["dnll"], "+.4f"), _show(row["top1"], ".3f")]
            lines.append(line)
    return names, lines


def recall_table(result: Row) -> Table | None:
    """Every scheme: planted codes. None without retrieval."""
    if result["exact"] is None:
        return None
    names = ["scheme", "bits/el", "digits right", "whole codes", "log p", "95%"]
    lines = []
    for row in result["schemes"]:
        if row["logprob"] is not None:
            line = [row["scheme"], _show(row["bits"], ".3f"), *(_show(row[key], ".3f") for key in ("digits", "whole"))]
            lines.append([*line, _show(row["logprob"], ".4f"), _interval(row["logprob_ci95"], ".4f")])
    return names, lines


def domain_table(result: Row) -> Table:
    """KL of every scheme by domain, and its bits."""
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
    """Size against CacheGen by length of groups, at its quality."""
    against = result["against"]
    if not against or not against["group_sizes"]:
        return None
    lines = [
        [str(row["group_tokens"]), f"{row['theirs']:.3f}", f"{row['ours']:.3f}", f"{row['ratio']:.2f}x"]
        for row in against["group_sizes"]
    ]
    return ["tokens a group", "CacheGen bits/el", "kvabr bits/el", "fewer bytes"], lines


def sentence(result: Row) -> str:
    """What came out."""
    against = result["against"]
    if not against:
        return f"{len(result['schemes'])} schemes on {len(result['contexts'])} contexts"
    parts = [f"{name} {against[key]:.3f}" for key, name in _MEASURES.items() if against.get(key) is not None]
    if against["bits"] is None:
        return f"CacheGen's quality is not reached by every measure; bits an element: {', '.join(parts) or 'none'}"
    spread = _interval(against["ci95"], ".3f")
    theirs = f", where CacheGen takes {against['theirs']:.2f}" if against["theirs"] else ""
    said = f" (95%: {spread})" if against["ci95"] else ""
    bits = f"{against['bits']:.3f} bits an element{said}{theirs}"
    return f"As good as CacheGen by every measure at {bits}: {', '.join(parts)}"


_MEASURES = {"kl": "KL", "logprob": "log p of codes", "whole": "whole codes"}


def _show(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _interval(ends: list[float] | None, form: str) -> str:
    return "-" if not ends else f"{ends[0]:{form}} to {ends[1]:{form}}"
