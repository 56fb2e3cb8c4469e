"""Tracks that grow: the track itself, and requests behind its edge. `test_pushing` has subscriptions."""

import pytest

from kvabr.moqt.codes import RequestCode
from kvabr.moqt.events import Answered, Ended, Refused
from kvabr.moqt.messages import TrackStatus
from kvabr.moqt.parameters import Filter
from kvabr.moqt.wire import DRAFT_20
from kvabr.server.growing import GrowingBytes
from tests.server.tracks import SPACE, data, every, growing, serving

pytestmark = pytest.mark.process


# ------------------------------------------------------------------ behind the edge


@every
async def test_a_fetch_behind_the_edge_is_refused(draft, tls):
    """As the drafts have it; what there is of a range comes, and the track has not ended."""
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
    """The last groups of a track, in drafts that can say so."""
    async with serving(tls, DRAFT_20) as served:
        growing(served, *(data(group) for group in range(5)))
        number = served.fetch((0, 0), (0, 0), filter=Filter(groups_back=2))
        await served.soon(Ended)
        assert list(served.groups(number)) == [3, 4]


async def test_a_track_that_has_ended():
    track = GrowingBytes()
    with pytest.raises(ValueError, match="got -1"):
        track.grow(-1)
    track.append(b"x")
    track.finish("why")
    track.finish("another reason")
    assert (track.growing, track.failure, track.groups) == (False, "why", 1)
    with pytest.raises(ValueError, match="has ended"):
        track.append(b"y")
    with pytest.raises(IndexError, match="1 group so far"):
        track.open(1)


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
