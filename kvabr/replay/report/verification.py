"""The table of verified plays: what the catalog predicted against what the real model measured."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def verification_table(result: dict[str, Any]) -> Table:
    """One row per verified run: recomputed tokens, predicted loss, measured KL, their ratio, ΔNLL, top-1 agreement."""
    table = Table(title="verified with the real model", title_justify="left")
    for column in ("policy", "trace", "start s", "recomputed", "predicted", "measured KL", "ratio", "ΔNLL", "top-1"):
        table.add_column(column, justify="left" if column in {"policy", "trace"} else "right")
    for run in result["runs"]:
        measured = run.get("measured")
        if measured is None:
            continue
        predicted, kl = measured["predicted"], measured["kl"]
        table.add_row(
            Text(run["policy"]),
            Text(run["trace"]),
            f"{run['start_s']:.1f}",
            str(run["tokens_recomputed"]),
            f"{predicted:.5f}",
            f"{kl:.5f}",
            f"{kl / predicted:.2f}" if predicted > 0 else "-",
            f"{measured['dnll']:+.4f}",
            f"{measured['top1']:.3f}",
        )
    return table
