"""One small real asset and its library for all tests of the client, and origins in memory around it."""

from functools import partial

import pytest
import torch

from kvabr.codec.fit import fit
from kvabr.server.published_assets import PublishedAssets
from tests.client.live import Producer
from tests.client.playing import connection
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A folder with two assets of one prompt: 5 groups of 16 tokens, and twice as many with a codec profile."""
    folder = tmp_path_factory.mktemp("origin")
    toy_asset(folder / "short", ("FP16", "Int8", "Int4"))
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    toy_asset(folder / "long", ("FP16", "Int4", "AC-5x"), profile=profile, tokens=160)
    return folder


@pytest.fixture(scope="session")
def libraries(root):
    return {folder: PublishedAssets(root / folder) for folder in (".", "short", "long")}


@pytest.fixture(scope="session")
def short(libraries):
    """Catalog of the asset of 70 tokens."""
    return libraries["short"].assets[0].catalog


@pytest.fixture(scope="session")
def long(libraries):
    """Catalog of the asset of 160 tokens."""
    return libraries["long"].assets[0].catalog


@pytest.fixture
def origin(libraries):
    """Make a connection to an origin: ``origin(rate=..., rtt_s=..., faults=..., folder=...)``."""

    return lambda *link, folder="short", **options: connection(libraries[folder], *link, **options)


@pytest.fixture
def library_origin(library):
    """Make connections as `origin` does, to an origin that has the ``library`` of the test's module."""
    return partial(connection, library)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Ignore this user's client cache on disk, and tokens in the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVABR_TOKEN", raising=False)


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    """An asset for live plays: 10 groups on three tracks; Int4 is the base."""
    return toy_asset(tmp_path_factory.mktemp("live") / "asset", ("FP16", "Int8", "Int4"), tokens=160)


@pytest.fixture
def producer(asset):
    return Producer(asset)
