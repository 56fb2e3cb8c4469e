"""Answers to subscriptions. `Pushing` has those of tracks that grow; the others bring nothing, so players fetch."""

from __future__ import annotations

from collections.abc import Callable

from kvabr.moqt.codes import PublishDoneCode, RequestCode
from kvabr.moqt.messages import Subscribe, SubscribeNamespace, TrackStatus
from kvabr.moqt.objects import DEFAULT_PRIORITY
from kvabr.moqt.parameters import Parameters
from kvabr.moqt.responder import Responder
from kvabr.server.grants import Grant
from kvabr.server.growing import GrowingPublication
from kvabr.server.publication import Publication
from kvabr.server.pushing import DESCENDING, Pushing, Subscription, largest_of
from kvabr.types.naming import ROOT

_ROOT_PARTS = tuple(part.encode() for part in ROOT.split("/") if part)


class Subscriptions:
    """The subscriptions of one connection."""

    def __init__(self, refuse: Callable[[int, RequestCode, str], None], pushing: Pushing) -> None:
        """Begin without any; ``refuse`` refuses a request by its number."""
        self._refuse, self._pushing = refuse, pushing
        self._aliases = 0
        self._prefixes: dict[int, tuple[bytes, ...]] = {}

    def to_track(
        self,
        responder: Responder,
        number: int,
        message: Subscribe | TrackStatus,
        publication: Publication,
        grant: Grant,
        *,
        silent: bool,
    ) -> None:
        """Tell where a track ends. A growing one is pushed; others end at once unless they are to be ``silent``.

        moq-rs subscribes before it fetches: it would take an end of the track for a track that is no more, and a
        largest object for an invitation to fetch that too. So its subscriptions stay open, and silent.

        Raises `AssetError`.
        """
        largest = largest_of(publication, dense=silent)
        if isinstance(message, TrackStatus):
            responder.accept(number, Parameters(largest=largest))
            return
        self._aliases += 1
        if isinstance(publication, GrowingPublication):
            responder.accept_subscribe(number, self._aliases, largest)
            asked = message.parameters
            subscription = Subscription(
                number, self._aliases, responder, publication, grant, message.track.decode(),
                DEFAULT_PRIORITY if asked.priority is None else asked.priority,
                forward=asked.forward != 0, descending=asked.group_order == DESCENDING, dense=silent,
                next=publication.groups, timeout_s=_timeout_s(asked),
            )  # fmt: skip
            self._pushing.begin(subscription, message, largest)
            return
        responder.accept_subscribe(number, self._aliases, None if silent else largest)
        if not silent:
            responder.publish_done(number, PublishDoneCode.TRACK_ENDED, "everything is published; fetch it")

    def to_namespace(self, responder: Responder, number: int, message: SubscribeNamespace) -> None:
        """Answer with the root of kvabr's names only; the namespaces below it are not listed."""
        prefix = message.prefix
        if any(_overlap(prefix, other) for other in self._prefixes.values()):
            self._refuse(number, RequestCode.PREFIX_OVERLAP, "you have subscribed to that prefix already")
            return
        responder.accept(number)
        self._prefixes[number] = prefix
        for name in ((ROOT.encode(),), _ROOT_PARTS):
            if _overlap(prefix, name):
                responder.tell_namespace(number, name[len(prefix) :])

    def cancel(self, number: int) -> None:
        """Forget a subscription, if this is one."""
        self._prefixes.pop(number, None)


def _timeout_s(asked: Parameters) -> float | None:
    """Return the delivery timeout of a subscription, seconds; None if it has none."""
    given = [ms for ms in (asked.object_delivery_timeout, asked.subgroup_delivery_timeout) if ms]
    return min(given) / 1000 if given else None


def _overlap(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> bool:
    """Return whether one is a prefix of the other."""
    size = min(len(one), len(other))
    return one[:size] == other[:size]
