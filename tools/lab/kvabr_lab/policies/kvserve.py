"""``kvserve``: the online controller of KVServe (Liu et al., 2026; arXiv 2605.13734), after its public code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvabr.abr.policy import Decision, FrontToBack
from kvabr.abr.view import View
from kvabr.types.catalog import Track
from kvabr.types.parameters import Parameter

_CANDIDATES = 3
"""Number of tracks, those of the highest compression ratio, that are compared by latency."""


class KvServe(FrontToBack):
    """Chooses among sufficiently accurate tracks with an analytic latency model.

    Candidates are the three smallest of the tracks within the accepted loss that are faster than the largest track at
    the expected rate. The candidate with the lowest latency (bytes over the rate, plus decode time) is chosen. KVServe
    decides once per transfer of a cache; here decisions are per group. The accuracy classes by kind of task are
    omitted, because a play has a single task, and so is the bandit that corrects latencies between requests, because a
    play does not see other plays. If no candidate meets the deadline, KVServe sends the cache uncompressed; here the
    fastest accurate track is chosen.
    """

    name: ClassVar[str] = "kvserve"
    abandons: ClassVar[bool] = False
    parameters: ClassVar[Mapping[str, Parameter]] = {"loss": Parameter(1e-4, 0.3, 0.03, log=True)}

    def __init__(self, *, loss: float = 0.03) -> None:
        """Set the accepted loss, nats per generated token; KVServe's artifact requires 97 % of the accuracy."""
        self._loss = loss

    def choose(self, view: View, group: int) -> Decision:
        """Choose for the first missing group as if for all remaining groups."""
        tracks = view.ladder.tracks
        good = [track for track in tracks if track.total_loss <= self._loss] or [tracks[-1]]
        if view.rate <= 0:
            return Decision.fetch(group, good[0].name, "no throughput is known yet: the smallest accurate track")
        latency = {track.name: _latency(view, track) for track in good}
        whole = max(good, key=lambda track: track.total_bytes)
        useful = [track for track in good if latency[track.name] < latency[whole.name]]
        if not useful:
            return Decision.fetch(group, whole.name, "no smaller track saves time at this rate")
        candidates = sorted(useful, key=lambda track: track.total_bytes)[:_CANDIDATES]
        feasible = [track for track in candidates if latency[track.name] <= view.time_left]
        chosen = min(feasible or good, key=lambda track: latency[track.name])
        return Decision.fetch(
            group, chosen.name, f"least latency, {latency[chosen.name]:.3g} s for all remaining groups"
        )


def _latency(view: View, track: Track) -> float:
    network = view.missing_bytes(track) / view.rate
    decoded_s = view.decode_s(track.name) * len(view.missing) / view.decoders
    return network + view.decode_latency_s(track.name) + decoded_s
