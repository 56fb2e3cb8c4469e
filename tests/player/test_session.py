"""The state machine by hand: what goes in and what must come out."""

from kvabr.player.session_types import Cancel, Decode, Deliver, FetchGroup, PlayerConfig
from tests.player.sessions import bring, decode_all, of, session


def test_plays_every_group_and_delivers_once():
    play = session()
    play.start(0.0)
    todo = of(play.actions(), FetchGroup)
    assert [fetch.group for fetch in todo] == [0, 1, 2, 3]
    delivered = []
    now = 0.0
    while todo:
        now += 0.05
        actions = bring(play, todo.pop(0), now)
        todo += of(actions, FetchGroup)
        delivered += of(actions, Deliver)
    assert len(delivered) == 1
    assert delivered[0].met
    assert play.over
    assert play.next_timer() is None
    assert [group.track for group in play.record.groups] == ["Int4"] * 4
    assert play.record.bytes_wasted == 0


def test_events_of_unknown_requests_are_ignored():
    play = session()
    play.start(0.0)
    before = len(play.view.in_flight)
    for event in (play.first_byte, play.done, play.decoded):
        event(999, 0.1)
    play.progress(999, 5, 0.1)
    play.failed(999, "x", 0.1)
    play.refused(999, "x", 0.1)
    play.computed(0, 1, 0.1)
    assert len(play.view.in_flight) == before


def test_upgrades_replace_only_what_is_worse_and_stop_at_the_deadline():
    play = session(2, "cheapfirst", config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    for _ in range(3):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    upgrade = todo[0]
    assert upgrade.priority >= 128
    play.timer(0.96)
    decode_all(play, play.actions(), 0.96)
    assert play.record.groups[0].source == "upgraded"
    play.timer(1.0)
    actions = play.actions()
    assert [cancel.request for cancel in of(actions, Cancel)] == [upgrade.request]
    assert of(actions, Deliver)[0].met
    assert play.record.groups[1].track == "AC-5x"


def test_nothing_changes_once_the_play_is_over():
    play = session(2, "cheapfirst", config=PlayerConfig(min_requests=1, first_requests=1))
    play.start(0.0)
    todo, now = of(play.actions(), FetchGroup), 0.0
    for _ in range(2):
        now += 0.05
        todo += of(bring(play, todo.pop(0), now), FetchGroup)
    play.timer(0.8)
    decode_all(play, play.actions(), 0.8)
    play.done(todo[0].request, 0.99)
    (decode,) = of(play.actions(), Decode)
    play.timer(1.0)
    assert play.over
    wasted, tracks = play.record.bytes_wasted, [group.track for group in play.record.groups]
    assert wasted == todo[0].bytes
    play.decoded(decode.request, 1.1)
    play.refused(decode.request, "late", 1.2)
    assert [group.track for group in play.record.groups] == tracks
    assert play.record.bytes_wasted == wasted
