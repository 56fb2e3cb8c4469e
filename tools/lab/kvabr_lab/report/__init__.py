"""One self-contained page for a matrix: which policy wins, where and why, and the worst plays with timelines.

It is the page of a replay (`kvabr.replay.report`) with additional sections before the plays.
"""

from kvabr_lab.report.page import write_report

__all__ = ["write_report"]
