"""A rank of a pipeline: it plays its own layers of a whole model's cache, or a cache of these alone. Without vLLM."""

from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from kvabr.data import default_catalog
from kvabr.engines.layouts import BlockLayout
from kvabr.engines.vllm.caches import EngineCaches, Pages
from kvabr.engines.vllm.config import _whole
from kvabr.publish.publisher import Publisher, with_heads, with_layers
from kvabr.types.errors import PlayError
from kvabr.types.kv import KVSpec, LayerClass
from tests import kvdata
from tests.client.served import Served
from tests.engines.paging import paged_blocks
from tests.engines.vllm.halves import BLOCK, Bench, request
from tests.engines.vllm.test_groups import SPEC, TOKENS, numbers, publish

pytestmark = pytest.mark.process

ELSEWHERE = (Pages(1, -1, BLOCK, (), (), passing=True),)
STAGES = {
    # Layers 0, 1 and 3 have windows, 2 full attention: the second stage has the classes in another order.
    range(2): (Pages(0, 0, BLOCK, ("0",), (0,), passing=True), Pages(1, 0, BLOCK, ("1",), (1,), passing=True),
               Pages(2, -1, BLOCK, (), ())),
    range(2, 4): (Pages(0, 1, BLOCK, ("3",), (0,), passing=True), Pages(2, 0, BLOCK, ("2",), (0,)), *ELSEWHERE),
}  # fmt: skip
TABLES = [
    [0] * 15 + [16, 17, 18, 19, 20],
    [0] * 15 + [30, 31, 32, 33, 34],
    [1 + (7 * place) % 39 for place in range(20)],
]


def test_the_spec_of_some_layers():
    assert with_layers(SPEC, range(4)) is SPEC
    first, second = (with_layers(SPEC, layers) for layers in STAGES)
    assert (first.model, second.model) == ("test/windows+layers0-1", "test/windows+layers2-3")
    assert [(one.kind, one.layers) for one in first.classes] == [("window", (0, 1))]
    assert [(one.kind, one.layers) for one in second.classes] == [("full", (0,)), ("window", (1,))]
    assert with_heads(second, range(1)).model == "test/windows+layers2-3+heads0-0"


def test_what_a_stage_can_tell_of_the_whole():
    window, full = SPEC.classes
    types = ["window", "window", "full", "window"]
    own = [one for one in (full, window) if one is full] + [LayerClass("window", (3,), 2, 8, 8, "float16", window=40)]
    assert _whole(own, range(2, 4), 4, types) == SPEC.classes
    assert _whole([window], range(2), 4, types) is None  # nothing is known of full attention
    assert _whole(own, range(2, 4), 4, None) is None
    only = KVSpec.uniform("m", "t", 4, 2, 8, "float16")
    assert _whole([LayerClass("full", (1, 2), 2, 8, 8, "float16")], range(1, 3), 4, None) == only.classes


def publish_stages(root):
    for layers in STAGES:
        spec = with_layers(SPEC, layers)
        made = Publisher(root, spec, prior=default_catalog(), tracks=["FP16"])
        kv = []
        for one in spec.classes:
            part = next(at for at, each in enumerate(SPEC.classes) if each.kind == one.kind)
            rows = [SPEC.classes[part].layers.index(layers.start + layer) for layer in one.layers]
            kv.append(numbers()[part][rows])
        made.reserve(TOKENS).fill(tuple(kv), lambda _: None)
        made.close()


@pytest.fixture(params=["whole", "stages"])
def served(request, tmp_path):
    (publish if request.param == "whole" else publish_stages)(tmp_path / "assets")
    served = Served(tmp_path / "assets", tmp_path)
    served.apart = request.param == "stages"
    yield served
    served.close()


@pytest.fixture(params=list(STAGES), ids=["first", "second"])
def layers(request):
    return request.param


def test_a_stage_plays_its_own_layers(served, layers):
    caches = EngineCaches(with_layers(SPEC, layers).classes, STAGES[layers])
    with closing(Bench(served, spec=SPEC, caches=caches, layers=layers, waits=True)) as bench:
        asked = request(tokens=[*TOKENS, 7, 8])
        count, waits = bench.matched(asked)
        assert (count, waits) == (160, True)
        bench.scheduler.allocated(asked, TABLES, count)
        assert bench.steps() == (set(), {"r"}, set())
        assert bench.worker.failed_requests() == set()
        seen = {"window": 40, "full": 160}
        for pages in STAGES[layers]:
            for name in pages.names:
                part = next(at for at, each in enumerate(SPEC.classes) if int(name) in each.layers)
                row = SPEC.classes[part].layers.index(int(name))
                run = TABLES[pages.group][pages.absent(TABLES[pages.group]) :]
                wanted = numbers()[part][row : row + 1, :, :, 160 - len(run) * BLOCK :]
                assert wanted.shape[3] == seen[SPEC.classes[part].kind]
                out = torch.empty_like(wanted)
                paged_blocks([bench.named[name]], run, BlockLayout.TRANSPOSED).read(out)
                assert torch.equal(out, wanted)
        own = 2 * sum(48 * each.elements_per_token if each.only.kind == "window" else 160 * each.elements_per_token
                      for each in (with_layers(SPEC, layers) if served.apart else SPEC).parts)  # fmt: skip
        assert own <= bench.worker.counts.take()["bytes_fetched"] < 1.3 * own + 9000


def test_layers_of_another_model_are_not_written(served, layers):
    caches = EngineCaches(with_layers(SPEC, layers).classes, STAGES[layers])
    foreign = SimpleNamespace(spec=kvdata.spec(layers=3, group_tokens=16))
    with (
        closing(Bench(served, spec=SPEC, caches=caches, layers=layers, waits=True)) as bench,
        pytest.raises(PlayError, match="fit neither the model nor this rank"),
    ):
        bench.worker.blocks.places(foreign, 0, 8, [[1]] * 3)
