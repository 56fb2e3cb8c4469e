"""Engines whose prefills were measured, and the notation of a cost."""

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest

from kvabr.cli.main import main
from kvabr.data import default_catalog
from kvabr.replay.engines import ENGINES, MEASURED, engine_cost, parse_cost
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError


@pytest.mark.parametrize("name", MEASURED)
def test_the_shipped_costs_are_those_that_were_measured(name: str) -> None:
    off = [ENGINES[name].seconds(before, new) / (ms / 1000) for before, new, ms in MEASURED[name]]
    assert all(0.85 < each < 1.2 for each in off), off
    assert math.exp(sum(abs(math.log(each)) for each in off) / len(off)) < 1.06
    fitted = PrefillCost.fit([(before, new, ms / 1000) for before, new, ms in MEASURED[name]])
    for before, new, _ in MEASURED[name]:
        assert ENGINES[name].seconds(before, new) == pytest.approx(fitted.seconds(before, new), rel=0.01)


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("8000", PrefillCost(0.0, 1 / 8000)),
        ("0.03:30e-6", PrefillCost(0.03, 30e-6)),
        ("0.03:30e-6:1e-6", PrefillCost(0.03, 30e-6, 0.0, 1e-6)),
        ("0:30e-6:1e-6:2e-10", PrefillCost(0.0, 30e-6, 2e-10, 1e-6)),
        ("0:30e-6:0:2e-10:0.02", PrefillCost(0.0, 30e-6, 2e-10, 0.0, 0.02)),
    ],
)
def test_the_notation(text: str, cost: PrefillCost) -> None:
    assert parse_cost(text, "--prefill") == cost


@pytest.mark.parametrize(
    "text", ["", "fast", "1:", "1:2:3:4:5:6", "1:-2", "nan", "1:nan", "0", "0:0", "1,2", "inf:1", "-1"]
)
def test_a_cost_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=f"--prefill {text}: "):
        parse_cost(text, "--prefill")


def test_an_engine_that_nobody_measured() -> None:
    with pytest.raises(UsageError, match="did you mean h200-70b"):
        engine_cost("h100-70b", "--engine")


def ttft(folder: Path, *how: str) -> float:
    out, trace = folder / "out.json", folder / "flat.csv"
    trace.write_text("t_s,mbps\n" + "".join(f"{second},1\n" for second in range(30)))
    args = ["replay", str(trace), "-d", "60", "--jobs", "1", "--json", str(out), "-p", "fixed:Int4", *how]
    assert main(args) == 0
    (run,) = json.loads(out.read_text())["runs"]
    return float(run["recompute_s"])


def test_a_replay_with_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = default_catalog().tokens
    seconds = ENGINES["h200-8b"].seconds(0, tokens)
    given = "0.00415:2.76e-5:1.70e-6:4.76e-10:0.0209"
    assert ttft(tmp_path, "--engine", "h200-8b") == ttft(tmp_path, "--prefill", given) >= 0.5 * seconds
    for wrong, says in (
        (["--engine", "h200-8b", "--prefill", "1:2"], "not allowed with"),
        (["--engine", "mine"], "no such engine; there are h200-8b"),
        (["--prefill", "1:-2"], "--prefill 1:-2"),
    ):
        with suppress(SystemExit):
            assert main(["replay", str(tmp_path / "flat.csv"), *wrong]) == 2
        assert says in " ".join(capsys.readouterr().err.split())
