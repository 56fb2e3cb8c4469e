"""Batches that are lost, late, twice or out of order: a replay is asked for, else the publisher is forgotten."""

import random

import pytest

from kvabr.telemetry.kv_events import feed as feeds
from kvabr.telemetry.kv_events.feed import EventFeed
from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVBlocksRemoved

CLEARED = [KVBlocksCleared()]


def events(number):
    return [KVBlocksRemoved([number])]


class Heard:
    """What comes out of a feed, as numbers and "forgotten"."""

    def __init__(self, *, replays=True, asked=True):
        self.log = []
        self.feed = EventFeed(self.hear, lambda _: self.log.append("forgotten"), replays=replays)
        if asked:  # at the start, without an answer
            self.feed.replay_ended()

    def hear(self, _topic, told):
        self.log.append("cleared" if told == CLEARED else told[0].block_hashes[0])

    def publish(self, *numbers):
        for number in numbers:
            self.feed.receive(number, "t", events(number))
        return self

    def replay(self, *numbers):
        for number in numbers:
            self.feed.replayed(number, "t", events(number))
        self.feed.replay_ended()
        return self


def test_what_came_before_is_asked_for_and_need_not_be_had():
    new = Heard(asked=False)
    assert new.feed.wanted == 0
    assert new.publish(5).replay(3, 4, 5).publish(6).log == [3, 4, 5, 6]
    assert Heard(asked=False, replays=False).feed.wanted is None
    heard = Heard().publish(5, 6)
    assert (heard.log, heard.feed.wanted) == ([], 0)
    assert heard.replay(3, 4, 5, 6).publish(7).log == [3, 4, 5, 6, 7]
    assert Heard().publish(5, 6).replay().publish(7).log == [5, 6, 7]
    assert Heard(replays=False).publish(5, 6).log == [5, 6]


@pytest.mark.parametrize(
    ("answers", "heard"),
    [
        ((), [0, 1, "forgotten", 4, 5]),
        ((3, 4, 5), [0, 1, "forgotten", 3, 4, 5]),
        ((2,), [0, 1, 2, "forgotten", 4, 5]),
        ((4, 5), [0, 1, "forgotten", 4, 5]),
        ((0, 1), [0, 1, "forgotten", 4, 5]),
        ((3, 2), [0, 1, "forgotten", 3, 4, 5]),
    ],
)
def test_a_gap_that_stays_open_makes_everything_worthless(answers, heard):
    assert Heard().publish(0, 1, 4, 5).replay(*answers).log == heard


def test_an_answer_that_clears_stands_for_what_is_gone():
    heard = Heard().publish(0, 1, 9)
    for _ in range(2):  # a publisher of two models clears each
        heard.feed.replayed(7, "t", CLEARED)
    assert heard.replay(8, 9).log == [0, 1, "forgotten", "cleared", "cleared", 8, 9]


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_number_that_is_not_higher_begins_anew(again):
    heard = Heard().publish(0, 1, 2, again)
    assert heard.log[:4] == [0, 1, 2, "forgotten"]
    heard.replay().publish(again + 1)
    assert heard.log[4:] == [again, again + 1]
    anew = Heard().publish(0, 5, 3)  # while a replay is wanted
    assert (anew.log, anew.feed.wanted) == ([0, "forgotten"], 0)


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(feeds, "MOST_WAITING", 3)
    assert Heard().publish(0, 5, 6, 7, 8).log == [0, "forgotten", 5, 6, 7, 8]
    monkeypatch.setattr(feeds, "MOST_WAITING_BYTES", 10)
    heard = Heard().publish(0)
    for number in (5, 6):
        heard.feed.receive(number, "t", events(number), 6)
    assert heard.log == [0, "forgotten", 5, 6]


def test_whatever_is_lost_what_is_believed_is_true():
    """A reader's belief after each batch is what the publisher held, or a part of it that was told since."""
    dice = random.Random(5)
    for _ in range(300):
        held, states, believed, batches = set(), [], set(), []
        for _ in range(30):
            one = dice.randrange(6)
            held = held ^ {one}
            states.append(set(held))
            batches.append((one, one in held))

        def hear(_topic, told, believed=believed):
            one, stored = told
            believed.add(one) if stored else believed.discard(one)

        feed = EventFeed(hear, lambda _, believed=believed: believed.clear(), replays=dice.random() < 0.7)
        for number, batch in enumerate(batches):
            if dice.random() < 0.2:
                continue
            feed.receive(number, "t", batch)
            if feed.wanted is not None and dice.random() < 0.7:
                first = feed.wanted if dice.random() < 0.6 else number - dice.randrange(3)
                for at in range(max(0, first), number + 1):
                    feed.replayed(at, "t", batches[at])
                feed.replay_ended()
            if feed.wanted is None:
                assert believed <= states[number]
