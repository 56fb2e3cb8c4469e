"""What is told of assets that come and go is what a reader of the events then believes."""

import random

import pytest

from kvabr.store.names import prompt_name
from kvabr.telemetry.kv_events.hashes import BlockHashes
from kvabr.telemetry.kv_events.told import ToldAssets, ToldPrompt, prompt_of
from kvabr.telemetry.kv_events.wire import encoded
from kvabr.types.errors import UsageError
from tests.telemetry.kv_events.routers import LlmdIndex, NamedIndex
from tests.toymodel import toy_asset, toy_passage

HASHES = BlockHashes(4)


class Store:
    """Prompts by name, and what was told of them."""

    def __init__(self, **options):
        self.prompts, self.warned = {}, []
        self.told = ToldAssets(HASHES, self.read, warn=lambda *what: self.warned.append(what), **options)
        self.named, self.llmd, self.events = NamedIndex(), LlmdIndex(4), []

    def read(self, prompt):
        return prompt if isinstance(prompt, str) else ToldPrompt("m", "a" * 64, prompt)

    def look(self, again=False):
        for topic, events in self.told.again() if again else self.told.changes(self.prompts):
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
    assert store.told.untold == {"no tokens": 2, "salted": 1, "short": 1}
    assert store.warned == [("a", "no tokens"), ("c", "salted"), ("d", "short")]
    store.read = None
    del store.prompts["b"], store.prompts["e"]
    store.look()
    assert store.told.untold == {"no tokens": 1, "salted": 1, "short": 1}
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
    store = ToldAssets(HASHES, prompt_of)
    list(store.changes({"plain": plain}))
    assert store.untold == {"unreadable": 1}
