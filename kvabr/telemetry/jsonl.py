"""`JsonLines`: one JSON object an event, with CMCD names where one fits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

from kvabr.telemetry.cmcd import Cmcd
from kvabr.telemetry.listener import Heard, Listener
from kvabr.telemetry.plays import Plays
from kvabr.types.errors import AssetError
from kvabr.types.events import PlayEnded


class JsonLines(Listener):
    """Appends to a file. Every line names its play (``sid``), so that any number of plays may share it."""

    name: ClassVar[str] = "jsonl"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file.

        Raises:
            AssetError: it cannot be written.
        """
        try:
            self._file = Path(path).open("a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  # see `close`
        except OSError as error:
            raise AssetError(f"{path}: cannot be written ({error.strerror}); name another place") from error
        self._plays = Plays(Cmcd)

    def hear(self, heard: Heard) -> None:
        """Write what the event amounts to; the file is complete whenever a play has ended."""
        play = self._plays.of(heard)
        self._file.writelines(json.dumps(record) + "\n" for record in play.records(heard.wall_s, heard.event))
        if isinstance(heard.event, PlayEnded):
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
