"""What a user may set: every wrong key and value is named. Needs no vLLM."""

from __future__ import annotations

import pytest

import kvabr.engines.vllm as adapter
from kvabr.engines.vllm import stats
from kvabr.engines.vllm.options import read_options
from kvabr.types.errors import ModelError, PolicyError, UsageError

URL = {"url": "moqt://origin.example/"}


def read(given, *, consumes=True, produces=False):
    return read_options(given, consumes=consumes, produces=produces)


def test_defaults_and_values(tmp_path):
    options = read(URL | {"deadline_s": 1, "tracks": ["FP16", "Int4"], "publish": str(tmp_path)}, produces=True)
    assert options.deadline_s == 1.0
    assert options.tracks == ("FP16", "Int4")
    assert options.publish == tmp_path
    assert options.salt == b""


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("deadline", "deadline_s"), ("deadlines_s", "deadline_s"), ("polisy", "policy"), ("URL", "there are url")],
)
def test_a_wrong_key_is_named_with_the_nearest_right_one(key, nearest):
    with pytest.raises(UsageError, match=f"no key '{key}'") as caught:
        read(URL | {key: 1})
    assert nearest in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("deadline_s", 0),
        ("deadline_s", True),
        ("deadline_s", float("nan")),
        ("url", ""),
        ("url", "http://origin.example/"),
        ("quic", "tcp"),
        ("tracks", "FP16"),
        ("tracks", []),
        ("queue", 0),
        ("queue", 1.5),
        ("store_mib", -1),
        ("insecure", 1),
        ("lookup_share", 1),
        ("lookup_share", 2),
        ("prefill_rate", -1),
        ("model", 7),
    ],
)
def test_a_wrong_value_is_named(key, value):
    with pytest.raises(UsageError, match=f"{key}|moqt://"):
        read(URL | {key: value})


def test_what_a_role_needs():
    with pytest.raises(UsageError, match='"url"'):
        read({})
    with pytest.raises(UsageError, match='"publish"'):
        read({}, consumes=False, produces=True)


def test_policies():
    with pytest.raises(PolicyError):
        read(URL | {"policy": "there-is-none"})


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


def test_counts_add_up():
    counts = stats.Counts()
    counts.add("plays")
    counts.add("loss", 0.5)
    counts.play(0.2)
    one = counts.take()
    assert counts.take() == {}
    counts.add("plays", 2)
    counts.play(0.4)
    both = stats.added(one, counts.take())
    assert both == {"plays": 3, "loss": 0.5, stats.SECONDS: [0.2, 0.4]}
    assert stats.summary(both)["play_seconds_max"] == 0.4
    with pytest.raises(KeyError):
        counts.add("nothing")
