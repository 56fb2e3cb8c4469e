"""``fixed:TRACK``: every group on one track, regardless of the network. The baseline of every adaptive policy."""

from __future__ import annotations

from typing import ClassVar

from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View
from kvabr.types.errors import PolicyError


class Fixed(Policy):
    """Play one track from the first group to the last."""

    name: ClassVar[str] = "fixed"
    abandons: ClassVar[bool] = False

    def __init__(self, track: str = "") -> None:
        """Set the track, as in ``fixed:FP8``."""
        self._track = track
        self._reason = f"always {track}"

    def start(self, view: View) -> None:
        """Check that the asset has the track, and that it is self-contained."""
        offered = view.catalog.by_name
        if self._track not in offered or offered[self._track].refines is not None:
            alone = ", ".join(track.name for track in view.catalog.tracks if track.refines is None)
            raise PolicyError(f"no track {self._track!r} to play alone; write fixed:TRACK with one of {alone}")

    def decide(self, view: View) -> Decision:
        """Request the next missing group."""
        group = view.first_missing()
        if group is None:
            return Decision.finish("every group is in place or under way")
        return Decision.fetch(group, self._track, self._reason)
