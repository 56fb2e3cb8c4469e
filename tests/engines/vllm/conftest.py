"""An origin with a toy model's cache, and the connector's two halves for it."""

import pytest

import tests.codec.gpu.conftest  # noqa: F401  # loads Triton to interpret kernels, before vLLM loads it
from tests.client.served import Served
from tests.engines.vllm.halves import Bench
from tests.toymodel import toy_asset


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    toy_asset(folder / "one", ("FP16", "Int4"))
    return folder


@pytest.fixture(scope="module")
def served(assets, tmp_path_factory):
    served = Served(assets, tmp_path_factory.mktemp("tls"))
    yield served
    served.close()


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """The `World` that the tests of a module share with the real vLLM."""
    world = request.module.World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture
def settled(world):
    """After every test, no state of its plays is left."""
    yield
    world.engine.settle()
    assert world.engine.worker._plays == {}
    assert world.engine.half._promises.held_bytes == 0


@pytest.fixture
def bench(served):
    bench = Bench(served)
    yield bench
    bench.close()
