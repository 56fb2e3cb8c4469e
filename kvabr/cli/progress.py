"""One progress bar for work in stages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StageBar:
    """Shows stages as they come, on a terminal's standard error; silent elsewhere. A context manager."""

    def __init__(self, stages: Mapping[str, str], console: Console | None = None) -> None:
        """Take the stages' names and what to call them."""
        self._stages = stages
        self._tasks: dict[str, TaskID] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(self._stages.get(stage, stage), total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)
