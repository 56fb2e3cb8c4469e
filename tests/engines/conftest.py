"""A home for player processes; Triton is loaded for its interpreter, before any other library of an engine loads it."""

import tempfile
from pathlib import Path

import pytest

import tests.codec.gpu.conftest  # noqa: F401
from tests.processes import LIMIT_S


@pytest.fixture(scope="module")
def home():
    """A folder of sockets with a short path; whatever process was started there ends."""
    from kvabr.engines.player_process import client as remote  # not before Triton, which tests of kernels load first

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="kv") as folder:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        for started in remote._started:
            started.terminate()
            assert started.wait(LIMIT_S) == 0


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path_factory):
    """Each test starts without profiles and measurements of an earlier one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
