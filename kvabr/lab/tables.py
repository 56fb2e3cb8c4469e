"""What a laboratory result says, for a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from kvabr.lab.causes import CAUSES
from kvabr.lab.matrix import Cell, varying
from kvabr.replay.report.plays import DASH, nats

_WORDS = {
    "too_high": "too high", "too_low": "too low", "gave_up": "gave up",
}  # fmt: skip


def cause_title(cause: str) -> str:
    """A cause as people read it."""
    return _WORDS.get(cause, cause)


def interval(ends: list[float] | None) -> str:
    """A 95 % interval of a regret."""
    return DASH if ends is None else f"{short(ends[0], 2)}{DASH}{short(ends[1], 2)}"


def short(value: float | None, digits: int = 3) -> str:
    """A regret or loss in few characters: so many digits, no more than five places, no zero before the point."""
    if value is None:
        return DASH
    if abs(value) < 5e-6:
        return "0"
    text = nats(value, digits)
    places = len(text.partition(".")[2])
    text = f"{value:.5f}" if places > 5 else text
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def ranking_table(result: dict[str, Any]) -> Table:
    """Policies over the whole matrix, best first; those that cannot be told apart share a place."""
    comparison = result["comparison"]
    title = f"{comparison['plays']:,} feasible plays over {comparison['traces']} traces, each by every policy"
    table = _table(title)
    for name in ("#", "policy", "regret", "95 %", "net only", "cannot be told from"):
        left = name in {"policy", "cannot be told from"}
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "cannot be told from")
    for row in comparison["ranking"]:
        line = result["summary"][row["policy"]]
        table.add_row(
            str(row["place"]), row["policy"], short(row["regret_mean"]), interval(row["regret_ci95"]),
            short(line["network_regret_mean"]), ", ".join(row["like"]),
        )  # fmt: skip
    return table


def deadline_table(result: dict[str, Any]) -> Table:
    """Deadlines met, and what was paid, policy by policy, over the feasible plays of each."""
    table = _table("deadlines met, loss and waste")
    for name in ("policy", "met", "95 %", "TTFT p50", "p95", "loss", "wasted"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in result["comparison"]["ranking"]:
        line = result["summary"][row["policy"]]
        low, high = line["hit_ratio_ci95"]
        table.add_row(
            row["policy"], f"{100 * line['hit_ratio']:.2f} %", f"{100 * low:.2f}{DASH}{100 * high:.2f}",
            _seconds(line["ttft_p50_s"]), _seconds(line["ttft_p95_s"]), short(line["loss_mean"]),
            f"{100 * line['bytes_wasted_share']:.2f} %",
        )  # fmt: skip
    return table


def cells_table(result: dict[str, Any]) -> Table:
    """Mean regret of every policy in every cell."""
    cells = list(map(cell_of, result["cells"]))
    table = _table(f"mean regret by cell ({cells[0].title(varying(cells), kinds=True)})")
    policies = [row["policy"] for row in result["comparison"]["ranking"]]
    table.add_column("cell", no_wrap=True)
    for policy in policies:
        table.add_column(policy, justify="right", overflow="fold")
    for cell, where in zip(result["cells"], cells, strict=True):
        table.add_row(
            where.title(varying(cells)),
            *(short(cell["summary"][policy]["regret_mean"], 2) for policy in policies),
        )  # fmt: skip
    return table


def causes_table(result: dict[str, Any]) -> Table:
    """Mean regret of every policy by cause."""
    table = _table("mean regret by cause, thousandths")
    table.add_column("policy", no_wrap=True)
    table.add_column("regret", justify="right")
    lines = [result["summary"][row["policy"]] for row in result["comparison"]["ranking"]]
    here = [cause for cause in CAUSES if any(abs(line["causes"][cause]) >= 5e-7 for line in lines)]
    for cause in here:
        table.add_column(cause_title(cause), justify="right")
    for row in result["comparison"]["ranking"]:
        line = result["summary"][row["policy"]]
        shown = (_thousandths(line["causes"][cause]) for cause in here)
        table.add_row(row["policy"], _thousandths(line["regret_mean"]), *shown)
    return table


def apart_table(result: dict[str, Any]) -> Table | None:
    """What policies did where nobody could have made it; None if there were no such plays."""
    lines = {policy: line["apart"] for policy, line in result["summary"].items()}
    if not any(line["plays"] for line in lines.values()):
        return None
    table = _table("plays that nobody could have made: what was done")
    for name in ("policy", "plays", "gave up", "TTFT / deadline", "loss", "tokens recomputed"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for policy, line in lines.items():
        late, tokens = line["ttft_over_deadline_mean"], line["tokens_recomputed_mean"]
        table.add_row(
            policy, f"{line['plays']:,}", f"{line['gave_up']:,}", DASH if late is None else f"{late:.2f}",
            short(line["loss_mean"]), DASH if tokens is None else f"{tokens:.0f}",
        )  # fmt: skip
    return table


def verdict(result: dict[str, Any]) -> str:
    """One sentence: what leads, by how much, and what cannot be told from it."""
    rows = result["comparison"]["ranking"]
    if not rows:
        return "No play was feasible for every policy: nothing can be compared."
    best = rows[0]
    said = f"{best['policy']} leads with mean regret {short(best['regret_mean'])} ({interval(best['regret_ci95'])})"
    alike = [row["policy"] for row in rows if row["policy"] in best["like"]]
    if alike:
        said += f"; {', '.join(alike)} cannot be told from it"
    other = next((row for row in rows[1:] if row["policy"] not in best["like"]), None)
    if other is None:
        return f"{said}."
    pair = next(
        pair for pair in result["comparison"]["pairs"]
        if (pair["first"], pair["second"]) == (best["policy"], other["policy"])
    )  # fmt: skip
    more = -pair["difference"]
    low, high = (-end for end in reversed(pair["difference_ci95"]))
    times = f", {other['regret_mean'] / best['regret_mean']:.3g} times as much" if best["regret_mean"] > 1e-9 else ""
    return f"{said}. Next is {other['policy']} with {short(more)} more ({interval([low, high])}){times}."


def cell_of(cell: dict[str, Any]) -> Cell:
    """The cell that a part of a result is about."""
    return Cell(cell["asset"], cell["deadline_s"], cell["load"], cell["rtt_s"], cell["engine"])


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f} s"


def _thousandths(value: float | None) -> str:
    if value is None:
        return DASH
    return "0" if abs(value) < 5e-7 else f"{1000 * value:.2g}" if abs(value) < 0.1 else f"{1000 * value:.0f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
