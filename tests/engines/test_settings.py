"""Settings of the adapters: every wrong key and value is named, with its place and what is allowed."""

import logging
import os
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

import kvabr.engines.vllm as adapter
from kvabr.engines.chunk_store import KeyedSettings
from kvabr.engines.client_arguments import ClientArguments
from kvabr.engines.settings import EngineSettings, TroubleLog
from kvabr.engines.vllm.config import VllmSettings, read_settings
from kvabr.types.errors import ModelError, UsageError

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
        ("deadline", 1, "unknown key 'deadline'; did you mean 'deadline_s'?"),
        ("zzz", 1, "unknown key 'zzz'; choose from url, sources, "),
        ("deadline_s", 0, "deadline_s is 0: it must be greater than 0"),
        ("deadline_s", True, "deadline_s is True: it must be a valid number"),
        ("deadline_s", "2", "deadline_s is '2': it must be a valid number"),
        ("deadline_s", float("nan"), "deadline_s is nan: it must be "),
        ("url", "", "url is '': "),
        ("url", "ftp://origin.example/", "url is 'ftp://origin.example/': .*moqt://"),
        ("tracks", "FP16", "tracks is 'FP16': it must be a list of names"),
        ("tracks", [], "tracks is .*: .*at least 1 item"),
        ("store_mib", -1, "store_mib is -1: it must be greater than or equal to 0"),
        ("model", 7, "model is 7: it must be a valid string"),
        ("publish", 7, "publish is 7: it must be "),
        ("policy", "sloth", "policy is 'sloth': unknown policy 'sloth'; choose from .*anytime"),
    ],
)
def test_a_wrong_key_or_value_is_named(kind, key, value, says):
    with pytest.raises(UsageError, match=f"^here: {says}"):
        kind.read(URL | {key: value}, "here")


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_refused_without_repeating_it(kind):
    with pytest.raises(UsageError, match="KVABR_TOKEN") as error:
        kind.read(URL | {"token": "a secret"}, "here")
    assert "a secret" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_link_is_remembered_in_the_users_cache_folder(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kind.read(URL, "here").cache == tmp_path / "kvabr"
    assert ClientArguments.of(kind.read(URL, "here")).cache == tmp_path / "kvabr"
    assert kind.read(URL | {"cache": None}, "here").cache is None


def test_further_sources_are_urls_beside_a_first_one():
    for kind in (KeyedSettings, VllmSettings):
        assert kind.read(URL | {"sources": ["moqt://other.test/"]}, "here").sources == ("moqt://other.test/",)
        with pytest.raises(UsageError, match="here: sources"):
            kind.read(URL | {"sources": ["other.test"]}, "here")
        with pytest.raises(UsageError, match="sources need a first origin, url"):
            kind.read({"sources": ["moqt://other.test/"], "publish": "folder"}, "here")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_model_that_no_namespace_can_name_is_refused(name):
    for kind in (KeyedSettings, VllmSettings):
        with pytest.raises(UsageError, match="here: model is "):
            kind.read(URL | {"model": name}, "here")
    assert KeyedSettings.read(URL | {"model": "通义千问"}, "here").model == "通义千问"


def table():
    """The table of docs/guides/engines.md: every key, its defaults, and its docstring."""
    keyed, vllm = KeyedSettings.keys(), VllmSettings.keys()
    lines = ["| key | vLLM | LMCache, SGLang | meaning |", "|---|---|---|---|"]
    for key in sorted({**vllm, **keyed}, key=[*EngineSettings.keys(), *keyed, *vllm].index):
        shown = []
        for fields in (vllm, keyed):
            default = fields[key][0] if key in fields else "-"
            own = default is not PydanticUndefined and default not in (None, ())  # else the meaning has it
            shown.append(str(default).lower() if own else "")
        meaning = (vllm[key] if key in vllm else keyed[key])[1]
        meaning = " ".join(meaning.replace("``", "`").replace("None:", "Unset:").split())
        lines.append(f"| `{key}` | {shown[0]} | {shown[1]} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_has_every_key():
    page = Path(__file__).parents[2] / "docs" / "guides" / "engines.md"
    text = page.read_text()
    if os.environ.get("KVABR_WRITE_TABLE"):
        head, _, rest = text.partition("| key | vLLM |")
        page.write_text(head + table() + rest[rest.index("\n\n") + 1 :])
        return
    assert table() in text, "write it with KVABR_WRITE_TABLE=1"


def test_trouble_is_logged_at_once_and_then_summed_up(caplog):
    trouble = TroubleLog(logging.getLogger("kvabr.engines"), every_s=3600.0)
    with caplog.at_level(logging.WARNING):
        trouble.warn("a play failed", "gone")
        for number in range(1, 61):
            trouble.warn("a play failed", f"gone {number}")
        trouble.warn("a cache is not published", ValueError())
        trouble.flush()
        trouble.warn("a play failed", "gone again")
        trouble.flush()
        trouble.flush()
        trouble.warn("a play failed", "much later")
    assert caplog.messages == [
        "kvabr: a play failed: gone",
        "kvabr: a cache is not published: ValueError()",
        "kvabr: within 3600 s: a play failed: 60 more, the last: gone 60",
        "kvabr: within 3600 s: a play failed: 1 more, the last: gone again",
        "kvabr: a play failed: much later",
    ]


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
