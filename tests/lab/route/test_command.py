"""`kvabr route`: answers, tables, files, errors."""

import json
import xml.etree.ElementTree as ET

import pytest

from kvabr.cli.main import main
from kvabr.types.errors import FormatError
from kvabr_lab.bench.routes import DAY_SCHEMA, chart
from kvabr_lab.day.compare import BEST, ORACLE
from kvabr_lab.day.rules import RULES
from tests.catalogs import catalog


def run(capsys, *argv):
    status = main(["route", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out, err


def test_it_decides_with_a_reason(capsys, tmp_path):
    status, out, _ = run(capsys, "--tokens", 32_000, "--link", 400, "--json", tmp_path / "a.json")
    assert status == 0
    assert "remote: remote prefill takes" in out
    assert "remote prefill is faster from" in out
    answer = json.loads((tmp_path / "a.json").read_text())
    assert answer["place"] == "remote"
    assert answer["remote_lengths"][0][1] is None
    assert [one["place"] for one in answer["options"]] == ["local", "remote"]


def test_an_asset_tells_the_bytes(capsys, tmp_path):
    path = tmp_path / "catalog.json"
    path.write_text(catalog(16, layered=True).dumps())
    coarse = run(capsys, "--tokens", 4000, "--link", 50, "--asset", path, "--floor", 0.2)[1]
    fine = run(capsys, "--tokens", 4000, "--link", 50, "--asset", path, "--floor", 0.001)[1]
    assert "per token at a loss of 0.09 nats" in coarse
    assert coarse != fine
    assert "no tracks of this asset" in run(capsys, "-n", 10, "--link", 5, "--asset", path, "--floor", 1e-9)[2]


def test_a_day_is_compared_and_drawn(capsys, tmp_path):
    files = ("--json", tmp_path / "day.json", "--svg", tmp_path / "day.svg")
    argv = ("--day", "--link", 50, 200, "--requests", 60, "--hours", 0.2, "--oracle", 1, "--deadline", 3, *files)
    status, out, err = run(capsys, *argv)
    assert status == 0, err
    assert "best threshold" in out
    result = json.loads((tmp_path / "day.json").read_text())
    assert result["schema"] == DAY_SCHEMA
    assert [day["mbps"] for day in result["days"]] == [50, 200]
    for day in result["days"]:
        means = {one["rule"]: one["ttft_mean_s"] for one in day["rules"]}
        assert set(means) == {*RULES, BEST, ORACLE}
        assert means[ORACLE] == min(means.values())
    picture = ET.fromstring((tmp_path / "day.svg").read_text())  # noqa: S314 - our own
    assert picture.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in (tmp_path / "day.svg").read_text()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, "not results"),
        ({"schema": DAY_SCHEMA, "days": []}, "no days"),
        ({"schema": DAY_SCHEMA, "days": [{"mbps": 1}]}, "damaged"),
    ],
)
def test_a_chart_of_something_else_is_refused(result, words):
    with pytest.raises(FormatError, match=words):
        chart(result)
