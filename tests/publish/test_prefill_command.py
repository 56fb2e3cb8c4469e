"""`kvabr prefill`, as a user calls it."""

from __future__ import annotations

import json

import pytest

from kvabr.cli.main import main
from kvabr.engines.transformers import publish
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.publish.texts import measuring_texts
from kvabr.store.files import NameClaim
from kvabr.store.locations import open_asset
from kvabr.types.cost import PrefillCost
from tests import tinymodels
from tests.toymodel import toy_asset


def kvabr(*words):
    return main([str(word) for word in words])


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text(measuring_texts()["manual"][:3000])
    return tmp_path / "text"


@pytest.mark.model
@pytest.mark.parametrize("live", [False, True])
def test_a_prompt_is_published_and_known_the_second_time(live, text, tmp_path, capsys):
    model = tinymodels.save(tmp_path / "tiny")
    out, report = tmp_path / "assets", tmp_path / "report.json"
    words = ["prefill", "--text", text, "--tokens", 300, "--model", model, "--out", out, "--json", report]
    words += ["--live", "--edge", "Int4"] if live else []
    assert kvabr(*words) == 0
    said = capsys.readouterr().out
    asset = open_asset(out)
    catalog, path = asset.catalog, out / asset.prompt_digest
    assert (f"can be played from now on: {catalog.spec.model}/{path.name}" in said) == live
    assert f"asset: {path} (300 tokens" in said
    assert [track.name for track in catalog.tracks] == ["FP16", "Int8", "Int4"]
    asset.check_parts()
    value = json.loads(report.read_text())
    assert (value["schema"], value["command"]) == ("kvabr.result/1", "prefill")
    assert (value["asset"], value["tokens"], value["verdict"]) == (str(path), 300, "published")
    assert value["bytes"] == sum(track.total_bytes for track in catalog.tracks)
    capsys.readouterr()
    assert kvabr(*words) == 0
    assert f"published already: {path}" in capsys.readouterr().out


@pytest.mark.model
def test_what_another_process_publishes_is_not_computed(text, tmp_path, capsys, monkeypatch):
    words = ["prefill", "--text", text, "--tokens", 300, "--model", tinymodels.save(tmp_path / "tiny"), "--live"]
    assert kvabr(*words, "--out", tmp_path / "one") == 0
    (tmp_path / "two").mkdir()
    name = open_asset(tmp_path / "one").prompt_digest
    claim = NameClaim(tmp_path / "two" / name)
    assert claim.take()
    monkeypatch.setattr(TransformersEngine, "extend", None)  # nothing is computed
    monkeypatch.setattr(publish, "_pace", lambda *_: PrefillCost.from_rate(1000.0))
    capsys.readouterr()
    assert kvabr(*words, "--out", tmp_path / "two") == 0
    assert f"another process is publishing this cache: {tmp_path / 'two' / name}" in capsys.readouterr().out
    claim.release()


@pytest.mark.model
def test_texts_and_options_that_do_not_fit_the_model(text, tmp_path, capsys):
    model, out = tinymodels.save(tmp_path / "tiny"), tmp_path / "assets"
    base = ("prefill", "--text", text, "--model", model, "--out", out)
    assert kvabr(*base) == 2
    assert "tokens do not fit tiny" in capsys.readouterr().err
    assert kvabr(*base, "--tokens", 4000) == 2
    assert "give a longer text, or --tokens" in capsys.readouterr().err
    assert kvabr(*base, "--tokens", 200, "--tracks", "AC-L0") == 2
    assert "needs a codec profile" in capsys.readouterr().err
    prior = tmp_path / "prior"
    toy_asset(prior, tracks=("Int4",))
    assert kvabr(*base, "--tokens", 200, "--prior", prior, "--tracks", "Int8") == 2
    assert "the prior catalog does not have it" in capsys.readouterr().err
    assert kvabr(*base, "--tokens", 200, "--prior", prior, "--tracks", "Int4", "--live") == 0


def test_mistakes_are_found_before_the_model_is_loaded(text, tmp_path, capsys):
    base = ("prefill", "--model", tmp_path / "no-model", "--out", tmp_path / "assets")
    (tmp_path / "empty").write_text(" \n")
    for words, status, message in [
        (("--text", tmp_path / "no"), 2, "cannot be read"),
        (("--text", tmp_path / "empty"), 2, "is empty"),
        (("--text", text, "--tokens", 0), 2, "--tokens must be at least 1"),
        (("--text", text, "--run-tokens", 0), 2, "--run-tokens must be at least 1"),
        (("--text", text, "--edge", "Int4"), 2, "add --live"),
        (("--text", text, "--tracks", "Int2"), 1, "no codec for track 'Int2'"),
        (("--text", text, "--live", "--edge", "AC-L1"), 2, "refines AC-L0"),
        (("--text", text, "--json", tmp_path / "no" / "f"), 2, "there is no folder"),
        (("--text", text, "--prior", tmp_path / "no"), 2, "no such asset"),
        (("--text", text, "--salt-file", tmp_path / "no"), 2, "cannot be read"),
        (("--text", text), 1, "no such model"),
    ]:
        assert kvabr(*base, *words) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / "assets").exists()
