"""The subscriptions of one connection, one for each track with wanted unpublished groups.

A group arrives on its own stream when published. Groups published before the subscription, or requested after their
stream, are fetched. A subscription ends with its last transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from kvabr.link.moqt.requests import MoqtRequest
from kvabr.moqt.events import Answered, Ended, Received, Refused, SubscriptionDone, SubscriptionEnding
from kvabr.moqt.messages import PublishDone, SubscribeOk
from kvabr.moqt.objects import ObjectHeader
from kvabr.moqt.parameters import Parameters
from kvabr.moqt.session import MoqtSession
from kvabr.types.events import Limit

_LATE_STREAMS_S = 1.0
"""Seconds that streams may be late after the publisher's end."""
_Track = tuple[tuple[bytes, ...], str]


class TrackSubscription:
    """One SUBSCRIBE and its transfers."""

    def __init__(self, track: _Track, number: int, priority: int) -> None:
        """``number`` is the ID of the SUBSCRIBE, with this priority."""
        self.track, self.number, self.asked_priority = track, number, priority
        self.waiting: dict[int, MoqtRequest] = {}
        """Transfers without data, by group."""
        self.receiving: dict[int, MoqtRequest] = {}
        """The other transfers, by stream."""
        self.last: int | None = None
        """Last published group, which cannot be waited for; None before the peer's answer."""
        self.done: PublishDone | None = None
        self.late: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[MoqtRequest]:
        return iter((*self.waiting.values(), *self.receiving.values()))

    @property
    def priority(self) -> int:
        """Priority of its most urgent transfer."""
        return min((one.transfer.priority for one in self), default=255)

    def reach(self, group: int) -> None:
        """Note that a group was published."""
        self.last = group if self.last is None else max(self.last, group)


class Subscriber:
    """All subscriptions of a connection."""

    def __init__(
        self, session: Callable[[], MoqtSession], fetch: Callable[[MoqtRequest], None],
        over: Callable[[MoqtRequest], None], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """``over`` is called with each finished transfer, ``fetch`` fetches other groups, ``settle`` sends output."""
        self._session, self._fetch, self._over, self._settle = session, fetch, over, settle
        self._by_track: dict[_Track, TrackSubscription] = {}
        self._by_number: dict[int, TrackSubscription] = {}
        self._of: dict[MoqtRequest, TrackSubscription] = {}

    def __contains__(self, request: MoqtRequest) -> bool:
        return request in self._of

    @property
    def receiving(self) -> int:
        """Number of groups that are being received."""
        return sum(len(one.receiving) for one in self._by_number.values())

    def bring(self, request: MoqtRequest) -> None:
        """Request a group by a subscription to its track, or by a FETCH if it was published."""
        track, group = (request.fields, request.request.track), request.request.group
        subscription = self._by_track.get(track)
        if subscription is None:
            priority = request.transfer.priority
            number = self._session().subscribe(request.fields, track[1].encode(), Parameters(priority=priority))
            subscription = self._by_track[track] = self._by_number[number] = TrackSubscription(track, number, priority)
        if subscription.done is not None or (subscription.last is not None and group <= subscription.last):
            self._fetch(request)
            return
        subscription.waiting[group] = request
        self._of[request] = subscription
        self._prioritise(subscription)

    def reprioritise(self, request: MoqtRequest) -> None:
        """Apply the new priority of a transfer."""
        self._prioritise(self._of[request])

    def leave(self, request: MoqtRequest) -> None:
        """Drop a transfer."""
        subscription = self._of.pop(request)
        requester = self._session().requester
        for stream in [stream for stream, one in subscription.receiving.items() if one is request]:
            del subscription.receiving[stream]
            requester.stop(stream)
        if subscription.waiting.get(request.request.group) is request:
            del subscription.waiting[request.request.group]
        self._end_unread(subscription)

    def clear(self) -> None:
        """Forget all subscriptions at the end of the connection."""
        for subscription in self._by_number.values():
            if subscription.late is not None:
                subscription.late.cancel()
        for each in (self._by_track, self._by_number, self._of):
            each.clear()

    # ------------------------------------------------------------------ from the peer

    def happened(self, event: Answered | Ended | Refused | SubscriptionEnding | SubscriptionDone) -> None:
        """Handle a subscription's event, other than `Received`."""
        subscription = self._by_number.get(event.request_id)
        if subscription is None:
            return
        match event:
            case Answered(message=SubscribeOk(parameters=parameters)):
                subscription.reach(-1 if parameters.largest is None else parameters.largest.group)
                self._fetch_past(subscription)
            case Ended(stream=int(stream)):
                if (request := subscription.receiving.pop(stream, None)) is not None:
                    self._leave(request)
                    request.finish(event.reset)
                    self._end_unread(subscription)
            case Refused():
                self._forget(subscription)
                for request in subscription:
                    self._leave(request)
                    request.refuse(event.message)
            case SubscriptionEnding():
                subscription.done = event.message
                loop = asyncio.get_running_loop()
                subscription.late = loop.call_later(_LATE_STREAMS_S, self._end_late, subscription)
            case SubscriptionDone():
                self._end(subscription)
            case _:
                pass

    def take(self, event: Received, limit: Limit) -> None:
        """Pass objects to their group's transfer; stop an unwanted stream."""
        subscription, stream = self._by_number.get(event.request_id), event.stream
        if subscription is None or stream is None:
            return
        if (request := subscription.receiving.get(stream)) is None:
            header = event.items[0]
            group = header.group if isinstance(header, ObjectHeader) else -1
            subscription.reach(group)
            request = subscription.waiting.pop(group, None)
            if request is None:
                self._session().requester.stop(stream)
                return
            subscription.receiving[stream] = request
        request.take(event.items, limit)

    # ------------------------------------------------------------------ internals

    def _prioritise(self, subscription: TrackSubscription) -> None:
        priority = subscription.priority
        if priority != subscription.asked_priority:
            subscription.asked_priority = priority
            self._session().requester.update(subscription.number, Parameters(priority=priority))
            self._settle()

    def _fetch_past(self, subscription: TrackSubscription) -> None:
        last = subscription.last
        for group in sorted(subscription.waiting):
            if subscription.done is not None or (last is not None and group <= last):
                request = subscription.waiting.pop(group)
                del self._of[request]
                self._fetch(request)
        self._end_unread(subscription)

    def _end_unread(self, subscription: TrackSubscription) -> None:
        if not (subscription.waiting or subscription.receiving) and subscription.number in self._by_number:
            self._forget(subscription)
            self._session().requester.cancel(subscription.number)
            self._settle()

    def _end_late(self, subscription: TrackSubscription) -> None:
        """End a subscription after a wrong stream count of the publisher."""
        if subscription.number in self._by_number:
            self._session().requester.cancel(subscription.number)
            for stream in list(subscription.receiving):
                self.happened(Ended(subscription.number, 0, stream))
            self._end(subscription)
            self._settle()

    def _end(self, subscription: TrackSubscription) -> None:
        self._forget(subscription)
        self._fetch_past(subscription)

    def _leave(self, request: MoqtRequest) -> None:
        del self._of[request]
        self._over(request)

    def _forget(self, subscription: TrackSubscription) -> None:
        if subscription.late is not None:
            subscription.late.cancel()
        self._by_number.pop(subscription.number, None)
        if self._by_track.get(subscription.track) is subscription:
            del self._by_track[subscription.track]
