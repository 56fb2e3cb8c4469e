"""Checks a policy's decisions; errors name the policy, its file and its line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from kvabr.abr.plugins import where
from kvabr.abr.policy import Decision, Division, Kind, Policy
from kvabr.abr.tail import TailOffer
from kvabr.abr.view import View
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import PolicyError

T = TypeVar("T")
_KINDS = frozenset(get_args(Kind))


class PolicyCalls:
    """Calls a policy; every method raises `PolicyError` if it raises or misbehaves."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def choose_tail(self, offers: Sequence[TailOffer], costs: Sequence[float]) -> TailOffer:
        """Return the offer that the policy takes."""
        index = self._call(partial(self.policy.choose_tail, offers, costs))
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(offers):
            raise self.invalid(f"must choose a tail from 0 to {len(offers) - 1}, got {index!r}")
        return offers[index]

    def invalid(self, what: str, error: BaseException | None = None) -> PolicyError:
        """Return an error that names policy, fault and file."""
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
        """Start the policy, which may refuse."""
        self._call(partial(self.policy.start, self._view))

    def next_decision(self) -> Decision:
        """Return the policy's next decision, checked."""
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
        """Return whether the policy will request another track for a group."""
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
