"""Prompts made of passages in the two halves of the connector: loaded as a prefix, and never published as exact."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

from kvabr.codec.rope import rotate
from kvabr.engines.layouts import BlockLayout
from kvabr.engines.vllm.config import VllmSettings
from kvabr.engines.vllm.requests import PassageRequests, salt_of
from kvabr.publish.fusion import FusionLosses
from kvabr.types.catalog import Catalog
from kvabr.types.passage import Exact, Passage
from tests.client.served import Served
from tests.engines.paging import paged_blocks
from tests.engines.vllm.halves import BLOCK, LONGEST, TOKENS, Bench, lora, near, request
from tests.toymodel import SPEC, ToyModel, toy_asset, toy_base, toy_passage

pytestmark = pytest.mark.process

ONE, OTHER, BARE = [9, 8, 7, 6, 5] * 8, [3, 1, 4, 1, 5] * 5, [2, 7, 1] * 7
PROMPT = [*TOKENS, *ONE, *OTHER, 11, 12, 13]
PLACES = [[70, 110], [110, 135]]
LAST = 128
"""Tokens in whole blocks before the end of the last passage."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    toy_asset(folder / "system", ("FP16", "Int4"))
    for number, passage in enumerate((ONE, OTHER)):
        toy_passage(folder / str(number), passage, ("FP16", "Int4"))
    toy_passage(folder / "bare", BARE, ("FP16",), fusion=())
    served = Served(folder, tmp_path_factory.mktemp("tls"))
    yield served
    served.close()


def asking(name="r", *, passages=PLACES, salt="blended", tokens=PROMPT, **more):
    return request(name, tokens, cache_salt=salt, kv_transfer_params={"passages": passages} | more)


def wanted():
    kv = [ToyModel().prefill(TOKENS)]
    for ids, place in ((ONE, 70), (OTHER, 110)):
        own = toy_base(ids).kv.clone()
        own[:, 0] = rotate(own[:, 0], SPEC.rope, place)
        kv.append(own)
    return torch.cat(kv, dim=3)


