"""Assets, certificates and clocks of the tests of relays."""

import pytest

from kvabr.server.certificates import development
from kvabr.server.relay_catalogs import Catalogs
from tests.assets import make_asset


@pytest.fixture
def asset(tmp_path):
    return make_asset(tmp_path / "asset", list(range(32)), frame_bytes=300_000)


@pytest.fixture
def small(tmp_path):
    return make_asset(tmp_path / "small", list(range(32)), frame_bytes=20_000)


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def tls():
    return development()


@pytest.fixture
def stale(monkeypatch):
    """Nothing is fresh: the origin is asked every time."""
    monkeypatch.setattr(Catalogs, "FRESH_S", 0.0)
    monkeypatch.setattr("kvabr.server.relay_catalogs._FRESH_PER_FETCH", 0.0)


@pytest.fixture
def fresh(monkeypatch):
    """What was told stays fresh, however slow the machine."""
    monkeypatch.setattr(Catalogs, "FRESH_S", 1e9)
