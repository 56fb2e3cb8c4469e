"""The subscriptions of one connection to tracks that grow: each group is pushed as it appears, on its own stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvabr.moqt.codes import PublishDoneCode, ResetCode
from kvabr.moqt.messages import Subscribe
from kvabr.moqt.objects import DEFAULT_PRIORITY, SubgroupHeader
from kvabr.moqt.parameters import Filter, Parameters
from kvabr.moqt.responder import Responder
from kvabr.moqt.wire import Location
from kvabr.server.budgets import Host, Room
from kvabr.server.fetch_range import GroupRange, last_object
from kvabr.server.grants import Grant
from kvabr.server.growing import GrowingPublication
from kvabr.server.publication import Publication
from kvabr.server.send_queue import Sending, SendQueue
from kvabr.types.errors import AssetError

MOST_STREAMS = 8
"""Groups of one subscription that are sent at a time. Later ones wait: only their numbers are kept."""
DESCENDING = 2
"""GROUP_ORDER: the newest group first."""


@dataclass(eq=False)
class Subscription:
    """One subscription, and how far it has got."""

    request_id: int
    alias: int
    responder: Responder
    publication: GrowingPublication
    grant: Grant
    track: str
    priority: int
    forward: bool
    descending: bool
    dense: bool
    next: int
    """The next group to push."""
    start: Location = field(default_factory=lambda: Location(0, 0))
    last: Location | None = None
    """The first and the last location of its filter."""
    sending: dict[int, Sending] = field(default_factory=dict)
    """What is being sent, by stream."""
    ending: tuple[PublishDoneCode, str] | None = None
    """Why it ends once that is sent."""
    timeout_s: float | None = None
    """Seconds after which a group that is not sent completely is no longer wanted; None: however long it takes."""
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
        publication, beyond = self.publication, self.beyond
        if self.ending is not None:
            return self.ending
        if not publication.growing and (beyond or self.next >= publication.groups):
            failed = PublishDoneCode.INTERNAL_ERROR if publication.failure else PublishDoneCode.TRACK_ENDED
            return failed, publication.failure
        return None  # after the end of its filter it stays open for another one

    def due(self) -> Iterator[GroupRange]:
        """Yield what is to be pushed now; count it as pushed."""
        groups = self.publication.groups
        if not self.forward:
            self.next = max(self.next, groups)
        while self.next < groups and len(self.sending) < MOST_STREAMS and not self.beyond and self.over is None:
            group, last = self.next, self.last
            self.next += 1
            if not self.publication.has(group):
                continue
            first = self.start.object if group == self.start.group else 0
            end = last.object + 1 if last is not None and group == last.group else None
            yield GroupRange(group, first, end)


class Pushing:
    """All such subscriptions of a connection."""

    def __init__(
        self, server: Host[Any], queue: SendQueue, wake: Callable[[], None], dropped: Callable[[Sending], None]
    ) -> None:
        """Begin without any; ``wake`` has the connection send what is queued, ``dropped`` hears of what is too late."""
        self._server, self._queue, self._wake, self._dropped = server, queue, wake, dropped
        self._subscriptions: dict[int, Subscription] = {}
        self.room: Room | None = None

    def __len__(self) -> int:
        return len(self._subscriptions)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._subscriptions.values()))

    def begin(self, subscription: Subscription, message: Subscribe, largest: Location | None) -> None:
        """Push what appears from now on."""
        subscription.confine(message.parameters.filter or Filter(), largest)
        self._subscriptions[subscription.request_id] = subscription
        self._server.requests += 1
        subscription.unwatch = subscription.publication.watch(lambda: self._grown(subscription))
        self._advance(subscription)

    def sent(self, job: Sending) -> None:
        """Go on after a stream of a subscription has ended or is no longer wanted."""
        subscription = self._subscriptions.get(job.request_id)
        if subscription is not None:
            subscription.sending.pop(job.stream, None)
            self._advance(subscription)

    def stopped(self, number: int, stream: int) -> Sending | None:
        """Take a stream that the subscriber does not want out of the queue; the caller calls `sent`."""
        subscription = self._subscriptions.get(number)
        job = None if subscription is None else subscription.sending.get(stream)
        return None if job is None else self._queue.remove(job.key)

    def _too_late(self, subscription: Subscription, job: Sending) -> None:
        """Send no more of a group that has taken longer than its subscriber waits."""
        if subscription.sending.get(job.stream) is job and self._queue.remove(job.key) is not None:
            subscription.responder.pushed(job.request_id, job.stream, reset=ResetCode.DELIVERY_TIMEOUT)
            self._dropped(job)

    def update(self, number: int, parameters: Parameters) -> None:
        """Apply what a REQUEST_UPDATE changes."""
        subscription = self._subscriptions.get(number)
        if subscription is None:
            return
        if parameters.priority is not None:
            subscription.priority = parameters.priority
            for job in subscription.sending.values():
                self._queue.prioritise(job.key, parameters.priority)
        if parameters.filter is not None:
            with contextlib.suppress(AssetError):  # the old filter holds
                subscription.confine(parameters.filter, largest_of(subscription.publication, dense=subscription.dense))
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
        """End a subscription of which a group cannot be sent; the caller calls `sent`.

        The reset of its stream alone could overtake the stream's header, and would then tell nothing.
        """
        if (subscription := self._subscriptions.get(job.request_id)) is not None:
            why = f"group {job.ranges[0].group} cannot be read"
            subscription.ending = PublishDoneCode.INTERNAL_ERROR, why

    def remove(self, number: int) -> list[Sending]:
        """Forget a subscription, and return what was still being sent."""
        subscription = self._subscriptions.pop(number, None)
        if subscription is None:
            return []
        self._server.requests -= 1
        subscription.unwatch()
        return [job for each in subscription.sending.values() if (job := self._queue.remove(each.key)) is not None]

    def _grown(self, subscription: Subscription) -> None:
        self._advance(subscription)
        self._wake()

    def _advance(self, subscription: Subscription) -> None:
        """Push what is due, or end the subscription if nothing follows."""
        if subscription.request_id not in self._subscriptions or subscription.request_id not in subscription.responder:
            return  # it is over, or the session is about to say so
        for part in subscription.due():
            self._push(subscription, part)
        if not subscription.sending and (over := subscription.over) is not None:
            self.remove(subscription.request_id)
            subscription.responder.publish_done(subscription.request_id, *over)

    def _push(self, subscription: Subscription, part: GroupRange) -> None:
        responder = subscription.responder
        number, publication = subscription.request_id, subscription.publication
        header = SubgroupHeader(
            subscription.alias, part.group, 0, DEFAULT_PRIORITY,
            properties=True, end_of_group=part.end_object is None, first_object=part.first_object == 0,
        )  # fmt: skip
        stream = responder.push(number, header)
        job = Sending(
            number, stream, publication, [part], grant=subscription.grant,
            track=subscription.track, priority=subscription.priority, dense=subscription.dense,
            descending=subscription.descending, subgroup=header, on_more=self._wake, room=self.room,
        )  # fmt: skip
        subscription.sending[stream] = job
        self._queue.add(job)
        if subscription.timeout_s is not None:
            asyncio.get_running_loop().call_later(subscription.timeout_s, self._too_late, subscription, job)
        self._server.requests += 1
        self._server.metrics.requests_in_flight.inc()


def largest_of(publication: Publication, *, dense: bool) -> Location | None:
    """Return the location of a track's last object; None if it has none yet. Raises `AssetError`."""
    group = publication.groups - 1
    return None if group < 0 else Location(group, last_object(publication.objects(group), dense=dense))
