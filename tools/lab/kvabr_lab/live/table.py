"""The terminal table of a live replay, with the errors of the simulator."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvabr.replay.report.queries import DASH, Result, number
from kvabr.replay.report.table import plain_table

_LIVE_TITLES = (
    "plays", "TTFT error\nmedian", "\np90", "\nbias", "same\ntrack", "same\nverdict", "regret\nlive", "\nsimulated",
)  # fmt: skip


def live_table(result: Result) -> RenderableType:
    """Return the simulator's errors relative to the live TTFT: in total, by trace family and by policy."""
    compared: dict[str, Any] = result["live_comparison"]
    table = plain_table()
    table.spare = ("regret\nlive", "\nsimulated", "\np90", "\nbias", "same\ntrack")
    table.add_column("simulated\nagainst live", no_wrap=True, overflow="ellipsis", min_width=12)
    for title in _LIVE_TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    _live_row(table, "all", compared["all"], style="bold")
    busy = compared["all"]["plays"] - compared["network"]["plays"]
    if busy:
        _live_row(table, "network-limited", compared["network"])
    for kind in ("families", "policies"):
        if len(compared[kind]) > 1:
            for name, totals in compared[kind].items():
                _live_row(table, name, totals)
    notes: list[RenderableType] = [
        Text("error: |simulated / live - 1| · same track: share of the tokens · verdict: deadline met or not", "dim"),
        Text("regret: mean over the plays that some schedule could have completed in time, nats per token", "dim"),
    ]
    if busy:
        plays = "1 play was" if busy == 1 else f"{busy} plays were"
        notes.append(Text(f"{plays} limited by this machine's processors, not by the link", "yellow"))
    return Group(table, *notes)


def _live_row(table: Table, name: str, totals: dict[str, Any], style: str = "") -> None:
    table.add_row(
        Text(name, style),
        f"{totals['compared']}" if totals["compared"] == totals["plays"] else f"{totals['compared']}/{totals['plays']}",
        _share(totals["ttft_error_median"]),
        _share(totals["ttft_error_p90"]),
        _share(totals["ttft_bias"], sign=True),
        _share(totals["track_agreement"]),
        _share(totals["met_agreement"]),
        _live_nats(totals.get("regret_live")),
        _live_nats(totals.get("regret_simulated")),
    )


def _live_nats(value: Any) -> str:
    regret = number(value)
    return DASH if regret is None else f"{regret:.4f}"


def _share(value: Any, *, sign: bool = False) -> str:
    share = number(value)
    if share is None:
        return DASH
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"
