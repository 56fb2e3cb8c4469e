"""Growing tracks: subscriptions and all the ways in which they end, and requests beyond the live edge."""

import pytest

from kvabr.moqt.codes import PublishDoneCode, RequestCode, ResetCode
from kvabr.moqt.events import Answered, Ended, Received, Refused, Stop, SubscriptionDone, SubscriptionEnding
from kvabr.moqt.messages import TrackStatus
from kvabr.moqt.wire import DRAFT_20, Filter, Location
from kvabr.server.live_tracks import GrowingBytes
from kvabr.server.subscriptions import MAX_STREAMS
from tests.faults.test_guests import until
from tests.server.tracks import SPACE, Wide, data, every, growing, serving

pytestmark = pytest.mark.process


@every
async def test_groups_are_pushed_as_they_appear_until_the_track_ends(draft, tls):
    async with serving(tls, draft) as served:
        track = growing(served, data(0), data(1))
        number = served.subscribe()
        (answer,) = await served.soon(Answered)
        assert answer.message.parameters.largest == (1, 0)
        for group in range(2, 6):
            track.append(data(group, 70_000))
            await served.soon(Ended, count=group - 1)
        before = served.fetch((0, 0), (1, 0))
        await served.soon(Ended, count=5)
        assert served.groups(before) == {0: [(0, data(0))], 1: [(0, data(1))]}
        track.append(data(6))
        track.finish()
        await served.soon(SubscriptionDone)
        assert served.groups(number) == {
            group: [(0, data(group, 300 if group == 6 else 70_000))] for group in range(2, 7)
        }
        (ending,) = served.told(SubscriptionEnding)
        assert (ending.message.code, ending.message.streams) == (PublishDoneCode.TRACK_ENDED, 5)
        late = served.subscribe()
        await served.soon(SubscriptionDone, count=2)
        assert served.groups(late) == {}
        await until(lambda: served.requests == 0)
        assert track._watchers == {}


async def test_a_producer_that_dies(tls):
    """The subscriber gets the reason, and can fetch the published groups."""
    async with serving(tls) as served:
        track = growing(served)
        number = served.subscribe()
        (answer,) = await served.soon(Answered)
        assert answer.message.parameters.largest is None
        track.append(data(0))
        track.finish("the engine was stopped")
        await served.soon(SubscriptionDone)
        assert served.groups(number) == {0: [(0, data(0))]}
        (ending,) = served.told(SubscriptionEnding)
        assert (ending.message.code, ending.message.reason) == (
            PublishDoneCode.INTERNAL_ERROR,
            "the engine was stopped",
        )
        again = served.fetch((0, 0), (9, 0))
        await served.soon(Ended, count=2)
        assert served.groups(again) == {0: [(0, data(0))]}
        assert served.told(Answered)[-1].message.end_of_track


async def test_many_groups_at_once_wait_for_each_other(tls):
    """A subscription has a limited number of open streams, in the order of the groups."""
    async with serving(tls) as served:
        track = growing(served)
        number = served.subscribe(priority=7)
        await served.soon(Answered)
        (peer,) = served.server.peers
        for group in range(40):
            track.append(data(group))
        await until(lambda: len(peer._queue) > 0 or served.told(Ended))
        assert len(peer._queue) <= MAX_STREAMS
        await served.soon(Ended, count=40)
        assert sorted(served.groups(number)) == list(range(40))
        assert len(served.server.peers) == 1


@every
async def test_a_filter_with_an_end(draft, tls):
    """A subscription outlives its filter, and ends with the track."""
    async with serving(tls, draft) as served:
        track = growing(served, kind=Wide)
        number = served.subscribe(filter=Filter(Location(1, 150), None, 2))
        await served.soon(Answered)
        for group in range(4):
            track.append(data(group))
        await served.soon(Ended, count=2)
        track.finish()
        await served.soon(SubscriptionDone)
        (ending,) = served.told(SubscriptionEnding)
        assert ending.message.code == PublishDoneCode.TRACK_ENDED
        assert {group: [at for at, _ in found] for group, found in served.groups(number).items()} == {
            1: [200], 2: [0, 100, 200],
        }  # fmt: skip


async def test_a_subscription_that_pauses(tls):
    """With FORWARD 0 new groups are not pushed, only named as the largest object, for a FETCH."""
    async with serving(tls) as served:
        track = growing(served)
        number = served.subscribe(forward=0)
        await served.soon(Answered)
        (peer,) = served.server.peers
        (subscription,) = peer._subscriptions._growing.values()
        track.append(data(0))
        await until(lambda: subscription.next == 1)
        served.update(number, forward=1, priority=3)
        await until(lambda: subscription.forward and subscription.request.priority == 3)
        track.append(data(1))
        await served.soon(Ended)
        served.update(number, filter=Filter(Location(3, 0)))
        await until(lambda: subscription.next == 3)
        track.append(data(2))
        track.append(data(3))
        await served.soon(Ended, count=2)
        assert list(served.groups(number)) == [1, 3]


async def test_a_subscription_that_is_cancelled(tls):
    async with serving(tls) as served:
        track = growing(served)
        number = served.subscribe()
        await served.soon(Answered)
        (peer,) = served.server.peers
        track.append(data(0, 5_000_000))
        await served.soon(Received)
        served.cancel(number)
        await until(lambda: served.requests == 0)
        assert len(peer._subscriptions) == len(peer._queue) == 0
        assert track._watchers == {}
        track.append(data(1))
        assert not served.end.over.done()


