"""The policy of a play: loaded, offered the groups of the local store first, and its decisions checked.

Errors name the policy, its file and its line.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from kvabr.abr.estimators import Estimator
from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.policy import Decision, Division, Kind, Policy
from kvabr.abr.tail import TailOffer
from kvabr.abr.view import View
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import PolicyError, UsageError
from kvabr.types.naming import TrackNamespace
from kvabr.types.plugins import where

T = TypeVar("T")
_KINDS = frozenset(get_args(Kind))


def new_estimator(policy: str, estimator: str | None = None) -> Estimator:
    """Return a new estimator, by name or as preferred by the policy; see `load_estimator`."""
    return load_estimator(estimator or load_policy(policy)().estimator)()


def choose_tail(policy: str, offers: Sequence[TailOffer], costs: Sequence[float]) -> TailOffer:
    """Return the offer that a separate instance of a policy accepts before the play; ``costs`` are from `tail_costs`.

    Raises `PolicyError` if there is no such policy, or if it raises or accepts none of them.
    """
    if len(offers) == 1:
        return offers[0]
    return PolicyCalls(load_policy(policy)()).choose_tail(offers, costs)


class PolicyCalls:
    """Calls a policy; methods raise `PolicyError` if the policy raises or returns something invalid."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def choose_tail(self, offers: Sequence[TailOffer], costs: Sequence[float]) -> TailOffer:
        """Return the offer that the policy accepts."""
        index = self._call(partial(self.policy.choose_tail, offers, costs))
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(offers):
            raise self.invalid(f"must choose a tail from 0 to {len(offers) - 1}, got {index!r}")
        return offers[index]

    def invalid(self, what: str, error: BaseException | None = None) -> PolicyError:
        """Return an error that names the policy, its fault and its file."""
        title = self.policy.name or type(self.policy).__name__
        return PolicyError(f"policy {title} {what} ({where(type(self.policy), error)})")

    def _call(self, next_decision: Callable[[], T]) -> T:
        try:
            return next_decision()
        except (PolicyError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a policy that calls sys.exit() must not silently end the replay
            raise self.invalid(f"raised {error!r}", error) from error


class PolicyGuard(PolicyCalls):
    """Calls a policy for a session."""

    def __init__(self, policy: Policy, view: View) -> None:
        super().__init__(policy)
        self._view = view

    def start(self) -> None:
        """Start the policy, which may refuse the play."""
        self._call(partial(self.policy.start, self._view))

    def next_decision(self) -> Decision:
        """Return the policy's next decision, after checking it."""
        decision = self._call(partial(self.policy.decide, self._view))
        if (fault := self._fault(decision)) is not None:
            raise self.invalid(fault)
        return decision

    def division(self) -> Division | None:
        """Return how the policy divides the work, or None."""
        if type(self.policy).division is Policy.division:
            return None
        found = self._call(lambda: self.policy.division)
        if not isinstance(found, Division | None):
            raise self.invalid(f"must have a Division or None as its division, got {found!r}")
        return found

    def will_replace(self, group: int) -> bool:
        """Return True if the policy will request another track for a group."""
        if type(self.policy).will_replace is Policy.will_replace:
            return False
        return bool(self._call(partial(self.policy.will_replace, self._view, group)))

    def _fault(self, decision: Any) -> str | None:
        view = self._view
        if not isinstance(decision, Decision):
            return f"must return a Decision, got {decision!r}"
        kind, group = decision.kind, decision.group
        if not isinstance(kind, str) or kind not in _KINDS:
            return f"must return a decision of kind {', '.join(sorted(_KINDS))}, got {kind!r}"
        reason: Any = decision.reason
        if not isinstance(reason, str):
            return f"must give text as its reason, got {reason!r}"
        if (others := decision.alternatives) is not None and not _is_table(others):
            return f"must give names with finite numbers as alternatives, got {others!r}"
        if kind == "wait":
            return None
        if kind == "deliver":
            return None if view.arrived else "cannot deliver: some groups are still missing"
        if kind == "finish":
            return f"cannot finish: {len(view.missing)} groups are missing" if view.missing else None
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < view.groups:
            return f"must name a group from 0 to {view.groups - 1}, got {group!r}"
        return self._compute_fault(decision, group) if kind == "recompute" else self._track_fault(decision, group)

    def _compute_fault(self, decision: Decision, group: int) -> str | None:
        view, last = self._view, group + 1 if decision.last is None else decision.last
        if isinstance(last, bool) or not isinstance(last, int) or not group < last <= view.groups:
            return f"must recompute groups from 0 to {view.groups - 1}, got {group} to {last!r}"
        here = group in view.missing or group >= view.edge or view.track_of[group] not in {None, RECOMPUTED}
        if view.cost is None or not here:
            return f"cannot recompute group {group}: no engine can compute it, or it is in place"
        return None

    def _track_fault(self, decision: Decision, group: int) -> str | None:
        view, track = self._view, decision.track
        offered = view.catalog.by_name
        if not isinstance(track, str) or track not in offered:
            return f"must name a track of {', '.join(offered)}, got {track!r}"
        current = view.track_of[group]
        if decision.kind == "fetch" and group not in view.missing:
            return f"cannot fetch group {group}: it is not missing (it has {current})"
        settled = (group in view.settled and current != track) or view.extends(group, track)
        if decision.kind == "upgrade" and not settled:
            return f"cannot upgrade group {group} to {track}: it is not settled, or has that track (it has {current})"
        return None


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(number, int | float) and math.isfinite(number)
        for key, number in value.items()
    )


CachedGroups = Callable[[TrackNamespace, str], Collection[int]]
"""Function that returns the stored groups of a track, numbered as published (see `Catalog.offset`)."""


def policy_of(
    policy: Policy | str, catalog: Catalog, stored: CachedGroups | None = None, *, prefix: bool = False
) -> Policy:
    """Return the policy of a play, from a name or an object, which may first take ``stored`` groups; see `Session`."""
    made = load_policy(policy)() if isinstance(policy, str) else policy
    if prefix and made.computes:
        raise UsageError(
            f"policy {policy if isinstance(policy, str) else made.name} needs an engine that computes from the front, "
            "and this one cannot; name another"
        )
    return made if stored is None else cache_first(made, catalog, stored)


def cache_first(policy: Policy, catalog: Catalog, stored: CachedGroups) -> Policy:
    """Return the policy wrapped in a `CacheFirst` if it can continue from stored groups, else unchanged."""
    if not policy.takes_cached:
        return policy
    stored_groups = {track.name: _stored(catalog, track.name, stored) for track in catalog.tracks}
    return CacheFirst(policy, stored_groups) if any(stored_groups.values()) else policy


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
    """Requests the best stored track of every group, then follows another policy."""

    def __init__(self, inner: Policy, stored_groups: dict[str, frozenset[int]]) -> None:
        """Wrap a policy; ``stored_groups``: by track."""
        self._inner, self._stored_groups = inner, stored_groups
        self._wanted: deque[tuple[int, str]] = deque()
        """Groups still to request, each with its best stored track; the layers below it are stored, too."""
        # Copy the attributes of the wrapped policy.
        for name in ("name", "estimator", "abandons", "paces", "computes"):
            vars(self)[name] = getattr(inner, name)

    def start(self, view: View) -> None:
        stacks = view.ladder.stacks.values()
        for group in range(view.groups):
            costs = [
                (view.catalog.track(layers[-1]).loss[group], view.decode_s(layers[-1]), layers[-1])
                for layers in stacks
                if all(group in self._stored_groups[layer] for layer in layers)
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
