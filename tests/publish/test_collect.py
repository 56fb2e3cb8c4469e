"""What a calibration keeps on the disk: a disk that is full, and numbers that are none."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvabr.cli.main import main
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish import collect
from kvabr.publish.calibrate import calibrate
from kvabr.types.errors import AssetError, ModelError
from tests import tinymodels

TEXT = {"a": "what it says " * 60}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_disk_that_fills_is_named_and_leaves_no_profile(tmp_path, monkeypatch, capsys, by_layer):
    model = tinymodels.save(tmp_path / "model")
    text, out = tmp_path / "text.txt", tmp_path / "profile.safetensors"
    text.write_text(TEXT["a"])
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("w+b"))  # noqa: SIM115
    load = "layers" if by_layer else "whole"
    call = ["calibrate", "--model", str(model), "--text", str(text), "--context-tokens", "100", "--load", load]
    assert main([*call, "--out", str(out)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_disk_that_is_too_small_is_refused_before_the_work(tmp_path, monkeypatch, by_layer):
    loaded = load_model(str(tinymodels.save(tmp_path)), by_layer=by_layer)
    wanted = collect.room_needed(loaded.engine, [100] * 3)
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda _: SimpleNamespace(free=wanted - 1))
    with pytest.raises(AssetError, match="set TMPDIR to a folder with more room"):
        calibrate(loaded, TEXT, contexts=3, tokens=100)
    monkeypatch.setattr(collect.shutil, "disk_usage", lambda _: SimpleNamespace(free=wanted))
    calibrate(loaded, TEXT, contexts=3, tokens=100)


@pytest.mark.parametrize("by_layer", [False, True])
def test_caches_that_are_no_numbers_are_refused_with_the_layer(tmp_path, monkeypatch, by_layer):
    loaded = load_model(str(tinymodels.save(tmp_path)), by_layer=by_layer)
    attention = loaded.engine.model.base_model.layers[1].self_attn
    projected = attention.v_proj.forward
    monkeypatch.setattr(attention.v_proj, "forward", lambda hidden: projected(hidden).fill_(float("nan")))
    with pytest.raises(ModelError, match="layer 1 is NaN"):
        calibrate(loaded, TEXT, contexts=2, tokens=100)
