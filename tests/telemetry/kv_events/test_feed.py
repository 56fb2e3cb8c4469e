"""Batches that are lost, late, twice or out of order: a replay is asked for, else the publisher is forgotten."""

import random

import pytest

from kvabr.store.names import prompt_name
from kvabr.telemetry.kv_events import feed as feeds
from kvabr.telemetry.kv_events.announced import AnnouncedAssets, AnnouncedPrompt, prompt_of
from kvabr.telemetry.kv_events.feed import EventFeed
from kvabr.telemetry.kv_events.hashes import BlockHashes
from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVBlocksRemoved, encoded
from kvabr.types.errors import UsageError
from tests.telemetry.kv_events.routers import LlmdIndex, NamedIndex
from tests.toymodel import toy_asset, toy_passage

CLEARED = [KVBlocksCleared()]


def events(number):
    return [KVBlocksRemoved([number])]


class Heard:
    """What comes out of a feed, as numbers and "forgotten"."""

    def __init__(self, *, replays=True, asked=True):
        self.log = []
        self.feed = EventFeed(self.on_events, lambda _: self.log.append("forgotten"), replays=replays)
        if asked:  # at the start, without an answer
            self.feed.replay_ended()

    def on_events(self, _topic, told):
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
    monkeypatch.setattr(feeds, "MAX_WAITING", 3)
    assert Heard().publish(0, 5, 6, 7, 8).log == [0, "forgotten", 5, 6, 7, 8]
    monkeypatch.setattr(feeds, "MAX_WAITING_BYTES", 10)
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

        def on_events(_topic, told, believed=believed):
            one, stored = told
            believed.add(one) if stored else believed.discard(one)

        feed = EventFeed(on_events, lambda _, believed=believed: believed.clear(), replays=dice.random() < 0.7)
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


HASHES = BlockHashes(4)


class Store:
    """Prompts by name, and what was told of them."""

    def __init__(self, **options):
        self.prompts, self.warned = {}, []
        self.told = AnnouncedAssets(HASHES, self.read, warn=lambda *what: self.warned.append(what), **options)
        self.named, self.llmd, self.events = NamedIndex(), LlmdIndex(4), []

    def read(self, prompt):
        return prompt if isinstance(prompt, str) else AnnouncedPrompt("m", "a" * 64, prompt)

    def look(self, again=False):
        for topic, events in self.told.all_events() if again else self.told.changes(self.prompts):
            self.events += events
            if events:
                for router in (self.named, self.llmd):
                    router.take(topic.encode(), encoded(events, 0.0))


def test_readers_believe_what_is_there():
    """Random comings and goings of prompts that share beginnings, checked against all of them after each."""
    dice, store = random.Random(7), Store()
    trunk = [dice.randrange(1000) for _ in range(64)]
    for turn in range(150):
        for _ in range(dice.randrange(1, 4)):
            name = str(dice.randrange(12))
            if name in store.prompts and dice.random() < 0.6:
                del store.prompts[name]
            else:
                shared = dice.choice((0, 3, 8, 20, 40))
                store.prompts[name] = (*trunk[:shared], *(dice.randrange(3) for _ in range(dice.randrange(4, 24))))
        store.look()
        if turn % 10 == 0:
            store.look(again=True)
        there = {name for prompt in store.prompts.values() for name in HASHES.numbers(prompt)}
        assert store.named.held["kv@kvabr@m"] == there
        assert len(store.told) == len(store.prompts)
        for prompt in store.prompts.values():
            assert store.llmd.place("m", prompt) == {"kvabr": len(prompt) // 4}
        begun = HASHES.numbers(trunk[:4])[0] in there
        assert store.llmd.place("m", [*trunk[:4], *range(5000, 5016)]) == ({"kvabr": 1} if begun else {})


def test_what_is_not_told_is_counted_and_named_once():
    store = Store(topic="kv@here@mine")
    store.prompts = {"a": "no tokens", "b": "no tokens", "c": "salted", "d": (1, 2), "e": (1, 2, 3, 4)}
    store.look()
    assert store.told.skipped == {"no tokens": 2, "salted": 1, "short": 1}
    assert store.warned == [("a", "no tokens"), ("c", "salted"), ("d", "short")]
    store.read = None
    del store.prompts["b"], store.prompts["e"]
    store.look()
    assert store.told.skipped == {"no tokens": 1, "salted": 1, "short": 1}
    assert len(store.told) == 0
    for topic in ("", "x" * 2000, "\udcff"):
        with pytest.raises(UsageError, match="topic"):
            Store(topic=topic)


def test_assets_tell_their_tokens_if_they_may(tmp_path):
    plain = toy_asset(tmp_path / "plain")
    told = prompt_of(plain)
    assert (told.model, told.asset) == (plain.catalog.namespace.model, plain.catalog.namespace.prompt)
    assert len(told.tokens) == 70
    assert prompt_of(toy_asset(tmp_path / "salted", salt=b"secret")) == "salted"
    assert prompt_of(toy_passage(tmp_path / "passage", range(20))) == "passage"
    told_of = tmp_path / "plain" / prompt_name(plain.name)
    told_of.unlink()
    assert prompt_of(plain) == "no tokens"
    told_of.write_text("{}")
    store = AnnouncedAssets(HASHES, prompt_of)
    list(store.changes({"plain": plain}))
    assert store.skipped == {"unreadable": 1}
