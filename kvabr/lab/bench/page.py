"""One self-contained page of a rate-distortion bench: its plot, its tables and what was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from kvabr.lab.bench.plot import drawing

Row = dict[str, Any]

_STYLE = """
:root { --ground: #fbfbf9; --ink: #1c2027; --muted: #646c79; --hair: #e3e3dd; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --ink: #e7e9ed; --muted: #98a1af; --hair: #2c323c; } }
body { margin: 0 auto; padding: 28px clamp(14px, 3vw, 40px) 64px; max-width: 1120px;
  background: var(--ground); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.mark { margin: 0; color: var(--muted); font-weight: 650; }
h1 { font-size: 22px; font-weight: 550; margin: 6px 0 18px; max-width: 60ch; }
h2 { font-size: 17px; margin: 36px 0 10px; }
.muted { color: var(--muted); font-size: 12px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--hair); text-align: right; white-space: nowrap; }
th { font-weight: 400; font-size: 12px; color: var(--muted); }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; }
"""


def page(title: str, sentence: str, rows: Sequence[Row], exact: Row | None, tables: Sequence[tuple[str, Table]]) -> str:
    """The page's text.

    Args:
        title: what was measured.
        sentence: what came out, in one sentence.
        rows: what is drawn, see `kvabr.lab.bench.plot.drawing`.
        exact: retrieval behind the exact cache.
        tables: titles and tables.
    """
    parts = [f"<h2>{escape(name)}</h2>{_table(table)}" for name, table in tables]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<p class="mark">kvabr bench rd</p><h1>{escape(sentence)}</h1><p class="muted">{escape(title)}</p>'
        f"{drawing(rows, exact)}{''.join(parts)}</body></html>\n"
    )


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Names of columns, and lines of cells as text."""


def _table(table: Table) -> str:
    names, lines = table
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
