"""The subscriptions of one connection. Each group of a track that grows is pushed as it appears, on its own stream.

Other tracks end at once, so players fetch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvabr.moqt.codes import PublishDoneCode
from kvabr.moqt.messages import Subscribe, SubscribeNamespace, TrackStatus
from kvabr.moqt.objects import DEFAULT_PRIORITY, SubgroupHeader
from kvabr.moqt.parameters import Filter, Parameters
from kvabr.moqt.responder import Responder
from kvabr.moqt.wire import Location
from kvabr.server.fetch_range import GroupRange, last_object
from kvabr.server.growing import GrowingPublication
from kvabr.server.send_queue import Sending, TrackRequest
from kvabr.types.errors import AssetError
from kvabr.types.naming import ROOT

MOST_STREAMS = 8
"""Groups of one subscription that are sent at a time. Later ones wait: only their numbers are kept."""
_ROOT_PARTS = tuple(part.encode() for part in ROOT.split("/") if part)


@dataclass(eq=False)
class Subscription(TrackRequest):
    """One subscription to a track that grows, and how far it has got."""

    publication: GrowingPublication
    alias: int
    forward: bool
    next: int
    """The next group to push."""
    timeout_s: float | None
    """Seconds after which a group that is not sent completely is no longer wanted; None: however long it takes."""
    start: Location = field(default_factory=lambda: Location(0, 0))
    last: Location | None = None
    """The first and the last location of its filter."""
    sending: int = 0
    """Groups that are being sent."""
    ending: tuple[PublishDoneCode, str] | None = None
    """Why it ends once these are sent."""
    unwatch: Callable[[], object] = lambda: None

    def confine(self, found: Filter, largest: Location | None) -> None:
        """Take a new filter; groups that were pushed already stay pushed."""
        self.start, self.last = found.within(largest)
        self.next = max(self.next, self.start.group)

    @property
    def beyond(self) -> bool:
        """Whether its filter has ended."""
        return self.last is not None and self.next > self.last.group

    @property
    def over(self) -> tuple[PublishDoneCode, str] | None:
        """Why nothing follows; None if something may."""
        publication = self.publication
        if self.ending is not None:
            return self.ending
        if not publication.growing and (self.beyond or self.next >= publication.groups):
            failed = PublishDoneCode.INTERNAL_ERROR if publication.failure else PublishDoneCode.TRACK_ENDED
            return failed, publication.failure
        return None  # after the end of its filter it stays open for another one

    def due(self) -> Iterator[GroupRange]:
        """Yield what is to be pushed now; count it as pushed."""
        groups = self.publication.groups
        if not self.forward:
            self.next = max(self.next, groups)
        while self.next < groups and self.sending < MOST_STREAMS and not self.beyond and self.over is None:
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
        """Begin without any.

        Args:
            responder: returns the session's.
            push: sends a group on a stream; `sent` says that it is over.
            wake: has the connection send what is queued.
        """
        self._responder, self._push, self._wake = responder, push, wake
        self._aliases = 0
        self._prefixes: dict[int, tuple[bytes, ...]] = {}
        self._growing: dict[int, Subscription] = {}

    def __len__(self) -> int:
        return len(self._growing)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._growing.values()))

    def to_track(self, request: TrackRequest, message: Subscribe | TrackStatus) -> None:
        """Tell where a track ends. A growing one is pushed; others end at once, except for dense receivers.

        moq-rs subscribes before it fetches: it would take an end of the track for a track that is no more, and a
        largest object for an invitation to fetch that too. So its subscriptions stay open, and silent.

        Raises `AssetError`.
        """
        responder, number, publication = self._responder(), request.number, request.publication
        largest = _largest_of(request)
        if isinstance(message, TrackStatus):
            responder.accept(number, Parameters(largest=largest))
            return
        self._aliases += 1
        if isinstance(publication, GrowingPublication):
            responder.accept_subscribe(number, self._aliases, largest)
            asked = message.parameters
            subscription = Subscription(
                number, publication, request.grant, request.track, request.priority, request.descending, request.dense,
                alias=self._aliases, forward=asked.forward != 0, next=publication.groups, timeout_s=_timeout_s(asked),
            )  # fmt: skip
            subscription.confine(asked.filter or Filter(), largest)
            self._growing[number] = subscription
            subscription.unwatch = publication.watch(lambda: self._grown(subscription))
            self._advance(subscription)
            return
        responder.accept_subscribe(number, self._aliases, None if request.dense else largest)
        if not request.dense:
            responder.publish_done(number, PublishDoneCode.TRACK_ENDED, "everything is published; fetch it")

    def to_namespace(self, number: int, message: SubscribeNamespace) -> bool:
        """Answer with the root of kvabr's names only; the namespaces below it are not listed.

        Returns False if another subscription has a part of them.
        """
        responder, prefix = self._responder(), message.prefix
        if any(_overlap(prefix, other) for other in self._prefixes.values()):
            return False
        responder.accept(number)
        self._prefixes[number] = prefix
        for name in ((ROOT.encode(),), _ROOT_PARTS):
            if _overlap(prefix, name):
                responder.announce_namespace(number, name[len(prefix) :])
        return True

    def sent(self, job: Sending) -> None:
        """Go on after a group was sent, or is no longer wanted."""
        if (subscription := self._growing.get(job.request.number)) is not None:
            subscription.sending -= 1
            self._advance(subscription)

    def update(self, number: int, parameters: Parameters) -> None:
        """Apply what a REQUEST_UPDATE changes, besides the priority of what is being sent."""
        subscription = self._growing.get(number)
        if subscription is None:
            return
        if parameters.priority is not None:
            subscription.priority = parameters.priority
        if parameters.filter is not None:
            with contextlib.suppress(AssetError):  # the old filter holds
                subscription.confine(parameters.filter, _largest_of(subscription))
        if parameters.forward is not None:
            self._advance(subscription)  # what has appeared until now goes by the old value
            subscription.forward = bool(parameters.forward)
        self._advance(subscription)

    def end_all(self, code: PublishDoneCode, reason: str) -> None:
        """End all subscriptions, after what is being sent."""
        for subscription in self:
            subscription.ending = code, reason
            self._advance(subscription)

    def fail(self, job: Sending) -> None:
        """End a subscription of which a group cannot be sent; `sent` follows.

        The reset of its stream alone could overtake the stream's header, and would then tell nothing.
        """
        if (subscription := self._growing.get(job.request.number)) is not None:
            why = f"group {job.ranges[0].group} cannot be read"
            subscription.ending = PublishDoneCode.INTERNAL_ERROR, why

    def remove(self, number: int) -> None:
        """Forget a subscription, if this is one."""
        self._prefixes.pop(number, None)
        if (subscription := self._growing.pop(number, None)) is not None:
            subscription.unwatch()

    def _grown(self, subscription: Subscription) -> None:
        self._advance(subscription)
        self._wake()

    def _advance(self, subscription: Subscription) -> None:
        """Push what is due, or end the subscription if nothing follows."""
        responder, number = self._responder(), subscription.number
        if number not in self._growing or number not in responder:
            return  # it is over, or the session is about to say so
        for part in subscription.due():
            header = SubgroupHeader(
                subscription.alias, part.group, 0, DEFAULT_PRIORITY,
                properties=True, end_of_group=part.end_object is None, first_object=part.first_object == 0,
            )  # fmt: skip
            subscription.sending += 1
            self._push(subscription, part, header, responder.push(number, header))
        if not subscription.sending and (over := subscription.over) is not None:
            self.remove(number)
            responder.publish_done(number, *over)


def _largest_of(request: TrackRequest) -> Location | None:
    """Return the location of a track's last object; None if it has none yet. Raises `AssetError`."""
    publication, group = request.publication, request.publication.groups - 1
    return None if group < 0 else Location(group, last_object(publication.objects(group), dense=request.dense))


def _timeout_s(asked: Parameters) -> float | None:
    """Return the delivery timeout of a subscription, seconds; None if it has none."""
    given = [ms for ms in (asked.object_delivery_timeout, asked.subgroup_delivery_timeout) if ms]
    return min(given) / 1000 if given else None


def _overlap(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> bool:
    """Return whether one is a prefix of the other."""
    size = min(len(one), len(other))
    return one[:size] == other[:size]
