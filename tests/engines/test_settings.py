"""Settings of the adapters: every wrong key and value is named, with its place and what is allowed."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from kvabr.engines.chunk_store import KeyedSettings
from kvabr.engines.settings import EngineSettings, TroubleLog
from kvabr.engines.vllm.config import VllmSettings
from kvabr.types.errors import UsageError

KINDS = (EngineSettings, KeyedSettings, VllmSettings)
URL = {"url": "moqt://origin.example/"}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_and_values(kind, tmp_path):
    settings = kind.read(
        URL | {"deadline_s": 1, "tracks": ["FP16", "Int4"], "publish": str(tmp_path), "publish_mib": 3}, "here"
    )
    assert settings.deadline_s == 1.0
    assert settings.tracks == ("FP16", "Int4")
    assert settings.publish == tmp_path
    assert settings.publish_bytes == 3 << 20
    assert kind.read(URL, "here").publish_bytes is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("deadline", 1, "there is no key 'deadline'; did you mean 'deadline_s'?"),
        ("zzz", 1, "there is no key 'zzz'; there are url, sources, "),
        ("deadline_s", 0, "deadline_s is 0: it must be greater than 0"),
        ("deadline_s", True, "deadline_s is True: it must be a valid number"),
        ("deadline_s", "2", "deadline_s is '2': it must be a valid number"),
        ("deadline_s", float("nan"), "deadline_s is nan: it must be "),
        ("url", "", "url is '': "),
        ("url", "ftp://origin.example/", "url is 'ftp://origin.example/': .*moqt://"),
        ("quic", "tcp", "quic is 'tcp': it must be 'auto', "),
        ("tracks", "FP16", "tracks is 'FP16': it must be a list of names"),
        ("tracks", [], "tracks is .*: .*at least 1 item"),
        ("digest", "md5", "digest is 'md5': no kind of digests is called 'md5'"),
        ("queue", 0, "queue is 0: it must be greater than or equal to 1"),
        ("queue", 1.5, "queue is 1.5: it must be a valid integer"),
        ("store_mib", -1, "store_mib is -1: it must be greater than or equal to 0"),
        ("insecure", 1, "insecure is 1: it must be a valid boolean"),
        ("model", 7, "model is 7: it must be a valid string"),
        ("publish", 7, "publish is 7: it must be "),
        ("time_price", -0.001, "time_price is -0.001: it must be greater than or equal to 0"),
        ("time_price", math.nan, "time_price is nan: it must be a finite number"),
        ("time_price", math.inf, "time_price is inf: it must be a finite number"),
        ("policy", "sloth", "policy is 'sloth': unknown policy 'sloth'; there are .*anytime"),
    ],
)
def test_a_wrong_key_or_value_is_named(kind, key, value, says):
    with pytest.raises(UsageError, match=f"^here: {says}"):
        kind.read(URL | {key: value}, "here")


def test_a_secret_is_not_told():
    with pytest.raises(UsageError, match=r"^here: token: it must be a valid string$"):
        EngineSettings.read({"token": 123456}, "here")
    assert "secret" not in repr(EngineSettings.read({"token": "a secret"}, "here"))


@pytest.mark.parametrize("key", ["passages", "max_loss", "fusion"])
def test_engines_that_cannot_play_passages_say_which_can(key):
    with pytest.raises(UsageError, match=rf"there is no key '{key}': .* cannot play passages; transformers .* vLLM"):
        KeyedSettings.read(URL | {key: 0.5}, "here")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [("patience", 0.5, "greater than or equal to 1"), ("plays", 0, "greater than or equal to 1")],
)
def test_of_caches_by_key(key, value, says):
    with pytest.raises(UsageError, match=f"{key} is {value}: it must be {says}"):
        KeyedSettings.read(URL | {key: value}, "here")
    with pytest.raises(UsageError, match="here: set url to fetch caches, publish"):
        KeyedSettings.read({}, "here")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lookup_share", 1, "lookup_share is 1: it must be less than 1"),
        ("min_load_tokens", -1, "min_load_tokens is -1: it must be greater than or equal to 0"),
        ("max_load_tokens", 0, "max_load_tokens is 0: it must be greater than or equal to 1"),
        ("prefill_rate", -1, "prefill_rate is -1: it must be greater than 0"),
        ("estimator", "none", "estimator is 'none': "),
        ("policy", "cake", "policy is 'cake': it has the engine compute from the front"),
    ],
)
def test_of_vllm(key, value, says):
    with pytest.raises(UsageError, match=f"here: {says}"):
        VllmSettings.read(URL | {key: value}, "here")


def test_limits_of_what_is_loaded_that_contradict_each_other():
    given = URL | {"min_load_tokens": 512, "max_load_tokens": 256}
    for kind in (KeyedSettings, VllmSettings):
        with pytest.raises(UsageError, match="here: max_load_tokens is 256: it must be at least min_load_tokens, 512"):
            kind.read(given, "here")


def test_further_sources_are_urls_beside_a_first_one():
    for kind in (KeyedSettings, VllmSettings):
        assert kind.read(URL | {"sources": ["moqt://other.test/"]}, "here").sources == ("moqt://other.test/",)
        with pytest.raises(UsageError, match="here: sources"):
            kind.read(URL | {"sources": ["other.test"]}, "here")
        with pytest.raises(UsageError, match="further sources need a first one, url"):
            kind.read({"sources": ["moqt://other.test/"], "publish": "folder"}, "here")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_model_that_no_namespace_can_name_is_refused(name):
    for kind in (KeyedSettings, VllmSettings):
        with pytest.raises(UsageError, match="here: model is "):
            kind.read(URL | {"model": name}, "here")
    assert KeyedSettings.read(URL | {"model": "通义千问"}, "here").model == "通义千问"


def table():
    """The table of docs/guides/engines.md: every key, its defaults, and its docstring."""
    keyed, vllm = KeyedSettings.model_fields, VllmSettings.model_fields
    lines = ["| key | vLLM | LMCache, SGLang | meaning |", "|---|---|---|---|"]
    for key in sorted({**vllm, **keyed}, key=[*EngineSettings.model_fields, *keyed, *vllm].index):
        shown = []
        for fields in (vllm, keyed):
            default = fields[key].default if key in fields else "-"
            shown.append("" if default in (None, ()) else str(default).lower())
        field = vllm[key] if key in vllm else keyed[key]
        meaning = " ".join(field.description.replace("``", "`").replace("None:", "Unset:").split())
        lines.append(f"| `{key}` | {shown[0]} | {shown[1]} | {meaning} |")
    return "\n".join(lines)


def test_the_documentation_has_every_key():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "engines.md").read_text()
    assert table() in text, f"put this into docs/guides/engines.md:\n{table()}"


def test_trouble_is_told_at_once_and_then_in_a_line_a_minute(caplog):
    now = 1000.0
    trouble = TroubleLog(logging.getLogger("kvabr.engines"), lambda: now)
    with caplog.at_level(logging.WARNING):
        trouble.tell("a play failed", "gone")
        for second in range(1, 200):
            now = 1000.0 + second
            trouble.tell("a play failed", f"gone {second}")
            if second == 90:
                trouble.tell("a cache is not published", ValueError())
    assert caplog.messages == [
        "kvabr: a play failed: gone",
        "kvabr: within 60 s: a play failed: 60 more, the last: gone 60",
        "kvabr: a cache is not published: ValueError()",
        "kvabr: within 60 s: a play failed: 60 more, the last: gone 120",
        "kvabr: within 60 s: a play failed: 60 more, the last: gone 180",
    ]
