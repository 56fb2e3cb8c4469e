"""An application publishes passages with its own model, and plays them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvabr.blend.selectors import load_selector
from kvabr.codec.rope import rotate
from kvabr.data import default_catalog
from kvabr.engines.transformers.blend import blend_engine
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish.fusion import FusionLosses
from kvabr.publish.passage_publisher import publish_passage
from kvabr.publish.passages import (
    contexts_for,
    free_cache,
    fusion_losses,
    joined,
    mean_cache,
    publisher_order,
)
from kvabr.publish.publisher import Publisher
from kvabr.publish.texts import calibration_texts
from kvabr.replay.verify import load_profile
from kvabr.store.locations import open_asset
from kvabr.types.errors import AssetError, ForeignError, FormatError, UsageError
from kvabr.types.joined import join
from kvabr.types.kv import KVSpec
from kvabr.types.passage import Exact, Passage
from tests import kvdata
from tests.tinymodels import save
from tests.toymodel import SPEC, VOCABULARY, ToyModel

IDS = list(range(20, 65))
LOSSES = FusionLosses(SPEC, 3, ((0.0, 0.02),), "on paper")


class Model:
    """A toy model that is 400 tokens, and its tokenizer."""

    def __init__(self, opening=()):
        self.opening = opening
        self.engine = ToyModel()
        self.engine.context = 400

    def encode(self, text):
        return [ord(letter) % VOCABULARY for letter in text]


@pytest.fixture
def made(tmp_path):
    publisher = Publisher(tmp_path, SPEC, prior=default_catalog(), tracks=["FP16"])
    yield publisher
    publisher.close()


def cache_of(root, ids=IDS, salt=b"", position=7):
    """What is published of a passage, as a player places it, and what its catalog says."""
    from kvabr.player.assembler import Assembler

    asset = open_asset(root / Passage(ids).name(SPEC, salt).prompt)
    joined = join((Exact(range(position)), Passage(ids)), {Passage(ids): asset.catalog}, SPEC).suffix(1)
    assembler = Assembler(joined, dtype=torch.float32)
    for group in range(joined.groups):
        assembler.put(group, "FP16", asset.frame(joined.unit(group).group, "FP16"))
    return assembler.take(), asset.catalog


def placed(kv, position=7):
    kv = kv.clone()
    kv[:, 0] = rotate(kv[:, 0], SPEC.rope, position)
    return kv


@pytest.mark.parametrize("opening", [(), (3,)])
def test_the_mean_over_contexts_is_published(made, tmp_path, opening):
    model = Model(opening)
    outcome = publish_passage(made, model, IDS, contexts=3, fusion=LOSSES).result(60)
    assert (outcome.verdict, outcome.tokens) == ("published", len(IDS))
    kv, catalog = cache_of(tmp_path)
    contexts = contexts_for(model, calibration_texts(), 3)
    assert torch.allclose(kv, placed(mean_cache(ToyModel(), IDS, contexts)), rtol=4e-3, atol=4e-3)
    assert (catalog.passage.base, catalog.passage.contexts, catalog.passage.fusion) == ("mean", 3, LOSSES.losses)
    assert model.engine.prefilled == sum(map(len, contexts)) + 3 * len(IDS)
    assert publish_passage(made, model, IDS, contexts=3).result(60).verdict == "known"
    assert model.engine.prefilled == sum(map(len, contexts)) + 3 * len(IDS)  # nothing is computed for it


def test_alone_and_with_a_salt(made, tmp_path):
    assert publish_passage(made, Model(), IDS, contexts=0, salt=b"mine").result(60).verdict == "published"
    kv, catalog = cache_of(tmp_path, salt=b"mine")
    assert torch.allclose(kv, placed(free_cache(ToyModel(), IDS)), rtol=4e-3, atol=4e-3)
    assert (catalog.passage.base, catalog.passage.fusion) == ("alone", ())


def test_with_a_profile_its_layers_come_along(tmp_path):
    publisher = Publisher(tmp_path, SPEC, prior=default_catalog(), profile=kvdata.profile(SPEC))
    assert publish_passage(publisher, Model(), IDS).result(60).verdict == "published"
    publisher.close()
    asset = open_asset(tmp_path / Passage(IDS).name(SPEC).prompt)
    assert "AC-L3" in asset.catalog.by_name
    assert load_profile(asset) is not None


@pytest.mark.parametrize(
    ("error", "words", "more"),
    [
        (UsageError, "at least 1 token", {"tokens": []}),
        (UsageError, "whole numbers", {"tokens": ["x"]}),
        (UsageError, "is 400", {"tokens": list(range(390))}),
        (UsageError, "the mean over 3 contexts, but this passage is computed as the mean over 4", {"fusion": LOSSES}),
        (UsageError, "computed as alone", {"fusion": LOSSES, "contexts": 0}),
        (ForeignError, "calibrate --blend", {"fusion": replace(LOSSES, spec=SPEC.changed(heads=1)), "contexts": 3}),
    ],
)
def test_what_cannot_be_published_says_why(made, tmp_path, error, words, more):
    with pytest.raises(error, match=words):
        publish_passage(made, Model(), **{"tokens": IDS, "contexts": 4} | more)
    assert not list(Path(tmp_path).iterdir())


def test_a_model_that_fails_gives_its_place_back(made):
    broken = SimpleNamespace(opening=(), engine=ToyModel(), encode=Model().encode)
    broken.engine.context = 400
    broken.engine.prefill = None
    for _ in range(9):  # more than fit into the queue
        with pytest.raises(TypeError):
            publish_passage(made, broken, IDS)
    assert publish_passage(made, Model(), IDS).result(60).verdict == "published"


FUSED = KVSpec.uniform("toy", "bytes", 2, 2, 8, "float16")
FOUND = FusionLosses(FUSED, 4, ((0.0, 0.03), (0.15, 0.01)), "measured on paper")


def test_they_survive_the_file_and_become_notes(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(FOUND.to_json()))
    assert FusionLosses.read(path) == FOUND
    notes = FOUND.notes(FUSED, "mean", 4)
    assert (notes.base, notes.contexts, notes.fusion, notes.method) == ("mean", 4, FOUND.losses, "measured on paper")
    assert notes.fusion_loss(0.075) == pytest.approx(0.02)


def test_the_group_size_does_not_matter_and_the_model_does():
    assert (
        FOUND.notes(KVSpec.uniform("toy", "bytes", 2, 2, 8, "float16", group_tokens=16), "mean", 4).fusion
        == FOUND.losses
    )
    for other in (
        KVSpec.uniform("toy-2", "bytes", 2, 2, 8, "float16"),
        KVSpec.uniform("toy", "bytes", 3, 2, 8, "float16"),
    ):
        with pytest.raises(ForeignError, match=r"are of toy .*the passage is of toy.*calibrate --blend"):
            FOUND.notes(other, "mean", 4)


@pytest.mark.parametrize(
    ("base", "contexts", "said"),
    [
        ("mean", 2, "the mean over 2 contexts: .*means over 4"),
        ("alone", 0, "alone: .*--base alone"),
        ("behind", 0, "one after another text: .*--base behind"),
    ],
)
def test_passages_that_were_computed_otherwise_are_refused(base, contexts, said):
    with pytest.raises(UsageError, match=rf"the mean over 4 contexts, but this passage is computed as {said}"):
        FOUND.notes(FUSED, base, contexts)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "kvabr.fusion/9"},
        {"losses": []},
        {"losses": [[0.1, -1]]},
        {"losses": [[0.1, 1], [0.1, 2]]},
        {"losses": [["x", 1]]},
        {"losses": 3},
        {"contexts": "4"},
        {"spec": {}},
        {"spec": None},
        {"method": 3},
        {"base": 3},
        {"base": ""},
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, change):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(FOUND.to_json() | change))
    with pytest.raises(FormatError, match=r"toy\.json: .*`kvabr calibrate --blend` writes such files"):
        FusionLosses.read(path)


def test_neither_is_junk_nor_nothing(tmp_path):
    path = tmp_path / "toy.json"
    for junk in ("", "[]", "{", "3", "null"):
        path.write_text(junk)
        with pytest.raises(FormatError, match="fusion losses: "):
            FusionLosses.read(path)
    with pytest.raises(AssetError, match="nowhere"):
        FusionLosses.read(tmp_path / "nowhere.json")


BEFORE, PASSAGE, TAIL = (f"{words} " * 9 for words in ("ash birch", "cedar elm", "fir hazel"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Weights that are large enough for what stands before a token to matter.
    return load_model(str(save(tmp_path_factory.mktemp("tiny") / "model", initializer_range=0.3)))


@pytest.fixture(scope="module")
def engine(model):
    return blend_engine(model.engine)


@pytest.fixture(scope="module")
def ids(model):
    return tuple(model.encode(text) for text in (BEFORE, PASSAGE, TAIL))


def test_a_cache_behind_a_text_is_exact_where_it_was_computed(engine, ids):
    before, passage, _ = ids
    exact = engine.prefill([*before, *passage])[:, :, :, len(before) :]
    free = free_cache(engine, passage, before)
    assert free.dtype == torch.float32
    assert torch.allclose(joined([free], engine.spec, len(before)), exact, atol=1e-4)
    assert not torch.allclose(free, free_cache(engine, passage), atol=1e-2)


def test_a_mean_is_over_keys_before_rotation(engine, ids, model):
    before, passage, _ = ids
    other = model.encode("a")
    told = []
    mean = mean_cache(engine, passage, [before, other], lambda *step: told.append(step))
    wanted = (free_cache(engine, passage, before) + free_cache(engine, passage, other)) / 2
    assert torch.allclose(mean, wanted, atol=1e-6)
    assert told == [(1, 2), (2, 2)]
    one = mean_cache(engine, passage, [before])
    assert torch.equal(one, free_cache(engine, passage, before))
    for contexts in ([], [before, []]):
        with pytest.raises(UsageError, match="at least one context"):
            mean_cache(engine, passage, contexts)


def test_the_order_begins_with_the_token_that_is_most_wrong(engine, ids):
    before, passage, tail = ids
    base = free_cache(engine, passage, before)
    base[:, :, :, 11] += 2.0
    order = publisher_order(engine, passage, base, [before], tail)
    assert len(order) == len(passage)
    assert order[11] == max(order) == 255
    assert min(order) == 0
    assert len(set(order)) == len(passage)


@pytest.mark.parametrize("selector", ["question", "order"])
def test_fusion_losses_fall_to_nothing(engine, ids, model, selector):
    before, passage, tail = ids
    base = mean_cache(engine, passage, [model.encode("a"), model.encode("bcd")])
    order = publisher_order(engine, passage, base, [before], tail)
    losses = fusion_losses(
        engine, passage, base, [before, model.encode("pine oak")], tail, load_selector(selector),
        (0.0, 0.5, 1.0), order, question=8,
    )  # fmt: skip
    assert [share for share, _ in losses] == [0.0, 0.5, 1.0]
    none, half, every = (loss for _, loss in losses)
    assert none > half > every
    assert every < 1e-6
    with pytest.raises(UsageError, match="at least 10 tokens"):
        fusion_losses(engine, passage, base, [before], tail[:9], load_selector(selector), question=8)
