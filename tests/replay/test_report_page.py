import json
import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from kvabr.replay.report import write_page
from kvabr.replay.report.digest import FIELDS, digest
from kvabr.replay.report.page import SCRIPTS, render
from kvabr.replay.report.queries import track_order
from kvabr.types.errors import AssetError
from kvabr.types.events import DecisionMade
from tests.replay.report_samples import HOSTILE, POLICIES, early_base, hostile, result_of, sample


def embedded(text):
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def test_the_page_holds_every_play_and_nothing_outside(tmp_path):
    result, timelines = sample()
    write_page(tmp_path / "page.html", result, timelines)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = embedded(text)
    assert [play["run"] for play in data["plays"]] == list(range(len(result["runs"])))
    for play in data["plays"]:
        line = result["runs"][play["run"]]
        assert (play["trace"], play["policy"], play["met"]) == (line["trace"], line["policy"], line["met"])
        assert play["loss"] == pytest.approx(line["loss"], rel=1e-4)
        assert len(play["groups"]) == len(line["groups"]) == play["groups_total"]
    assert {policy["name"] for policy in data["policies"]} == set(POLICIES)
    outside = r"""(?:src|href|action|data|poster)\s*=|url\((?!#)|@import|\bfetch\(|XMLHttpRequest|WebSocket|import\("""
    markup = text.replace(embedded_source(text), "")
    assert not re.search(outside, markup)
    assert re.findall(r"https?://[^\"' ]*", markup) == ["http://www.w3.org/2000/svg"], "a name, not an address"
    assert "default-src 'none'" in text


def embedded_source(text):
    return re.search(r'<script type="application/json" id="data">.*?</script>', text, re.DOTALL)[0]


def test_hostile_names_stay_text():
    result, timelines = hostile()
    text = render(result, timelines)
    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert "alert(1)<" not in text
    assert "<!--" not in text
    data = embedded(text)
    assert data["plays"][0]["trace"] == HOSTILE
    assert any(policy["name"] == HOSTILE for policy in data["policies"])
    assert text.count("--ground:") == 2, "a name that looks like a place to fill is not filled"


def test_numbers_that_json_lacks_do_not_reach_the_page():
    result, timelines = sample()
    result["runs"][0] |= {"loss": float("nan"), "regret": float("inf"), "measured": {"kl": float("nan")}}
    log = timelines[0]["log"]
    at = next(index for index, event in enumerate(log) if isinstance(event, DecisionMade))
    log[at] = replace(log[at], rate=math.inf, slack_s=math.nan)
    text = embedded_source(render(result, timelines))
    assert not re.search(r"[:\[,](NaN|-?Infinity)", text)


def test_the_digest_says_what_the_log_said():
    result, timelines = sample()
    tracks = track_order(result, timelines)
    assert tracks[0] == "AC-5x"
    assert set(tracks[-2:]) == {"FP16", "BF16"}
    data = digest(result, timelines, tracks)
    front = timelines[0]["log"][0].worth_playing
    assert [tracks[index] for index in data["worth"]] == [track for track in tracks if track in front]
    seen = set()
    for timeline, play in zip(timelines, data["plays"], strict=True):
        logged = [event for event in timeline["log"] if isinstance(event, DecisionMade)]
        assert len(play["decisions"]) + play["left_out"] == len(logged)
        loud = [event for event in logged if event.kind not in {"wait", "finish"}]
        rows = [dict(zip(FIELDS["decisions"], row, strict=True)) for row in play["decisions"]]
        shown = [row for row in rows if row["kind"] not in {"wait", "finish"}]
        assert [row["reason"] for row in shown] == [event.reason for event in loud]
        assert [row["request"] for row in shown] == [event.request for event in loud]
        for row in play["requests"]:
            request = dict(zip(FIELDS["requests"], row, strict=True))
            assert request["sent"] <= request["end"] <= play["until"]
            seen.add(request["outcome"])
        sources = {row[FIELDS["groups"].index("source")] for row in play["groups"]}
        seen |= sources
        assert play["division"] == result["runs"][play["run"]].get("division")
        placed = [row[0] for row in play["groups"]]
        final = [group["track"] for group in result["runs"][play["run"]]["groups"]]
        assert [None if t is None else "recomputed" if t == -1 else tracks[t] for t in placed] == final
    assert seen >= {"done", "cancelled", "fetched", "upgraded", "recomputed"}, "the sample shows every kind"


def test_the_page_opens_on_the_default_policy_and_never_on_one_that_knows_the_future():
    result, timelines = sample()
    tracks = track_order(result)
    data = digest(result, timelines, tracks)
    assert data["plays"][data["opening"]]["policy"] == data["policies"][0]["name"], "the default was not played"
    best = data["policies"][0]["name"]
    for line in result["runs"]:
        line["policy"] = "oracle" if line["policy"] == best else line["policy"]
    result["summary"] = {"oracle" if name == best else name: line for name, line in result["summary"].items()}
    data = digest(result, timelines, tracks)
    assert data["policies"][0]["name"] == "oracle"
    assert data["plays"][data["opening"]]["policy"] == data["policies"][1]["name"]


def test_the_digest_says_where_a_policy_stopped_with_better_tracks_left():
    result, timelines = sample()
    tracks = track_order(result, timelines)
    assert all(play["stopped"] is None for play in digest(result, timelines, tracks)["plays"])
    index = early_base(result, timelines)
    play = digest(result, timelines, tracks)["plays"][index]
    stopped = play["stopped"]
    assert stopped == {"t": play["ttft_s"], "reason": "not worth it", "decision": stopped["decision"], "left": 12}
    assert play["decisions"][stopped["decision"]][FIELDS["decisions"].index("reason")] == "not worth it"
    run = result["runs"][timelines[index]["run"]]
    for group in run["groups"]:
        group["track"] = "FP16"
    assert digest(result, timelines, tracks)["plays"][index]["stopped"] is None, "nothing better was left"


def test_a_result_without_timelines_still_makes_a_page():
    result, _ = sample()
    data = embedded(render(result, []))
    assert data["plays"] == []
    assert len(data["policies"]) == len(POLICIES)
    assert embedded(render(result_of(), []))["policies"] == []


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    result, timelines = sample()
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(AssetError, match="cannot be written"):
        write_page(tmp_path / "missing" / "page.html", result, timelines)
    broken = [{**timelines[0], "run": 10_000}]
    with pytest.raises(IndexError):
        write_page(path, result, broken)
    assert [item.name for item in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "old"
    write_page(path, result, timelines)
    first = path.read_bytes()
    write_page(path, result, timelines)
    assert path.read_bytes() == first, "the same input gives the same page"


def test_the_parts_of_the_page_are_shipped_and_tidy():
    room = files("kvabr.replay.report")
    assert {item.name for item in room.iterdir() if item.name.endswith(".js")} == set(SCRIPTS)
    for name in SCRIPTS:
        assert "innerHTML" not in room.joinpath(name).read_text(encoding="utf-8"), "text goes in as text"