async def test_a_server_that_goes_away(tls):
    """Subscriptions end after the groups being sent."""
    async with serving(tls) as served:
        track = growing(served, data(0))
        served.subscribe()
        await served.soon(Answered)
        (peer,) = served.server.peers
        assert not peer.busy
        peer.say_goaway(1.0)
        (ending,) = await served.soon(SubscriptionEnding)
        assert ending.message.code == PublishDoneCode.GOING_AWAY
        track.append(data(1))
        await until(lambda: served.requests == 0)


async def test_a_stream_is_stopped_while_its_subscription_is_cancelled(tls):
    """Both events arrive before either is handled."""
    async with serving(tls) as served:
        track = growing(served)
        number = served.subscribe()
        await served.soon(Answered)
        for group in range(20):
            track.append(data(group, 1_000_000))
        (received,) = (await served.soon(Received))[:1]
        served.end._carry_out(Stop(received.stream, 1))
        served.cancel(number)
        await until(lambda: served.requests == 0)
        growing(served, data(0), track="other")
        served.subscribe("other")
        await served.soon(Answered, count=2)


async def test_the_transport_asks_for_more_in_the_moment_in_which_a_group_appears(tls):
    """The head of a stream is sent before its objects."""
    async with serving(tls) as served:
        track = growing(served)
        number = served.subscribe()
        await served.soon(Answered)
        (peer,) = served.server.peers
        track.watch(peer, peer.feed)  # after the subscription
        track.append(data(0))
        await served.soon(Ended)
        assert served.groups(number) == {0: [(0, data(0))]}


async def test_a_group_that_takes_longer_than_its_subscriber_waits(tls):
    async with serving(tls) as served:
        track = growing(served)
        served.subscribe(subgroup_delivery_timeout=1)
        await served.soon(Answered)
        (peer,) = served.server.peers
        peer._queue._may_send = lambda _: False
        track.append(data(0))
        (ended,) = await served.soon(Ended)
        assert ended.reset == ResetCode.DELIVERY_TIMEOUT
        assert len(peer._queue) == 0


async def test_the_timer_of_a_group_ends_with_it(tls):
    """Otherwise a subscriber that has left could keep its connection in memory for ages."""
    async with serving(tls) as served:
        track = growing(served)
        served.subscribe(subgroup_delivery_timeout=2**62 - 1)
        await served.soon(Answered)
        (peer,) = served.server.peers
        track.append(data(0))
        await served.soon(Ended)
        assert peer._deadlines == {}
        peer._queue._may_send = lambda _: False
        track.append(data(1))
        await until(lambda: len(peer._deadlines) == 1)
        (timer,) = peer._deadlines.values()
        served.end.shut(0, "")
        await until(lambda: not served.server.peers)
        assert timer.cancelled()
        assert peer._deadlines == {}


async def test_a_group_that_cannot_be_read(tls):
    """It ends the subscription, with a reason."""
    async with serving(tls) as served:
        track = growing(served, kind=Wide)
        number = served.subscribe()
        await served.soon(Answered)
        track.append(data(0))
        await served.soon(Ended)
        track.broken = 1
        track.append(data(1))
        (ending,) = await served.soon(SubscriptionEnding)
        assert ending.message.code == PublishDoneCode.INTERNAL_ERROR
        assert ending.message.reason == "group 1 cannot be read"
        assert sorted(served.groups(number)) == [0]
        await until(lambda: served.requests == 0)


async def test_what_may_no_longer_be_read(tls):
    async with serving(tls) as served:
        track = growing(served)
        served.subscribe()
        await served.soon(Answered)
        track.readable = lambda _grant: False
        (peer,) = served.server.peers
        peer.reconsider(0.0)
        await served.soon(SubscriptionEnding)
        await until(lambda: served.requests == 0)
        assert not served.end.over.done()


@every
async def test_a_fetch_behind_the_edge_is_refused(draft, tls):
    """As the drafts demand; the existing part of a range is sent, and the track has not ended."""
    async with serving(tls, draft) as served:
        growing(served, data(0))
        served.fetch((1, 0), (1, 0))
        (refused,) = await served.soon(Refused)
        assert refused.message.code == RequestCode.INVALID_RANGE
        assert "1 group so far" in refused.message.reason
        number = served.fetch((0, 0), (7, 0))
        await served.soon(Ended)
        (answer,) = served.told(Answered)
        assert (answer.message.end, answer.message.end_of_track) == ((0, 1), False)
        assert served.groups(number) == {0: [(0, data(0))]}


async def test_a_range_that_depends_on_the_largest_object(tls):
    """The last groups of a track, in drafts that can express this."""
    async with serving(tls, DRAFT_20) as served:
        growing(served, *(data(group) for group in range(5)))
        number = served.fetch((0, 0), (0, 0), filter=Filter(groups_back=2))
        await served.soon(Ended)
        assert list(served.groups(number)) == [3, 4]


async def test_a_track_that_has_ended():
    track = GrowingBytes()
    track.append(b"x")
    track.finish("why")
    track.finish("another reason")
    assert (track.growing, track.failure, track.groups) == (False, "why", 1)


async def test_the_state_of_a_growing_track(tls):
    async with serving(tls) as served:
        growing(served)
        channel = served.end.session._channel
        stream = channel.open_bidi()
        channel.write(stream, TrackStatus(channel.take_id(), SPACE.fields(), b"live"), fin=True)
        served.end.settle_and_send()
        growing(served, data(0), track="later")
        number = served.subscribe("later")
        await served.soon(Answered)
        assert served.told(Answered)[0].request_id == number
        assert not served.end.over.done()
