"""Reports of a replay: terminal table, summary sentence, HTML page, SVG picture, Perfetto trace, and JSON lines log."""

from __future__ import annotations

from kvabr.replay.report.exports import write_log, write_perfetto
from kvabr.replay.report.page import write_page
from kvabr.replay.report.picture import write_picture
from kvabr.replay.report.table import family_table, summary_table, verification_table
from kvabr.replay.report.verdict import verdict

__all__ = [
    "family_table",
    "summary_table",
    "verdict",
    "verification_table",
    "write_log",
    "write_page",
    "write_perfetto",
    "write_picture",
]
