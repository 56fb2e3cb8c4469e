"""The benches from the command line, on a tiny model."""

import json

import pytest

from kvabr.cli.main import main
from tests.scripts import run_tool
from tests.tinymodels import save_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture
def profile_file(profile, tmp_path):
    path = tmp_path / "tiny.profile.safetensors"
    path.write_bytes(profile.to_bytes())
    return path


def rd(capsys, *options):
    status = main(["bench", "rd", *map(str, options)])
    return status, *capsys.readouterr()


def test_rd_prints_tables_and_writes_every_file(capsys, tmp_path, model_folder, texts_folder, profile_file):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "html", "svg")}
    status, out, err = rd(
        capsys, "--model", model_folder, "--texts", texts_folder, "--profile", profile_file, "--contexts", 1,
        "--tokens", 200, "--continuation", 16, "--retrieval", 1, "--tracks", "Int4", "AC-L0", "AC-L1",
        "--group-tokens", 128, 256, "--work", tmp_path / "work", "--peers", tmp_path / "none",
        *(word for kind, path in files.items() for word in (f"--{kind}", path)),
    )  # fmt: skip
    assert status == 0, err
    assert "AC-L1" in out
    assert "bits per element" in out
    assert "setup-peers" in err
    result = json.loads(files["json"].read_text())
    assert result["schema"] == "kvabr.bench.rd/1"
    assert {row["scheme"] for row in result["schemes"]} >= {"Int4", "AC-L0", "AC-L1", "KIVI-2", "CacheGen", "exact"}
    assert files["svg"].read_text().startswith("<svg")
    assert "<svg" in files["html"].read_text()


def test_codec_prints_rates_and_writes_json(capsys, tmp_path, model_folder, profile_file):
    status = main(
        [
            "bench", "codec", "--models", str(model_folder), "--tracks", "Int8", "AC-L0", "--seconds", "0.01",
            "--profile", str(profile_file), "--peers", str(tmp_path), "--json", str(tmp_path / "codec.json"),
        ]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "AC-L0" in out
    assert "setup-peers" in err
    result = json.loads((tmp_path / "codec.json").read_text())
    assert {row["track"] for row in result["tracks"]} == {"Int8", "AC-L0"}
    assert result["machine"]["cores"] >= 1
    assert result["coder"][0]["decode"] > 0


def windowed(tmp_path):
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=640, query_pre_attn_scalar=8, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"], bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path / "gemma"
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_a_model_with_windows_is_measured_class_by_class_or_as_one(capsys, tmp_path, texts_folder):
    options = (
        "--model", windowed(tmp_path), "--texts", texts_folder, "--contexts", 1, "--tokens", 150,
        "--continuation", 16, "--retrieval", 0, "--tracks", "AC-L1", "FP16", "--work", tmp_path / "work",
        "--peers", tmp_path,
    )  # fmt: skip
    for how in ((), ("--whole-windows",)):
        status, out, err = rd(capsys, *options, "--json", tmp_path / "rd.json", *how)
        assert status == 0, err
        assert "AC-L1 (own tables)" in out
        rows = {row["scheme"]: row for row in json.loads((tmp_path / "rd.json").read_text())["schemes"]}
        assert rows["FP16"]["kl"] < 1e-4


def test_profiles_are_calibrated_once_and_kept(capsys, tmp_path, texts_folder, monkeypatch):
    options = (
        "--model", windowed(tmp_path), "--texts", texts_folder, "--contexts", 1, "--tokens", 150, "--continuation", 16,
        "--retrieval", 0, "--tracks", "AC-L0", "AC-L1", "--work", tmp_path / "work", "--peers", tmp_path,
        "--calibrate", 3, "--target-kl", 0.00001, "--target-track", "AC-L1", "--step-scale", 1, 0.5,
    )  # fmt: skip
    status, out, err = rd(capsys, *options, "--json", tmp_path / "rd.json")
    assert status == 0, err
    assert "AC-L1 loses" in out
    first = json.loads((tmp_path / "rd.json").read_text())
    bits = {row["scheme"]: row["bits"] for row in first["schemes"]}
    assert bits["AC-L0"] < bits["AC-L0@x0.5"]
    assert bits["AC-L1"] < bits["AC-L1@x0.5"]

    def again(*_, **__):
        raise AssertionError("calibrated again")

    monkeypatch.setattr("kvabr_lab.bench.calibrated.calibrate", again)
    assert rd(capsys, *options, "--json", tmp_path / "again.json")[0] == 0
    assert json.loads((tmp_path / "again.json").read_text()) == first


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
