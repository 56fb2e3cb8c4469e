"""A whole bench on a tiny model: what is measured, what is kept, what is shown."""

import json

import pytest

from kvabr_lab.bench import rate_distortion as rd
from kvabr_lab.bench import summary
from kvabr_lab.bench.contexts import DEPTHS
from kvabr_lab.bench.measure import EXACT, STAGES, CacheStore, QualityBench

pytestmark = pytest.mark.slow

TRACKS = ("FP16", "Int4", "AC-L0", "AC-L1", "AC-L2")


@pytest.fixture(scope="module")
def outcome(tiny, profile, tmp_path_factory):
    from kvabr_lab.bench.contexts import cut
    from tests.lab.bench.conftest import prose

    contexts = cut(tiny, {"prose": prose(20), "trees": prose(21)}, 1, 200, 24)
    folder, steps = tmp_path_factory.mktemp("work"), []
    plan = rd.BenchPlan(contexts, TRACKS, {"": profile}, None, group_tokens=(128, 256), retrieval=1, kvtc=(4, 8))
    bench = QualityBench(tiny, CacheStore(folder, tiny.engine.spec), lambda *step: steps.append(step))
    findings, families, notes = rd.run(bench, plan)
    return plan, folder, steps, findings, families, notes


def test_every_scheme_is_measured_on_every_context(outcome):
    plan, _, steps, findings, families, notes = outcome
    names = {*TRACKS, "KIVI-4", "KIVI-2", "CacheGen", "FP8, engine", "NVFP4"}
    names |= {f"TurboQuant-{bits}" for bits in (2, 3, 4)}
    ends = {"AC-L0, end AC-L1", "AC-L0, end AC-L2", "AC-L1, end AC-L2"}
    learned = {f"KVTC-{ratio}x{end}" for ratio in (4, 8) for end in ("", ", last 128 exact")}
    assert set(findings.quality) == set(families) == names | learned | ends
    assert set(findings.recall) == names | {EXACT}
    for rows in findings.quality.values():
        assert set(rows) == {"prose-0", "trees-0"}
        assert all(row["kl"] >= 0 and 0 <= row["top1"] <= 1 for row in rows.values())
    assert all(len(rows) == DEPTHS for rows in findings.recall.values())
    assert findings.quality["FP16"]["prose-0"]["kl"] == 0
    for ascending in (("AC-L2", "AC-L0"), ("KVTC-4x", "KVTC-8x"), ("TurboQuant-4", "TurboQuant-2")):
        kl = [findings.quality[name]["prose-0"]["kl"] for name in ascending]
        assert kl == sorted(kl)
    assert [findings.recall[EXACT][case] for case in findings.recall[EXACT]] == list(findings.recall["FP16"].values())
    assert set(findings.sizes) == {256}
    assert notes == []
    assert {stage for stage, _, _ in steps} == set(STAGES)
    assert all(done <= total for _, done, total in steps)
    assert len(plan.contexts) == 2


def test_nothing_is_measured_twice(outcome, tiny, monkeypatch):
    plan, folder, _, findings, families, _ = outcome
    monkeypatch.setattr(type(tiny.engine), "score", lambda *_: pytest.fail("asked the model again"))
    monkeypatch.setattr(type(tiny.engine), "prefill", lambda *_: pytest.fail("computed a cache again"))
    again = rd.run(QualityBench(tiny, CacheStore(folder, tiny.engine.spec)), plan)
    assert again[0] == findings
    assert again[1] == families


def test_the_result_is_plain_json_and_says_all(outcome):
    plan, _, _, findings, families, _ = outcome
    result = json.loads(json.dumps(rd.result(findings, families, plan), allow_nan=False))
    assert result["schema"] == rd.SCHEMA
    assert result["exact"]["cases"] == DEPTHS
    assert result["text"]["nll"] == pytest.approx(sum(row["nll"] for row in findings.texts.values()) / 2)
    assert f"cost the model {result['text']['nll']:.3f} nats" in summary.text_sentence(result)
    assert set(result["domains"]) == {"prose", "trees"}
    assert result["against"]["theirs"] is None  # CacheGen's size takes LMCache
    assert result["against"]["group_sizes"] == []
    for table in (summary.loss_table(result), summary.recall_table(result), summary.domain_table(result)):
        names, lines = table
        assert all(len(line) == len(names) for line in lines)
    assert summary.group_table(result) is None
    assert "bits an element" in summary.sentence(result)


def test_without_a_profile_tables_come_from_the_cache_and_are_counted(tiny, profile, contexts, store):
    found, families, _ = rd.run(QualityBench(tiny, store), rd.BenchPlan(contexts[:1], ["AC-5x"]))
    (name,) = (name for name in families if name.startswith("AC-5x"))
    with_one, _, _ = rd.run(QualityBench(tiny, store), rd.BenchPlan(contexts[:1], ["AC-5x"], {"": profile}))
    row = found.quality[name]["prose-0"]
    assert row["nbytes"] > with_one.quality["AC-5x"]["prose-0"]["nbytes"]
    assert 0 < row["kl"] < 0.1
