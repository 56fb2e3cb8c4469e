"""Tables on narrow terminals: columns go, numbers stay whole."""

import io

import pytest
from rich.console import Console

from kvabr.cli.display import table, track_table
from kvabr.replay.fitting_table import FittingTable
from tests.catalogs import catalog


def shown(made, width):
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    return out.getvalue()


def made():
    rows = [("anytime", "100 %", "1234.5", "0.00012"), ("fixed:Int8", "5 %", "7.0", "1.2")]
    return table("plays", ("policy", "hit", "TTFT", "loss"), rows, left=("policy",), spare=("TTFT", "hit"))


@pytest.mark.parametrize(("width", "gone"), [(28, ["TTFT"]), (22, ["TTFT", "hit"])])
def test_columns_are_left_out_in_their_order_and_named(width, gone):
    text = shown(made(), width)
    assert f"not shown in {width} columns: {', '.join(gone)}" in " ".join(text.split())
    assert "1234.5" not in text
    assert ("100 %" in text) == ("hit" not in gone)
    assert "0.00012" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [25, 30, 45])
def test_a_long_name_does_not_squeeze_what_wraps(width):
    made = FittingTable(box=None, padding=0, pad_edge=False)
    made.add_column("policy", no_wrap=True, overflow="ellipsis", min_width=10)
    made.add_column("loss", justify="right", no_wrap=True)
    made.add_column("mix")
    made.add_row("./leased.py:Leased", "0.00045", "abcdefgh " * 4)
    first = shown(made, width).splitlines()[1]
    assert "abcdefgh" in first
    assert "0.00045" in first
    assert first.startswith("./leased.py:Leased"[: width - 16])


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_tracks_of_an_asset_are_never_cut(width):
    text = shown(track_table(catalog(10)), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
