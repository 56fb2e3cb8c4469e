"""`kvabr bench blend` on a real model of a few thousand weights, whose tokens are bytes."""

import json

import pytest
import torch

from kvabr.cli.main import main
from kvabr.engines.transformers.blend import blend_engine
from kvabr.engines.transformers.model_loader import load_model
from kvabr_lab.bench.blend import FusedCase, FusionLab, Recipe, measure, recipes
from kvabr_lab.bench.blend_prompts import KINDS, make_prompts
from tests.lab.bench.conftest import prose
from tests.tinymodels import save

TEXTS = {"prose": prose(30), "trees": prose(31)}
SIZE = 64


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Weights that are large enough for what stands before a passage to matter."""
    return load_model(str(save(tmp_path_factory.mktemp("large") / "model", initializer_range=0.3)))


@pytest.fixture(scope="module")
def lab(large):
    behind = [large.encode("before ")] + [large.encode(prose(seed, 8)) for seed in (40, 41)]
    held_out, following = [large.encode(prose(42, 8))], large.encode(prose(43, 6))
    return FusionLab(blend_engine(large.engine), behind, held_out, following)


def prompts(model, kind, count=1):
    return make_prompts(model, TEXTS, kind, count, size=SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_the_same_every_time(large, kind):
    three, one = prompts(large, kind, 3), prompts(large, kind)
    assert three[0] == one[0]
    assert len({prompt.key for prompt in three}) == 3
    prompt = one[0]
    assert len(prompt.passages) == (4 if kind == "text" else 5)
    assert all(len(passage) == SIZE for passage in prompt.passages)
    assert prompt.spans[0][0] == len(prompt.beginning)
    assert prompt.spans[-1][1] == len(prompt.tokens)


def test_what_is_recomputed_in_full_loses_nothing(large, lab):
    prompt = prompts(large, "codes")[0]
    case = FusedCase(lab, prompt)
    none, some, every = (case.measure(Recipe("alone", name, share)) for name, share in
                         (("", 0.0), ("oracle", 0.5), ("random", 1.0)))  # fmt: skip
    assert every["kl"] < 1e-6
    assert every["work"] == pytest.approx(5 * SIZE / len([*prompt.tokens, *prompt.question]))
    assert none["kl"] > 1e-4
    assert some["kl"] < none["kl"]
    assert none["work"] == 0
    assert isinstance(every["found"], bool)
    assert every["found"] == (every["gap"] > 0)
    assert every["margin"] == pytest.approx(case.exact()["margin"], abs=1e-3)
    assert none["margin"] != pytest.approx(every["margin"], abs=1e-3)
    assert every["found"] == case.exact()["found"]


def test_results_are_kept_and_the_next_run_computes_nothing(large, lab):
    kept, steps = {}, []
    plan = recipes(("question", "order", "hkvd", "legolink", "oracle"), (0.15,), ())
    some = prompts(large, "facts", 2)
    found = measure(lab, some, plan, kept.get, kept.setdefault, lambda *at: steps.append(at))
    assert steps[-1] == ("measure", 2 * (len(plan) + 1), 2 * (len(plan) + 1))
    assert len(kept) == len(steps)
    assert all(torch.isfinite(torch.tensor(row["kl"])) for rows in found.values() for row in rows.values())

    def never(key, row):
        raise AssertionError(key)

    assert measure(lab, some, plan, kept.get, never) == found


@pytest.mark.slow
def test_the_command_writes_tables_json_and_picture(capsys, tmp_path, model_folder, profile):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    (tmp_path / "p.safetensors").write_bytes(profile.to_bytes())
    argv = ["bench", "blend", "--model", model_folder, "--texts", folder, "--quick", "--passage-tokens", 64]
    argv += ["--work", tmp_path / "work", "--json", tmp_path / "b.json", "--svg", tmp_path / "b.svg", "--contexts", 2]
    assert main([*map(str, argv), "--profile", str(tmp_path / "p.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "KL codes" in out
    assert "ratio of KL" in out
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["schema"] == "kvabr.bench.blend/1"
    assert {row["kind"] for row in result["recipes"]} == set(KINDS)
    assert "mean, AC-L0, question-peaks 0.15" in {row["recipe"] for row in result["recipes"]}
    assert (tmp_path / "b.svg").read_text().startswith("<svg")
