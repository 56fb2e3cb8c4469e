"""Take groups from the local store first, at almost no cost, and use a policy for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from kvabr.abr.ladder import stack
from kvabr.abr.policy import Decision, Policy
from kvabr.abr.view import View
from kvabr.types.catalog import Catalog
from kvabr.types.naming import TrackNamespace

CachedGroups = Callable[[TrackNamespace, str], Collection[int]]
"""Returns the stored groups of a track, numbered as published (see `Catalog.offset`)."""


def cache_first(policy: Policy, catalog: Catalog, stored: CachedGroups) -> Policy:
    """Wrap the policy in a `CacheFirst` if it can build on stored groups, or return it unchanged."""
    if not policy.takes_cached:
        return policy
    kept = {track.name: _stored(catalog, track.name, stored) for track in catalog.tracks}
    return CacheFirst(policy, kept) if any(kept.values()) else policy


def _stored(catalog: Catalog, track: str, stored: CachedGroups) -> frozenset[int]:
    if catalog.even:
        first, end = catalog.offset, catalog.offset + catalog.groups
        return frozenset(number - first for number in stored(catalog.namespace, track) if first <= number < end)
    here: dict[tuple[TrackNamespace, str], Collection[int]] = {}
    found = set()
    for group in range(catalog.groups):
        name, number = catalog.address(group, track)
        where = catalog.namespace_of(group), name
        if where not in here:
            here[where] = frozenset(stored(*where))
        if number in here[where]:
            found.add(group)
    return frozenset(found)


class CacheFirst(Policy):
    """Takes the best stored version of every group, then follows another policy."""

    def __init__(self, inner: Policy, kept: dict[str, frozenset[int]]) -> None:
        """Wrap a policy; ``kept``: the stored groups of each track."""
        self._inner, self._kept = inner, kept
        self._wanted: deque[tuple[int, str]] = deque()
        """Groups not requested yet, with their best stored track; the layers below are stored, too."""
        # Present the attributes of the wrapped policy.
        for name in ("name", "estimator", "abandons", "paces", "computes"):
            vars(self)[name] = getattr(inner, name)

    def start(self, view: View) -> None:
        stacks = [stack(view.catalog, track) for track in view.catalog.tracks]
        for group in range(view.groups):
            costs = [
                (layers[-1].loss[group], view.decode_s(layers[-1].name), layers[-1].name)
                for layers in stacks
                if all(group in self._kept[layer.name] for layer in layers)
            ]
            if costs:
                self._wanted.append((group, min(costs)[2]))
        self._inner.start(view)

    def decide(self, view: View) -> Decision:
        while self._wanted:
            group, track = self._wanted.popleft()
            if group in view.missing_groups:
                return Decision("fetch", "the group is in the local store", group, track, local=True)
        return self._inner.decide(view)
