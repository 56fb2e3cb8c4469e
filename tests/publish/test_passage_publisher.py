"""An application publishes passages with its own model, and plays them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvabr.codec.rope import rotate
from kvabr.data import default_catalog
from kvabr.publish.fusion import FusionLosses
from kvabr.publish.passage_publisher import publish_passage
from kvabr.publish.passages import contexts_for, free_cache, mean_cache
from kvabr.publish.publisher import Publisher
from kvabr.publish.texts import calibration_texts
from kvabr.replay.verify import load_profile
from kvabr.store.locations import open_asset
from kvabr.types.errors import ForeignError, UsageError
from kvabr.types.joined import join
from kvabr.types.passage import Exact, Passage
from tests import kvdata
from tests.toymodel import SPEC, VOCABULARY, ToyModel

IDS = list(range(20, 65))
LOSSES = FusionLosses(SPEC, 3, ((0.0, 0.02),), "on paper")


class Model:
    """A toy model that sees 400 tokens, and its tokenizer."""

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
        (UsageError, "at least one token", {"tokens": []}),
        (UsageError, "whole numbers", {"tokens": ["x"]}),
        (UsageError, "sees 400", {"tokens": list(range(390))}),
        (UsageError, "the mean over 3 contexts, the passage is computed as the mean over 4", {"fusion": LOSSES}),
        (UsageError, "computed as alone", {"fusion": LOSSES, "contexts": 0}),
        (ForeignError, "measured with", {"fusion": replace(LOSSES, spec=SPEC.changed(heads=1)), "contexts": 3}),
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
