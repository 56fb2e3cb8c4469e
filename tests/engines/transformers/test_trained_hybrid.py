"""What levels cost a trained model with latents and states, on text that it has not seen."""

from pathlib import Path

import pytest

from kvabr.cli.main import main
from kvabr.engines.transformers.model_loader import load_model
from kvabr.engines.transformers.publish import find_profile
from kvabr.publish.encoder import publish
from kvabr.publish.frames import MemoryFrames
from kvabr.publish.texts import measuring_texts
from kvabr.store.locations import open_asset
from kvabr.store.prompt import Prompt

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = Path(__file__).parents[2] / "data" / "hybrid"
TRACKS = ("Raw", "BF16", "FP8", "Int8", "Int4", "AC-L0", "AC-L1", "AC-L2", "AC-L3", "AC-5x")


@pytest.fixture(scope="module")
def catalog():
    loaded = load_model(str(MODEL))
    profile = find_profile(loaded.engine.spec, MODEL.parent / "hybrid.profile.safetensors")
    ids = loaded.encode(measuring_texts()["manual"])[:768]
    prompt = Prompt(tuple(ids[:640]), tuple(ids[640:]))
    return publish(loaded.engine, prompt, TRACKS, profile, MemoryFrames(), max_passes=16, time_engine=False)


def test_levels_lose_what_their_bits_say(catalog):
    kl = {track.name: track.measured.kl for track in catalog.tracks}
    assert kl["Raw"] < 1e-6
    assert kl["Int8"] <= 1e-4
    assert kl["FP8"] <= 1e-3
    assert kl["AC-L0"] > kl["AC-L1"] > kl["AC-L2"] > kl["AC-L3"]


def test_ac_loses_less_than_int4_at_fewer_bytes(catalog):
    sizes = {track.name: track.total_bytes for track in catalog.to_play.tracks}
    kl = {track.name: track.measured.kl for track in catalog.tracks}
    layers = sum(sizes[f"AC-L{depth}"] for depth in range(4))
    assert layers < 0.75 * sizes["Int4"]
    assert sizes["AC-5x"] < 0.6 * sizes["Int4"]
    assert kl["AC-L3"] < kl["AC-5x"] < kl["Int4"]


def test_snapshots_of_states_are_encoded_inspected_and_refused_between_groups(tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "asset"
    text.write_text(measuring_texts()["manual"][:400], encoding="utf-8")
    words = ["encode", "--text", text, "--tokens", 256, "--continuation", 8, "--model", MODEL, "--out", out]
    words += ["--tracks", "Raw", "Int8", "--snapshots-every"]
    assert main([*map(str, words), "128"]) == 0
    catalog = open_asset(out).catalog
    states = [number for number, each in enumerate(catalog.spec.classes) if each.kind == "state"]
    assert [unit.first for unit in catalog.units if unit.part in states] == [128, 128, 256, 256]
    assert main(["inspect", str(out), "--check"]) == 0
    capsys.readouterr()
    assert main([*map(str, words), "100", "--force"]) == 1
    assert "snapshots every 100 tokens do not match groups of 128" in capsys.readouterr().err
    assert open_asset(out).catalog == catalog
