"""Simulated against live, on numbers that can be checked by hand; and the table of them."""

import pytest
from rich.console import Console

from kvabr_lab.live.compare import comparison
from kvabr_lab.live.table import live_table


def run(ttft, tracks, *, family="a", policy="p", met=True, limit="network", regret=None):
    return {
        "trace": f"{family}/t",
        "trace_family": family,
        "start_s": 0.0,
        "policy": policy,
        "ttft_s": ttft,
        "met": met,
        "regret": regret,
        "groups": [{"track": track} for track in tracks],
        "transport": {"limit": limit},
    }


def compared():
    live = [
        run(2.0, ["X", "X", "Y"], regret=0.02),
        run(1.0, ["X", "X", "X"], family="b", regret=0.01),
        run(4.0, ["Y", "X", "X"], policy="q", met=False),
        run(None, [None, None, None], family="b", policy="q", met=False, limit="player"),
    ]
    simulated = [
        run(1.8, ["X", "X", "X"], regret=0.04),
        run(1.1, ["X", "X", "X"], family="b"),
        run(3.0, ["X", "X", "X"], policy="q"),
        run(5.0, ["X", "X", "X"], family="b", policy="q", met=False),
    ]
    return comparison(live, simulated, [16, 16, 8])


def test_errors_are_relative_to_live_and_a_play_without_a_ttft_has_none():
    found = compared()
    assert [play["ttft_error"] for play in found["plays"]] == [-0.1, 0.1, -0.25, None]
    everything = found["all"]
    assert (everything["plays"], everything["compared"], found["network"]["plays"]) == (4, 3, 3)
    assert everything["ttft_error_median"] == pytest.approx(0.1)
    assert everything["ttft_bias"] == pytest.approx(-0.1)
    assert everything["met_agreement"] == 0.75
    assert (everything["regret_live"], everything["regret_simulated"]) == (0.02, 0.04)
    assert found["policies"]["q"]["regret_live"] is None


def test_the_table_has_all_families_and_policies_and_owns_up_to_a_busy_machine():
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(live_table({"live_comparison": compared()}))
    text = capture.get()
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert {"all", "a", "b", "p", "q"} <= rows.keys()
    assert "3/4" in rows["all"]
    assert "10.0 %" in rows["all"]
    assert "-10.0 %" in rows["all"]
    assert "network-limited" in rows
    assert "1 play was limited by this machine's processors" in text
