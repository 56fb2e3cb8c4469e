"""An asset, and a certificate."""

import pytest

from kvabr.server.certificates import development
from tests.assets import make_asset


@pytest.fixture(scope="module")
def asset(tmp_path_factory):
    return make_asset(tmp_path_factory.mktemp("assets") / "one", range(40), frame_bytes=300_000, levels=("FP16",))


@pytest.fixture(scope="module")
def tls():
    return development()
