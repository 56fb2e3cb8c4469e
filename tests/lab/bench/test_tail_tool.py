"""A short form of `tools/bench-tail` on a tiny model."""

import json

import pytest

from tests.scripts import run_tool

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(model_folder, profile, texts_folder, tmp_path):
    (tmp_path / "own.safetensors").write_bytes(profile.to_bytes())

    def run(*words):
        given = ["--model", model_folder, "--texts", texts_folder, "--work", tmp_path / "work"]
        given += ["--profile", tmp_path / "own.safetensors", "--json", tmp_path / "found.json", "--tokens", "200"]
        given += ["--continuation", "24", "--answer", "10", "--domains", "python", "prose"]
        return run_tool("bench-tail", *given, *words)

    return run


def test_what_is_computed_behind_a_coded_cache_is_measured_by_text_and_questions(bench, tmp_path):
    done = bench("--tracks", "FP16", "AC-L0=0", "AC-L1=0", "AC-L0*2=0", "AC-L0", "--tails", "0", "150")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    names = {"FP16", "AC-L0=0", "AC-L1=0", "AC-L0=0*2", "AC-L0", "CacheGen"}
    assert set(found["by_context"]) == {"python-0", "prose-0"}
    for schemes in found["by_context"].values():
        assert set(schemes) == names
        for tails in schemes.values():
            assert set(tails) == {"0", "150"}
            assert all(set(rows) == {"text", "short", "about", "task"} for rows in tails.values())
        assert schemes["FP16"]["0"]["text"]["loss"] < 1e-5
        bits = {name: tails["0"]["text"]["bits"] for name, tails in schemes.items()}
        assert bits["AC-L0=0*2"] < bits["AC-L0=0"] < bits["AC-L0"] < bits["AC-L1=0"]
    text = found["summary"]["loss"]["text"]
    assert text["AC-L0=0"]["150"]["loss"][0] < text["AC-L0=0"]["0"]["loss"][0]
    assert [line[:3] for line in found["summary"]["bits_at"]["text"]] == [
        ["CacheGen", "0", "=0"],
        ["CacheGen", "150", "=0"],
    ]
    assert "answers to three questions" in done.stdout
