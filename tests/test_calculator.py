"""The calculator of the docs says at its points what was simulated there, and refuses what is out of its range."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
ENTRIES = json.loads((ASSETS / "calculator.json").read_text(encoding="utf-8"))


def estimates(questions):
    if (node := shutil.which("node")) is None:
        pytest.skip("there is no Node.js: apt-get install nodejs")
    script = (
        f"const {{ estimate }} = require({json.dumps(str(ASSETS / 'calculator.js'))});"
        f"const entries = require({json.dumps(str(ASSETS / 'calculator.json'))});"
        "console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map((each) => estimate(entries, each))))"
    )
    run = subprocess.run(  # noqa: S603
        [node, "-e", script], input=json.dumps(questions), capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def test_at_a_point_it_says_what_was_simulated():
    asked, told = [], []
    for entry in ENTRIES:
        axes = [(len(entry["tokens"]), len(entry["mbit"]), speed) for speed in range(len(entry["speeds"]))]
        for tokens, rates, speed in axes[:: max(1, len(axes) - 1)]:
            here, there = tokens // 2, rates // 3
            asked.append(
                {
                    "name": entry["name"],
                    "tokens": entry["tokens"][here],
                    "mbit": entry["mbit"][there],
                    "speed": entry["speeds"][speed],
                }
            )
            told.append(
                [
                    way["seconds"][((speed if way["computes"] else 0) * tokens + here) * rates + there]
                    for way in entry["ways"]
                ]
            )
    for answer, seconds in zip(estimates(asked), told, strict=True):
        assert [way["seconds"] for way in answer["ways"]] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "change",
    [{"tokens": 100}, {"mbit": 0}, {"speed": None}, {"tokens": "many"}, {"mbit": 1e9}, {"kilobytes": 0}],
)
def test_what_is_out_of_its_range_is_refused(change):
    question = {"name": "my own, on a GPU", "tokens": 10_000, "mbit": 1000, "speed": 2000} | change
    ((problem,),) = (answer.values() for answer in estimates([question]))
    assert problem.startswith("Give ")
