"""Results of `kvabr bench blend`: means with 95 % intervals over prompts, and ratios over the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvabr_lab.bench.blend import FULL, LMCACHE, SHARES, Recipe, Row
from kvabr_lab.bench.blend_prompts import KINDS
from kvabr_lab.bench.page import Table
from kvabr_lab.paired import Bootstrap

SCHEMA = "kvabr.bench.blend/1"
Found = Mapping[str, Mapping[str, Row]]


def summarise(found: Found, plan: Sequence[Recipe]) -> dict[str, Any]:
    """Return the JSON result: a row per recipe and kind of prompt, and the ratios."""
    return {"recipes": _recipes(found, plan), "ratios": _ratios(found, plan)}


def _of_kind(rows: Mapping[str, Row], kind: str) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if name.startswith(f"{kind}-")}


def _recipes(found: Found, plan: Sequence[Recipe]) -> list[Row]:
    named = {recipe.name: recipe for recipe in plan}
    out = []
    for name, every in found.items():
        for kind in KINDS:
            rows = _of_kind(every, kind)
            if not rows:
                continue
            bootstrap, recipe = Bootstrap(list(rows)), named.get(name)
            kl, share = (np.array([row[key] for row in rows.values()]) for key in ("kl", "time"))
            loss, spent = bootstrap.interval(kl), bootstrap.interval(share)
            row: Row = {
                "recipe": name,
                "kind": kind,
                "base": recipe.base if recipe else FULL,
                "selector": recipe.selector if recipe else "",
                "share": recipe.share if recipe else 1.0,
                "track": recipe.track if recipe else "",
                "prompts": len(rows),
                "kl": loss.mean,
                "kl_ci95": [loss.low, loss.high],
                "work": float(np.mean([row["work"] for row in rows.values()])),
                "time": spent.mean,
                "time_ci95": [spent.low, spent.high],
            }
            if kind == "codes":
                row["found"] = sum(bool(each["found"]) for each in rows.values())
                margin = bootstrap.interval(np.array([each["margin"] for each in rows.values()]))
                row |= {"margin": margin.mean, "margin_ci95": [margin.low, margin.high]}
            out.append(row)
    return out


def _ratios(found: Found, plan: Sequence[Recipe]) -> list[Row]:
    main = next((recipe for recipe in plan if recipe.selector and recipe.share == SHARES[1]), None)
    if main is None:
        return []
    pairs = [(main, Recipe("alone", peer, main.share)) for peer in ("hkvd", LMCACHE, main.selector)]
    pairs += [(one, main) for one in plan if one.selector == main.selector and one.chosen_on != main.chosen_on]
    out = []
    for one, other in pairs:
        for kind in KINDS:
            first, second = (_of_kind(found.get(recipe.name, {}), kind) for recipe in (one, other))
            if not first or first.keys() != second.keys():
                continue
            bootstrap = Bootstrap(list(first))
            tops, bottoms = (np.array([row["kl"] for row in rows.values()]) for rows in (first, second))
            if not bottoms.sum() > 0:
                continue
            drawn = bootstrap.means(tops) / np.maximum(bootstrap.means(bottoms), 1e-12)
            low, high = np.quantile(drawn, (0.025, 0.975))
            row = {"recipe": one.name, "over": other.name, "kind": kind, "ratio": float(tops.sum() / bottoms.sum())}
            out.append(row | {"ratio_ci95": [float(low), float(high)]})
    return out


def loss_table(result: Mapping[str, Any]) -> Table:
    """Return a line per recipe: losses, codes found and their margin, work and time."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in result["recipes"]:
        by_name.setdefault(row["recipe"], {})[row["kind"]] = row
    kinds = [kind for kind in KINDS if any(kind in rows for rows in by_name.values())]
    lines = []
    for name, rows in by_name.items():
        cells = [_loss(rows.get(kind)) for kind in kinds]
        codes = rows.get("codes")
        share = [float(np.mean([row[key] for row in rows.values()])) for key in ("work", "time")]
        found = [] if "codes" not in kinds else ["-", "-"]
        if codes:
            low, high = codes["margin_ci95"]
            found = [f"{codes['found']} of {codes['prompts']}", f"{codes['margin']:.2f} [{low:.1f}, {high:.1f}]"]
        lines.append((name, *cells, *found, *(f"{value:.3f}" for value in share)))
    found_names = ("found", "margin") if "codes" in kinds else ()
    return ("recipe", *(f"KL {kind}" for kind in kinds), *found_names, "work", "time"), lines


def _loss(row: Row | None) -> str:
    if row is None:
        return "-"
    low, high = row["kl_ci95"]
    return f"{row['kl']:.4f} [{low:.3f}, {high:.3f}]"


def ratio_table(result: Mapping[str, Any]) -> Table:
    """Return a line per ratio."""
    lines = [
        (row["recipe"], row["over"], row["kind"], "{:.2f} [{:.2f}, {:.2f}]".format(row["ratio"], *row["ratio_ci95"]))
        for row in result["ratios"]
    ]
    return ("recipe", "over", "prompts", "ratio of KL"), lines
