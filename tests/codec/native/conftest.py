"""Every path of this machine, and a case for each seed."""

from __future__ import annotations

import pytest

from kvabr.codec.native import coder

NATIVE = [path for path in coder.available_paths() if path != "reference"]


@pytest.fixture(params=coder.available_paths())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on each path in turn."""
    monkeypatch.setenv(coder.VARIABLE, request.param)
    return request.param


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """Return a function that selects the path of later calls."""
    return lambda name: monkeypatch.setenv(coder.VARIABLE, name)
