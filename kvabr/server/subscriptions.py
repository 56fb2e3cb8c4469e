"""The subscriptions of one connection: each new group of a growing track is pushed on its own stream.

Subscriptions to complete tracks end at once; players fetch those tracks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvabr.moqt.codes import PublishDoneCode
from kvabr.moqt.messages import Subscribe, SubscribeNamespace, TrackStatus
from kvabr.moqt.objects import DEFAULT_PRIORITY, SubgroupHeader
from kvabr.moqt.responder import Responder
from kvabr.moqt.wire import Filter, Location, Parameters
from kvabr.server.fetch_range import GroupRange, last_object
from kvabr.server.live_tracks import GrowingPublication
from kvabr.server.send_queue import Sending, TrackRequest
from kvabr.types.errors import AssetError
from kvabr.types.naming import ROOT

MAX_STREAMS = 8
"""Maximum groups of one subscription that are being sent; later groups wait by number, unopened."""
_ROOT_PARTS = tuple(part.encode() for part in ROOT.split("/") if part)


@dataclass(eq=False)
class Subscription:
    """One subscription to a growing track, and its progress."""

    request: TrackRequest
    publication: GrowingPublication
    alias: int
    forward: bool
    next: int
    timeout_s: float | None
    """Seconds after which an incompletely sent group is abandoned; None: never."""
    start: Location = field(default_factory=lambda: Location(0, 0))
    last: Location | None = None
    """Last location of the filter; None: no end."""
    sending: int = 0
    ending: tuple[PublishDoneCode, str] | None = None
    """Why it ends once the groups being sent are sent; None if it continues."""

    def confine(self, found: Filter, largest: Location | None) -> None:
        """Apply a new filter to groups that have not been pushed."""
        self.start, self.last = found.within(largest)
        self.next = max(self.next, self.start.group)

    @property
    def past_filter(self) -> bool:
        """True if all groups of the filter were pushed."""
        return self.last is not None and self.next > self.last.group

    @property
    def over(self) -> tuple[PublishDoneCode, str] | None:
        """Why it has ended; None if groups may follow."""
        publication = self.publication
        if self.ending is not None:
            return self.ending
        if not publication.growing and (self.past_filter or self.next >= publication.groups):
            failed = PublishDoneCode.INTERNAL_ERROR if publication.failure else PublishDoneCode.TRACK_ENDED
            return failed, publication.failure
        return None  # past its filter it stays open, since the filter may change

    def due(self) -> Iterator[GroupRange]:
        """Yield the groups to push now, and count them as pushed."""
        groups = self.publication.groups
        if not self.forward:
            self.next = max(self.next, groups)
        while self.next < groups and self.sending < MAX_STREAMS and not self.past_filter and self.over is None:
            group, last = self.next, self.last
            self.next += 1
            if not self.publication.has(group):
                continue
            first = self.start.object if group == self.start.group else 0
            end = last.object + 1 if last is not None and group == last.group else None
            yield GroupRange(group, first, end)


class Subscriptions:
    """All subscriptions of one connection."""

    def __init__(
        self,
        responder: Callable[[], Responder],
        push: Callable[[Subscription, GroupRange, SubgroupHeader, int], None],
        wake: Callable[[], None],
    ) -> None:
        """``push`` sends a group on a stream, and the caller then calls `sent`; ``wake`` sends queued data soon."""
        self._responder, self._push, self._wake = responder, push, wake
        self._aliases = 0
        self._prefixes: dict[int, tuple[bytes, ...]] = {}
        self._growing: dict[int, Subscription] = {}

    def __len__(self) -> int:
        return len(self._growing)

    def __iter__(self) -> Iterator[TrackRequest]:
        return iter([subscription.request for subscription in self._growing.values()])

    def to_track(self, request: TrackRequest, message: Subscribe | TrackStatus) -> None:
        """Answer a SUBSCRIBE or TRACK_STATUS. Push growing tracks; end other subscriptions, except of dense receivers.

        moq-rs (a dense receiver) subscribes before it fetches. It would treat the end of the subscription as a removed
        track, and fetch a reported largest object too. So its subscriptions stay open without data. Raises
        `AssetError`.
        """
        responder, number, publication = self._responder(), request.number, request.publication
        largest = _largest_of(request)
        if isinstance(message, TrackStatus):
            responder.accept(number, Parameters(largest=largest))
            return
        self._aliases += 1
        if isinstance(publication, GrowingPublication):
            responder.accept_subscribe(number, self._aliases, largest)
            parameters = message.parameters
            forward, timeout_s = parameters.forward != 0, _timeout_s(parameters)
            subscription = Subscription(request, publication, self._aliases, forward, publication.groups, timeout_s)
            subscription.confine(parameters.filter or Filter(), largest)
            self._growing[number] = subscription
            publication.watch(subscription, lambda: self._grown(subscription))
            self._advance(subscription)
            return
        responder.accept_subscribe(number, self._aliases, None if request.dense else largest)
        if not request.dense:
            responder.publish_done(number, PublishDoneCode.TRACK_ENDED, "everything is published; fetch it")

    def to_namespace(self, number: int, message: SubscribeNamespace) -> bool:
        """Answer with the root of kvabr's namespaces; return False if the prefix overlaps an earlier one."""
        responder, prefix = self._responder(), message.prefix
        if any(_overlap(prefix, other) for other in self._prefixes.values()):
            return False
        responder.accept(number)
        self._prefixes[number] = prefix
        for name in ((ROOT.encode(),), _ROOT_PARTS):
            if _overlap(prefix, name):
                responder.announce_namespace(number, name[len(prefix) :])
        return True

    def sent(self, job: Sending, *, failed: bool = False) -> None:
        """Continue after a group was sent or abandoned; end the subscription if it ``failed``.

        Resetting only the group's stream is not enough: the reset could overtake the stream's header, and be ignored.
        """
        if (subscription := self._growing.get(job.request.number)) is not None:
            if failed:
                why = f"group {job.group} cannot be read"
                subscription.ending = PublishDoneCode.INTERNAL_ERROR, why
            subscription.sending -= 1
            self._advance(subscription)

    def update(self, number: int, parameters: Parameters) -> None:
        """Apply a REQUEST_UPDATE, except for the priority of data being sent."""
        subscription = self._growing.get(number)
        if subscription is None:
            return
        if parameters.priority is not None:
            subscription.request.priority = parameters.priority
        if parameters.filter is not None:
            with contextlib.suppress(AssetError):  # keep the old filter
                subscription.confine(parameters.filter, _largest_of(subscription.request))
        if parameters.forward is not None:
            self._advance(subscription)  # earlier groups follow the old value
            subscription.forward = bool(parameters.forward)
        self._advance(subscription)

    def end_all(self, code: PublishDoneCode, reason: str) -> None:
        """End all subscriptions once the groups being sent are sent."""
        for subscription in list(self._growing.values()):
            subscription.ending = code, reason
            self._advance(subscription)

    def remove(self, number: int) -> None:
        """Remove a subscription, if ``number`` is one."""
        self._prefixes.pop(number, None)
        if (subscription := self._growing.pop(number, None)) is not None:
            subscription.publication.unwatch(subscription)

    def _grown(self, subscription: Subscription) -> None:
        self._advance(subscription)
        self._wake()

    def _advance(self, subscription: Subscription) -> None:
        responder, number = self._responder(), subscription.request.number
        if number not in self._growing or number not in responder:
            return  # it has ended, or the session is about to report its end
        for due in subscription.due():
            header = SubgroupHeader(
                subscription.alias, due.group, 0, DEFAULT_PRIORITY,
                properties=True, end_of_group=due.end_object is None, first_object=due.first_object == 0,
            )  # fmt: skip
            subscription.sending += 1
            self._push(subscription, due, header, responder.push(number, header))
        if not subscription.sending and (over := subscription.over) is not None:
            self.remove(number)
            responder.publish_done(number, *over)


def _largest_of(request: TrackRequest) -> Location | None:
    publication, group = request.publication, request.publication.groups - 1
    return None if group < 0 else Location(group, last_object(publication.objects(group), dense=request.dense))


def _timeout_s(parameters: Parameters) -> float | None:
    given = [ms for ms in (parameters.object_delivery_timeout, parameters.subgroup_delivery_timeout) if ms]
    return min(given) / 1000 if given else None


def _overlap(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> bool:

    size = min(len(one), len(other))
    return one[:size] == other[:size]
