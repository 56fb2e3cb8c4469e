"""Object stores of every kind that can run here."""

from __future__ import annotations

import secrets

import pytest


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.process)])
def store_url(request, tmp_path):
    """The URL of an empty store."""
    if request.param == "s3":
        return request.getfixturevalue("seaweed").url()
    return {
        "memory": f"memory://test-{secrets.token_hex(6)}/assets",
        "file": f"file://{tmp_path}/objects?layout=objects",
    }[request.param]
