"""The chart of speeds: what it draws, and what it refuses."""

import json
import math
from dataclasses import asdict
from xml.etree import ElementTree as ET

import pytest

from kvabr.types.errors import FormatError
from kvabr_lab.bench.speeds import SCHEMA, Point, chart
from tests.scripts import run_tool

SVG = "{http://www.w3.org/2000/svg}"
SHAPES = [
    {"title": "small", "cold_s": 8.0, "kl": "measured"},
    {"title": "large", "cold_s": None, "kl": "expected"},
]


def points(shape="small", way="kvabr", live_to=100.0):
    rates = (1.0, 10.0, 100.0, 1000.0)
    return [Point(shape, mbit, way, mbit <= live_to, 4.0 / math.sqrt(mbit), 0.01 / mbit, 1000) for mbit in rates]


def elements(svg, name):
    return list(ET.fromstring(svg).iter(f"{SVG}{name}"))  # noqa: S314  # our own chart


def marks(svg):
    return [path for path in elements(svg, "path") if ":" in path[0].text]  # the legend's say only a name


def test_every_play_has_a_mark_in_both_panels_and_says_what_it_is():
    made = points() + points(way="Int8") + points("large", live_to=0.0)
    found = marks(chart(SHAPES, made))
    assert len(found) == 2 * len(made)
    told = [path[0].text for path in found]
    assert told.count("kvabr, 1 Gbit/s, simulated: 0.126 s, KL 1e-05") == 4  # two caches, two panels
    assert told.count("kvabr, 10 Mbit/s, live: 1.26 s, KL 0.001") == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ttft_s": 0.0}, "out of range"),
        ({"kl": math.nan}, "out of range"),
        ({"mbit": -1.0}, "out of range"),
        ({"speed": 1.0}, "damaged"),
        ({"way": None, "mbit": None}, "damaged"),
    ],
)
def test_damaged_points_are_refused(change, says):
    with pytest.raises(FormatError, match=says):
        Point.from_json(asdict(points()[0]) | change)


def test_the_tool_draws_again_from_its_results(tmp_path):
    results, picture = tmp_path / "speeds.json", tmp_path / "speeds.svg"
    results.write_text(json.dumps({"schema": SCHEMA, "shapes": SHAPES, "points": [asdict(p) for p in points()]}))
    done = run_tool("bench-speeds", "--from", results, "--svg", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_text() == chart(SHAPES, points())
    assert "~0.126" in done.stdout
    results.write_text(json.dumps({"schema": "another/1"}))
    done = run_tool("bench-speeds", "--from", results)
    assert done.returncode == 1
    assert "not results of this tool" in done.stderr
