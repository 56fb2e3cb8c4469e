import io

import pytest
from rich.console import Console

from kvabr.cli.display import table, track_table
from kvabr.replay.fitting_table import FittingTable
from kvabr.replay.report import family_table, summary_table, verdict, verification_table
from kvabr.replay.report.queries import DARK
from tests.catalogs import catalog
from tests.replay.report_samples import POLICIES, result_of, run, sample


def printed(renderable, width, colour=None):
    out = io.StringIO()
    Console(file=out, width=width, color_system=colour, force_terminal=colour is not None).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_every_policy_fits_on_one_line_best_first(width):
    result, _ = sample()
    result["summary"]["cachegen-oracle"] = dict(result["summary"]["rate"], ttft_p95_s=12.345, loss_p95=0.00012)
    lines = printed(summary_table(result), width).splitlines()
    assert max(map(len, lines)) <= width
    order = [line.split()[0] for line in lines if line.split()[0] in {*POLICIES, "cachegen-oracle"}]
    regret = [result["summary"][policy]["regret_mean"] for policy in order]
    assert sorted(order) == sorted(result["summary"])
    assert regret == sorted(regret)
    assert not any("\u2026" in line for line in lines), "nothing is cut off"


def test_the_bar_shows_shares_with_and_without_colour():
    result, _ = sample()
    result["summary"] = {"rate": result["summary"]["rate"] | {"track_share": {"AC-5x": 0.5, "recomputed": 0.5}}}
    plain = printed(summary_table(result), 100)
    row = next(line for line in plain.splitlines() if line.startswith("rate"))
    assert row.count("1") >= 4
    assert row.split()[-1] == "1" * (len(row.split()[-1]) // 2) + "r" * (len(row.split()[-1]) // 2)
    assert "r  recomputed" in plain
    first = DARK[0].removeprefix("#")
    code = ";".join(str(int(first[i : i + 2], 16)) for i in (0, 2, 4))
    assert f"48;2;{code}m" in printed(summary_table(result), 100, "truecolor")


def test_a_summary_without_numbers_shows_dashes():
    result = result_of(run("rate", feasible=False, met=False))
    result["summary"]["rate"] |= {"hit_ratio": None, "hit_ratio_ci95": None, "loss_mean": float("nan")}
    text = printed(summary_table(result), 100)
    assert "\u2013" in text
    assert "nan" not in text
    assert "1 play is set apart" in text
    assert "their TTFT" not in text
    result["summary"]["rate"]["infeasible_ttft_p50_s"] = 12.34
    assert "their TTFT p50: 12.3 (rate)" in printed(summary_table(result), 100)


def test_names_are_text_not_markup():
    result = result_of(run("[red]x[/red]"))
    assert "[red]x[/red]" in printed(summary_table(result), 100)
    assert family_table(result) is None


@pytest.mark.parametrize("width", [80, 100])
def test_families_beyond_the_width_go_below(width):
    names = [f"a_rather_long_family_{i}" for i in range(9)]
    runs = [run(policy, name, family=name, loss=0.001 * i) for name in names for i, policy in enumerate(POLICIES, 1)]
    text = printed(family_table(result_of(*runs)), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("cheapfirst") == -(-9 // ((width - 11) // 13))
    assert text.count("0.0050") == 9
    for i in range(9):
        assert f"family_{i}" in text


def test_verified_plays_are_readable_in_80_columns():
    measured = {"predicted": 0.01234, "kl": 0.01301, "dnll": -0.0021, "top1": 0.987}
    names = [("anytime", "mahimahi/att-lte-driving-2016"), ("./policies/mine.py:Mine:caution=0.5", "lte")]
    runs = [
        {"policy": policy, "trace": trace, "start_s": 123.4, "tokens_recomputed": 8192, "measured": measured}
        for policy, trace in names
    ]
    text = printed(verification_table({"runs": [*runs, runs[0] | {"measured": None}]}), 80)
    assert "…" not in text
    assert len(text.splitlines()) <= 3 + 2 * 4
    for number in ("123.4", "8192", "0.01234", "0.01301", "1.05", "-0.0021", "0.987"):
        assert text.count(number) == 2


def made():
    rows = [("anytime", "100 %", "1234.5", "0.00012"), ("fixed:Int8", "5 %", "7.0", "1.2")]
    return table("plays", ("policy", "hit", "TTFT", "loss"), rows, left=("policy",), spare=("TTFT", "hit"))


@pytest.mark.parametrize(("width", "gone"), [(28, ["TTFT"]), (22, ["TTFT", "hit"])])
def test_columns_are_left_out_in_their_order_and_named(width, gone):
    text = printed(made(), width)
    assert f"not shown in {width} columns: {', '.join(gone)}" in " ".join(text.split())
    assert "1234.5" not in text
    assert ("100 %" in text) == ("hit" not in gone)
    assert "0.00012" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_long_name_does_not_squeeze_what_wraps():
    made = FittingTable(box=None, padding=0, pad_edge=False)
    made.add_column("policy", no_wrap=True, overflow="ellipsis", min_width=10)
    made.add_column("loss", justify="right", no_wrap=True)
    made.add_column("mix")
    made.add_row("./leased.py:Leased", "0.00045", "abcdefgh " * 4)
    assert "abcdefgh" in printed(made, 25).splitlines()[1]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_tracks_of_an_asset_are_never_cut(width):
    text = printed(track_table(catalog(10)), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def plays(policy, count=4, *, missed=0, **fields):
    return [run(policy, f"t{i}", met=i >= missed, **fields) for i in range(count)]


SAID = [
    (
        [*plays("cheapfirst", loss=0.0031), *plays("fixed:AC-5x", loss=0.0082)],
        "cheapfirst met the deadline in 4 of 4 plays, as often as the best fixed track (AC-5x), and lost 62 % less",
    ),
    (
        [*plays("rate", loss=0.004), *plays("fixed:FP8", loss=0.002, missed=3)],
        "in 4 of 4 plays, against 1 of 4 for the best fixed track (FP8), but lost 100 % more quality",
    ),
    (
        [*plays("mpc", loss=0.1, missed=1), *plays("fixed:Int4", loss=0.9)],
        "mpc met the deadline in 3 of 4 plays, against 4 of 4 for the best fixed track (Int4), and lost 89 %",
    ),
    (
        [*plays("rate", loss=0.01, missed=2), *plays("bola", loss=0.5), *plays("fixed:AC-5x")],
        "No adaptive policy beat the best fixed track here: AC-5x met the deadline in 4 of 4 plays",
    ),
    (
        [*plays("bola", loss=0.00801), *plays("fixed:AC-5x", loss=0.008)],
        "bola did as well as the best fixed track (AC-5x) and no better: both met the deadline",
    ),
    (
        [run("cheapfirst", loss=0.001), run("fixed:FP8", loss=0.002)],
        "cheapfirst met the deadline, as did the best fixed track (FP8), and lost 50 % less quality",
    ),
    (
        [*plays("bola", loss=1e-8), *plays("fixed:FP16", loss=1e-7, missed=2)],
        "neither lost any quality that could be measured",
    ),
    ([*plays("bola", loss=0.01205), *plays("fixed:FP16", loss=0.01235)], "0.0120 against 0.0123"),
    ([*plays("rate", loss=0.004), *plays("fixed:FP8"), run("rate", "extra", met=False)], "in 4 of 4 plays"),
    ([run("rate", "a", loss=0.001), run("fixed:FP8", "b", loss=0.004)], "they share none"),
]


@pytest.mark.parametrize(("runs", "words"), SAID)
def test_what_adapting_was_worth(runs, words):
    assert words in verdict(result_of(*runs))


def test_nothing_to_compare_with():
    for runs, words in (
        (plays("cheapfirst", loss=0.003), "lost 0.0030 nats per token; no fixed track was played"),
        (
            [*plays("bola", loss=0.02), *plays("cheapfirst", loss=0.003)],
            "its mean regret is 0.0030 against 0.020 for bola.",
        ),
        ([*plays("fixed:FP8"), *plays("fixed:Int4", loss=0.1)], "no adaptive policy was played"),
        ([], "Nothing was played."),
    ):
        assert words in verdict(result_of(*runs))


def test_infeasible_plays_are_set_apart_and_counted_once():
    hopeless = [run(policy, "dead", feasible=False, met=False) for policy in ("cheapfirst", "fixed:AC-5x")]
    played = [*plays("cheapfirst", loss=0.001), *plays("fixed:AC-5x", loss=0.002)]
    text = verdict(result_of(*played, *hopeless))
    assert "in 4 of 4 plays" in text
    assert text.endswith("; one more play is set apart because even the cheapest tracks could not arrive in time.")
    assert verdict(result_of(*hopeless)).startswith("In the only play, even the cheapest tracks could not arrive")
    limited = {**result_of(*hopeless), "options": {"max_loss": 1e-3}}
    assert "no cache within max_loss (0.001 nats per token) could arrive in time" in verdict(limited)


@pytest.mark.parametrize("told", ["oracle", "cachegen-oracle"])
def test_an_oracle_does_not_compete(told):
    runs = [*plays(told, loss=0.0), *plays("rate", loss=0.004), *plays("fixed:FP8", loss=0.008)]
    assert verdict(result_of(*runs)).startswith("rate met")


def test_a_play_that_was_given_up_is_worse_than_any():
    given_up = run("rate", "t1", met=False, ttft=None) | {"regret": None}
    runs = [run("rate", "t0"), given_up, *plays("fixed:FP8", 2)]
    text = verdict(result_of(*runs))
    assert text.startswith("No adaptive policy beat")
    assert "beyond measure" in text
