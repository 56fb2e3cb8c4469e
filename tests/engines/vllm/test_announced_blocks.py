"""Which blocks vLLM's connector announces to routers, and when it withdraws them; without vLLM."""

from contextlib import closing
from types import SimpleNamespace

from kvabr.engines.vllm.announced_blocks import AnnouncedBlocks
from kvabr.telemetry.kv_events.wire import STORAGE, KVBlocksRemoved, KVBlocksStored
from tests.engines.vllm.halves import TOKENS, Bench, request


def polling(name="r", tokens=range(20), salt=None):
    """A request of vLLM with blocks of four tokens; their names depend on all earlier tokens."""
    tokens = list(tokens)
    names = [repr(tokens[: 4 * (at + 1)]).encode() for at in range(len(tokens) // 4)]
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, num_prompt_tokens=len(tokens), block_hashes=names, cache_salt=salt
    )


def test_what_lookups_find_is_told_each_time_and_what_they_miss_is_taken_back():
    told, one = AnnouncedBlocks(4), polling()
    told.found(one, 15)
    (stored,) = told.take()
    assert stored == KVBlocksStored(one.block_hashes[:3], None, list(range(12)), 4, medium=STORAGE)
    told.found(one, 12)
    assert told.take() == [stored]  # a router may have forgotten it
    told.found(one, 4)
    again, gone = told.take()
    assert (again.block_hashes, gone) == (one.block_hashes[:1], KVBlocksRemoved(one.block_hashes[1:3], STORAGE))
    told.found(polling(tokens=range(100, 120)), 0)
    assert told.take() == []
    told.found(one, 0)
    assert told.take() == [KVBlocksRemoved(one.block_hashes[:1], STORAGE)]


def test_what_is_published_is_told_once_all_ranks_have():
    told, one = AnnouncedBlocks(4, ranks=2), polling()
    told.publishing(one)
    told.published("r", 16)
    assert told.take() == []
    told.published("r", 16)
    (stored,) = told.take()
    assert stored.block_hashes == one.block_hashes[:4]
    told.publishing(polling("failed"))
    told.published("failed", 0)
    told.published("failed", 16)
    told.published("unknown", 16)
    assert told.take() == []


def test_changed_weights_take_everything_back():
    told, one, other = AnnouncedBlocks(4), polling(), polling("o", range(50, 60))
    told.found(one, 20)
    told.found(other, 8)
    told.publishing(one)
    told.take()
    told.reset()
    (gone,) = told.take()
    assert set(gone.block_hashes) == {*one.block_hashes, *other.block_hashes}
    told.published("r", 20)  # under a name that nobody asks for any more
    assert told.take() == []


def test_the_scheduler_tells_what_its_lookups_say(served):
    with closing(Bench(served)) as bench:
        bench.scheduler.announced = AnnouncedBlocks(8)
        names = [str(at).encode() for at in range(8)]
        bench.matched(request(block_hashes=names))
        (stored,) = bench.scheduler.announced.take()
        assert stored.block_hashes == names
        assert stored.token_ids == TOKENS[:64]
        bench.matched(request("unknown", [5, *TOKENS[1:]], block_hashes=names))  # blocks that were told, and are gone
        assert bench.scheduler.announced.take() == [KVBlocksRemoved(names, STORAGE)]
        bench.matched(request("again", block_hashes=names))
        bench.scheduler.reset()
        assert bench.scheduler.announced.take()[-1] == KVBlocksRemoved(list(reversed(names)), STORAGE)


def test_nothing_is_told_of_adapters_and_pictures():
    """Routers that make names from tokens would take their blocks for the base model's, or another picture's."""
    for more in ({"lora_request": object()}, {"mm_features": [object()]}):
        told, one = AnnouncedBlocks(4), polling()
        vars(one).update(more)
        told.found(one, 16)
        told.publishing(one)
        told.published(one.request_id, 16)
        assert told.take() == []
