"""Assembles and writes the page of a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvabr.replay.report.page import Frame, render
from kvabr.store.files import write_text
from kvabr_lab.matrix import LabMatrix
from kvabr_lab.report.sections import build
from kvabr_lab.report.worst import PER_POLICY, replay_worst
from kvabr_lab.run import PlayedMatrix
from kvabr_lab.tables import verdict
from kvabr_lab.totals import cuts


def write_report(
    path: Path, matrix: LabMatrix, played: PlayedMatrix, result: dict[str, Any], *, per_policy: int = PER_POLICY
) -> None:
    """Write the page with the ``per_policy`` worst plays of each policy; the file is replaced atomically.

    Raises:
        AssetError: The file cannot be written.
    """
    ranked = [row["policy"] for row in result["comparison"]["ranking"]]
    policies = ranked or list(matrix.policies)
    worst = replay_worst(matrix, played, policies, per_policy=per_policy)
    sections = build(result, played, cuts(played, policies), worst.shown)
    frame = Frame(
        mark="kvabr lab",
        title=f"{_assets(matrix)} · kvabr lab",
        verdict=verdict(result),
        sections=sections,
        style=files("kvabr_lab.report").joinpath("lab.css").read_text(encoding="utf-8"),
        facts=_facts(matrix, played),
    )
    write_text(path, render(_as_replay(matrix, played, result, worst.runs), worst.timelines, frame))


def _as_replay(matrix: LabMatrix, played: PlayedMatrix, result: dict[str, Any], worst: Sequence[Any]) -> dict[str, Any]:
    """Return the result in the form of a replay's; shown plays are first, since timelines refer to them by index."""
    lines = [line for cell in played.lines for line in cell]
    tracks: dict[str, dict[str, Any]] = {}
    for offer in matrix.offers:
        for track in offer.catalog.tracks:
            row = {"track": track.name, "bytes": track.total_bytes, "loss": sum(track.loss)}
            tracks.setdefault(track.name, row)
    return {
        "asset": {
            "model": _assets(matrix),
            "tokens": matrix.offers[0].catalog.tokens if len(matrix.offers) == 1 else None,
            "tracks": list(tracks.values()),
        },
        "summary": result["summary"],
        "runs": [*worst, *lines],
    }


def _assets(matrix: LabMatrix) -> str:
    return ", ".join(offer.name for offer in matrix.offers)


def _facts(matrix: LabMatrix, played: PlayedMatrix) -> dict[str, Any]:
    lines = [line for cell in played.lines for line in cell]
    starts = sum(matrix.counts())
    first = matrix.policies[0]
    return {
        "runs": len(lines),
        "plays": starts * len(played.cells),
        "traces": len(matrix.traces),
        "apart": sum(not line["feasible"] for line in lines if line["policy"] == first),
        "deadlines": sorted(matrix.deadlines),
        "engine_mode": None,
    }
