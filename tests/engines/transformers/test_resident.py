"""The cache of a play on the model's device: nothing is copied there twice, and what is computed on it is the same."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from kvabr.client.driver import EngineCache
from kvabr.engines.transformers import engine as engines
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.engines.transformers.resident import RoomyCache
from kvabr.player.assembler import Assembler
from kvabr.store.asset import Asset
from kvabr.store.locations import open_asset
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import ModelError
from tests.client.virtual import virtual
from tests.engines.transformers.test_ready_cache import ready_from
from tests.engines.transformers.text import IDS, PREFIX

pytestmark = pytest.mark.model


class Watched(TransformersEngine):
    """Counts what is copied to the device, in tokens."""

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__(engine.model, engine.spec, context=engine.context)
        self.placed: list[tuple[int, int]] = []
        self.rooms: list[weakref.ref[RoomyCache]] = []

    def reside(self, tokens: int) -> RoomyCache | None:
        room = super().reside(tokens)
        assert room is not None
        self.rooms.append(weakref.ref(room))
        place = room.place

        def watched(first: int, kv: torch.Tensor) -> None:
            self.placed.append((first, kv.shape[3]))
            place(first, kv)

        room.place = watched  # type: ignore[method-assign]
        return room


@pytest.fixture
def asset(root: Path) -> Asset:
    return open_asset(root)


@pytest.fixture
def watched(engine: TransformersEngine) -> Watched:
    return Watched(engine)


def test_only_what_has_changed_is_copied_to_the_device(asset: Asset, watched: Watched) -> None:
    catalog = asset.catalog.to_play
    play = Assembler(catalog, None, dtype=torch.float32)
    engine = EngineCache(watched, catalog, PREFIX, play)
    exact = watched.prefill(PREFIX)
    watched.rooms.clear()

    engine.compute(0, 1)
    assert watched.placed == []
    play.put(1, "Int8", asset.frame(1, "Int8"))
    engine.compute(2, 3)
    assert watched.placed == [(128, 128)]  # not what it has computed itself
    engine.compute(3, 4)
    assert watched.placed == [(128, 128)]
    play.put(1, "FP16", asset.frame(1, "FP16"))
    engine.compute(2, 4)
    assert watched.placed == [(128, 128), (128, 128)]
    assert len(watched.rooms) == 1
    assert play.coverage == (RECOMPUTED, "FP16", RECOMPUTED, RECOMPUTED)
    (kv,) = play.take_classes()
    assert torch.allclose(kv, exact, atol=0.02)
    assert torch.allclose(kv[:, :, :, :128], exact[:, :, :, :128], atol=1e-5)
    before = exact.clone()
    before[:, :, :, 128:256] = kv[:, :, :, 128:256]
    assert torch.allclose(kv[:, :, :, 256:], watched.prefill(PREFIX[256:], before[:, :, :, :256]), atol=1e-5)

    del engine
    gc.collect()
    assert watched.rooms[0]() is None  # freed with the play


def test_a_failed_computation_leaves_nothing_that_counts_as_computed(asset: Asset, watched: Watched) -> None:
    catalog = asset.catalog.to_play
    play = Assembler(catalog, None, dtype=torch.float32)
    engine = EngineCache(watched, catalog, [*PREFIX[:128], 10**6, *PREFIX[129:]], play)
    engine.compute(0, 1)
    with pytest.raises(ModelError, match="vocabulary"):
        engine.compute(1, 2)
    play.put(1, "FP16", asset.frame(1, "FP16"))
    engine.compute(2, 3)
    assert watched.placed == [(128, 128)]


@virtual
async def test_a_play_with_an_engine_leaves_no_memory_behind(origin, watched):
    async with origin(rate=2e4) as link:
        ready = await ready_from(link, watched, deadline=1.0, policy="anytime", prefill_cost=None)
    assert ready.played is not None
    assert RECOMPUTED in ready.played.coverage
    gc.collect()
    assert not any(room() is not None for room in watched.rooms)


def test_a_gpu_takes_long_passes_and_shorter_ones_where_memory_is_short(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = TransformersEngine(engine.model, engine.spec, context=engine.context)
    exact, sizes, base = own.prefill(IDS), [], own.model.base_model.forward
    monkeypatch.setattr(engines, "CHUNK", 100)
    monkeypatch.setattr(own, "pass_tokens", lambda _: own._max_tokens)
    own._max_tokens = 400

    def forward(*args: object, **given: object) -> object:
        found = base(*args, **given)
        sizes.append(given["input_ids"].shape[1])  # type: ignore[attr-defined]
        if sizes[-1] > 100:
            raise torch.OutOfMemoryError("too much")
        return found

    monkeypatch.setattr(own.model.base_model, "forward", forward)
    assert torch.allclose(own.prefill(IDS), exact, atol=1e-5)
    assert sizes == [400, 200, 100, 100, 100, 100, 30]
    assert own._max_tokens == 100
