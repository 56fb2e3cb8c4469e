"""The log as JSON lines: every event of every timeline, exactly as the player wrote it, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvabr.replay.report.plays import Result, Timeline
from kvabr.store.files import write_text


def write_log(path: Path, result: Result, timelines: list[Timeline]) -> None:
    """Write one event a line: the event with ``run`` (index into the result's runs), ``trace`` and ``policy`` added.

    Events stand in the order of the timelines and, within one, of the log; the same input gives the same bytes.
    Numbers that JSON does not have (NaN, infinity) become null.

    Args:
        path: where to; replaced whole.
        result: what `kvabr replay --json` writes.
        timelines: ``{"run": index, "log": [event, ...], "link": [[seconds, bytes per second], ...]}``.

    Raises:
        AssetError: the file cannot be written.
    """
    write_text(path, "".join(_lines(result, timelines)))


def _lines(result: Result, timelines: list[Timeline]) -> Iterator[str]:
    for timeline in timelines:
        run = result["runs"][timeline["run"]]
        head = {"run": timeline["run"], "trace": run["trace"], "policy": run["policy"]}
        for event in timeline["log"]:
            line = {**head, **finite(event.to_json())}
            yield json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity in it replaced by None, as JSON wants it."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