def test_passages_are_loaded_behind_the_text_that_begins_the_prompt(bench):
    numbers = [30, 2, 17, 5, 9, 11, 0, 4, 25, 31, 32, 33, 6, 7, 8, 10, 12, 13]
    count, failed = bench.load(asking(), blocks=numbers)
    assert (count, failed) == (LAST, set())
    assert near(bench.blocks(numbers[: LAST // BLOCK]), wanted()[:, :, :, :LAST])
    assert bench.scheduler.counts.take() == {"lookups_hit": 1, "lookups_joined": 1}
    counted = bench.worker.counts.take()
    assert counted["tokens_loaded"] == LAST
    assert counted["loss"] == pytest.approx(0.1, rel=0.3)  # of each passage 0.05


@pytest.mark.parametrize("computed", [64, 72, 80, 112])
def test_what_the_engine_has_is_left_alone(bench, computed):
    numbers = list(range(10, 28))
    count, failed = bench.load(asking(), computed=computed, blocks=numbers)
    assert (computed + count, failed) == (LAST, set())
    first = computed // BLOCK
    assert near(bench.blocks(numbers[first : LAST // BLOCK]), wanted()[:, :, :, computed:LAST])
    assert bool(bench.caches[0][numbers[:first]].isnan().all())


def test_the_end_of_the_last_passage_is_computed_with_the_question(served, tmp_path):
    """Where one of its groups ends with a block."""
    (tmp_path / "longest.py").write_text(LONGEST)
    bench = Bench(served, policy=f"{tmp_path / 'longest.py'}:Longest", tail=40)
    try:
        tokens = [*TOKENS[:64], *ONE, 11, 12, 13]
        count, failed = bench.load(asking(tokens=tokens, passages=[[64, 104]]))
        assert (count, failed) == (80, set())
        counted = bench.worker.counts.take()
        assert counted["tokens_tail"] == 24
        assert "tokens_missed" not in counted
        assert bench.load(asking("other"))[0] == LAST
    finally:
        bench.close()


def test_a_text_that_nobody_has_must_be_the_engines(bench):
    """Nothing can be loaded behind a gap; where the engine's own cache reaches the passages, they can."""
    other = [5, *TOKENS[1:], *PROMPT[70:]]
    assert bench.matched(asking("a", tokens=other)) == (0, False)
    assert bench.matched(asking("b", tokens=other), 64) == (0, False)
    asked = asking("c", tokens=other)
    count, failed = bench.load(asked, computed=72)
    assert (72 + count, failed) == (LAST, set())
    assert near(bench.blocks(list(range(9, 16))), wanted()[:, :, :, 72:LAST])


def test_what_the_engine_has_may_change_while_the_request_waits(bench):
    if bench.promises_first:
        pytest.skip("answers at once")
    asked = asking()
    bench.scheduler.arrived(asked)
    assert bench.scheduler._lookups["r"].handle.result(300) is not None
    assert bench.scheduler.matched(asked, 80) == (None, False)  # a play of what is behind these
    count, failed = bench.load(asked, computed=64)
    assert (64 + count, failed) == (LAST, set())
    assert near(bench.blocks(list(range(8, 16))), wanted()[:, :, :, 64:LAST])


def test_a_gap_ends_what_is_loaded(bench):
    absent = [*TOKENS, *ONE, 1, 2, 3, *OTHER, 5]
    count, _ = bench.load(asking("a", tokens=absent, passages=[[70, 110], [113, 138]]))
    assert count == 104
    count, _ = bench.load(asking("b", tokens=[*TOKENS, *BARE, *ONE, 1], passages=[[70, 91], [91, 131]]))
    assert count == 64
    assert bench.scheduler.counts.take()["passages_refused"] == 1  # nobody measured what joining it costs


@pytest.mark.parametrize(("limit", "count"), [(0.11, LAST), (0.06, 104), (0.04, 64)])
def test_the_limit_of_what_it_may_lose(served, mode, limit, count):
    bench = Bench(served, mode=mode, max_loss=limit)
    try:
        # What the codec loses counts, too, once the cache is there.
        loaded, failed = bench.load(asking())
        assert BLOCK * len(failed) + count == loaded if bench.promises_first else loaded == count
    finally:
        bench.close()


def test_more_lost_than_allowed_is_not_used(served, mode):
    bench = Bench(served, mode=mode, policy="fixed:Int4", max_loss=0.1001)
    try:
        count, failed = bench.load(asking())
        assert (count, len(failed)) == ((LAST, LAST // BLOCK) if bench.promises_first else (0, 0))
        assert bench.worker.counts.take()["tokens_missed"] == LAST
    finally:
        bench.close()


WRONG = [
    3, "x", [], {}, [[]], [[70]], [[70, 110, 111]], [["70", 110]], [[70.0, 110]], [[True, 110]], [[70, 70]],
    [[110, 70]], [[-1, 5]], [[70, 139]], [[70, 1 << 40]], [[70, 110], [109, 135]], [[110, 135], [70, 110]], [None],
    [[70, 110]] * 3000,
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG, ids=lambda given: str(given)[:20])
def test_wrong_places_are_an_ordinary_play(bench, given, caplog):
    count, _ = bench.load(asking(passages=given))
    assert count == 64  # of the system prompt alone
    assert "kv_transfer_params: passages" in caplog.text
    assert "lookups_joined" not in bench.scheduler.counts.take()


@pytest.mark.parametrize("salt", [None, "", "tenant", "blendedtenant", "tenant:blended"])
def test_without_a_salt_of_its_own_it_is_computed(bench, salt, caplog):
    count, _ = bench.matched(asking(salt=salt))
    assert count == (0 if salt else 64)  # exact, and as always under the request's own name
    assert 'requests without the cache_salt "blended"' in caplog.text


def test_without_prefix_caching_it_needs_none(bench):
    bench.scheduler._passages._model = replace(bench.model, prefix_caching=False)
    assert bench.load(asking(salt=None))[0] == LAST


def test_a_tenants_passages_are_found_under_its_own_name(served, tmp_path):
    assert salt_of(asking(), b"engine") == salt_of(request(), b"engine") == b"engine"
    mine = salt_of(request(cache_salt="mine"), b"")
    assert salt_of(asking(salt="blended:mine"), b"") == mine != salt_of(asking(salt="blended:yours"), b"")
    toy_passage(tmp_path / "assets" / "one", ONE, ("FP16",), salt=mine)
    own = Served(tmp_path / "assets", tmp_path)
    bench = Bench(own)
    try:
        for name, salt, last in (("a", "blended", 0), ("b", "blended:yours", 0), ("c", "blended:mine", 104)):
            count, _ = bench.matched(asking(name, salt=salt), 72)
            assert count == max(0, last - 72)
    finally:
        bench.close()
        own.close()


@pytest.mark.parametrize("live", [False, True])
def test_nothing_of_it_is_published(served, tmp_path, live):
    bench = Bench(served, tmp_path / "out", publish_live=live)
    try:
        for asked in (
            asking("a"),
            asking("b", salt=None),
            asking("c", passages=[]),
            request("d", PROMPT, cache_salt="blended"),
            request("e", PROMPT, cache_salt="blended:x", kv_transfer_params={"publish_passage": True}),
        ):
            bench.load(asked)
            bench.running, bench.tables = {asked.request_id: 8}, {asked.request_id: [list(range(20))]}
            bench.step()
            bench.running = {}
            assert not bench.scheduler.finished(asked, [list(range(20))])
        bench.step()
        assert bench.scheduler.counts.take()["publish_skipped_blended"] == 5
        assert not list((tmp_path / "out").iterdir())
        assert not bench.worker.lossy
        # The same prompt without passages is published.
        plain = request("f", PROMPT)
        assert bench.scheduler.finished(plain, [list(range(20))])
    finally:
        bench.close()


def test_a_step_with_passages_travels_between_processes(bench):
    asked = asking()
    count, _ = bench.matched(asked)
    if bench.promises_first:
        bench.scheduler.allocated(asked, [list(range(20))], count)
        step = bench.scheduler.step({}, None)
        (load,) = step.loads
        assert load.max_loss == 0.5
        assert pickle.loads(pickle.dumps(step)) == step  # noqa: S301  # vLLM's own way between its processes


def model_with(spec):
    from kvabr.engines.vllm.config import ServedModel
    from tests.engines.vllm.halves import plain

    return ServedModel(spec, torch.float32, plain(spec), (range(2),))


class Told:
    def __init__(self):
        self.said = []

    def tell(self, *why):
        self.said.append(" ".join(map(str, why)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"window": 16, "kind": "window"}, "full attention in every layer; it has window16"),
        ({"rope": None}, "cannot be moved"),
    ],
)
def test_models_that_have_no_passages_say_why(change, why):
    spec = replace(SPEC, classes=(replace(SPEC.only, **change),))
    told = Told()
    made = PassageRequests(model_with(spec), told)
    assert made.parts(asking()) is None
    assert made.passage(request(kv_transfer_params={"publish_passage": True})) is None
    assert len(told.said) == 2
    assert all(why in each for each in told.said)


def test_so_does_a_quantised_cache():
    told = Told()
    made = PassageRequests(model_with(SPEC.changed(dtype="float8_e4m3fn", scales=(1.0,))), told)
    assert made.parts(asking()) is None
    assert "keys of a quantised cache cannot be moved" in told.said[0]


def test_parts_are_those_of_the_prompt():
    made = PassageRequests(model_with(SPEC), Told())
    assert made.parts(asking()) == (Exact(TOKENS), Passage(ONE), Passage(OTHER), Exact((11, 12, 13)))
    assert made.parts(asking(passages=[[0, 4], (4, 138)])) == (Passage(PROMPT[:4]), Passage(PROMPT[4:]))
    assert made.parts(request()) is None


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize(("first", "given"), [(0, True), (0, 0), (3, 3), (19, 19)])
def test_a_passage_is_published_without_its_rotation(served, tmp_path, first, given):
    bench = Bench(served, tmp_path / "out")
    tokens, numbers = [*range(40, 40 + first), *ONE], list(range(5, 13))
    kv = ToyModel().prefill([*tokens, *[0] * (64 - len(tokens))])
    losses = FusionLosses(SPEC, 0, ((0.0, 0.07),), "on paper", "behind" if first else "alone")
    bench.worker._publications._publishers = replace(bench.worker._publications._publishers, fusion=losses)
    try:
        paged_blocks(bench.caches, numbers, BlockLayout.TRANSPOSED).write(kv)
        asked = request("p", tokens, kv_transfer_params={"publish_passage": given})
        assert bench.matched(asked) == (0, False)  # computed, whatever there is
        assert bench.scheduler.finished(asked, [numbers])
        assert bench.steps()[0] == {"p"}
        bench.published()
        assert bench.worker.counts.take()["published"] == 1
    finally:
        bench.close()
    name = Passage(ONE).name(SPEC).prompt
    catalog = Catalog.read(tmp_path / "out" / name / "catalog.json")
    assert (catalog.passage.base, catalog.passage.fusion) == (losses.base, losses.losses)
    assert catalog.tokens == len(ONE)
    # It is played like any other.
    toy_asset(tmp_path / "out" / "system", ("FP16",))
    again = Served(tmp_path / "out", tmp_path)
    bench = Bench(again)
    try:
        count, _ = bench.load(asking(tokens=[*TOKENS, *ONE, 1], passages=[[70, 110]]))
        assert count == 104
        own = kv[:, :, :, first : first + len(ONE)].clone()
        own[:, 0] = rotate(rotate(own[:, 0], SPEC.rope, first, undo=True), SPEC.rope, 70)
        both = torch.cat((ToyModel().prefill(TOKENS), own), dim=3)
        assert near(bench.blocks(list(range(13))), both[:, :, :, :104])
    finally:
        bench.close()
        again.close()


@pytest.mark.parametrize(
    ("given", "more"),
    [
        (40, {}), (-1, {}), ("0", {}), (0.0, {}), ([0], {}), (10**400, {}),
        (True, {"num_computed_tokens": 39}), (True, {"lora_request": lora("/nowhere")}),
    ],
)  # fmt: skip
def test_what_is_no_passage_is_not_published(served, tmp_path, given, more):
    bench = Bench(served, tmp_path / "out")
    try:
        asked = request("p", ONE, kv_transfer_params={"publish_passage": given}, **more)
        assert not bench.scheduler.finished(asked, [list(range(5))])
        assert bench.scheduler.counts.take() == {"publish_skipped_unfit": 1}
    finally:
        bench.close()


def test_nor_is_one_of_a_rank_that_has_a_part_of_the_model(served, tmp_path):
    bench = Bench(served, tmp_path / "out", heads=range(1, 2))
    try:
        asked = request("p", ONE, kv_transfer_params={"publish_passage": True})
        assert not bench.scheduler.finished(asked, [list(range(5))])
    finally:
        bench.close()


@pytest.mark.parametrize("computed", [0, 32])
def test_nor_what_may_be_computed_behind_a_lossy_cache(served, tmp_path, computed, mode):
    """Its groups are none of a prompt, so if vLLM had any of it, it may be of what was played with losses."""
    bench = Bench(served, tmp_path / "out", policy="fixed:Int4", mode=mode)
    try:
        bench.load(request("lossy"))
        asked = request("p", [*TOKENS[:40], *ONE], kv_transfer_params={"publish_passage": 40})
        assert bench.matched(asked, computed) == (0, False)
        assert bench.scheduler.finished(asked, [list(range(10))])
        bench.steps()
        assert bench.worker.counts.take().get("publish_dropped_lossy", 0) == (computed > 0)
    finally:
        bench.close()


def test_settings(tmp_path):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(FusionLosses(SPEC, 0, ((0.0, 0.1),), "", "alone").to_json()))
    found = VllmSettings.read({"max_loss": 0.2, "fusion": str(path)}, "x")
    assert (found.max_loss, found.fusion) == (0.2, path)
    assert VllmSettings.read({"max_loss": float("inf")}, "x").max_loss == float("inf")
    for wrong in (-1.0, float("nan"), "0.5"):
        with pytest.raises(Exception, match="max_loss"):
            VllmSettings.read({"max_loss": wrong}, "x")
