"""A whole bench on a tiny model: what is measured, what is kept in its folder, what findings amount to."""

import json

import pytest

from kvabr_lab.bench import rate_distortion as rd
from kvabr_lab.bench import summary
from kvabr_lab.bench.contexts import DEPTHS
from kvabr_lab.bench.measure import EXACT, STAGES, CacheStore, Findings, QualityBench
from kvabr_lab.bench.summary import curve, first_table, match, scheme_rows
from tests import kvdata

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
    assert "bits per element" in summary.sentence(result)


def test_without_a_profile_tables_come_from_the_cache_and_are_counted(tiny, profile, contexts, store):
    found, families, _ = rd.run(QualityBench(tiny, store), rd.BenchPlan(contexts[:1], ["AC-5x"]))
    (name,) = (name for name in families if name.startswith("AC-5x"))
    with_one, _, _ = rd.run(QualityBench(tiny, store), rd.BenchPlan(contexts[:1], ["AC-5x"], {"": profile}))
    row = found.quality[name]["prose-0"]
    assert row["nbytes"] > with_one.quality["AC-5x"]["prose-0"]["nbytes"]
    assert 0 < row["kl"] < 0.1


SPEC = kvdata.spec()


def test_half_a_file_and_another_length_are_computed_again(tmp_path):
    store = CacheStore(tmp_path, SPEC)
    store.cache("a", 20, lambda: kvdata.cache(SPEC, 20))
    (path,) = tmp_path.glob("*/a.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert store.cache("a", 20, lambda: kvdata.cache(SPEC, 20)).shape[3] == 20
    assert store.cache("a", 10, lambda: kvdata.cache(SPEC, 10)).shape[3] == 10


def test_results_outlive_a_run_and_a_torn_line(tmp_path):
    store = CacheStore(tmp_path, SPEC)
    assert store.known("x") is None
    assert store.keep("x", {"kl": 0.5}) == {"kl": 0.5}
    (journal,) = tmp_path.glob("*/results.jsonl")
    with journal.open("a") as file:
        file.write('{"key": "y", "val')
    again = CacheStore(tmp_path, SPEC)
    assert again.known("x") == {"kl": 0.5}
    assert again.known("y") is None


def findings(points, cases=40):
    """Schemes by name: bits, KL, and log-probability of codes; contexts and cases differ by known factors."""
    made = Findings()
    for name, (bits, kl, logprob, whole) in points.items():
        made.quality[name] = {
            f"c{n}": {"nbytes": 1, "bits": bits, "dnll": kl * (n / 11 - 0.5), "top1": 0.9}
            | dict(
                zip(("kl", "kl8", "kl32", "loss"), (kl * (0.5 + n / 11) * more for more in (1, 3, 2, 2)), strict=True)
            )
            for n in range(12)
        }
        made.recall[name] = {
            f"n{n}": {"digits": 1.0, "whole": n >= cases * (1 - whole), "logprob": logprob} for n in range(cases)
        }
    made.recall[EXACT] = {f"n{n}": {"digits": 1.0, "whole": True, "logprob": -0.01} for n in range(cases)}
    return made


POINTS = {
    "L0": (0.25, 0.4, -0.9, 0.2),
    "L1": (1.0, 0.04, -0.1, 0.9),
    "L2": (2.0, 0.004, -0.02, 1.0),
    "CacheGen": (6.75, 0.04, -0.1, 0.9),
}


def test_rows_are_sorted_by_size_and_say_mean_median_and_worst():
    rows = scheme_rows(findings(POINTS), {"L0": "AC", "L1": "AC", "L2": "AC"})
    assert [row["scheme"] for row in rows] == ["L0", "L1", "L2", "CacheGen", EXACT]
    row = rows[1]
    assert row["kl"] == pytest.approx(0.04)
    assert [row[key] for key in ("kl8", "kl32", "loss")] == pytest.approx([0.12, 0.08, 0.08])
    assert row["kl_worst"] == pytest.approx(0.06)
    assert row["kl_median"] == pytest.approx(0.04)
    assert row["kl_ci95"][0] < 0.04 < row["kl_ci95"][1]
    assert row["dnll_ci95"][0] < 0 < row["dnll_ci95"][1]
    assert row["ratio"] == 16
    assert row["whole"] == 0.9
    assert rows[-1]["bits"] is None
    assert (rows[3]["family"], row["family"]) == ("CacheGen", "AC")


def test_losses_of_first_tokens_count():
    made = findings(POINTS)
    names, lines = first_table({"schemes": scheme_rows(made, {})})
    assert names == ["scheme", "bits/el", "KL of 8 tokens", "of 32", "of all", "loss"]
    assert lines[1] == ["L1", "1.000", "0.12000", "0.08000", "0.04000", "0.08000"]
    for row in made.quality["L1"].values():
        row["loss"] *= 2  # as good as CacheGen by KL, but not at first
    found = match(curve(made, ["L0", "L1", "L2"]), curve(made, ["CacheGen"]))
    assert found["kl"] == pytest.approx(1.0)
    assert 1.0 < found["loss"] < 2.0
    assert found["bits"] == found["loss"]


def test_the_same_quality_is_found_where_it_is():
    made = findings(POINTS)
    found = match(curve(made, ["L2", "L0", "L1"]), curve(made, ["CacheGen"]))
    for key in ("kl", "loss", "logprob", "whole", "bits"):
        assert found[key] == pytest.approx(1.0), key
    assert found["theirs"] == 6.75
    # All schemes differ by one factor on all contexts and cases, so drawing them again changes little.
    assert found["ci95"][0] <= 1.0 <= found["ci95"][1] + 1e-9
