"""The subscriptions of one connection: one for each track of which groups are wanted that are not published yet.

A group comes on a stream of its own as soon as it is published. What a track had before the subscription began, and
what is asked for once the publisher has sent it, is fetched. A subscription ends with the last transfer that needs it.
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
"""Seconds for which streams may be on their way once the publisher has said that it begins no more."""
_Track = tuple[tuple[bytes, ...], str]
"""Fields of the namespace, and the track's name."""


class TrackSubscription:
    """One SUBSCRIBE, and the transfers that it brings."""

    def __init__(self, track: _Track, number: int, priority: int) -> None:
        """Begin without transfers; ``number`` is the ID of the SUBSCRIBE, which has this priority."""
        self.track, self.number, self.asked_priority = track, number, priority
        self.waiting: dict[int, MoqtRequest] = {}
        """Transfers of which nothing has come, by group."""
        self.coming: dict[int, MoqtRequest] = {}
        """The others, by the stream that carries them."""
        self.last: int | None = None
        """The last group that was published before it could be waited for; None while the peer has not answered."""
        self.done: PublishDone | None = None
        """How the publisher has ended it."""
        self.late: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[MoqtRequest]:
        return iter((*self.waiting.values(), *self.coming.values()))

    @property
    def priority(self) -> int:
        """That of its most urgent transfer."""
        return min((one.transfer.priority for one in self), default=255)

    def reach(self, group: int) -> None:
        """Note that a group was published, so that it need not be waited for any more."""
        self.last = group if self.last is None else max(self.last, group)


class Subscriber:
    """All subscriptions of a connection."""

    def __init__(
        self, session: Callable[[], MoqtSession], fetch: Callable[[MoqtRequest], None],
        over: Callable[[MoqtRequest], None], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """Begin without any.

        Args:
            session: returns the session, once there is one.
            fetch: fetches the group of a transfer.
            over: told of each transfer that has come or failed.
            settle: sends what the session has to send.
        """
        self._session, self._fetch, self._over, self._settle = session, fetch, over, settle
        self._by_track: dict[_Track, TrackSubscription] = {}
        self._by_number: dict[int, TrackSubscription] = {}
        self._of: dict[MoqtRequest, TrackSubscription] = {}

    def __contains__(self, request: MoqtRequest) -> bool:
        return request in self._of

    @property
    def coming(self) -> int:
        """How many groups are being received."""
        return sum(len(one.coming) for one in self._by_number.values())

    def bring(self, request: MoqtRequest) -> None:
        """Have a group brought: by the subscription to its track, which is made if there is none, or by a FETCH."""
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
        """Take in the new priority of a transfer."""
        self._prioritise(self._of[request])

    def leave(self, request: MoqtRequest) -> None:
        """Bring no more of a transfer."""
        subscription = self._of.pop(request)
        requester = self._session().requester
        for stream in [stream for stream, one in subscription.coming.items() if one is request]:
            del subscription.coming[stream]
            requester.stop(stream)
        if subscription.waiting.get(request.request.group) is request:
            del subscription.waiting[request.request.group]
        self._end_unread(subscription)

    def clear(self) -> None:
        """Forget everything; the connection is over."""
        for subscription in self._by_number.values():
            if subscription.late is not None:
                subscription.late.cancel()
        for each in (self._by_track, self._by_number, self._of):
            each.clear()

    # ------------------------------------------------------------------ from the peer

    def happened(self, event: Answered | Ended | Refused | SubscriptionEnding | SubscriptionDone) -> None:
        """Handle an event of a subscription, other than `Received`."""
        subscription = self._by_number.get(event.request_id)
        if subscription is None:
            return
        match event:
            case Answered(message=SubscribeOk(parameters=parameters)):
                subscription.reach(-1 if parameters.largest is None else parameters.largest.group)
                self._fetch_past(subscription)
            case Ended(stream=int(stream)):
                if (request := subscription.coming.pop(stream, None)) is not None:
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
        """Pass objects on to the transfer that waits for their group; stop a stream that no transfer waits for."""
        subscription, stream = self._by_number.get(event.request_id), event.stream
        if subscription is None or stream is None:
            return
        if (request := subscription.coming.get(stream)) is None:
            header = event.items[0]
            group = header.group if isinstance(header, ObjectHeader) else -1
            subscription.reach(group)
            request = subscription.waiting.pop(group, None)
            if request is None:
                self._session().requester.stop(stream)
                return
            subscription.coming[stream] = request
        request.take(event.items, limit)

    # ------------------------------------------------------------------ internals

    def _prioritise(self, subscription: TrackSubscription) -> None:
        priority = subscription.priority
        if priority != subscription.asked_priority:
            subscription.asked_priority = priority
            self._session().requester.update(subscription.number, Parameters(priority=priority))
            self._settle()

    def _fetch_past(self, subscription: TrackSubscription) -> None:
        """Fetch the groups that have been waited for in vain."""
        last = subscription.last
        for group in sorted(subscription.waiting):
            if subscription.done is not None or (last is not None and group <= last):
                request = subscription.waiting.pop(group)
                del self._of[request]
                self._fetch(request)
        self._end_unread(subscription)

    def _end_unread(self, subscription: TrackSubscription) -> None:
        """Unsubscribe from a track of which no transfer is left."""
        if not (subscription.waiting or subscription.coming) and subscription.number in self._by_number:
            self._forget(subscription)
            self._session().requester.cancel(subscription.number)
            self._settle()

    def _end_late(self, subscription: TrackSubscription) -> None:
        """End a subscription of which the publisher has counted the streams wrongly."""
        if subscription.number in self._by_number:
            self._session().requester.cancel(subscription.number)
            for stream in list(subscription.coming):
                self.happened(Ended(subscription.number, 0, stream))
            self._end(subscription)
            self._settle()

    def _end(self, subscription: TrackSubscription) -> None:
        """Find out by FETCHes what became of the groups that have not come."""
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
