"""What a role needs, the salt, and counters. Needs no vLLM."""

import pytest

import kvabr.engines.vllm as adapter
from kvabr.engines.vllm.config import read_settings
from kvabr.types.errors import ModelError, UsageError

URL = {"url": "moqt://origin.example/"}


def read(given, *, consumes=True, produces=False):
    return read_settings(given, consumes=consumes, produces=produces)


def test_what_a_role_needs():
    with pytest.raises(UsageError, match='"url"'):
        read({})
    with pytest.raises(UsageError, match='"publish"'):
        read({}, consumes=False, produces=True)


def test_a_salt_file(tmp_path):
    secret = tmp_path / "salt"
    secret.write_bytes(b"x" * 32)
    assert read(URL | {"salt_file": str(secret)}).salt == b"x" * 32
    with pytest.raises(UsageError, match="cannot be read"):
        _ = read(URL | {"salt_file": str(tmp_path / "none")}).salt


def test_without_vllm_it_says_so():
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ModelError, match="not installed"):
            _ = adapter.KvabrConnector
    else:
        assert adapter.KvabrConnector.__name__ == "KvabrConnector"
    with pytest.raises(AttributeError):
        _ = adapter.Nothing
