"""``fixed``: the whole cache on one track."""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View
from kvabr.types.errors import PolicyError


class Fixed(FrontToBack):
    """Play one track from the first group to the last: the baseline of every adaptive policy."""

    name: ClassVar[str] = "fixed"
    abandons: ClassVar[bool] = False

    def __init__(self, track: str = "") -> None:
        """Set the track, as in ``fixed:FP8``."""
        self._track = track
        self._reason = f"always {track}"

    def start(self, view: View) -> None:
        check_alone(view, self.name, self._track)

    def choose(self, view: View, group: int) -> Decision:  # noqa: ARG002
        return Decision.fetch(group, self._track, self._reason)


def check_alone(view: View, policy: str, track: str) -> None:
    """Raise `PolicyError` if the asset has no such self-contained track."""
    alone = [one.name for one in view.catalog.tracks if one.refines is None]
    if track not in alone:
        raise PolicyError(f"track {track!r} cannot be played alone; give {policy}:TRACK with one of {', '.join(alone)}")
