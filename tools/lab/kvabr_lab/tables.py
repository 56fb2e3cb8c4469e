"""Tables and a verdict of a laboratory result, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from kvabr.replay.fitting_table import FittingTable
from kvabr.replay.report.queries import DASH, nats
from kvabr.types.words import counted
from kvabr_lab.causes import CAUSES
from kvabr_lab.paired import MIN_TRACES
from kvabr_lab.totals import Cut

_WORDS = {
    "too_high": "too high", "too_low": "too low", "gave_up": "gave up",
}  # fmt: skip
_POLICY_WIDTH = 40
_BETWEEN = 2


def cause_title(cause: str) -> str:
    """Return a cause's title."""
    return _WORDS.get(cause, cause)


def interval(ends: list[float] | None) -> str:
    """Format the 95 % interval of a regret."""
    return DASH if ends is None else f"{short(ends[0], 2)}{DASH}{short(ends[1], 2)}"


def short(value: float | None, digits: int = 3) -> str:
    """Format a regret or loss with ``digits`` significant digits and at most five decimal places."""
    if value is None:
        return DASH
    if abs(value) < 5e-6:
        return "0"
    text = nats(value, digits)
    places = len(text.partition(".")[2])
    return f"{value:.5f}" if places > 5 else text


def ranking_table(result: dict[str, Any]) -> Table:
    """Return the whole matrix's ranking; policies without a significant difference share a place."""
    comparison = result["comparison"]
    title = f"{comparison['plays']:,} feasible plays over {comparison['traces']} traces, each by every policy"
    table = _table(title)
    table.spare = ("net only", "95 %")
    table.add_column("#", justify="right", no_wrap=True)
    _policy_column(table)
    for name in ("regret", "95 %", "net only"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("indistinguishable from", overflow="fold")
    for row in comparison["ranking"]:
        line = result["summary"][row["policy"]]
        table.add_row(
            str(row["place"]), row["policy"], short(row["regret_mean"]), interval(row["regret_ci95"]),
            short(line["network_regret_mean"]), ", ".join(row["like"]),
        )  # fmt: skip
    return table


def deadline_table(result: dict[str, Any]) -> Table:
    """Return deadlines met, TTFT, loss and waste over feasible plays."""
    table = _table("deadlines met, loss and waste")
    table.spare = ("wasted", "95 %", "engine", "p95")
    _policy_column(table)
    computed = any(line["recompute_s_mean"] for line in result["summary"].values())
    for name in ("met", "95 %", "TTFT p50", "p95", "loss", "wasted", *(["engine"] if computed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["comparison"]["ranking"]:
        line = result["summary"][row["policy"]]
        low, high = line["hit_ratio_ci95"]
        table.add_row(
            row["policy"], f"{100 * line['hit_ratio']:.2f} %", f"{100 * low:.2f}{DASH}{100 * high:.2f}",
            _seconds(line["feasible_ttft_p50_s"]), _seconds(line["feasible_ttft_p95_s"]), short(line["loss_mean"]),
            f"{100 * line['feasible_wasted_share']:.2f} %",
            *([_seconds(line["recompute_s_mean"])] if computed else []),
        )  # fmt: skip
    return table


def cut_tables(cut: Cut, policies: Sequence[str], width: int) -> list[Table]:
    """Return mean regrets along one axis, in tables of at most ``width`` characters."""
    columns = []
    for value in cut.values:
        scores = [cut.scores.get((policy, value)) for policy in policies]
        columns.append((value.replace("_", "_\n"), [short(score.regret if score else None, 2) for score in scores]))
    return _side_by_side(f"mean regret by {cut.title}", policies, columns, width)


def causes_tables(result: dict[str, Any], width: int) -> list[Table]:
    """Return mean regrets by cause, in tables of at most ``width`` characters."""
    policies = [row["policy"] for row in result["comparison"]["ranking"]]
    lines = [result["summary"][policy] for policy in policies]
    columns = [("regret", [_thousandths(line["regret_mean"]) for line in lines])]
    for cause in CAUSES:
        if any(abs(line["causes"][cause]) >= 5e-7 for line in lines):
            cells = [_thousandths(line["causes"][cause]) for line in lines]
            columns.append((cause_title(cause).replace(" ", "\n"), cells))
    return _side_by_side("mean regret by cause, thousandths", policies, columns, width) if policies else []


def _side_by_side(
    title: str, policies: Sequence[str], columns: Sequence[tuple[str, list[str]]], width: int
) -> list[Table]:
    blocks: list[list[tuple[str, list[str]]]] = []
    room = 0
    for head, cells in columns:
        needed = _BETWEEN + max(map(len, (*head.split("\n"), *cells)))
        if needed > room:
            blocks.append([])
            room = width - min(_POLICY_WIDTH, max(map(len, policies))) - 2 * _BETWEEN
        blocks[-1].append((head, cells))
        room -= needed
    tables: list[Table] = []
    for number, block in enumerate(blocks):
        table = _table(title + (", continued" if number else ""))
        _policy_column(table)
        for head, _ in block:
            table.add_column(head, justify="right", no_wrap=True)
        for policy, row in zip(policies, zip(*(cells for _, cells in block), strict=True), strict=True):
            table.add_row(policy, *row)
        tables.append(table)
    return tables


def apart_table(result: dict[str, Any]) -> Table | None:
    """Return the results of infeasible plays; None if there are none."""
    lines = {policy: line["apart"] for policy, line in result["summary"].items()}
    if not any(line["plays"] for line in lines.values()):
        return None
    table = _table("infeasible plays: what the policies did")
    table.spare = ("tokens recomputed", "gave up")
    _policy_column(table)
    for name in ("plays", "gave up", "TTFT / deadline", "loss", "tokens recomputed"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy, line in lines.items():
        late, tokens = line["ttft_over_deadline_mean"], line["tokens_recomputed_mean"]
        table.add_row(
            policy, f"{line['plays']:,}", f"{line['gave_up']:,}", DASH if late is None else f"{late:.2f}",
            short(line["loss_mean"]), DASH if tokens is None else f"{tokens:.0f}",
        )  # fmt: skip
    return table


def verdict(result: dict[str, Any]) -> str:
    """Return a sentence on the leading policy, its lead, and policies without a significant difference; no oracles."""
    everyone = result["comparison"]["ranking"]
    if not everyone:
        return "No play was feasible for every policy: policies cannot be compared."
    rows = [row for row in everyone if not row["policy"].endswith("oracle")] or everyone
    best = rows[0]
    plays, traces = result["comparison"]["plays"], result["comparison"]["traces"]
    if len(rows) > 1 and traces < MIN_TRACES:
        return (
            f"{best['policy']} has the least mean regret, {short(best['regret_mean'])}, but {counted(plays, 'play')} "
            f"over {counted(traces, 'trace')} are too few for a significant difference. At least {MIN_TRACES} traces "
            "are needed; more "
            "--starts on the same traces do not replace them."
        )
    said = f"{best['policy']} leads with mean regret {short(best['regret_mean'])} ({interval(best['regret_ci95'])})"
    alike = [row["policy"] for row in rows if row["policy"] in best["like"]]
    if rows is not everyone and everyone[0] not in rows:
        said += f" ({everyone[0]['policy']}, which knows the future, has {short(everyone[0]['regret_mean'])})"
    if alike:
        said += f"; not significantly different by {counted(plays, 'play')} over {traces} traces: {', '.join(alike)}"
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


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f} s"


def _thousandths(value: float | None) -> str:
    if value is None:
        return DASH
    return "0" if abs(value) < 5e-7 else f"{1000 * value:.2g}" if abs(value) < 0.1 else f"{1000 * value:.0f}"


def _policy_column(table: Table) -> None:
    table.add_column("policy", overflow="fold", max_width=_POLICY_WIDTH)


def _table(title: str) -> FittingTable:
    return FittingTable(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
