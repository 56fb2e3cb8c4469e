"""What is at hand comes first: groups that need not cross the network, before a policy is asked about the others.

A node keeps the groups of earlier plays. To take the best of what it has costs next to nothing, and every byte that is
at hand is one that the link can carry for something better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvabr.abr.ladder import stack
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View
from kvabr.types.catalog import Catalog, Track
from kvabr.types.naming import TrackNamespace

AtHand = Callable[[TrackNamespace, str], Collection[int]]
"""Which groups of a track are at hand, as they are published: see `Catalog.offset`."""


def kept_first(policy: Policy, catalog: Catalog, at_hand: AtHand) -> Policy:
    """The policy, if it takes what is at hand and anything is: behind a `KeptFirst`."""
    if not policy.takes_kept:
        return policy
    kept = {
        track.name: frozenset(
            group - catalog.offset for group in at_hand(catalog.namespace, track.name) if group >= catalog.offset
        )
        for track in catalog.tracks
    }
    return KeptFirst(policy, kept) if any(kept.values()) else policy


class KeptFirst(Policy):
    """Takes the best of what is at hand for every group, then lets another policy go on."""

    def __init__(self, inner: Policy, kept: dict[str, frozenset[int]]) -> None:
        """Stand before a policy.

        Args:
            inner: the policy.
            kept: by track, the groups that are at hand.
        """
        self._inner, self._kept = inner, kept
        self._wanted: dict[int, list[str]] = {}
        """Per group, the layers at hand that are not asked for yet, base first."""
        # To the player it is the policy that it stands before.
        for name in ("name", "estimator", "abandons", "paces", "computes"):
            vars(self)[name] = getattr(inner, name)

    def start(self, view: View) -> None:
        """Find the best of what is at hand for every group."""
        for group in range(view.groups):
            stacks = [stack(view.catalog, track) for track in view.catalog.tracks]
            whole = [layers for layers in stacks if all(group in self._kept[layer.name] for layer in layers)]
            if whole:

                def cost(layers: tuple[Track, ...], group: int = group) -> tuple[float, float]:
                    return layers[-1].loss[group], sum(layer.decode_s for layer in layers)

                self._wanted[group] = [layer.name for layer in min(whole, key=cost)]
        self._inner.start(view)

    def decide(self, view: View) -> Decision:
        """What is at hand and can be taken now; then whatever the policy says."""
        for group, layers in self._wanted.items():
            track = layers[0]
            below = view.catalog.by_name[track].refines
            if group in view.missing_groups and below is None:
                return self._take(Decision.fetch(group, track, "it is at hand"), group)
            if below is not None and group in view.settled and view.track_of[group] == below:
                return self._take(Decision.upgrade(group, track, "it is at hand"), group)
        # A group whose base is on its way from the store settles in a moment, and is then asked about again.
        return self._inner.decide(view)

    def _take(self, decision: Decision, group: int) -> Decision:
        layers = self._wanted[group]
        del layers[0]
        if not layers:
            del self._wanted[group]
        return decision
