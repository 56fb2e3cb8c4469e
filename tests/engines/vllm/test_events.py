"""The connector announces kvabr's caches to routers in the real vLLM's KV events; the subscriber receives them."""

import threading
import time

import msgspec
import pytest
import structlog

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from kvabr.telemetry.kv_events.announced import AnnouncedAssets, AnnouncedPrompt
from kvabr.telemetry.kv_events.hashes import BlockHashes
from kvabr.telemetry.kv_events.publisher import EventSockets
from kvabr.telemetry.kv_events.subscriber import KVEventSubscriber
from kvabr.telemetry.kv_events.wire import STORAGE, KVBlocksCleared, KVBlocksRemoved, KVBlocksStored, encoded
from kvabr_lab.route import HeldPrefixes, PrefixHolder
from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.tinies import tiny_llama
from tests.engines.vllm.world import SMALL, VllmWorld
from tests.processes import LIMIT_S

pytestmark = pytest.mark.model

BLOCK, IDS = SMALL["block_size"], list(TEXT[:4000].encode())
PROMPT = IDS[:500]
PUBLISHED = 384
"""Tokens of the prompt in whole groups."""


class World(VllmWorld):
    """An engine that plays, publishes and sends events, and a subscriber."""

    def __init__(self, folder):
        super().__init__(folder)
        from vllm.config.kv_events import KVEventsConfig

        sockets = EventSockets(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        events = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=sockets.endpoint, replay_endpoint=sockets.replay, topic="kv@e@tiny"
        )
        extra = self.playing() | self.publishing("FP16")
        model = tiny_llama(folder / "model")
        self.engine = RealEngine(model, extra, **SMALL, kv_events_config=events)
        self.told, self.held, self._lock = [], HeldPrefixes(), threading.Lock()
        self._subscriber = KVEventSubscriber(sockets, self.on_events, lambda _: None, structlog.get_logger())
        self._subscriber.__enter__()

    def on_events(self, topic, events):
        with self._lock:
            self.told += events
            self.held.apply(PrefixHolder("engine", topic), events)

    def wait(self, what):
        """Let the engine step until that is so."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            with self._lock:
                if found := what():
                    return found
            assert time.monotonic() < end_s, self.told
            self.engine.llm.llm_engine.step()
            time.sleep(0.01)

    def stored(self):
        """Events of blocks that kvabr can load."""
        return [one for one in self.told if isinstance(one, KVBlocksStored) and one.medium == STORAGE]

    def removed(self):
        """Events of blocks that kvabr can no longer load."""
        return [one for one in self.told if isinstance(one, KVBlocksRemoved) and one.medium == STORAGE]

    def close(self):
        self._subscriber.__exit__()
        super().close()


def test_vllms_own_classes_read_what_kvabr_tells_and_name_blocks_alike(monkeypatch):
    from vllm.distributed.kv_events import BlockStored, KVEventBatch
    from vllm.utils.hashing import sha256, sha256_cbor
    from vllm.v1.core import kv_cache_utils

    for hashed in (sha256, sha256_cbor):
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
        kv_cache_utils.init_none_hash(hashed)
        parent, names = None, []
        for first in range(0, 500 - 16, 16):
            parent = kv_cache_utils.hash_block_tokens(hashed, parent, PROMPT[first : first + 16])
            names.append(kv_cache_utils.maybe_convert_block_hash(parent))
        assert BlockHashes(16, hashed.__name__).numbers(PROMPT) == names
    told = AnnouncedAssets(BlockHashes(16), lambda tokens: AnnouncedPrompt("m", "a" * 64, tokens))
    events = [event for _, each in told.changes({"one": PROMPT}) for event in each]
    read = msgspec.msgpack.decode(encoded(events, 1.0), type=KVEventBatch).events
    assert isinstance(read[1], BlockStored)
    assert (read[1].token_ids, read[1].block_size) == (PROMPT[:496], 16)


def test_what_is_published_and_found_is_told_and_what_is_gone_is_taken_back(world):
    engine = world.engine
    engine.generate([PROMPT], 4)
    (told,) = world.wait(world.stored)
    own = world.wait(lambda: [one for one in world.told if isinstance(one, KVBlocksStored) and one.medium == "GPU"])
    names = [name for one in own for name in one.block_hashes]
    assert told.token_ids == PROMPT[:PUBLISHED]
    assert told.block_hashes == names[: PUBLISHED // BLOCK]  # vLLM's own names
    world.origin.wait_for_assets()

    # What vLLM clears with its own prefix cache, the next lookup tells again.
    engine.forget()
    engine.generate([PROMPT], 4, publish=False)
    world.wait(lambda: any(isinstance(one, KVBlocksCleared) for one in world.told))
    assert world.wait(lambda: len(world.stored()) > 1 and world.stored()[-1]) == told
    world.wait(lambda: world.held.cached(PROMPT) == {PrefixHolder("engine", "kv@e@tiny"): 480})

    for catalog in world.assets.glob("a/*"):
        catalog.unlink()
    world.wait(lambda: not engine.finds(PROMPT))
    engine.forget()
    engine.generate([PROMPT], 4, publish=False)
    gone = world.wait(lambda: [one for one in world.told if isinstance(one, KVBlocksRemoved) and one.medium == STORAGE])
    assert gone[-1].block_hashes == told.block_hashes


def test_weights_that_change_take_everything_back(world):
    engine = world.engine
    prompt = IDS[1000:1300]
    engine.generate([prompt], 4)
    told = world.wait(lambda: [one for one in world.stored() if one.token_ids == prompt[:256]])[-1]
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.generate([IDS[2000:2040]], 4)
    world.wait(lambda: any(set(told.block_hashes) <= set(one.block_hashes) for one in world.removed()))
