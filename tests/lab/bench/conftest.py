"""A real model of a few thousand weights, whose tokens are bytes, its profile, and texts to measure on."""

import pytest

from kvabr.codec.fit import fit
from kvabr.engines.transformers.model_loader import load_model
from kvabr_lab.bench.contexts import cut
from kvabr_lab.bench.measure import CacheStore
from tests.tinymodels import save

WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "spruce", "yew")


def prose(seed, words=600):
    import random

    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny(model_folder):
    return load_model(str(model_folder))


@pytest.fixture(scope="session")
def profile(tiny):
    caches = [tiny.engine.prefill(tiny.encode(prose(seed))[:300]) for seed in (1, 2, 3)]
    return fit(tiny.engine.spec, lambda: iter(caches))


@pytest.fixture(scope="session")
def texts_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("python", "prose")):
        (folder / f"{name}.txt").write_text(prose(10 + seed))
    return folder


@pytest.fixture
def contexts(tiny):
    return cut(tiny, {"prose": prose(20), "trees": prose(21)}, 1, 200, 24)


@pytest.fixture
def store(tmp_path, tiny):
    return CacheStore(tmp_path / "work", tiny.engine.spec)
