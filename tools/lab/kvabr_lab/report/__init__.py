"""One self-contained page for a matrix: who wins, where, why, and the worst plays with their timelines.

It is a replay's page (`kvabr.replay.report`) with the laboratory's own sections before the plays.
"""

from kvabr_lab.report.page import write_report

__all__ = ["write_report"]
