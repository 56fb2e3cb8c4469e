"""Stores of every kind that can run here, and the assets of the client tests."""

import secrets

import pytest

from kvabr.store.encrypted import EncryptedStore
from kvabr.store.local import LocalStore
from kvabr.store.memory import MemoryStore
from tests.client.conftest import libraries, long, origin, root, short  # noqa: F401  # fixtures


@pytest.fixture(params=["memory", "folder", "encrypted", pytest.param("s3", marks=pytest.mark.process)])
def place(request, tmp_path):
    """An empty store, by its location."""
    if request.param == "s3":
        return request.getfixturevalue("seaweed").url()
    return {
        "memory": f"memory://test-{secrets.token_hex(6)}",
        "folder": str(tmp_path / "objects"),
        "encrypted": EncryptedStore(LocalStore(tmp_path / "sealed"), secrets.token_bytes(32)),
    }[request.param]


@pytest.fixture(params=["memory", "folder", "encrypted"])
def small_place(request, tmp_path):
    if request.param == "encrypted":
        return EncryptedStore(MemoryStore(), secrets.token_bytes(32))
    return f"memory://test-{secrets.token_hex(6)}" if request.param == "memory" else str(tmp_path / "objects")


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.process)])
def store_url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("seaweed").url()
    return f"memory://test-{secrets.token_hex(6)}" if request.param == "memory" else f"file://{tmp_path}/objects"
