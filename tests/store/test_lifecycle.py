"""A bucket's lifecycle rule removes objects whenever it likes: plays miss them, and never have a hole or a hang.

Real rules count in days, so the objects are deleted here as a rule does: without a look at who reads them.
"""

import asyncio

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher, Slot
from kvabr.store.cloud import CloudStore
from kvabr.store.store import listing
from kvabr.types.cost import PrefillCost
from kvabr.types.events import RequestDone
from tests.client.served import LIMIT_S
from tests.client.test_play import exact_of
from tests.toymodel import SPEC, ToyModel, prompt

pytestmark = pytest.mark.process

TOKENS = prompt(1300).tokens
"""Six pages of up to 16 groups: more than a connection asks for at a time."""
COST = PrefillCost(0.001, 0.03)
"""A play fetches, and computes what does not come."""


def publish(url):
    """Publish the prompt unless it is there, whole; return whether it was published."""
    outcomes = []
    publisher = Publisher(url, SPEC, prior=default_catalog(), tracks=("FP16",))
    try:
        slot = publisher.reserve(TOKENS)
        if isinstance(slot, Slot):
            slot.fill(exact_of(TOKENS).clone(), outcomes.append)
    finally:
        publisher.close()
    return [outcome.verdict for outcome in outcomes] == ["published"]


class Rule:
    """Deletes all frames of a store once a play of it has received a group."""

    def __init__(self, url):
        self._bucket = CloudStore(url)
        self.deleted = []

    def __call__(self, event):
        if isinstance(event, RequestDone) and not self.deleted:
            self.deleted = list(self._bucket.blocked(listing(self._bucket, "g/")))
            self._bucket.blocked(self._bucket.delete(self.deleted))


async def play(urls, rule, engine=None, deadline=LIMIT_S):
    options = PlayOptions(prefill_cost=None if engine is None else COST, time_price=0.0, log=rule)
    async with AsyncClient(urls, engine=engine, options=options) as client:
        return await client.play(TOKENS, deadline=deadline, model=SPEC)


def is_right(played):
    """Whether a cache is the one of the first tokens of the prompt."""
    return torch.allclose(played.kv.float(), exact_of(TOKENS)[:, :, :, : played.tokens], atol=2e-2)


def is_whole(played):
    return played.tokens == len(TOKENS) and is_right(played)


async def test_a_play_computes_what_the_rule_removed_under_it(seaweed):
    url, engine = seaweed.url(), ToyModel()
    assert await asyncio.to_thread(publish, url)
    rule = Rule(url)
    played = await play(url, rule, engine, deadline=10.0)
    assert len(rule.deleted) >= 6
    assert engine.prefilled > 0
    assert is_whole(played)


async def test_a_play_fetches_elsewhere_what_the_rule_removed_under_it(seaweed):
    url, other = seaweed.url(), seaweed.url()
    for each in (url, other):
        assert await asyncio.to_thread(publish, each)
    rule = Rule(url)
    played = await play([url, other], rule)
    assert len(rule.deleted) >= 6
    assert is_whole(played)
