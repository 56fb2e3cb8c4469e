"""A tiny real model, a text, and an origin in memory that has the cache of the text's beginning."""

from functools import partial

import pytest

from kvabr.engines.transformers import cache_publisher, publish_cache
from kvabr.engines.transformers.model_loader import load_model
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from tests import tinymodels
from tests.engines.transformers.text import IDS, PREFIX, cold
from tests.memory_transport import MemoryConnection, MemoryLink


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed: tools/setup-venv")
    return tinymodels.save(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def engine(folder):
    return load_model(str(folder)).engine


@pytest.fixture(scope="session")
def root(tmp_path_factory, engine):
    """A folder with the cache of the first 400 tokens, published from a prefill: three groups, and a short one."""
    root = tmp_path_factory.mktemp("origin")
    publisher = cache_publisher(engine, root)
    outcome = publish_cache(publisher, engine, cold(engine.model, IDS).past_key_values, PREFIX)
    publisher.close()
    assert outcome.result().verdict == "published", outcome.result()
    return root


@pytest.fixture(scope="session")
def origin(root):
    """Make a connection to an origin that has it: ``origin(rate=..., faults=...)``."""
    library = PublishedAssets(root)

    def make(rate=1e8, **options):
        return MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(rate, 0.02), **options)

    return make
