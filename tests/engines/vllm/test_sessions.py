"""A session in the real vLLM says that it will be back: its next turn is played from the node's store."""

import time
from contextlib import ExitStack

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from kvabr.store.locations import open_asset
from tests.engines.served import harmed
from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.tinies import tiny_llama
from tests.engines.vllm.world import SMALL, VllmWorld
from tests.processes import LIMIT_S

pytestmark = pytest.mark.model

PROMPT = list(TEXT[:4000].encode())[:500]
PUBLISHED = 384
"""Tokens of the prompt in whole groups."""


class World(VllmWorld):
    """An engine that plays in a process of its own, and publishes."""

    def __init__(self, folder):
        super().__init__(folder)
        extra = self.playing(store_mib=64) | self.publishing("FP16")
        self.engine = RealEngine(tiny_llama(folder / "model"), extra, **SMALL)

    def followed(self):
        """Wait until all hints have been followed."""
        self.engine.settle()
        end_s = time.monotonic() + LIMIT_S
        hints = self.engine.half._hints
        while hints._publishing or any(not one.done() for one in hints._running):
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_the_next_turn_needs_nothing_but_its_lookup(world):
    params = {"kv_transfer_params": {"keep_s": 600, "deadline_s": 60.0}}
    (cold,) = world.engine.generate([PROMPT], 16, **params)
    world.followed()
    with ExitStack() as stack:
        asset = open_asset(world.assets)
        for group in range(asset.catalog.groups):
            stack.enter_context(harmed(asset, group, "FP16", "corrupt"))
        world.engine.forget()
        (says,) = world.engine.generate([PROMPT], 16, kv_transfer_params={"publish": False})
    world.engine.settle()
    counted = world.engine.counted()
    assert says == cold
    assert (counted["hints"], counted["tokens_kept"], counted["tokens_loaded"]) == (1, PUBLISHED, PUBLISHED)
    assert not counted.keys() & {"hints_failed", "groups_damaged", "groups_failed", "tokens_missed"}
