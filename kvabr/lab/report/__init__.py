"""One self-contained page for a matrix: who wins, where, why, and the worst plays with their timelines.

The page is the one of a replay (`kvabr.replay.report`), with sections of the laboratory's own in front of the plays.
"""

from kvabr.lab.report.page import write_report

__all__ = ["write_report"]
