"""What findings amount to: crossings, intervals, and a comparison whose answer is known."""

import pytest

from kvabr_lab.bench.measure import EXACT, Findings
from kvabr_lab.bench.summary import curve, first_table, match, scheme_rows

pytestmark = pytest.mark.slow


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
